"""Pipeline parallelism x DDP: the layers are divided among the processes of a replica.

Run `torchrun --nproc-per-node=4 recipes/pipeline/minimal.py --checkpoint pipeline.pt`; train.py has all options.
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

SEED, BATCH_SIZE, LR, WARMUP = 1, 64, 0.02, 100


def main() -> None:
    """Train, evaluate after each epoch, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--checkpoint", help="file to resume from if it exists, and to write after each epoch")
    parser.add_argument("--stages", type=int, default=2, help="processes of a replica, 1 to 4; replicas divide 16")
    args = parser.parse_args()
    # DDP: torchrun sets each process's rank; each takes its GPU and connects at MASTER_ADDR:MASTER_PORT.
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.cuda.set_device(device if device.type == "cuda" else -1)  # -1: no effect
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device.index)
    # Pipeline: the processes form a grid: a row is a replica of the model, a column all replicas of a stage.
    mesh = DeviceMesh(device.type, torch.arange(world_size).view(-1, args.stages), mesh_dim_names=("dp", "pp"))
    dp, pp, stage, replicas = mesh.get_group("dp"), mesh.get_group("pp"), mesh.get_local_rank("pp"), mesh.size(0)
    digits = load_digits()  # 1,797 images of 8x8 pixels; the first 360 in this order are for testing
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.images).float()[order, None], torch.tensor(digits.target)[order]
    images, labels = ((images - images[360:].mean()) / images[360:].std()).to(device), labels.to(device)
    images, labels, test_images, test_labels = images[360:], labels[360:], images[:360], labels[:360]
    # DDP: each replica evaluates its own share of the test samples.
    test_images, test_labels = (part.tensor_split(replicas)[dp.rank()] for part in (test_images, test_labels))

    torch.manual_seed(SEED)
    first, second, pool = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5, padding=2), nn.MaxPool2d(2)
    linear = [nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    model = nn.Sequential(first, pool, nn.ReLU(), second, pool, nn.ReLU(), nn.Flatten(), *linear)
    for weight in list(model.parameters())[:-2]:  # the last layer keeps torch's smaller weights
        nn.init.kaiming_uniform_(weight, nonlinearity="relu") if weight.dim() > 1 else nn.init.zeros_(weight)
    start, end = ([0, 3, 7, 9, 11, 12][-(-5 * i // args.stages)] for i in (stage, stage + 1))
    part = model[start:end].to(device)  # Pipeline: this stage's layers; the 5 with weights are spread evenly
    optimizer = torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
    first_epoch, accuracy, state = 0, 0.0, None
    in_main_memory = StateDictOptions(cpu_offload=True)
    if rank == 0 and args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    # DDP: rank 0 reads the file and sends its content, here some 170 KB, or None, to the others.
    dist.broadcast_object_list(received := [state])
    if state := received[0]:
        first_epoch, accuracy = state["epoch"], state["accuracy"]
        weights, momentum = state["states"][stage]
        set_state_dict(part, optimizer, model_state_dict=weights, optim_state_dict=momentum)
    ddp = nn.parallel.DistributedDataParallel(part, process_group=dp)  # DDP: averages over the replicas of a stage
    # Pipeline: each of 4 microbatches sends activations to the next stage, and their gradient to the one before.
    schedule = Schedule1F1B(PipelineStage(ddp, stage, args.stages, device, group=pp), 4, cross_entropy)
    forward = ScheduleGPipe(PipelineStage(part, stage, args.stages, device, group=pp), 1)

    started, steps_per_epoch = time.perf_counter(), len(labels) // BATCH_SIZE
    for epoch in range(first_epoch, args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
        batches = order.to(device).split(BATCH_SIZE)[:steps_per_epoch]  # full batches
        for step, batch in enumerate(batches, epoch * steps_per_epoch + 1):
            optimizer.zero_grad()
            share = batch.view(replicas, 4, -1)[dp.rank()].flatten()  # DDP: a replica's share, in 4 equal parts
            losses: list[Tensor] = []  # filled on the last stage; equal microbatches, so their mean is the batch's
            schedule.step(*([images[share]] if stage == 0 else []), target=labels[share], losses=losses)
            loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
            decay = max(0, step - 1 - WARMUP) / max(1, args.epochs * steps_per_epoch - WARMUP)
            optimizer.param_groups[0]["lr"] = LR * min(step / WARMUP, (1 + math.cos(math.pi * decay)) / 2)
            optimizer.step()
            if step % args.log_every == 0:
                dist.all_reduce(total := loss.detach())  # DDP: sums the losses of the ranks, 4 bytes each
                if rank == 0:
                    print(f"step {step} loss {total.item() / replicas:.8f}")
        with torch.no_grad():  # with dropout or batch norm: model.eval() before, model.train() after
            if (logits := forward.step(*([test_images] if stage == 0 else []))) is None:  # not the last stage
                logits, test_labels = torch.empty(0, 10, device=device), test_labels[:0]
            correct = (logits.argmax(dim=1) == test_labels).sum()
            totals = torch.stack([cross_entropy(logits, test_labels, reduction="sum"), correct])
        dist.all_reduce(totals)  # DDP: sums losses and counts, 8 bytes per rank, before the division
        test_loss, accuracy = (totals / 360).tolist()
        if rank == 0:
            print(f"epoch {epoch + 1} test_loss {test_loss:.8f} test_accuracy {accuracy:.4f}")
        # Pipeline: gathers the weights and the momentum of all stages of a replica in main memory, here 170 KB.
        own = get_state_dict(part, optimizer, options=in_main_memory) if args.checkpoint else None
        dist.all_gather_object(states := [own] * args.stages, own, group=pp)
        if rank == 0 and args.checkpoint:
            torch.save({"epoch": epoch + 1, "accuracy": accuracy, "states": states}, f"{args.checkpoint}.tmp")
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)
    speed = (args.epochs - first_epoch) * steps_per_epoch * BATCH_SIZE / (time.perf_counter() - started)
    if rank == 0:
        print(f"result recipe=pipeline {world_size=} test_accuracy={accuracy:.4f} samples_per_s={speed:.0f}")
    dist.barrier()  # DDP: no rank disconnects while another still waits for it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
