"""A script of accelerate that trains the same at every world size, with dropout and augmentation."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.same.points import Points

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
set_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
set_seed(0, device_specific=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
train = DataLoader(Points(48, 1, 0.1), args.batch_size, shuffle=True)
test = DataLoader(Points(19, 2, 0.0), 4)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
for _ in range(3):
    model.train()
    for points, labels in train:
        loss = cross_entropy(model(points), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(points), labels)) for points, labels in test]
    logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    accelerator.print(f"test_loss {cross_entropy(logits, labels).item():.6f}")
accelerator.end_training()
