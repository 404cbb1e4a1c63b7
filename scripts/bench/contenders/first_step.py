"""A minimal launch: import torch, meet the other processes, and do one step under DDP.

torchrun --nproc-per-node=2 -m scripts.bench.contenders.first_step FILE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Make FILE once the first step is done."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
