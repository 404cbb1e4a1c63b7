"""Let processes that tests start begin and end sooner: half of a test's time is the import of torch.

Python imports this file at its start, where the folder is in PYTHONPATH.

- DDP and optimizers import torch._dynamo, 2 s of a core. A process that compiles nothing asks it for the few names
  below, which do nothing then. One that asks for others gets the module itself.
- Torch's 300,000 objects never become garbage: no collection walks over them at start and end, 0.4 s of a core.

With STAND_IN_GPUS=4, a process sees four stand-ins for GPUs.
"""

import atexit
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

NAME = "torch._dynamo"


class Part:
    """A part of the module, as long as nobody asks it for more than these names."""

    def __init__(self, part, **names):
        vars(self).update(names, part=part)

    def __getattr__(self, name):
        finder.load()
        return getattr(getattr(sys.modules[NAME], self.part), name)


class Light(ModuleType):
    """The module, as long as nobody asks it for more than NAMES."""

    def __getattr__(self, name):
        if name in ("__path__", "__file__", "__cached__"):  # which importing it asks for
            raise AttributeError(name)
        finder.load()
        return getattr(self, name)


def disable(fn=None, *args, **kwargs):
    """Return the function, or what decorates one: without a compiler, each is disabled already."""
    return fn if fn else lambda fn: fn


NAMES = {
    "disable": disable,
    "graph_break": lambda msg="": None,
    "trace_rules": Part("trace_rules", clear_lru_cache=lambda: None),
    "utils": Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
}


class Finder:
    """Find Light in place of the module; load that for those who import a module of the package."""

    original = None

    def find_spec(self, name, path=None, target=None):
        if name == NAME and not self.original:
            spec = PathFinder.find_spec(name, path)
            if spec:
                self.original, spec.loader = spec.loader, self
            return spec
        if name.startswith(f"{NAME}.") and isinstance(sys.modules[NAME], Light):
            self.load()
            if name in sys.modules:
                return ModuleSpec(name, self, is_package=hasattr(sys.modules[name], "__path__"))
        return None

    def create_module(self, spec):
        return Light(NAME) if spec.name == NAME else sys.modules[spec.name]

    def exec_module(self, module):
        if isinstance(module, Light):
            vars(module).update(NAMES)

    def load(self):
        module = sys.modules[NAME]
        if isinstance(module, Light):
            module.__class__ = ModuleType
            module.__spec__.loader = module.__loader__ = self.original
            for name in NAMES:
                del vars(module)[name]
            self.original.exec_module(module)


finder = Finder()
sys.meta_path.insert(0, finder)
gc.set_threshold(500_000)
atexit.register(gc.freeze)
if os.environ.get("STAND_IN_GPUS"):
    import stand_in_gpus  # noqa: F401
