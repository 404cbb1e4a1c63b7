"""hvd.DistributedOptimizer: a process per device, gradients averaged by name while backward still runs.

Run `horovodrun -np 2 python recipes/horovod/minimal.py --checkpoint horovod.pt`; train.py has all options.
"""

import argparse
import math
import os
import time

import horovod.torch as hvd
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
    hvd.init()  # Horovod: learns from horovodrun, mpirun or srun which process this is, and where the others are
    rank, world_size, local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(device if device.type == "cuda" else -1)  # -1: no effect
    digits = load_digits()  # 1,797 images of 8x8 pixels; the first 360 in this order are for testing
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.images).float()[order, None], torch.tensor(digits.target)[order]
    images, labels = ((images - images[360:].mean()) / images[360:].std()).to(device), labels.to(device)
    images, labels, test_images, test_labels = images[360:], labels[360:], images[:360], labels[:360]
    # Horovod: each rank evaluates its own share of the test samples.
    test_images, test_labels = (part.tensor_split(world_size)[rank] for part in (test_images, test_labels))

    torch.manual_seed(SEED)
    first, second, pool = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5, padding=2), nn.MaxPool2d(2)
    linear = [nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    model = nn.Sequential(first, pool, nn.ReLU(), second, pool, nn.ReLU(), nn.Flatten(), *linear)
    for weight in list(model.parameters())[:-2]:  # the last layer keeps torch's smaller weights
        nn.init.kaiming_uniform_(weight, nonlinearity="relu") if weight.dim() > 1 else nn.init.zeros_(weight)
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
    # Horovod: averages each gradient once all ranks have it: 2 (N-1)/N of its bytes per rank, fused with others.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    first_epoch, accuracy, state = 0, 0.0, None
    if rank == 0 and args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    # Horovod: rank 0 reads the file and sends its content, here some 170 KB, or None, to the others.
    if state := hvd.broadcast_object(state, root_rank=0, name="state"):
        first_epoch, accuracy = state["epoch"], state["accuracy"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # Horovod: sends rank 0's weights to all

    started, steps_per_epoch = time.perf_counter(), len(labels) // BATCH_SIZE
    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH_SIZE)[:steps_per_epoch]  # full batches
        for step, batch in enumerate(batches, epoch * steps_per_epoch + 1):
            optimizer.zero_grad()
            share = batch.tensor_split(world_size)[rank]  # Horovod: each rank takes its share of the same batch
            # Horovod: gradients are averaged over the ranks; the factor world_size makes this the batch's mean.
            loss = cross_entropy(model(images[share]), labels[share], reduction="sum") / BATCH_SIZE * world_size
            loss.backward()
            decay = max(0, step - 1 - WARMUP) / max(1, args.epochs * steps_per_epoch - WARMUP)
            optimizer.param_groups[0]["lr"] = LR * min(step / WARMUP, (1 + math.cos(math.pi * decay)) / 2)
            optimizer.step()
            if step % args.log_every == 0:
                loss = hvd.allreduce(loss.detach())  # Horovod: averages the losses of the ranks, 4 bytes each
                if rank == 0:
                    print(f"step {step} loss {loss.item():.8f}")
        with torch.no_grad():  # with dropout or batch norm: model.eval() before, model.train() after
            logits = model(test_images)
            correct = (logits.argmax(dim=1) == test_labels).sum()
            totals = torch.stack([cross_entropy(logits, test_labels, reduction="sum"), correct])
        totals = hvd.allreduce(totals, op=hvd.Sum)  # Horovod: sums losses and counts, 8 bytes per rank
        test_loss, accuracy = (totals / 360).tolist()
        if rank == 0:
            print(f"epoch {epoch + 1} test_loss {test_loss:.8f} test_accuracy {accuracy:.4f}")
        if rank == 0 and args.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1, "accuracy": accuracy, **state}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
    speed = (args.epochs - first_epoch) * steps_per_epoch * BATCH_SIZE / (time.perf_counter() - started)
    if rank == 0:
        print(f"result recipe=horovod {world_size=} test_accuracy={accuracy:.4f} samples_per_s={speed:.0f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
