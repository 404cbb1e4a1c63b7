"""Links and GPUs by name, with where their numbers come from. All are starting points: measure, and say so.

alpha of RDMA and within a node: the latency of a hop of NCCL's ring with the Simple protocol (hwLat in NCCL's
src/graph/tuning.cc, 2.20 and later: 14.0 us network, 5.7 us PCI, 3.4 us NVLink). alpha of TCP: 50 us, an
assumption (a hop of a small all-reduce over gloo took 60 to 70 us between two processes on shared cores). EFA: 30
us, an assumption between the two.
Rates are the makers': NDR, HDR and EDR InfiniBand, EFA of p4d (400 Gbit/s) and p5 (3,200 Gbit/s) instances.
The share of it that arrives: 1,448 bytes of each 1,538 on a wire with packets of 1,500 bytes for TCP; 0.9 for
RDMA is an assumption, --efficiency another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.plan.model import Link

TCP_SHARE = 1448 / 1538
RDMA_SHARE = 0.9


@dataclass(frozen=True)
class Fabric:
    """A network between nodes."""

    alpha_us: float
    gbit: float  # of a port, each way
    per_gpu: bool  # whether each GPU usually has a port of its own; else a node has one
    share: float  # of the rate, that arrives


FABRICS = {
    "ib-400": Fabric(14.0, 400, True, RDMA_SHARE),  # InfiniBand NDR
    "ib-200": Fabric(14.0, 200, True, RDMA_SHARE),  # InfiniBand HDR
    "ib-100": Fabric(14.0, 100, False, RDMA_SHARE),  # InfiniBand EDR
    "efa-400": Fabric(30.0, 400, False, RDMA_SHARE),  # EFA of p4d instances
    "efa-3200": Fabric(30.0, 3200, False, RDMA_SHARE),  # EFA of p5 instances
    # RDMA and TCP over Ethernet
    **{f"roce-{gbit}": Fabric(14.0, gbit, gbit > 100, RDMA_SHARE) for gbit in (400, 200, 100)},
    **{f"tcp-{gbit}": Fabric(50.0, gbit, False, TCP_SHARE) for gbit in (100, 25, 10, 1)},
}

CONTROL_ALPHA_US = 50.0
"""A hop of the vote on stopping, which goes over TCP by gloo on every fabric."""

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
    """A GPU by NVIDIA's data sheet: dense TFLOP/s with fp32 accumulation, and memory."""

    tflops: dict[str, float]  # by --amp; none is TF32 where there is one, fp32 what computes without it
    memory_gb: float


GPUS = {
    "v100": Gpu({"fp32": 15.7, "none": 15.7, "fp16": 125.0, "bf16": 15.7}, 32),
    "a100": Gpu({"fp32": 19.5, "none": 156.0, "fp16": 312.0, "bf16": 312.0}, 80),
    "h100": Gpu({"fp32": 66.9, "none": 494.7, "fp16": 989.4, "bf16": 989.4}, 80),
    "h200": Gpu({"fp32": 66.9, "none": 494.7, "fp16": 989.4, "bf16": 989.4}, 141),
    "b200": Gpu({"fp32": 75.0, "none": 1125.0, "fp16": 2250.0, "bf16": 2250.0}, 180),
}


def network(fabric: Fabric, gpus: int, ports: int | None) -> Link:
    """Return the link of a node: all its ports together."""
    count = ports or (gpus if fabric.per_gpu else 1)
    return Link(fabric.alpha_us * 1e-6, count * fabric.gbit * 1e9 / 8 * fabric.share)
