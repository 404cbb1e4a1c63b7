"""The usual loop: Dataset, DataLoader, eager; DistributedDataParallel where torchrun starts several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scripts.bench.contenders.lenet import (
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    WORLD_SIZE,
    Clock,
    arguments,
    loader_of,
    model_of,
)


def main() -> None:
    """Train as the tutorials do."""
    args = arguments()
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    model: nn.Module = model_of(args)
    if WORLD_SIZE > 1:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    clock = Clock(args)
    model.train()
    while not clock.is_done:
        for images, labels in loader_of(args):
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.count(loss.item())
            if clock.is_done:
                break
    clock.report()
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
