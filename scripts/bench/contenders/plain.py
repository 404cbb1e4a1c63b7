"""The usual loop: Dataset, DataLoader, eager; DistributedDataParallel where torchrun starts several."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scripts.bench.contenders.lenet import WORLD_SIZE, arguments, model_of, sgd_of, train


def main() -> None:
    """Train as the tutorials do."""
    args = arguments()
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    model: nn.Module = model_of(args)
    if WORLD_SIZE > 1:
        model = DistributedDataParallel(model)
    train(args, model, sgd_of(model))
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
