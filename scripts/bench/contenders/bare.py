"""The limit: forward, backward and step of a recipe's own model on ready tensors, and nothing else.

With --exchange DDP averages the gradients: the limit of what several processes can do together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchvision import datasets

from recipes.common.data import Data, TensorSplit
from recipes.common.models import build_model
from recipes.common.optim import build_optimizer
from recipes.single.train import options
from scripts.bench.contenders.lenet import WORLD_SIZE, Clock, arguments

READY = 16
"""Batches that lie ready and are taken in turn."""


def main() -> None:
    """Train on batches that were made before."""
    args = arguments()
    start = torch.load(args.begin_with, weights_only=True)
    recipe = options(start["options"])
    data = datasets.FashionMNIST(str(args.data_dir), train=True)
    mean, std = torch.tensor([start["mean"]]), torch.tensor([start["std"]])
    split = TensorSplit(data.data.unsqueeze(1), data.targets, mean, std, recipe.channels_last)
    order = start["order"].split(args.batch_size // WORLD_SIZE)
    ready = list(split.batches(order[:READY], 0))
    model = build_model(recipe, Data(split, split, 1, 28, 10))
    if args.exchange:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(recipe, model.parameters())
    clock = Clock(args)
    model.train()
    while not clock.is_done:
        for images, labels in ready:
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.count(loss.item())
            if clock.is_done:
                break
    clock.report()
    if args.exchange:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
