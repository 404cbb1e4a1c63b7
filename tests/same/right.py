"""A script that trains the same at every world size, with dropout, augmentation, accumulation and checkpoints.

Tests plant bugs in it by small edits: each changes lines that stand here once.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.same.points import Points

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--checkpoint")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
ddp = DistributedDataParallel(model)
torch.manual_seed(100 + rank)

train, test = Points(48, 1, 0.1), Points(19, 2, 0.0)
sampler = DistributedSampler(train)
loader = DataLoader(train, args.batch_size // args.accumulate, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
first_epoch = 0
if args.checkpoint and os.path.exists(args.checkpoint):
    state = torch.load(args.checkpoint, weights_only=True)
    first_epoch = state["epoch"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])

for epoch in range(first_epoch, 3):
    sampler.set_epoch(epoch)
    model.train()
    mean = torch.zeros(())
    for i, (points, labels) in enumerate(loader, 1):
        is_last = i % args.accumulate == 0
        ddp.require_backward_grad_sync = is_last
        loss = cross_entropy(ddp(points), labels) / args.accumulate
        loss.backward()
        mean += loss.detach()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"loss {mean.item() / world_size:.6f}")
            mean = torch.zeros(())
    model.eval()
    with torch.no_grad():
        points, labels = test.points[rank::world_size], test.labels[rank::world_size]
        total = torch.tensor([cross_entropy(model(points), labels, reduction="sum"), len(labels)])
    dist.all_reduce(total)
    if rank == 0:
        print(f"test_loss {total[0] / total[1]:.6f}")
        state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if args.checkpoint:
            torch.save({**state, "scheduler": scheduler.state_dict()}, args.checkpoint)
    dist.barrier()
dist.destroy_process_group()
