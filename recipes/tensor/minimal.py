"""Tensor parallelism x data parallelism: each layer is split over the N ranks of a replica.

Run `torchrun --nproc-per-node=4 recipes/tensor/minimal.py --checkpoint tensor.pt`; train.py has all options.
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

SEED, BATCH_SIZE, LR, WARMUP = 1, 64, 0.02, 100


def main() -> None:
    """Train, evaluate after each epoch, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--checkpoint", help="file to resume from if it exists, and to write after each epoch")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that each layer is split over")
    args = parser.parse_args()
    # Tensor: torchrun sets each process's rank; each takes its GPU and connects at MASTER_ADDR:MASTER_PORT.
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(device if device.type == "cuda" else -1)  # -1: no effect
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device.index)
    # Tensor: the ranks form a grid, a row for each replica. The ranks of a replica take the same samples.
    grid = torch.arange(world_size).view(-1, args.tensor_parallel)
    mesh = DeviceMesh(device.type, grid, mesh_dim_names=("dp", "tp"))
    replicas, replica, dp = mesh.size(0), mesh.get_local_rank("dp"), mesh.get_group("dp")
    digits = load_digits()  # 1,797 images of 8x8 pixels; the first 360 in this order are for testing
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.images).float()[order, None], torch.tensor(digits.target)[order]
    images, labels = ((images - images[360:].mean()) / images[360:].std()).to(device), labels.to(device)
    images, labels, test_images, test_labels = images[360:], labels[360:], images[:360], labels[:360]
    # Tensor: each replica evaluates its own share of the test samples.
    test_images, test_labels = (part.tensor_split(replicas)[replica] for part in (test_images, test_labels))

    torch.manual_seed(SEED)
    first, second, pool = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5, padding=2), nn.MaxPool2d(2)
    linear = [nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    model = nn.Sequential(first, pool, nn.ReLU(), second, pool, nn.ReLU(), nn.Flatten(), *linear)
    for weight in list(model.parameters())[:-2]:  # the last layer keeps torch's smaller weights
        nn.init.kaiming_uniform_(weight, nonlinearity="relu") if weight.dim() > 1 else nn.init.zeros_(weight)
    # Tensor: a rank keeps 1/N of layer 7's rows, and the columns of layer 9 for their outputs. An all-reduce sums
    # layer 9's outputs, 84 x 4 bytes per sample, another layer 7's input gradients, 64 x 4: 2 (N-1)/N per rank.
    plan = {"7": ColwiseParallel(), "9": RowwiseParallel()}  # others stay plain tensors, hence foreach=False
    parallelize_module(model.to(device), mesh["tp"], plan, src_data_rank=None)  # None: the seed made ranks equal
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=0.01, foreach=False)
    first_epoch, accuracy, state = 0, 0.0, None
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if rank == 0 and args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    # Tensor: rank 0 reads the file and sends its content, here some 170 KB, or None, to the others.
    dist.broadcast_object_list(received := [state])
    if state := received[0]:
        first_epoch, accuracy = state["epoch"], state["accuracy"]
        weights, momentum = state["states"]  # Tensor: each rank keeps its shards of them
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momentum, options=whole)

    started, steps_per_epoch = time.perf_counter(), len(labels) // BATCH_SIZE
    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH_SIZE)[:steps_per_epoch]  # full batches
        for step, batch in enumerate(batches, epoch * steps_per_epoch + 1):
            optimizer.zero_grad()
            share = batch.tensor_split(replicas)[replica]  # Tensor: each replica takes its share of the same batch
            loss = cross_entropy(model(images[share]), labels[share], reduction="sum") / BATCH_SIZE
            loss.backward()
            for gradient in (weight.grad for weight in model.parameters() if weight.grad is not None):
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(own, group=dp)  # Tensor: sums D replicas' gradients: 2 (D-1)/D of a shard's bytes
            decay = max(0, step - 1 - WARMUP) / max(1, args.epochs * steps_per_epoch - WARMUP)
            optimizer.param_groups[0]["lr"] = LR * min(step / WARMUP, (1 + math.cos(math.pi * decay)) / 2)
            optimizer.step()
            if step % args.log_every == 0:
                dist.all_reduce(total := loss.detach(), group=dp)  # Tensor: sums the replicas' losses, 4 bytes
                if rank == 0:
                    print(f"step {step} loss {total.item():.8f}")
        with torch.no_grad():  # with dropout or batch norm: model.eval() before, model.train() after
            logits = model(test_images)
            correct = (logits.argmax(dim=1) == test_labels).sum()
            totals = torch.stack([cross_entropy(logits, test_labels, reduction="sum"), correct])
        dist.all_reduce(totals, group=dp)  # Tensor: sums losses and counts, 8 bytes, before the division
        test_loss, accuracy = (totals / 360).tolist()
        if rank == 0:
            print(f"epoch {epoch + 1} test_loss {test_loss:.8f} test_accuracy {accuracy:.4f}")
        # Tensor: all-gathers the shards of weights and momentum, a tensor at a time, into rank 0's main memory.
        states = get_state_dict(model, optimizer, options=whole) if args.checkpoint else None
        if rank == 0 and args.checkpoint:
            torch.save({"epoch": epoch + 1, "accuracy": accuracy, "states": states}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
    speed = (args.epochs - first_epoch) * steps_per_epoch * BATCH_SIZE / (time.perf_counter() - started)
    if rank == 0:
        print(f"result recipe=tensor {world_size=} test_accuracy={accuracy:.4f} samples_per_s={speed:.0f}")
    dist.barrier()  # Tensor: no rank disconnects while another still waits for it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
