"""Code of your own, named on the command line as package.module:function: a model, data, a task, an optimizer.

The module is imported from the working directory or from wherever Python finds it. docs/your-model.md shows one.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recipes.common.arguments import is_user_code
from recipes.common.errors import UserError, explain_unrepeatable, may_pass, nearest
from recipes.common.options import STANDARD_LIBRARY, Options
from recipes.common.task import Task


def digests(args: Options) -> dict[str, str]:
    """Return a digest of each module that the options name, so that ranks can check that they run the same code.

    For each module that these import, there is an entry "import NAME": a digest of the user's own, the version of
    a library.
    """
    found, before = dict[str, str](), set(sys.modules)
    for name in ("data", "model", "task", "optimizer"):
        flag, text = f"--{name}", getattr(args, name)
        if is_user_code(text):
            import_user_code(flag, text)
            module = text.split(":")[0]
            path = getattr(sys.modules[module], "__file__", None)
            found[module] = f"code with digest {zlib.crc32(Path(path).read_bytes()):08x}" if path else "no file"
    for name in sorted(set(sys.modules) - before - found.keys()):
        version = getattr(sys.modules[name], "__version__", None)
        if own := own_digest(sys.modules[name]):
            found[f"import {name}"] = f"code with digest {own}"
        elif "." not in name and name not in sys.stdlib_module_names and isinstance(version, str):
            found[f"import {name}"] = f"version {version}"
    return found


def own_code() -> dict[str, str]:
    """Return a digest of each imported file of the user's own code, by its module's name."""
    ours = ("__main__", "__mp_main__", "recipes", "scripts")
    modules = [pair for pair in list(sys.modules.items()) if pair[0].partition(".")[0] not in ours]
    return {name: own for name, module in modules if (own := own_digest(module))}


def own_digest(module: ModuleType) -> str:
    """Return a digest of a module's file, or "" if it has none that is the user's own code."""
    path = Path(getattr(module, "__file__", None) or "")
    # is_file: torch.classes names a file that is not there
    is_users = path.suffix == ".py" and is_own(path) and path.is_file()
    return f"{zlib.crc32(path.read_bytes()):08x}" if is_users else ""


def is_own(path: Path) -> bool:
    """Return whether a file of code is the user's: not a recipe's, Python's or a package's."""
    is_package = bool({"site-packages", "dist-packages"} & set(path.parts))
    others = STANDARD_LIBRARY, Path(__file__).parents[1]
    return not (is_package or any(map(path.is_relative_to, others)))


def import_user_code(flag: str, text: str) -> Callable[..., Any]:
    """Import the function or class that an option names.

    Raises UserError if the module cannot be imported, or has nothing callable of that name.
    """
    before = process_state()
    module_name, name = text.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script without a __main__ guard calls sys.exit(); Rust may panic
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module_name}.".startswith(f"{missing}."):
            fix = f"put {missing.replace('.', '/')}.py into {os.getcwd()}, or its folder into PYTHONPATH"
            if module_name.endswith(".py"):
                fix = f"name the module without .py: {flag} {module_name.removesuffix('.py')}:{name}"
            raise UserError(f"{flag} {text}: there is no module {missing!r}; {fix}") from None
        raise refusal(f"{flag} {text}: importing {module_name} failed", error) from error
    check_process_state(f"{flag} {text}: importing {module_name}", before)
    found = getattr(module, name, None)
    if not callable(found):
        what = "is not a function or class" if hasattr(module, name) else "does not exist"
        place = getattr(module, "__file__", module_name)  # a built-in module has no file
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(f"{flag} {text}: {name} {what} in {place}{nearest(name, known)}")
    return found


def call_user_code(what: str, function: Callable[..., Any], *values: Any) -> Any:
    """Return the result of a user's function; raises UserError, with the line, if the function raises an error."""
    before = process_state()
    try:
        result = function(*values)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise refusal(f"{what} failed", error) from error
    check_process_state(what, before)
    return result


def process_state() -> tuple[str, str]:
    """Return what the user's code has to leave: the default device of new tensors, and the current folder."""
    try:
        device = str(torch.get_default_device())  # not the CPU where a caller builds on the meta device
    except (RuntimeError, AssertionError):  # a GPU without a driver, or with a torch for CPUs
        device = "one that is not there"
    try:
        return device, os.getcwd()
    except OSError:  # somebody has deleted it
        return device, ""


def check_process_state(what: str, before: tuple[str, str]) -> None:
    """Raise UserError if process_state() has changed: ranks exchange tensors, and options have relative paths."""
    device, folder = process_state()
    if device != before[0]:
        torch.set_default_device(None)  # for what ranks exchange about this error
        fix = "leave torch.set_default_device() out, the recipe moves the data and the model"
        raise UserError(f"{what} sets torch's default device to {device}; {fix}")
    if folder != before[1]:
        fix = "leave os.chdir() out, and open files by absolute paths"
        raise UserError(f"{what} leaves {before[1]}, where paths of options begin, for {folder}; {fix}")


def build_user_task(args: Options) -> Task:
    """Return the task that --task names; raises UserError if it is not a Task."""
    task = call_user_code(f"--task {args.task}", import_user_code("--task", args.task))
    if not isinstance(task, Task):
        fix = "give a subclass of recipes.common.task.Task, without arguments"
        raise UserError(f"--task {args.task} makes a {type(task).__name__}; {fix}")
    names = ["loss", *task.metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--task {args.task}: two values have the name {twice[0]!r}; rename one of metrics")
    modules = [value for value in (task, *vars(task).values()) if isinstance(value, nn.Module)]
    if any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        fix = "move them into the model, or set their requires_grad to False"
        raise UserError(f"--task {args.task}: it has parameters, and only the model's are trained; {fix}")
    return task


def build_user_optimizer(args: Options, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the user's function makes of the model's parameters.

    The schedule sets the learning rate of each group, in proportion to what the function has set.

    Raises UserError if the function fails or returns no optimizer, or that does not step the model's parameters.
    """
    what, named = f"--optimizer {args.optimizer}", list(model.named_parameters())
    make = import_user_code("--optimizer", args.optimizer)
    optimizer = call_user_code(what, make, named, args.lr, args.weight_decay)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{what} returned {name_of(optimizer)}; return a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise UserError(f"{what}: step() of {name_of(optimizer)} needs a closure; use one that steps without")
    places = {parameter: place for place, (_, parameter) in enumerate(named)}
    for group in optimizer.param_groups:
        if "lr" not in group:
            raise UserError(f"{what}: a group of its parameters has no lr, which the schedule sets; give it one")
        if not places.keys() >= set(group["params"]):
            raise UserError(f"{what}: it has a parameter that is not the model's; give it those it is called with")
        group["places"] = [places.pop(parameter) for parameter in group["params"]]
        group["lr_share"] = float(group["lr"]) / args.lr
    if left := [name for name, parameter in named if parameter in places and parameter.requires_grad]:
        raise UserError(f"{what}: it leaves out {left[0]}; add it to a group, or set its requires_grad to False")
    return optimizer


def check_optimizer_state(args: Options, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if a checkpoint could not restore what the user's optimizer keeps after a step."""
    what, fix = f"--optimizer {args.optimizer}", "let it keep"
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                check_restorable(what, f"{name} of a group", value, fix)
    for parameter, values in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            fix = "keep what is not of one parameter in the groups"
            raise UserError(f"{what}: it has the state {parameter!r}, which is not a parameter; {fix}")
        for name, value in values.items():
            check_restorable(what, f"{name} of a parameter's state", value, fix)


def check_restorable(what: str, name: str, value: Any, fix: str) -> None:
    """Raise UserError if a checkpoint could not give back a value."""
    if type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle and torch raise a dozen kinds
        fix += " tensors, numbers, texts, or lists and dicts of them"
        raise UserError(f"{what}: no checkpoint gives back {name}, {name_of(value)}; {fix}") from error


def state_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each entry of a model's state dict, () for what is not a tensor."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in model.state_dict().items()}


def check_state_stays(args: Options, model: nn.Module, before: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError if a step has changed the names or shapes of a model's state: no resume could load it."""
    now = state_shapes(model)
    if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        was, is_now = (shapes.get(changed[0], "missing") for shapes in (before, now))
        what = f"its state changes in training: {changed[0]} is {was} before it and {is_now} after the first step"
        fix = "make all parameters and buffers in __init__(), with their final shapes"
        raise UserError(f"--model {args.model}: {what}; {fix}")


def add_derived(means: dict[str, float], task: Task) -> dict[str, float]:
    """Return the averages and what the task derives from them, as floats: a checkpoint accepts nothing else.

    Raises UserError if derive() fails or returns something else, or the task's headline is not among them.
    """
    what = f"--task {type(task).__name__}: derive()"
    derived = call_user_code(what, task.derive, dict(means))
    if not isinstance(derived, dict):
        raise UserError(f"{what} returned {name_of(derived)}; return a dict of numbers")
    found = dict(means)
    for name, value in derived.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
            raise UserError(f"{what} returned {name_of(value)} as {name!r}; return a number") from None
    if task.headline not in found:
        fix = f"set it to one of {', '.join(found)}, or let derive() return it"
        raise UserError(f"--task {type(task).__name__}: nothing has the headline's name {task.headline!r}; {fix}")
    return found


def refusal(what: str, error: BaseException, fix: str = "fix it and start again") -> UserError:
    """Return a one-line UserError for an error of the user's code, with its innermost line outside of packages."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames if is_own(Path(frame.filename))]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    if text := explain_unrepeatable(str(error)):
        return UserError(f"{what}{where}: {text}")
    reason = " ".join(str(error).split())[:300]
    return UserError(f"{what}: {type(error).__name__}: {reason}{where}; {fix}", is_passing=may_pass(error))


def name_of(value: Any) -> str:
    """Return the kind of a value for messages: "None", "a dict", "a Tensor"."""
    return "None" if value is None else f"a {type(value).__name__}"
