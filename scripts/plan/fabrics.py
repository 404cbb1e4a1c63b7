"""Links and GPUs by name, with where their numbers come from. All are starting points for your own measurements.

Latency of a hop, for RDMA and within a node: that of NCCL's ring with the Simple protocol (hwLat in NCCL's
src/graph/tuning.cc, 2.20 and later). TCP: an assumption (a hop of a small all-reduce over gloo took 60 to 70 us
between two processes on shared cores). EFA: an assumption between the two. Rates are the vendors'. The usable
share of a rate, for TCP: 1,448 of each 1,538 bytes on the wire, with packets of 1,500 bytes; RDMA: an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.plan.cost_model import Link

TCP_SHARE = 1448 / 1538
RDMA_SHARE = 0.9

FABRICS = {
    **{f"ib-{gbit}": (14.0, gbit, gbit > 100, RDMA_SHARE) for gbit in (400, 200, 100)},  # NDR, HDR, EDR
    **{f"efa-{gbit}": (30.0, gbit, False, RDMA_SHARE) for gbit in (400, 3200)},  # of p4d and p5 instances
    **{f"roce-{gbit}": (14.0, gbit, gbit > 100, RDMA_SHARE) for gbit in (400, 200, 100)},  # RDMA over Ethernet
    **{f"tcp-{gbit}": (50.0, gbit, False, TCP_SHARE) for gbit in (100, 25, 10, 1)},
}
"""Between nodes: a hop's latency in us, a port's Gbit/s in each direction, whether each GPU has its own port (else
a node has one), and the usable share of the rate."""

CONTROL_ALPHA_US = 50.0
"""Latency of a hop of the vote on stopping, which uses gloo over TCP on every fabric."""

INTRA = {
    "nvlink": Link(3.4e-6, 450e9),
    "nvlink3": Link(3.4e-6, 300e9),
    "nvlink2": Link(3.4e-6, 150e9),
    "pcie": Link(5.7e-6, 25e9),
    "pcie5": Link(5.7e-6, 50e9),
    "none": None,
}
"""Within a node, each way: NVLink 4 (H100, H200; 900 GB/s both ways), 3 (A100), 2 (V100), PCIe 4 and 5 x16."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet by NVIDIA: dense TFLOP/s with fp32 accumulation, and memory."""

    tflops: dict[str, float]  # by --amp; "none" is TF32 if the GPU has it, "fp32" is without TF32
    memory_gb: float


GPUS = {
    "v100": Gpu({"fp32": 15.7, "none": 15.7, "fp16": 125.0, "bf16": 15.7}, 32),
    "a100": Gpu({"fp32": 19.5, "none": 156.0, "fp16": 312.0, "bf16": 312.0}, 80),
    "h100": Gpu({"fp32": 66.9, "none": 494.7, "fp16": 989.4, "bf16": 989.4}, 80),
    "h200": Gpu({"fp32": 66.9, "none": 494.7, "fp16": 989.4, "bf16": 989.4}, 141),
    "b200": Gpu({"fp32": 75.0, "none": 1125.0, "fp16": 2250.0, "bf16": 2250.0}, 180),
}


def node_link(fabric: str, gpus: int) -> Link:
    """Return the link of a node, with all its ports together."""
    alpha_us, gbit, per_gpu, share = FABRICS[fabric]
    return Link(alpha_us * 1e-6, (gpus if per_gpu else 1) * gbit * 1e9 / 8 * share)
