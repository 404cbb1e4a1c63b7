"""Absolute floors: what a GPU, its links and its network have to reach, even if all nodes are equally slow.

A comparison with other nodes does not show that all of them have fallen back: from NVLink to PCIe, or from RDMA to
TCP. The floors lie between the two speeds: about half of the data sheet (scripts/plan/fabrics.py) for matrix
products, above PCIe for NVLink, and half of the port's rate for a rail. On boards of four GPUs without NVSwitch, a
pair has a third of a GPU's NVLinks. They have not been measured on every kind of GPU; Azure's health checks
require more (55 GB/s from the host to an H200).

The link to the host is as old as its older end: H100 and H200 on PCIe 4 (AWS p5, p5e) copy 25 GB/s instead of 50,
A100 on PCIe 3 (AWS p4d, GCP a2) 12 instead of 24. Its floors lie below that, so that they find what is broken, not
what is older. They do not show that a newer link has fallen back by one generation, or to half its lanes.
"""

from __future__ import annotations

from statistics import median

from scripts.doctor.case import Case, Findings
from scripts.doctor.kernel_log import WATCH, XIDS

RAIL_SHARE = 0.5


def minimum(tflops: float, host_gb_s: float, peer_gb_s: float = 0.0) -> dict[str, float]:
    """Return the minimum of each measurement of torch_facts.py; without NVLink, peer_gb_s is 0."""
    return {"tflops": tflops, "to_device_gb_s": host_gb_s, "from_device_gb_s": host_gb_s, "peer_gb_s": peer_gb_s}


FLOORS = {
    "B200": minimum(1100.0, 40.0, 350.0),
    "H200 NVL": minimum(400.0, 18.0),
    "GH200": minimum(450.0, 40.0, 100.0),
    "H200": minimum(450.0, 18.0, 100.0),
    "H100 80GB HBM3": minimum(450.0, 18.0, 100.0),
    "H100 PCIe": minimum(300.0, 18.0),
    "A100-SXM4": minimum(150.0, 9.0, 60.0),
    "A100-PCIE": minimum(140.0, 9.0),
    "A100 80GB PCIe": minimum(140.0, 9.0),
}
"""Keyed by a part of the GPU's name in torch; the first match counts."""

PCIE = "see the PCIe link (GPU Link Info of nvidia-smi -q), NUMA binding, IOMMU"
NVLINK = "see nvidia-smi nvlink --status and topo -m; is the fabric manager running"
MEASURED = {
    "tflops": ("Tflop/s in bfloat16", "see its clocks and power cap (nvidia-smi -q -d PERFORMANCE)"),
    "to_device_gb_s": ("GB/s from the host", PCIE),
    "from_device_gb_s": ("GB/s to the host", PCIE),
    "peer_gb_s": ("GB/s to the next GPU", NVLINK),
}
"""For each measurement of torch_facts.py: its unit, and what to check if it is too low."""


def gpu_floors(case: Case) -> Findings:
    """Report GPUs, and their links to the host and to each other, that are below the floor of their kind."""
    for rank, torch in case.each("torch"):
        for device in torch.get("devices", []):
            floor = next((floor for name, floor in FLOORS.items() if name in device["name"]), {})
            if " MIG " in device["name"]:  # a part of a GPU
                continue
            for key, least in floor.items():
                value = device.get(key)
                if value is not None and value < least:
                    unit, remedy = MEASURED[key]
                    what = f"{device['device']} ({device['name']}) does {value:.0f} {unit}"
                    yield case.error(rank, f"{what}, at least {least:.0f} are expected", remedy)


def rails(case: Case) -> Findings:
    """Report rails of GPUs, by local rank, that reach less than half of the slowest active RDMA port's rate."""
    for node, found in sorted(case.ranks.items()):
        rates = case.fact(node, "rdma_gbit_s", {}).values()
        least = RAIL_SHARE * min(rates, default=0.0)
        slow: dict[int, float] = {}
        for rank in found["ranks"]:
            links = {**rank.get("links_gbit_s", {}), **rank.get("rail_gbit_s", {})}
            speeds = [speed for other, speed in links.items() if case.machine(int(other)) != case.machine(node)]
            if str(rank.get("device", "")).startswith("cuda") and speeds and max(speeds) < least:
                slow[rank["local_rank"]] = max(speeds)
        if slow and case.may_use_rdma(node):
            which = f"{'rails' if len(slow) > 1 else 'the rail'} of local rank {', '.join(map(str, sorted(slow)))}"
            speed = f"{median(slow.values()):.0f} Gbit/s, at least {least:.0f} are expected"
            fix = "see the transport (NCCL_DEBUG=INFO), the port (ibstat), its cable, and NCCL_IB_HCA"
            yield case.error(node, f"{which} at {speed}", fix)


def transport(case: Case) -> Findings:
    """Report NCCL over sockets on a node that has RDMA devices, or on which FABRIC asks for another network."""
    for node, found in sorted(case.ranks.items()):
        networks = {rank.get("network") for rank in found["ranks"]} - {None}
        fabric = case.fabric(node)
        if "Socket" not in networks or fabric == "tcp":
            continue
        remedy = "see docs/site.md: the device in the pod, libibverbs1 or aws-ofi-nccl in the image, locked memory"
        if fabric != "auto":
            yield case.error(node, f"FABRIC={fabric}, and NCCL uses Socket, which is TCP", remedy)
        elif rdma := case.fact(node, "rdma"):
            what = f"{case.name(node)} has {rdma[0]}, and NCCL uses Socket, which is TCP"
            yield case.warning((node,), what, remedy)


def kernel_log(case: Case) -> Findings:
    """Report Xid events and memory errors of the last day, with advice."""
    for rank, events in case.each("kernel_log"):
        for event in events:
            times = f"{event['count']} times" if event["count"] > 1 else "once"
            if event["xid"]:
                advice, what = XIDS[event["xid"]]
                text = f"GPU {event['device']}, Xid {event['xid']} {times}: {what}"
                say = case.warning if advice == WATCH else case.error
                yield say(rank, text, advice)
            else:
                remedy = "drain the node and replace the module (ras-mc-ctl --errors, ipmitool sel list)"
                yield case.error(rank, f"uncorrected errors of its main memory {times}", remedy)
