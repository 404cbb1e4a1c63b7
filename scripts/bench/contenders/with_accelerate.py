"""The usual loop with Hugging Face's accelerate; under torchrun it wraps the model for several processes."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn

from scripts.bench.contenders.lenet import LR, MOMENTUM, WEIGHT_DECAY, Clock, arguments, loader_of, model_of


def main() -> None:
    """Train as accelerate's quick tour does; the loader has this process's share already."""
    args = arguments()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=False))
    model = model_of(args)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    model, optimizer = accelerator.prepare(model, optimizer)
    clock = Clock(args)
    model.train()
    while not clock.is_done:
        for images, labels in loader_of(args):
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            clock.count(loss.item())
            if clock.is_done:
                break
    clock.report()
    accelerator.end_training()


if __name__ == "__main__":
    main()
