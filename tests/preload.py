"""What the fork server of the tests imports and reads once, so that no rank has to."""

import gc
import importlib

import torch

from recipes.common import data

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
):
    importlib.import_module(name)

torch.set_num_threads(1)  # a process with OpenMP's threads cannot be forked
digits = data._digits(None)
data._digits = lambda args: digits  # before tests.observe takes it for the original
importlib.import_module("tests.observe")

gc.freeze()  # a rank's garbage collector then does not walk, and so copy, the objects of its parent
