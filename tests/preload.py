"""What the fork server of support.py imports once, so that no rank has to."""

import gc
import importlib

for name in (
    "torch._dynamo",  # DDP and the optimizers import it: 1.5 s
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.optim",
    "torch.utils.tensorboard",
    "recipes.common.data.imagefolder",
    "recipes.ddp.train",
    "recipes.fsdp.train",
    "recipes.pipeline.train",  # torch.distributed.pipelining: 3.5 s
    "recipes.single.train",
    "recipes.tensor.train",
    "sklearn.datasets",  # each minimal.py: 0.9 s
    "tests.observe",
):
    importlib.import_module(name)

gc.freeze()  # a rank's collector need not walk, and copy, what its parent has loaded
