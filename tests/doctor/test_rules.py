"""The rules on facts: what each finds, what it leaves alone, and that every finding is one line with its remedy.

Faults of GPUs and drivers, ECC errors, heat and a broken torch are planted only here: no test machine has them.
"""

import contextlib
import copy
import errno
import functools
import json
import os
import re
import socket
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from recipes.common.errors import UserError
from recipes.common.process.node import Node
from recipes.common.process.ranks import Ranks
from scripts.doctor import __main__ as doctor
from scripts.doctor import collectives, folder, kernel_log, network, node, rendezvous, report, torch_facts
from scripts.doctor.case import Case, Finding
from scripts.doctor.collectives_job import read as read_rank
from scripts.doctor.rules import RULES, judge, outliers, tally
from scripts.launch.processes import Ended
from tests.support import write_program

GIB = 2**30

GPU = {
    "index": "0",
    "name": "NVIDIA H100",
    "driver_version": "580.1",
    "memory.total": "81559",
    "memory.used": "4",
    "temperature.gpu": "30",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
}
TORCH = {"version": "2.14.1", "cuda": "13.0", "nccl": "2.30.7", "gloo": True}


def facts(rank, gpus=0):
    """Return the facts of a healthy node."""
    device = {"device": "cpu", "name": "cpu", "is_right": True, "tflops": None}
    cuda = [{"device": f"cuda:{i}", "name": "NVIDIA H100", "is_right": True, "tflops": 700.0} for i in range(gpus)]
    own, tmp = f"10.0.0.{rank}", {"tmp": "/tmp", "tmp_free_bytes": 10 * GIB}
    return {
        "errors": {},
        "host": f"n{rank}",
        "names": [f"n{rank}"],
        "machine": f"machine {rank}",
        "python": "3.11.7",
        "cores": 8,
        "variables": {"NNODES": "3", "NPROC_PER_NODE": str(gpus or 1), "FABRIC": "auto"},
        "network": {"interface": "eth0", "address": own, "mtu": 9000, "is_up": True, "addresses": ["::1", own]},
        "limits": {"open_files": -1, "locked_bytes": -1},
        "disk": {"shm_bytes": 8 * GIB, "runs": "/runs", "runs_free_bytes": 100 * GIB, **tmp},
        "rdma": ["mlx5_0"],
        "revision": "abc",
        "code": "123",
        "gpus": [{**GPU, "index": str(i)} for i in range(gpus)] if gpus else None,
        "torch": {**TORCH, "devices": cuda or [device]},
    }


def names_of(rank):
    """Return what a node finds for the names of another one: one of them is enough."""
    return {f"n{rank}": [f"10.0.0.{rank}"], f"n{rank}.local": "Name or service not known"}


def healthy(nodes=3, gpus=0):
    """Return a case in which nothing is wrong."""
    ranks = range(nodes)
    case = Case(nodes, "n0:29500", 60.0, facts={rank: facts(rank, gpus) for rank in ranks})
    case.clocks = {rank: (0.01 * rank, 0.001) for rank in ranks}
    case.written = {rank: {"error": None} for rank in ranks}
    case.seen = {rank: list(ranks) for rank in ranks}
    case.peers = {
        a: {str(b): {"names": names_of(b), "port": 4000, "stage": "done"} for b in ranks if b != a} for a in ranks
    }
    done = {"local_rank": 0, "stage": "done", "wrong_elements": 0}
    done["map"] = {"world_size": nodes, "sum": nodes * (nodes + 1) // 2, "ranks": []}
    for a in ranks:
        links = {str(b): 10.0 for b in ranks if b != a}
        case.ranks[a] = {"ranks": [{"rank": a, **done, "links_gbit_s": links}]}
    return case


def slow_node(case):
    for a in (0, 1):
        case.ranks[a]["ranks"][0]["links_gbit_s"]["2"] = 1.0


def slow_link(case):
    case.ranks[0]["ranks"][0]["links_gbit_s"]["1"] = 1.0


def set_facts(**values):
    """Return a fault that changes the facts of node 1."""
    return lambda case: case.facts[1].update(values)


def set_in(part, **values):
    """Return a fault that changes a part of the facts of node 1."""
    return lambda case: case.facts[1][part].update(values)


def set_rank(**values):
    """Return a fault that changes what the rank of node 1 has found."""
    return lambda case: case.ranks[1]["ranks"][0].update(values)


def set_peer(**values):
    """Return a fault that changes what node 0 has found of node 1."""
    return lambda case: case.peers[0]["1"].update(values)


def set_gpu(name, value):
    """Return a fault that changes what nvidia-smi says of node 1's first GPU."""
    return lambda case: case.facts[1]["gpus"][0].update({name: value})


def choose_networks(case):
    for rank, found in case.ranks.items():
        found["fabric"] = {"FABRIC": "auto", "FABRIC_USED": "ib (mlx5_0)"}
        if rank == 1:
            found["fabric"]["FABRIC_USED"] = "tcp (no port of mlx5_0 is active)"


def see_no_gpus(visible):
    """Return a fault: torch sees no GPU on node 1, where CUDA_VISIBLE_DEVICES is `visible`."""
    own = {"torch": {"devices": facts(1)["torch"]["devices"]}, "variables": {"CUDA_VISIBLE_DEVICES": visible}}
    return lambda case: [case.facts[1][part].update(values) for part, values in own.items()]


FAULTS = {
    "attendance": (lambda case: case.facts.pop(2), "node 2 did not connect to n0:29500 within 60 s"),
    "attendance, refused": (
        lambda case: [case.facts.pop(2), case.refused.append((2, "10.0.0.2: it has NNODES 4"))],
        "node 0 rejected node 2 at 10.0.0.2: it has NNODES 4; give each node"),
    "attendance, told": (lambda case: [case.facts.pop(2), case.messages.update({2: "n2 cannot resolve n0"})],
        "node 2 did not connect to n0:29500; it says: n2 cannot resolve n0; its own log has more"),
    "attendance, lost": (lambda case: case.lost.update({1: ("ranks", "no answer within 60 s")}),
        "node 1 (n1) connected, and failed at the request for ranks: no answer within 60 s; see its own log"),
    "attendance, late": (lambda case: case.skipped.append("ranks"), "there was no time left to ask for ranks"),
    "node_errors": (set_facts(errors={"gpus": "nvidia-smi ended with status 9: no devices"}),
        "node 1 (n1): gpus: nvidia-smi ended with status 9: no devices; see nvidia-smi and dmesg"),
    "names": (set_peer(names={"n1": "Name or service not known"}),
        "node 0 (n0) cannot resolve the name of node 1 (n1): n1 (Name or service not known); add it to DNS"),
    "names, wrong": (set_peer(names={"n1": ["10.0.0.77"]}),
        "the name n1 of node 1 (n1) leads to 10.0.0.77, which is not its address (10.0.0.1 is); fix DNS"),
    "links_up": (set_in("network", mtu=1500), "node 1 (n1): the MTU of eth0 is 1500, on node 0 (n0), node 2"),
    "links_up, down": (set_in("network", is_up=False), "eth0 is down; ip link set eth0 up"),
    "ports": (set_peer(stage="connect", why="Connection refused"),
        "node 0 (n0) to node 1 (n1) at 10.0.0.1, port 4000: connections fail (Connection refused; the other "
        "way works); let all TCP ports"),
    "ports, large": (set_peer(stage="large", why="no answer"),
        "small packets pass and large ones do not (no answer); the path carries less than its MTU of 9000"),
    "clocks": (lambda case: case.clocks.update({1: (-7.0, 0.1)}),
        "its clock is 7.0 s behind most other nodes; start"),
    "limits": (set_in("limits", open_files=256), "sbatch --propagate=NONE); at least 1024"),
    "limits, locked": (set_in("limits", locked_bytes=65536), "sbatch --propagate=NONE)"),
    "disks": (set_in("disk", shm_bytes=64 * 2**20), "/dev/shm has 64 MiB; docker run --shm-size 8g"),
    "disks, runs": (set_in("disk", runs_free_bytes=2**20),
        "/runs, where records and checkpoints go, has 1 MiB free; make room, or choose another --runs-dir"),
    "disks, tmp": (set_in("disk", tmp_free_bytes=2**20), "/tmp, for temporary files, has 1 MiB free; make room"),
    "disks, readonly": (lambda case: case.written.update({1: {"error": "Read-only file system"}}),
        "node 1 (n1) cannot write /runs: Read-only file system; make room, fix"),
    "shared_folder": (lambda case: case.seen.update({1: [1]}),
        "node 1 (n1) cannot see what node 0 (n0) wrote to /runs; mount the same file system"),
    "versions, torch": (set_in("torch", version="2.11.0"), "node 1 (n1): torch is 2.11.0, on node 0 (n0), node 2"),
    "versions, nccl": (set_in("torch", nccl="2.20.0"), "NCCL is 2.20.0, on node 0 (n0), node 2 (n2) 2.30.7"),
    "versions, revision": (set_facts(revision="def", code="456"),
        "our revision is def, on node 0 (n0), node 2 (n2) abc"),
    "versions, code": (set_facts(code="456"), "our code is 456, on node 0 (n0), node 2 (n2) 123; files of"),
    "torch_works": (set_facts(torch={"error": "libcudart.so.13: cannot"}), "torch does not work: libcudart"),
    "torch_works, gloo": (set_in("torch", gloo=False), "node 1 (n1): torch has no gloo; install torch from PyPI"),
    "torch_works, device": (lambda case: case.facts[1]["torch"]["devices"][0].update(is_right=False),
        "node 1 (n1): cpu (cpu): a product of matrices is wrong; take the device out of service"),
    "collectives": (set_rank(stage="all-reduce", error="it did not end in time"),
        "node 1 (n1): a rank did not get past all-reduce: it did not end in time; "),
    "collectives, fabric": (lambda case: case.ranks.update({1: {"error": "FABRIC expects auto", "ranks": []}}),
        "node 1 (n1): no ranks were started: FABRIC expects auto; fix that first"),
    "sums": (set_rank(wrong_elements=7),
        "node 1 (n1): rank 1 received an incorrect sum from the all-reduce; its memory"),
    "sums, everywhere": (
        lambda case: [found["ranks"][0].update(wrong_elements=7) for found in case.ranks.values()],
        "all nodes received an incorrect sum from the all-reduce: one of them sends wrong values; run the"),
    "sums, two groups": (set_rank(map={"world_size": 3, "sum": 3, "ranks": []}),
        "the all-reduce of 1..3 gave 3: the ranks are not one group; see the launcher's variables"),
    "bandwidth": (slow_node,
        "node 2 (n2) is slow: at best 1.00 Gbit/s to another node, the others 10.00; see its cable"),
    "bandwidth, link": (slow_link,
        "between node 0 (n0) and node 1 (n1) only 1.00 Gbit/s, elsewhere 10.00; see the"),
}  # fmt: skip

GPU_FAULTS = {
    "fabrics": (choose_networks,
        "NCCL would use tcp (no port of mlx5_0 is active) on node 1 (n1), and ib (mlx5_0) on node 0 (n0), node"),
    "gpu_health, ecc": (set_gpu("ecc.errors.uncorrected.volatile.total", "3"),
        "node 1 (n1): GPU 0 (NVIDIA H100) has 3 uncorrected ECC errors; reset it or replace it"),
    "gpu_health, lost": (set_gpu("memory.used", "[Unknown Error]"),
        "node 1 (n1): GPU 0 (NVIDIA H100): nvidia-smi says Unknown Error; see dmesg"),
    "gpu_health, heat": (set_gpu("clocks_throttle_reasons.hw_slowdown", "Active"),
        "GPU 0 (NVIDIA H100) is throttled: hardware slowdown, 30 C; see to its cooling"),
    "gpu_health, taken": (set_gpu("memory.used", "40000"),
        "GPU 0 (NVIDIA H100): 40000 of 81559 MiB are in use already; see nvidia-smi"),
    "gpus_visible": (set_in("torch", devices=facts(1)["torch"]["devices"]),
        "node 1 (n1): nvidia-smi lists 2 GPUs and torch 2.14.1 sees none; ask for GPUs; with MIG,"),
    "gpus_visible, named": (see_no_gpus("2,3"),
        "lists 2 GPUs and torch 2.14.1 sees none; CUDA_VISIBLE_DEVICES is '2,3': correct it"),
    "gpus_visible, CPU torch": (set_in("torch", devices=facts(1)["torch"]["devices"], cuda=None),
        "nvidia-smi lists 2 GPUs and torch 2.14.1 sees none; install a torch with CUDA"),
    "gpus_visible, hidden": (see_no_gpus(""),
        "node 1 (n1): nvidia-smi lists 2 GPUs and CUDA_VISIBLE_DEVICES is '': all use the CPU; unset it, or"),
    "gpus_visible, driver": (lambda case: [case.facts[1]["torch"].update(devices=[]),
        [gpu.update(driver_version="570.86.15") for gpu in case.facts[1]["gpus"]]],
        "sees none; driver 570.86.15 is too old for CUDA 13.0: install 580 or later, or a torch of an"),
    "gpu_health, without ECC": (lambda case: case.facts[1]["gpus"][0].pop("ecc.errors.uncorrected.volatile.total"),
        "node 1 (n1): GPU 0 (NVIDIA H100): nvidia-smi does not report its ECC errors and clocks; see nvidia-smi"),
    "gpus_visible, CUDA": (set_in("torch", devices=[], cuda_error="Error 802: system not yet initialized"),
        "torch 2.14.1 sees none (Error 802: system not yet initialized); see its driver and, with NVSwitch,"),
    "gpus_visible, few": (lambda case: case.facts[1]["torch"]["devices"].pop(),
        "node 1 (n1): 2 processes for 1 GPUs: recipes refuse to start; NPROC_PER_NODE=1"),
    "torch_works, slow": (lambda case: case.facts[1]["torch"]["devices"][0].update(tflops=300.0),
        "node 1 (n1): cuda:0 (NVIDIA H100) does 300 Tflop/s, others of its kind 700; see its clocks"),
    "torch_works, timed": (  # the timed products are the first ones that load a device
        lambda case: case.facts[1]["torch"]["devices"][1].update(error="CUDA error: illegal", tflops=None),
        "node 1 (n1): cuda:1 (NVIDIA H100): CUDA error: illegal; take the device out of service",
    ),
    "torch_works, old GPU": (
        lambda case: case.facts[1]["torch"]["devices"][1].update(error="no kernel image is", tflops=None),
        "no kernel image is; this torch has no kernels for this GPU: install one that has (docker/README.md)",
    ),
    "versions, driver": (lambda case: [gpu.update(driver_version="470.2") for gpu in case.facts[1]["gpus"]],
        "node 1 (n1): driver is 470.2, on node 0 (n0), node 2 (n2) 580.1; install the same"),
}  # fmt: skip


SXM = "NVIDIA H100 80GB HBM3"
FULL_SPEED = {"name": SXM, "tflops": 700.0, "to_device_gb_s": 54.0, "from_device_gb_s": 53.0, "peer_gb_s": 370.0}


def fleet(nodes=2, **slow):
    """Return healthy nodes of two H100 each, with rails of 400 Gbit/s; the slow values apply to all GPUs."""
    case = healthy(nodes, gpus=2)
    for rank, one in case.facts.items():
        one["rdma_gbit_s"] = {"mlx5_0": 400.0, "mlx5_1": 400.0}
        for device in one["torch"]["devices"]:
            device.update({**FULL_SPEED, **slow})
        (first,) = case.ranks[rank]["ranks"]
        first.update(device="cuda:0", network="IB", links_gbit_s={str(b): 380.0 for b in case.facts if b != rank})
        second = {**first, "local_rank": 1, "device": "cuda:1", "map": None, "rail_gbit_s": {str(1 - rank): 379.0}}
        case.ranks[rank]["ranks"].append({key: second[key] for key in second if key != "links_gbit_s"})
    return case


def set_ranks(case, **values):
    for found in case.ranks.values():
        for rank in found["ranks"]:
            rank.update({key: value for key, value in values.items() if key in rank})


def xid(number, count=1, device="PCI:0000:3b:00"):
    return lambda case: case.facts[1].update(kernel_log=[{"device": device, "xid": number, "count": count}])


def slow_down(**speeds):
    """Return a fault that all GPUs of all nodes have."""
    return lambda case: [gpu.update(speeds) for one in case.facts.values() for gpu in one["torch"]["devices"]]


UNIFORM_FAULTS = {
    "gpu_floors, matmul": (slow_down(tflops=300.0),
        "cuda:0 (NVIDIA H100 80GB HBM3) does 300 Tflop/s in bfloat16, at least 450 are expected; see its clocks"),
    "gpu_floors, pcie": (slow_down(to_device_gb_s=13.0),
        "does 13 GB/s from the host, at least 18 are expected; see the PCIe link"),
    "gpu_floors, back": (slow_down(from_device_gb_s=12.0), "does 12 GB/s to the host, at least 18 are"),
    "gpu_floors, nvlink": (slow_down(peer_gb_s=40.0),
        "does 40 GB/s to the next GPU, at least 100 are expected; see nvidia-smi nvlink"),
    "rails": (
        lambda case: set_ranks(case, links_gbit_s={"0": 20.0, "1": 20.0}, rail_gbit_s={"0": 19.0, "1": 19.0}),
        "node 1 (n1): rails of local rank 0, 1 at 20 Gbit/s, at least 200 are expected; see the transport"),
    "rails, one": (lambda case: set_ranks(case, rail_gbit_s={"0": 90.0, "1": 90.0}),
        "node 0 (n0): the rail of local rank 1 at 90 Gbit/s, at least 200 are expected"),
    "transport": (lambda case: (set_ranks(case, network="Socket"),
        [one["variables"].update(FABRIC="ib") for one in case.facts.values()]),
        "node 0 (n0): FABRIC=ib, and NCCL uses Socket, which is TCP; see docs/site.md"),
    "transport, auto": (lambda case: set_ranks(case, network="Socket"),
        "warning: node 0 (n0) has mlx5_0, and NCCL uses Socket, which is TCP"),
    "transport, site": (  # FABRIC is set in site.env, not in the doctor's environment
        lambda case: (
            set_ranks(case, network="Socket"),
            [found.update(fabric={"FABRIC": "efa"}) for found in case.ranks.values()],
        ),
        "error: node 0 (n0): FABRIC=efa, and NCCL uses Socket, which is TCP; see docs/site.md",
    ),
    "kernel_log, bus": (xid(79),
        "GPU PCI:0000:3b:00, Xid 79 once: fallen off the bus; drain the node and switch it off"),
    "kernel_log, ecc": (xid(95, 3), "Xid 95 3 times: uncontained ECC error; drain the node and reset"),
    "kernel_log, nvlink": (xid(74), "NVLink error; drain the node and have the board"),
    "kernel_log, remap": (xid(63), "warning: node 1 (n1): GPU PCI:0000:3b:00, Xid 63 once"),
    "kernel_log, memory": (xid(0, device="memory"), "uncorrected errors of its main memory once"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNIFORM_FAULTS)
def test_a_fault_that_all_nodes_share_is_below_a_floor(name):
    """On two nodes, where no device or link is slower than others of its kind."""
    plant, words = UNIFORM_FAULTS[name]
    plant(case := fleet())
    findings = judge(case)
    assert {finding.rule for finding in findings} == {name.split(",")[0]}
    assert any(words in str(finding) for finding in findings), [str(finding) for finding in findings]


def test_the_report_says_over_what_nccl_goes():
    case = fleet(3)
    for rank in case.ranks[2]["ranks"]:
        rank["network"] = "Socket"
    said = [line for line in report.lines(case, [], 1.0) if line.startswith("NCCL uses ")]
    assert said == ["NCCL uses IB on node 0 (n0), node 1 (n1)", "NCCL uses Socket on node 2 (n2)"]


def test_where_tcp_is_chosen_or_asked_for_rdma_need_not_work():
    """A pod's /sys shows the machine's devices."""
    case = fleet()
    set_ranks(case, network="Socket", links_gbit_s={"0": 20.0, "1": 20.0}, rail_gbit_s={"0": 19.0, "1": 19.0})
    for one in case.facts.values():
        one["rdma"] = ["mlx5_0"]
        one["limits"]["locked_bytes"] = 65536
    assert {finding.rule for finding in judge(case)} == {"rails", "transport", "limits"}
    for found in case.ranks.values():
        found["fabric"] = {"FABRIC": "auto", "NCCL_IB_DISABLE": "1"}  # as fabric.sh leaves it if no device opens
    assert {(finding.rule, finding.severity) for finding in judge(case)} == {("transport", "warning")}
    for found in case.ranks.values():
        found["fabric"] = {"FABRIC": "tcp"}
    assert judge(case) == []


@pytest.mark.parametrize(
    ("name", "host", "peer"),
    [
        ("NVIDIA A100-SXM4-40GB", 24.0, 93.0),
        ("NVIDIA H100 80GB HBM3", 54.0, 140.0),
        ("NVIDIA GH200 480GB", 380.0, 140.0),
        ("NVIDIA H100 PCIe", 25.0, 20.0),
        ("NVIDIA H100 80GB HBM3", 25.0, 140.0),
        ("NVIDIA H200", 25.0, 360.0),
        ("NVIDIA H200 NVL", 25.0, 100.0),
        ("NVIDIA A100-SXM4-40GB", 12.0, 93.0),
        ("NVIDIA A100-PCIE-40GB", 12.0, 10.0),
    ],
)
def test_boards_of_four_gpus_and_older_hosts_are_fast_enough(name, host, peer):
    """Without NVSwitch, a GPU's links are divided among three others. Of hosts, AWS p5 has PCIe 4, p4d PCIe 3."""
    assert judge(fleet(name=name, to_device_gb_s=host, from_device_gb_s=host, peer_gb_s=peer)) == []


def test_a_part_of_a_gpu_or_a_board_without_nvlink_has_no_such_floor():
    assert judge(fleet(name="NVIDIA H100 PCIe", tflops=500.0, peer_gb_s=40.0)) == []
    assert judge(fleet(name="NVIDIA T4", tflops=20.0, to_device_gb_s=6.0, peer_gb_s=5.0)) == []
    assert judge(fleet(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", tflops=60.0, to_device_gb_s=10.0)) == []


KMSG = """6,1000,5000000;NVRM: loading NVIDIA UNIX Open Kernel Module
3,1001,99000000000;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
3,1002,99000000100,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.
3,1003,99000000200;NVRM: Xid (PCI:0000:5e:00): 31, pid=77, name=python, MMU Fault: ENGINE GRAPHICS
3,1004,99000000300;EDAC MC0: 1 UE memory read error on CPU_SrcID#0 (channel:0 slot:0)
6,1005,99000000400;EDAC MC0: 0 CE
3,1006,1000000;NVRM: Xid (PCI:0000:af:00): 48, pid=1, DBE of last week
 SUBSYSTEM=pci
"""


def test_the_kernels_log_of_the_last_day_is_read(monkeypatch):
    """Older events, and those that a bug in a program causes, are left out."""
    assert kernel_log.parse(KMSG, uptime_s=100_000) == [
        {"device": "PCI:0000:3b:00", "xid": 79, "count": 2},
        {"device": "memory", "xid": 0, "count": 1},
    ]
    monkeypatch.setenv("KMSG", "/nowhere/kmsg")
    assert kernel_log.read() is None


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_healthy_nodes_have_no_findings(nodes):
    assert [judge(healthy(nodes)), judge(healthy(nodes, gpus=2)), judge(fleet(nodes))] == [[], [], []]


WARNINGS = ("gpu_health, taken", "gpu_health, without ECC", "gpus_visible, hidden", "bandwidth, link")


@pytest.mark.parametrize(("name", "gpus"), [*((name, 0) for name in FAULTS), *((name, 2) for name in GPU_FAULTS)])
def test_a_fault_is_named_with_its_remedy(name, gpus):
    plant, words = (GPU_FAULTS if gpus else FAULTS)[name]
    plant(case := healthy(gpus=gpus))
    findings = judge(case)
    same = [one for one in findings if one.rule == name.split(",")[0]]
    (finding,) = [one for one in same if words in str(one)]
    assert len(same) == (2 if finding.rule == "gpus_visible" else 1)
    assert finding.nodes or "sums" in name or "late" in name
    assert finding.remedy
    assert "\n" not in str(finding)
    assert finding.severity == ("warning" if name in WARNINGS else "error")


def test_every_rule_is_tested():
    planted = {name.split(",")[0] for name in [*FAULTS, *GPU_FAULTS, *UNIFORM_FAULTS]}
    assert {rule.__name__ for rule in RULES} == planted


def test_of_two_values_that_are_as_frequent_the_greater_is_the_usual_one():
    assert outliers({0: 1500, 1: 9000}) == (9000, [1], {1500: [0]})
    assert outliers({0: 9000, 1: 1500, 2: 1500}) == (1500, [1, 2], {9000: [0]})


def test_a_wrong_sum_on_the_only_node_is_its_own():
    case = healthy(nodes=1)
    case.ranks[0]["ranks"][0].update(wrong_elements=7)
    (finding,) = judge(case)
    assert finding.what == "node 0 (n0): rank 0 received an incorrect sum from the all-reduce"


def block(case, pairs, why="no answer"):
    for a, b in pairs:
        case.peers[a][str(b)].update(stage="connect", why=why)


def test_a_node_that_is_cut_off_or_ports_that_are_closed_between_all_are_one_finding():
    block(case := healthy(8), [pair for rank in range(1, 8) for pair in ((0, rank), (rank, 0))])
    (finding,) = judge(case)
    assert "node 0 (n0) at 10.0.0.0: to and from all other nodes connections fail (no answer)" in finding.what
    block(case := healthy(64), ((a, b) for a in range(64) for b in range(64) if a != b))
    (finding,) = judge(case)
    assert "node 3 (n3) and 60 more: between all of them connections fail (no answer)" in finding.what
    assert finding.nodes == tuple(range(64))


def test_two_halves_that_do_not_reach_each_other_are_a_line_a_node():
    case = healthy(16)
    block(case, ((a, b) for a in range(16) for b in range(16) if a % 2 != b % 2))
    findings = judge(case)
    assert len(findings) == 16
    others = "node 1 (n1), node 3 (n3), node 5 (n5), node 7 (n7) and 4 more"
    assert findings[0].what == f"node 0 (n0) to {others}: connections fail (no answer)"
    assert findings[0].nodes == (0, *range(1, 16, 2))


def test_what_is_wrong_with_many_nodes_is_one_line():
    case = healthy(100)
    for rank in range(1, 100):
        case.facts[rank]["limits"] = {"open_files": 512, "locked_bytes": -1}
    case.facts[50]["limits"]["open_files"] = 256
    first, second = judge(case)
    names = "node 1 (n1), node 2 (n2), node 3 (n3), node 4 (n4) and 94 more"
    assert str(first).startswith(f"error: {names}: a process may open 512 files only; ulimit -n")
    assert first.nodes == tuple(rank for rank in range(1, 100) if rank != 50)
    assert second.what == "node 50 (n50): a process may open 256 files only"
    case = Case(100, case.master, case.wait_s, facts={0: case.facts[0]})
    [finding] = judge(case)
    assert finding.what == "node 1, node 2, node 3, node 4 and 95 more did not connect to n0:29500 within 60 s"


@pytest.mark.parametrize(("most_files", "is_enough"), [(4096, False), (9344, True), (-1, True)])
def test_node_0_may_open_a_connection_for_each_rank(most_files, is_enough):
    """Each rank of 512 nodes, and each agent, has two to the store; the soft limit is raised to what is needed."""
    case = healthy(4, gpus=8)
    case.nnodes = 512
    for rank in range(4):
        case.facts[rank]["limits"] = {"open_files": 1024, "most_files": most_files, "locked_bytes": -1}
    found = [finding.what for finding in judge(case) if finding.rule == "limits"]
    what = "node 0 (n0): a process may open 4096 files at most, and its store for 4096 ranks needs 9344"
    assert found == ([] if is_enough else [what])


def test_the_map_of_many_ranks_is_a_short_line():
    """Of 4,096 ranks it would be 600 kB."""
    case = healthy(3)
    rows = [{"rank": rank, "host": "n0"} for rank in range(4096)]
    case.ranks[0]["ranks"][0]["map"] = {"world_size": 4096, "sum": 8390656, "ranks": rows}
    lines = report.lines(case, [], 1.0)
    short = '"ranks": "4096 rows, which --json writes to its file"'
    assert f'probe {{"world_size": 4096, "sum": 8390656, {short}}}' in lines
    assert max(map(len, lines)) < 500
    assert len(report.probe_map(case)["ranks"]) == 4096


def test_of_many_nodes_each_looks_up_a_few_names_and_begins_with_the_next_one(monkeypatch):
    """The name server of 512 nodes would get 260,000 questions, and node 0 511 connections at once."""
    asked, tried = [], []
    monkeypatch.setattr(network, "try_name", lambda name: asked.append(name) or ["10.0.0.1"])
    monkeypatch.setattr(network, "try_port", lambda address, port, secret: tried.append(port) or {"stage": "done"})
    monkeypatch.setattr(network, "PARALLEL", 1)
    peers = [{"rank": i, "names": [f"n{i}"], "address": "10.0.0.1", "port": i} for i in range(512)]
    found = network.look_at_peers(peers, 500, "secret")
    assert tried == [*range(501, 512), *range(500)]
    assert asked == [f"n{i}" for i in [*range(501, 512), *range(21)]]
    assert len(found) == 511
    assert found["20"]["names"] == {"n20": ["10.0.0.1"]}
    assert found["21"] == {"names": {}, "port": 21, "stage": "done"}
    case = healthy(40)
    for a in range(40):
        for b in range(40):
            if a != b and (b - a) % 40 > 32:
                case.peers[a][str(b)]["names"] = {}
    assert judge(case) == [], "a name that was not looked up is no fault"


def test_many_slow_links_are_a_few_lines():
    case = healthy(16)
    for a in range(16):
        for b in range(16):
            if a // 4 != b // 4 and a + b < 16:
                case.ranks[a]["ranks"][0]["links_gbit_s"][str(b)] = 1.0
    findings = judge(case)
    assert [finding.rule for finding in findings] == ["bandwidth"] * 9
    assert re.match(r"\d\d links in all are that slow, between 16 nodes", findings[-1].what)


def test_a_gpu_that_is_missing_is_found_without_torch():
    case = healthy(gpus=2)
    for one in case.facts.values():
        one["torch"] = None
    assert judge(case) == []
    case.facts[1]["gpus"].pop()
    (finding,) = judge(case)
    assert finding.what == "node 1 (n1): 1 GPUs NVIDIA H100, other nodes 2 NVIDIA H100"


def test_the_kernels_log_is_read_on_where_lines_were_overwritten(monkeypatch, tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    monkeypatch.setenv("KMSG", str(log))
    us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    line = f"3,1,{us};NVRM: Xid (PCI:0000:3b:00): 79, off the bus\n".encode()
    monkeypatch.setattr(kernel_log.os, "read", Mock(side_effect=[BrokenPipeError, line, BlockingIOError]))
    assert [event["xid"] for event in kernel_log.read()] == [79]


def test_a_part_that_fails_or_hangs_leaves_the_others_alone(monkeypatch, tmp_path):
    at_once = threading.Barrier(2)  # two parts pass it only if they run in parallel
    monkeypatch.setattr(node, "PART_TIMEOUT_S", 5)
    monkeypatch.setattr(node, "network", lambda *_: {}["eth9"])
    monkeypatch.setattr(node, "code_digest", lambda: at_once.wait(4))
    monkeypatch.setattr(node, "disks", lambda _: at_once.wait(4))
    monkeypatch.setattr(node.socket, "getfqdn", lambda: time.sleep(8))
    found = node.gather("127.0.0.1", 1, tmp_path, is_quick=True, within_s=1.0)
    assert found["errors"] == {"network": "KeyError 'eth9'", "names": "no answer within 1 s"}
    assert found["names"] == [node.socket.gethostname()]
    assert {found["code"], found["disk"]} == {0, 1}


def test_the_revision_is_that_of_the_checkout_as_in_records(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_REVISION", "left over from a job in a container")
    assert node.gather("127.0.0.1", 1, tmp_path, is_quick=True)["revision"] == node.revision()


def test_a_node_that_answers_with_something_else_is_lost_with_the_reason():
    """Its code may be of another revision, so its answer may lack any key."""
    one, other = socket.socketpair()
    head = rendezvous.Coordinator(Case(2), "word", lambda order: {"facts": 1}, {1: rendezvous.Channel(one)})
    follower = rendezvous.Channel(other)

    def follow():
        with contextlib.suppress(UserError):
            rendezvous.serve(follower, lambda order: {}[order["do"]], 60)

    thread = threading.Thread(target=follow)
    thread.start()
    assert head.ask_all({"do": "facts"}, 5, ["facts"]) == {0: {"facts": 1}}
    assert head.case.lost == {1: ("facts", "KeyError 'facts'")}
    thread.join(5)
    head = rendezvous.Coordinator(Case(1), "word", lambda order: {"other": 1})
    assert head.ask_all({"do": "facts"}, 5, ["names", "other"]) == {}
    assert head.case.lost == {0: ("facts", "its answer has no names")}


def test_a_node_waits_for_the_first_order_as_long_as_node_0_does_for_the_others(monkeypatch):
    monkeypatch.setattr(rendezvous, "SILENCE_S", 0.1)
    one, other = socket.socketpair()
    threading.Timer(0.5, one.sendall, [b'{"do": "end", "status": 3}\n']).start()
    assert rendezvous.serve(rendezvous.Channel(other), dict, 60) == 3


def test_nodes_of_one_machine_have_no_names_mtus_or_links_to_judge():
    case = healthy()
    for rank, one in case.facts.items():
        one.update(machine="the same", host="laptop")
        one["network"]["mtu"] = 1500 + rank
    for seen in case.peers.values():
        for found in seen.values():
            found["names"] = {"laptop": "Name or service not known"}
    slow_node(case)
    assert judge(case) == []


def test_without_rdma_little_locked_memory_is_enough():
    case = healthy()
    for one in case.facts.values():
        one.update(rdma=[], limits={"open_files": 1024, "locked_bytes": 65536})
    assert judge(case) == []


@pytest.mark.parametrize(
    ("offset_s", "error_s", "is_found"),
    [(1.4, 0.5, False), (1.6, 0.5, True), (-1.4, 0.5, False), (-1.6, 0.5, True), (0.6, 0.5, False)],
)
def test_a_clock_is_wrong_only_beyond_the_uncertainty(offset_s, error_s, is_found):
    """The offset may be up to error_s smaller than measured, and has to exceed 1 s even then."""
    case = healthy(nodes=2)
    case.clocks = {0: (0.0, 0.0), 1: (offset_s, error_s)}
    assert [finding.rule for finding in judge(case)] == ["clocks"] * is_found


def test_the_offset_of_a_clock_is_taken_at_the_middle_of_its_answer(monkeypatch):
    """Node 1 is 30 s ahead; its answer takes 0.2 s, and its clock is read at half that time."""
    now = [1000.0]
    monkeypatch.setattr(rendezvous.time, "time", lambda: now[0])
    one, other = socket.socketpair()
    head, follower = rendezvous.Channel(one), rendezvous.Channel(other)
    met = rendezvous.Coordinator(Case(2), "word", dict)
    receive, send = head.receive, follower.send

    def answer(message):
        now[0] += 0.1
        send({**message, "time": message["time"] + 30.1})  # its time is from before these 0.1 s

    def take(*bounds):
        message = receive(*bounds)
        now[0] += 0.1
        return message

    follower.send, head.receive = answer, take
    joining = threading.Thread(target=rendezvous.introduce, args=(follower, Node(2, 1, 1, "n0", 1, 60), "word"))
    joining.start()
    met.welcome(head, "10.0.0.1")
    joining.join(10)
    assert met.case.clocks == {0: (0.0, 0.0), 1: (pytest.approx(30.0), pytest.approx(0.1))}


def test_the_verdict_counts_errors_and_warnings():
    case = healthy()
    error, warning = Finding("error", (1,), "a", "b"), Finding("warning", (1,), "c", "d")
    assert report.lines(case, [error, warning], 3.2)[-1] == "doctor: 1 error, 1 warning on 3 nodes, 3 s"
    assert report.lines(case, [warning], 3.2)[-1] == "doctor: all is well on 3 nodes, 1 warning, 3 s"
    assert tally([error, warning, warning]) == {"error": 1, "warning": 2}
    assert "error: a; b" in report.lines(case, [error], 3.2)


@pytest.mark.parametrize("nodes", range(2, 12))
def test_a_tournament_has_every_pair_once_and_a_node_once_a_round(nodes):
    rounds = collectives.rounds_of(nodes)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    for one in rounds:
        seats = [node for pair in one for node in pair]
        assert len(seats) == len(set(seats))


def bytes_read():
    """Return how many bytes this process has read from files so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def test_the_look_for_the_files_of_many_nodes_takes_a_few_bytes(tmp_path, monkeypatch):
    """If each of 1,024 nodes read all files whole, that would be four terabytes."""
    mine, other = (folder.RunsFolder(tmp_path, "word", rank) for rank in (0, 32))
    assert (mine.write(), other.write()) == (None, None)
    (other.folder / "node-64").write_bytes(other.content(64)[:-1])
    monkeypatch.setattr(folder, "SEEN_TIMEOUT_S", 0.0)
    before = bytes_read()
    assert mine.see([0, 32, 64, 96]) == [0, 32]
    assert bytes_read() - before < 2**16


def test_a_folder_to_whose_files_nothing_can_be_appended_is_named(tmp_path, monkeypatch):
    """Mounts of object stores may write new files only, and a run would end at its second logged step."""

    def refuse_to_append(path, mode, **options):
        if mode == "ab":
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return open(path, mode, **options)

    monkeypatch.setattr(folder, "open", refuse_to_append, raising=False)
    found = folder.RunsFolder(tmp_path, "word", 0).write()
    assert found == "nothing can be appended to a file (Operation not supported)"


@pytest.mark.parametrize("behind_s", [7200, -7200])
def test_another_doctors_folder_stays_although_the_file_server_has_another_time(tmp_path, behind_s):
    mine = folder.RunsFolder(tmp_path, "mine", 0)
    for name, age_s in ((mine.folder.name, 0), (".doctor-other", 60), (".doctor-old", 2 * folder.STALE_S)):
        (tmp_path / name).mkdir()
        dated = time.time() - behind_s - age_s
        os.utime(tmp_path / name, (dated, dated))
    mine.remove()
    assert [path.name for path in tmp_path.iterdir()] == [".doctor-other"]


def test_a_node_looks_for_the_files_of_a_few_others_and_a_folder_that_none_share_is_one_line():
    case = healthy(100)
    assert case.probed() == list(range(0, 100, 4))
    case.seen = {rank: case.probed() if rank != 7 else [] for rank in range(100)}
    [finding] = judge(case)
    assert finding.what == "node 7 (n7) cannot see what node 0 (n0) wrote to /runs"
    case.seen = {rank: [rank] for rank in range(100)}
    [finding] = judge(case)
    assert finding.what.startswith("node 1 (n1), node 2 (n2), ")
    assert finding.what.endswith(" cannot see what node 0 (n0) wrote to /runs")


@pytest.mark.parametrize("size", [2, 8192])
def test_the_sum_of_an_all_reduce_is_exact_at_any_number_of_ranks(monkeypatch, size):
    """Above 2^24, float32 rounds: ranks would be reported for correct sums."""
    given, notes = [], []
    monkeypatch.setattr(collectives, "SUM_ELEMENTS", 7)

    def check(rank, size=size):
        ranks = Ranks(rank, rank % 8, size, 8)
        world = types.SimpleNamespace(ranks=ranks, device=torch.device("cpu"))
        collectives.check_sum(world, types.SimpleNamespace(add=lambda **note: notes.append(note)))

    monkeypatch.setattr(collectives.dist, "all_reduce", lambda values: given.append(values.clone()))
    for rank in range(size):
        check(rank, size=1)  # what it gives does not depend on the size, and 8,192 ranks would add up 8,192 each
    total = functools.reduce(torch.add, given)
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda values: values.copy_(total))
    check(size - 1)
    assert notes[-1] == {"wrong_elements": 0}
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda values: values.copy_(total - given[1]))
    check(0)
    assert notes[-1] == {"wrong_elements": 7}


def test_the_map_of_ranks_is_sent_once():
    """With all rows in the notes of each rank, node 0 of 1,024 would get 8,192 x 8,192 rows."""
    rows = [{"rank": rank} for rank in range(100)]
    maps = [collectives.map_note(rank, rows, 5050) for rank in range(100)]
    assert sum(len(one["ranks"]) for one in maps) == 100
    assert maps[0]["ranks"] == rows
    assert {(one["world_size"], one["sum"]) for one in maps} == {(100, 5050)}


def test_errors_come_before_warnings_and_the_rules_change_no_facts():
    case = healthy(gpus=2)
    for plant, _ in (GPU_FAULTS["gpu_health, taken"], FAULTS["collectives"]):
        plant(case)
    before = copy.deepcopy(case)
    assert [finding.rule for finding in judge(case)] == ["collectives", "gpu_health"]
    assert case == before


def test_all_links_of_a_rail_are_noted(monkeypatch):
    """With an odd number of nodes, a rail has two rounds; its best link decides, not its last one."""
    seconds = {2: 1e-3, 4: 1e-1}
    monkeypatch.setattr(collectives, "exchange", lambda peer, *_: seconds[peer - 1])
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda *_, **__: None)
    notes = {}
    ranks = Ranks(rank=1, local_rank=1, world_size=6, local_world_size=2)
    world = types.SimpleNamespace(ranks=ranks, control=None, device=torch.device("cpu"))
    links = collectives.Links(world, types.SimpleNamespace(add=lambda **note: notes.update(note)))
    for pairs in ([(0, 1)], [(0, 2)]):
        links.measure(pairs, "bandwidth, rail 1", 1)
    assert notes["rail_gbit_s"].keys() == {1, 2}
    assert notes["rail_gbit_s"][1] == pytest.approx(100 * notes["rail_gbit_s"][2], rel=1e-2)


@pytest.mark.parametrize(
    ("status", "is_late", "said"),
    [
        (1, False, "last line"),
        (-9, True, "it did not end in time"),
        (-15, False, "it was killed by SIGTERM"),
        (-35, False, "it was killed by signal 35"),  # SIGRTMIN + 1 has no name
    ],
)
def test_how_a_rank_ended_is_said(tmp_path, status, is_late, said):
    found = read_rank(tmp_path, 0, Ended(status, is_late, "first line\nlast line\n"))
    assert found == {"local_rank": 0, "stage": "starting", "error": said}


@pytest.mark.parametrize(
    ("wanted", "name", "fits"),
    [
        *(("eth", "eth0", True), ("=eth", "eth0", False), ("=eth0,eth1", "eth1", True)),
        *(("^docker", "docker0", False), ("^docker,lo", "eth0", True), ("ib0", "eth0", False)),
        *(("^=eth1", "eth10", True), ("^=eth1,lo", "lo", False)),
    ],
)
def test_ncclss_list_of_interfaces(wanted, name, fits):
    assert node.interface_matches(wanted, name) is fits


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
    write_program(
        tmp_path / "nvidia-smi",
        'case $1 in *ecc*) echo "0, Not Active, Not Active, Not Active, Active";;\n'
        '*) echo "0, NVIDIA H100 80GB HBM3, 580.1, 81559, 4, 31";; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = node.gpus()
    assert gpu["driver_version"] == "580.1"
    assert gpu["clocks_throttle_reasons.sw_thermal_slowdown"] == "Active"
    case = healthy(gpus=1)
    case.facts[0]["gpus"] = [gpu]
    assert [one.rule for one in judge(case) if "too hot (driver)" in one.what] == ["gpu_health"]


def test_a_torch_that_does_not_import_is_a_finding(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text('raise ImportError("libcudart.so.13: cannot open shared object file")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert node.torch_facts() == {"error": "ImportError: libcudart.so.13: cannot open shared object file"}


def test_gpus_that_torch_counts_and_cannot_use_do_not_count(monkeypatch, capsys):
    """NVML counts GPUs whatever their driver: only CUDA itself tells that torch cannot use them."""
    said = "The NVIDIA driver on your system is too old (found version 12080)."
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(f"{said}\nPlease update it.")))
    torch_facts.main()
    found = json.loads(capsys.readouterr().out)
    assert [device["device"] for device in found["devices"]] == ["cpu"]
    assert found["cuda_error"] == said


def test_a_gpu_is_timed_until_its_clock_has_risen(monkeypatch):
    """An idle GPU is slow at first; 10 products of 2 x 10^3 operations in 1 us are 0.02 Tflop/s."""
    now, speeds = [0.0], iter([1.0, 0.5, 0.1, 1e-6, 0.1])
    clock = Mock(side_effect=lambda: now[0])
    ends = lambda device: now.__setitem__(0, now[0] + (next(speeds) if waits.call_count > 1 else 0))  # noqa: E731
    waits = Mock(side_effect=ends)
    monkeypatch.setattr(torch_facts, "TIMED_SIZE", 10)
    monkeypatch.setattr(torch_facts, "TIMED_S", 1.65)
    monkeypatch.setattr(torch_facts.time, "perf_counter", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    assert torch_facts.speed(torch.device("cpu")) == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize(
    ("nodes", "share", "skipped", "end_s"),
    [
        (3, 0.3, [], 70),
        (3, 0.9, ["peers", "ranks"], 114),
        (3, 1, ["see", "peers"], 110),
        (1, 1, ["write", "see", "peers"], 9),  # --quick of a health check
    ],
)
def test_an_examination_ends_in_time_and_names_what_it_has_left_out(monkeypatch, nodes, share, skipped, end_s):
    """Nodes take this share of the time that each order allows; with all of it, they have not answered."""
    now, case, known = [0.0], Case(nodes), healthy(nodes)
    answers = {"facts": known.facts, "write": known.written, "peers": known.peers, "ranks": known.ranks}
    answers["see"] = {rank: {"seen": seen} for rank, seen in known.seen.items()}
    for own in known.facts.values():
        own["echo_port"] = 4000

    def ask_all(order, timeout_s, keys):
        now[0] += share * timeout_s
        return answers[order["do"]] if share < 1 else {}

    monkeypatch.setattr(doctor, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(doctor.local, "free_port", lambda address: 29500)
    args = types.SimpleNamespace(quick=nodes == 1, timeout_s=60)
    doctor.examine(case, types.SimpleNamespace(ask_all=ask_all), args)
    assert case.skipped == skipped
    assert end_s - 1 < now[0] <= end_s
    assert bool(case.ranks) == (skipped == [])
