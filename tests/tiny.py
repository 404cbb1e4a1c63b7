"""Tiny data, and a job of the one-process recipe on it that has not begun, for tests of their parts."""

from types import SimpleNamespace

import torch

from recipes.common.data import Data, TensorSplit
from recipes.common.job import Job
from recipes.common.optim import build_optimizer, build_scaler
from recipes.common.process.signals import GO
from recipes.common.world.peers import Peers
from recipes.single.train import options

CPU = torch.device("cpu")
ALONE = Peers(CPU)


def tiny_data(channels=1, size=8, classes=10):
    def split(count):
        images = torch.randint(256, (count, channels, size, size), dtype=torch.uint8)
        return TensorSplit(images, torch.arange(count) % classes, torch.zeros(channels), torch.ones(channels))

    return Data.of_images(split(100), split(10), channels, size, classes)


def tiny_job(*argv):
    args = options(["--global-batch-size", "30", *argv])
    model = torch.nn.Linear(1, 1)
    stop = SimpleNamespace(error=None, vote=GO, listen=lambda: None)
    optimizer = build_optimizer(args, model, ALONE)
    return Job(args, "single", tiny_data(), Peers(CPU), model, optimizer, build_scaler(args, CPU), stop)
