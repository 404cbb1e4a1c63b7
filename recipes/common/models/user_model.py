"""A model of your own, and its checks against the data and the task before the training."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.language import LanguageModel
from recipes.common.models.batchnorm import checked_rows
from recipes.common.models.layers import containers, is_sequential, layers, sparse_embedding
from recipes.common.optim import autocast
from recipes.common.options import HALVES, HOOKED, Options
from recipes.common.task import Classification, Task, in_float
from recipes.common.user_code import (
    add_derived,
    call_user_code,
    check_restorable,
    import_user_code,
    name_of,
    refusal,
)


def build_user_model(args: Options, data: Data) -> nn.Module:
    """Return the model that the user's function builds for the data: see Data.

    Raises UserError if the function fails, or returns no nn.Module or one that is in shards already.
    """
    model = call_user_code(f"--model {args.model}", import_user_code("--model", args.model), data)
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {args.model} returned {name_of(model)}; return a torch.nn.Module")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        # --weights builds a second model, only on rank 0: passes through shards would wait for the other ranks.
        raise UserError(f"--model {args.model} returned the same model twice; let it make a new one in each call")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout != torch.strided:
                what = f"the buffer {name} of a {type(module).__name__} is sparse, and ranks exchange dense ones"
                raise UserError(f"--model {args.model}: {what}; keep its indices and values in two buffers")
            # An expanded buffer has less memory than numbers: a broadcast would write beyond it, a resume fail.
            if not is_lazy(buffer):
                module._buffers[name] = buffer.contiguous().resolve_conj().resolve_neg()
    vars(model)[HOOKED] = [
        name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks
    ]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()]
    vars(model)[HALVES] = [(name, str(p.dtype).removeprefix("torch.")) for name, p in trained if p.itemsize == 2]
    return model


def check_memory(model: nn.Module, args: Options) -> None:
    """Raise UserError if a parameter or buffer has no values to train, or a parameter's values share memory."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    if empty := [name for name, tensor in named if tensor.is_meta]:
        raise UserError(f"--model {args.model}: {empty[0]} is on the meta device; return a model with its weights")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or not parameter.numel() or parameter.layout != torch.strided:
            continue
        if parameter.untyped_storage().nbytes() < parameter.nbytes:
            what = f"several values of {name} are one number in memory, as expand() makes them, and no step can"
            raise UserError(f"--model {args.model}: {what} change that; clone() it")


def check_shared_memory(model: nn.Module, args: Options) -> None:
    """Raise UserError if two parameters share memory, as one and its transpose: the recipe would copy each."""
    owners: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        has_memory = not parameter.is_meta and parameter.numel() and not hasattr(parameter, "device_mesh")
        if not has_memory or parameter.layout != torch.strided:
            continue
        others = owners.setdefault(parameter.untyped_storage().data_ptr(), [])
        if found := next((other for other, there in others if overlap(parameter, there)), None):
            what = f"--model {args.model}: {found} and {name} are two parameters in the same memory"
            raise UserError(f"{what}; make one of them, and use its view in forward(), or use plain ddp")
        others.append((name, parameter))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage and type have an element in common."""

    def ends(tensor: Tensor) -> tuple[int, int]:
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return int(tensor.storage_offset()), int(tensor.storage_offset() + reach)

    def places(tensor: Tensor) -> Tensor:
        whole = torch.arange(max(ends(one)[1], ends(other)[1]) + 1)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()

    (first, last), (start, end) = ends(one), ends(other)
    return first <= end and start <= last and bool(torch.isin(places(one), places(other)).any())


ModelCheck = Callable[[nn.Module, Options, Data], None]
"""Raises UserError if a model does not pass: (model, options, data)."""


def check_on(device: torch.device, check: ModelCheck, model: nn.Module, args: Options, data: Data) -> None:
    """Run a check on the CPU and, if the model does not pass there, on the device where it will run.

    So a model passes that needs a GPU, as for some attention kernels, or that is too large for a GPU as a whole.
    The model is on the CPU afterwards. Raises the UserError of the device.
    """
    try:
        check(model, args, data)
    except UserError:
        if device.type == "cpu":
            raise
    else:
        return
    call_user_code(f"--model {args.model}: moving it to {device}", model.to, device)
    with autocast(args, device):  # such kernels may accept half precision only
        check(model, args, data)
    model.cpu()


def check_fit(
    model: nn.Module,
    args: Options,
    data: Data,
    device: torch.device,
    forward: Callable[[Tensor], Any] | None = None,
) -> None:
    """Run two samples through the model and the task, to find code that does not fit before training.

    A model on the meta device computes only shapes: the task then gets outputs filled with 0.5. The task gets
    tensors on `device`, as in training. `forward` runs a model that is sharded, with inputs on `device`.

    Raises UserError if the model rejects the inputs, or as check_task().
    """
    check_sparse(model, args)
    inputs, targets = data.examples(2)
    count = len(inputs)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    own = inputs.to("meta" if is_meta else device if forward else _device_of(model))
    run = forward or model
    model.eval()
    with checked_rows(model, args, count):
        output = call_user_code(f"--model {args.model} on {count} samples, {data.input}", run_seeded, run, own)
    if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != count:
        what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else name_of(output)
        fix = "return a tensor with a row for each"
        raise UserError(f"--model {args.model} returned {what} for {count} samples; {fix}")
    check_state(model, args)  # only now do lazy layers have their parameters
    if not is_meta:
        vars(model)["mixes_samples"] = mixes_samples(run, own, output)
    needs_grad, output = output.requires_grad, in_float(output)
    if is_meta:
        output = torch.full_like(output, 0.5, device="cpu", requires_grad=needs_grad)
    check_classes(output, args, data)
    check_task(data.task, output.to(device), targets.to(device))
    if getattr(model, "is_sequence", False) and not forward:
        check_sequence(model, args, data)
    model.train()


def check_classes(output: Tensor, args: Options, data: Data) -> None:
    """Raise UserError if an output has fewer logits than there are classes, and the task's loss needs all of them.

    On a GPU, the first sample of a missing class would end the process without a line of Python.
    """
    dim = {Classification.loss_sum: 1, LanguageModel.loss_sum: -1}.get(type(data.task).loss_sum)
    if dim and output.ndim > 1 and output.shape[dim] < (data.num_classes or 0):
        what = f"--model {args.model} returns {output.shape[dim]} logits, and --data {args.data} has"
        raise UserError(f"{what} {data.num_classes} classes; return one for each (data.num_classes)")


def check_task(task: Task, output: Tensor, targets: Tensor) -> None:
    """Raise UserError if a task rejects a model's output, or does not return sums."""
    what = f"--task {type(task).__name__} on outputs {tuple(output.shape)} and targets {tuple(targets.shape)}"
    versions = output._version, targets._version
    loss = call_user_code(what, task.loss_sum, output, targets)
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise UserError(f"{what}: loss_sum() has to return a scalar tensor that gradients come from")
    sums = call_user_code(what, task.metric_sums, output, targets)
    try:
        is_complete = len(sums) == len(task.metrics)
    except TypeError:  # a single value
        is_complete = False
    if not is_complete:
        fix = f"return a tuple, a value for each of metrics {tuple(task.metrics)}"
        raise UserError(f"{what}: metric_sums() returned {name_of(sums)} that does not fit; {fix}")
    if (output._version, targets._version) != versions:  # metrics would be those of other values
        raise UserError(f"{what}: it changes output or target in place; let it change a copy")
    if not math.isfinite(loss.item()):
        fix = "look for values that are not finite in --data, and in what the model returns"
        raise UserError(f"{what}: the loss of two samples is {loss.item()}; {fix}")
    count = call_user_code(f"{what}: count()", lambda: float(task.count(targets)))
    if not 0 <= count < math.inf:
        raise UserError(f"{what}: count() is {count:g}; return how many samples count")
    check_sums(what, task, output, targets)
    means = call_user_code(what, lambda: [torch.as_tensor(value).item() / len(targets) for value in (loss, *sums)])
    try:
        add_derived(dict(zip(("loss", *task.metrics), means, strict=True)), task)
    except UserError as error:
        # The variance of two samples may be 0, which says nothing about the whole test set.
        if not isinstance(error.__cause__, ArithmeticError | ValueError):
            raise


def run_seeded(model: Callable[[Tensor], Any], inputs: Tensor, seed: int = 0) -> Any:
    """Return the model's output; what it draws at random is the same in each call with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model(inputs.clone())  # it may change them in place


@torch.no_grad()
def mixes_samples(model: Callable[[Tensor], Any], inputs: Tensor, output: Tensor) -> bool:
    """Return whether the output for a sample depends on the others; `output` is run_seeded()'s, in eval().

    An nn.LSTM without batch_first=True, for example, takes the batch for time, and experts with a capacity leave
    out the second of two equal samples; rank_dependence.py warns. False if this cannot be seen, because forward()
    draws random numbers, returns something else when it is repeated, or fails here.

    Raises UserError if the model does.
    """
    try:
        again = run_seeded(model, inputs, seed=1)
        equal = run_seeded(model, inputs[:1].expand_as(inputs).contiguous())
        has_values = output.is_floating_point() or output.is_complex()
        if not has_values or not output.shape == again.shape == equal.shape:
            return False
        rows = (output[:1], again - output, equal - output[:1])
        largest, noise, change = (row.abs().nan_to_num().max().item() for row in rows)
    except UserError:
        raise
    except Exception:  # a probe is no reason to refuse a model: a step or an evaluation raises what matters
        return False
    return noise <= 0.001 * largest and change > 0.01 * largest


def check_sums(what: str, task: Task, output: Tensor, targets: Tensor) -> None:
    """Raise UserError if loss, count or a metric of several samples is not the sum of the single samples' values.

    Many metrics of an untrained model are 0, so all are also computed for an output that predicts the targets.
    """
    pairs = call_user_code(what, sums_of, task, output, targets)
    with contextlib.suppress(Exception):  # the task may take no such output
        pairs += sums_of(task, exact_output(output, targets), targets)
    names = "loss_sum()", "count()", *(f"metric_sums()'s {name}" for name in task.metrics)
    for own, (whole, alone) in zip(itertools.cycle(names), pairs, strict=False):
        if not math.isfinite(whole) or math.isclose(whole, alone, rel_tol=1e-3, abs_tol=1e-5):
            continue
        fix = "return a sum of one value for each sample, and let derive() compute what is not a sum"
        if math.isclose(whole * len(targets), alone, rel_tol=1e-3, abs_tol=1e-5):
            fix = 'return the sum over the samples (reduction="sum"), not the mean'
        raise UserError(f"{what}: {own} of two samples is {whole:.6g}, the sum of each one's {alone:.6g}; {fix}")


def sums_of(task: Task, output: Tensor, targets: Tensor) -> list[tuple[float, float]]:
    """Return loss, count and each metric of all samples together, each with the sum over single samples."""

    def values(rows: slice) -> Tensor:
        some = output[rows], targets[rows]
        sums = (task.loss_sum(*some), task.count(some[1]), *task.metric_sums(*some))
        return torch.stack([torch.as_tensor(value).detach().double().sum().cpu() for value in sums])

    alone = sum(values(slice(i, i + 1)) for i in range(len(targets)))
    return list(zip(values(slice(None)).tolist(), torch.as_tensor(alone).tolist(), strict=True))


def exact_output(output: Tensor, targets: Tensor) -> Tensor:
    """Return an output like this one that predicts the targets: their values, or the largest logits for them.

    Raises any error if the targets are neither classes nor of the output's shape.
    """
    if output.shape == targets.shape:
        return targets.to(output.dtype)
    dim = next(dim for dim in (1, -1) if output.movedim(dim, -1).shape[:-1] == targets.shape)
    classes = torch.nn.functional.one_hot(targets.clamp(min=0), output.shape[dim])
    return classes.movedim(-1, dim).to(output.dtype)


def check_sparse(model: nn.Module, args: Options) -> None:
    """Raise UserError if an embedding has sparse gradients, and the recipe or the optimizer does not take them."""
    if not args.takes_sparse_gradients and (name := sparse_embedding(model)):
        what = f"--model {args.model}: {name} has sparse gradients"
        fix = "make it without sparse=True; RECIPE=single, and ddp on CPUs, take them with "
        fix += "--optimizer sgd --weight-decay 0"
        raise UserError(f"{what}, which this recipe does not take with these options; {fix}")


def check_state(model: nn.Module, args: Options) -> None:
    """Raise UserError if a checkpoint could not restore the model from its state dict."""
    state = model.state_dict()
    for name, value in state.items():
        check_restorable(f"--model {args.model}", name, value, "let get_extra_state() return")
    if missing := [name for name, _ in model.named_parameters() if name not in state]:
        what = f"its state_dict() leaves out {missing[0]}, and a checkpoint has to give back all parameters"
        raise UserError(f"--model {args.model}: {what}; return all of them")
    what = f"--model {args.model}: load_state_dict() of its own state_dict()"
    call_user_code(what, model.load_state_dict, state)


def check_channels_last(model: nn.Module, args: Options, data: Data) -> None:
    """Raise UserError if a model that fits does not run, forward or backward, in the layout of --channels-last."""
    inputs, targets = (tensor.to(_device_of(model)) for tensor in data.examples(2))
    try:
        data.task.loss_sum(in_float(model.eval()(inputs)), targets).backward()
    except Exception as error:
        fix = "use reshape() in place of view(), or drop --channels-last"
        raise refusal(f"--channels-last: --model {args.model} fails in this layout", error, fix) from error
    model.zero_grad()
    model.train()


@torch.no_grad()
def check_sequence(model: nn.Module, args: Options, data: Data) -> None:
    """Check that a model is the sequence of layers that a pipeline makes of it.

    Raises UserError if it has more than its layers, or they, applied one after another, return something else.
    """
    sequence = [module for _, module in layers(model)]
    what = f"--model {args.model}"
    if any(module._backward_hooks or module._backward_pre_hooks for module in containers(model)):
        raise UserError(
            f"{what}: a sequence has a backward hook, and a pipeline runs only its layers; hook a layer"
        )
    inputs, _ = data.examples(2)
    inputs = inputs.to(_device_of(model))
    model.eval()

    expected = call_user_code(what, run_seeded, model, inputs)
    output = call_user_code(f"{what}, child by child", run_seeded, nn.Sequential(*sequence), inputs)
    if not isinstance(output, Tensor) or not (output.is_meta or torch.equal(output, expected)):
        fix = "remove is_sequence = True, or apply the children in order"
        if is_sequential(model):
            fix = "remove its hooks, or use a recipe that does not split it"
        raise UserError(f"{what}: its children one after another do not return what it does; {fix}")
    model.train()


def check_input(model: nn.Module, args: Options, data: Data) -> None:
    """Raise UserError if a model changes its input in place, which the microbatches of a pipeline share."""
    inputs = data.examples(2)[0].to(_device_of(model)).clone()
    model.eval()  # the pass changes no statistics
    with torch.no_grad():
        call_user_code(f"--model {args.model}", run_seeded, lambda _: model(inputs), inputs)
    if inputs._version:
        why = "it changes its input in place, and the microbatches of a step share that"
        raise UserError(f"--model {args.model}: {why}; let it make a new tensor, or use RECIPE=ddp")
    model.train()


def _device_of(model: nn.Module) -> torch.device:
    return next(itertools.chain(model.parameters(), model.buffers()), torch.empty(0)).device
