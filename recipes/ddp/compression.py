"""--grad-compression: buckets cross the wire in half precision, or as two low-rank factors.

Source: Vogels et al. 2019, PowerSGD, https://arxiv.org/abs/1905.13727.
"""

from __future__ import annotations

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from recipes.common.errors import UserError


def compress_gradients(ddp: DistributedDataParallel, how: str, powersgd_rank: int) -> None:
    """Make DDP compress its buckets of gradients; `how` is fp16, bf16 or powersgd.

    Raises UserError for powersgd on the CPUs of a machine with GPUs.
    """
    if how == "powersgd":
        if ddp.device.type == "cpu" and torch.cuda.is_available():  # torch's hook would wait for the device "cpu"
            what = "torch's PowerSGD fails on CPUs while it sees a GPU"
            raise UserError(f"--grad-compression powersgd: {what}; set CUDA_VISIBLE_DEVICES= to hide them")
        # DDP: an n x m gradient travels as (n + m) x rank numbers; the error is added to the next step's gradient.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=powersgd_rank, start_powerSGD_iter=10)
        ddp.register_comm_hook(state, one_by_one if ddp.device.type == "cpu" else powerSGD_hook.powerSGD_hook)
    else:
        # DDP: half the bytes; the sum is computed in half precision too.
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(None, hooks[how])


# DDP: a bucket is three messages, one after another. Gloo matches messages by their order, which differs between
# ranks while two buckets are in flight, so buckets are sent one by one.
def one_by_one(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201 (DDP reads types)
    """Exchange a bucket with PowerSGD, wait until that is done, and return its future."""
    exchange = powerSGD_hook.powerSGD_hook(state, bucket)
    exchange.wait()
    return exchange
