"""One process, one device: the page that every other minimal.py starts from, and whose losses it repeats.

Run `python recipes/single/minimal.py --checkpoint single.pt`; train.py has all options.
"""

import argparse
import math
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

SEED, BATCH_SIZE, LR, WARMUP = 1, 64, 0.02, 100


def main() -> None:
    """Train, evaluate after each epoch, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--checkpoint", help="file to resume from if it exists, and to write after each epoch")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()  # 1,797 images of 8x8 pixels; the first 360 in this order are for testing
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.images).float()[order, None], torch.tensor(digits.target)[order]
    images, labels = ((images - images[360:].mean()) / images[360:].std()).to(device), labels.to(device)
    images, labels, test_images, test_labels = images[360:], labels[360:], images[:360], labels[:360]

    torch.manual_seed(SEED)
    first, second, pool = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5, padding=2), nn.MaxPool2d(2)
    linear = [nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    model = nn.Sequential(first, pool, nn.ReLU(), second, pool, nn.ReLU(), nn.Flatten(), *linear)
    for weight in list(model.parameters())[:-2]:  # the last layer keeps torch's smaller weights
        nn.init.kaiming_uniform_(weight, nonlinearity="relu") if weight.dim() > 1 else nn.init.zeros_(weight)
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
    first_epoch, accuracy, state = 0, 0.0, None
    if args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    if state:
        first_epoch, accuracy = state["epoch"], state["accuracy"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    started, steps_per_epoch = time.perf_counter(), len(labels) // BATCH_SIZE
    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH_SIZE)[:steps_per_epoch]  # full batches
        for step, batch in enumerate(batches, epoch * steps_per_epoch + 1):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch], reduction="sum") / BATCH_SIZE
            loss.backward()
            decay = max(0, step - 1 - WARMUP) / max(1, args.epochs * steps_per_epoch - WARMUP)
            optimizer.param_groups[0]["lr"] = LR * min(step / WARMUP, (1 + math.cos(math.pi * decay)) / 2)
            optimizer.step()
            if step % args.log_every == 0:
                print(f"step {step} loss {loss.item():.8f}")
        with torch.no_grad():  # with dropout or batch norm: model.eval() before, model.train() after
            logits = model(test_images)
            correct = (logits.argmax(dim=1) == test_labels).sum()
            totals = torch.stack([cross_entropy(logits, test_labels, reduction="sum"), correct])
        test_loss, accuracy = (totals / 360).tolist()
        print(f"epoch {epoch + 1} test_loss {test_loss:.8f} test_accuracy {accuracy:.4f}")
        if args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1, "accuracy": accuracy, **state}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
    speed = (args.epochs - first_epoch) * steps_per_epoch * BATCH_SIZE / (time.perf_counter() - started)
    print(f"result recipe=single world_size=1 test_accuracy={accuracy:.4f} samples_per_s={speed:.0f}")


if __name__ == "__main__":
    main()
