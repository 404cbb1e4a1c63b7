"""The same model as a LightningModule, trained by Lightning's Trainer without logger, bar and checkpoints."""

from __future__ import annotations

import argparse
import warnings

import lightning
import torch
from torch import Tensor, nn

from scripts.bench.contenders.lenet import WORLD_SIZE, Clock, arguments, loader_of, model_of, sgd_of


class Module(lightning.LightningModule):
    """LeNet with its loss and optimizer."""

    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        super().__init__()
        self.model, self.criterion, self.clock = model_of(args), nn.CrossEntropyLoss(), clock

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return self.criterion(self.model(images), labels)

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: object, batch_idx: int) -> None:
        """Count the completed step."""
        self.clock.count(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return sgd_of(self)


def main() -> None:
    """Train as Lightning's documentation does; with its strategy "ddp" if there are several processes."""
    warnings.filterwarnings("ignore")
    args = arguments()
    clock = Clock(args)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(args, clock), loader_of(args))
    clock.report()


if __name__ == "__main__":
    main()
