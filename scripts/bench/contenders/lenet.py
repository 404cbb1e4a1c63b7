"""LeNet in the usual loop: Dataset, DataLoader, eager; and what the peers that train it share with that."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms

LR, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 0.01
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def arguments() -> argparse.Namespace:
    """Parse the options that all of these programs share."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="with FashionMNIST/raw")
    add("--begin-with", type=Path, required=True, help="weights, order and statistics, by torch.save")
    add("--batch-size", type=int, required=True, help="over all processes")
    add("--steps", type=int, required=True)
    add("--workers", type=int, default=0)
    return parser.parse_args()


class LeNet(nn.Module):
    """LeNet-5 as tutorials define it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 1, 28, 28) to logits (B, 10)."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = functional.relu(self.fc1(x))
        x = functional.relu(self.fc2(x))
        return self.fc3(x)


def model_of(args: argparse.Namespace) -> LeNet:
    """Return the model with the weights that all contenders start from."""
    model, start = LeNet(), torch.load(args.begin_with, weights_only=True)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start["weights"], strict=True):
            parameter.copy_(value)
    return model


def loader_of(args: argparse.Namespace) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the usual loader of this rank's share of the samples, in the order that all contenders use."""
    start = torch.load(args.begin_with, weights_only=True)
    normalize = transforms.Normalize((start["mean"] / 255,), (start["std"] / 255,))
    transform = transforms.Compose([transforms.ToTensor(), normalize])
    data = datasets.FashionMNIST(str(args.data_dir), train=True, transform=transform)
    dataset: Subset[tuple[Tensor, Tensor]] = Subset(data, start["order"].tolist())
    return DataLoader(
        dataset,
        batch_size=args.batch_size // WORLD_SIZE,
        sampler=DistributedSampler(dataset, WORLD_SIZE, RANK, shuffle=False),
        drop_last=True,
        num_workers=args.workers,
    )


def sgd_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all contenders use."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[Tensor], object] = Tensor.backward,
) -> None:
    """Train with the usual eager loop and print the result."""
    criterion, clock = nn.CrossEntropyLoss(), Clock(args)
    model.train()
    while not clock.is_done:
        for images, labels in loader_of(args):
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            backward(loss)
            optimizer.step()
            clock.count(loss.item())
            if clock.is_done:
                break
    clock.report()


class Clock:
    """Count steps and keep their losses; the time starts at the end of the first step."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.losses: list[float] = []
        self._since = 0.0

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return len(self.losses) == self.args.steps

    def count(self, loss: float) -> None:
        """Count a completed step; loss is the mean over this rank's share of the batch."""
        if not self.losses:
            self._since = time.perf_counter()
        self.losses.append(loss)

    def report(self) -> None:
        """Print samples/s and the losses, on rank 0."""
        seconds = time.perf_counter() - self._since
        if RANK == 0:
            speed = (len(self.losses) - 1) * self.args.batch_size / seconds
            print(json.dumps({"samples_per_s": speed, "losses": self.losses}), flush=True)


def main() -> None:
    """Train as the tutorials do; with DistributedDataParallel if there are several processes."""
    args = arguments()
    model: nn.Module = model_of(args)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    train(args, model, sgd_of(model))
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
