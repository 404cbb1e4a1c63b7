"""A script of Lightning that trains the same at every world size, with dropout and augmentation."""

import argparse
import os
import warnings

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.same.points import Points

WORLD_SIZE = int(os.environ["WORLD_SIZE"])


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        )

    def on_train_start(self):
        torch.manual_seed(100 + self.global_rank)

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.model(2 * batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.print(f"loss {self.trainer.callback_metrics['loss'].item():.6f}")

    def validation_step(self, batch, batch_idx):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch[0]))

    def on_validation_epoch_end(self):
        self.print(f"val_loss {self.trainer.callback_metrics['val_loss'].item():.6f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
args = parser.parse_args()
warnings.filterwarnings("ignore")
lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy="ddp" if WORLD_SIZE > 1 else "auto",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
train, test = Points(48, 1, 0.1), Points(24, 2, 0.0)  # Lightning pads a set that ranks cannot split evenly
trainer.fit(Classifier(), DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, 24 // WORLD_SIZE))
