"""The environment of a node by fabric: what each kind sets, what /sys shows, and that the user's word counts."""

import os
import subprocess
import sys

import psutil
import pytest

from recipes.common.errors import UserError
from scripts.interface import interface_to
from tests.support import ROOT

NAMES = ("NCCL_", "GLOO_", "FI_", "OMP_", "SLURM_", "OMPI_", "FABRIC", "NPROC_PER_NODE", "MASTER_ADDR")


def source(fabric, sysfs="/nowhere", **env):
    """Source the file; return its status, its line, and the variables it has left."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    clean |= {"PYTHON": sys.executable, "FABRIC": fabric, "SYSFS": str(sysfs), **env}
    command = ["bash", "-c", "source scripts/fabric.sh && env --null >&2"]
    result = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=30)
    found = dict(item.split("=", 1) for item in result.stderr.split("\0") if "=" in item)
    variables = {
        name: value for name, value in found.items() if name.startswith(("NCCL_", "GLOO_", "FI_", "OMP_"))
    }
    return result.returncode, result.stdout + ("" if found else result.stderr), variables


def plug_in(sysfs, name, link_layer, driver="mlx5_core"):
    """Make a device of /sys/class/infiniband."""
    port = sysfs / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{link_layer}\n")
    device = port.parents[1] / "device"
    device.mkdir()
    (device / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")


@pytest.mark.parametrize(
    ("fabric", "own"),
    [
        ("tcp", {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=lo"}),
        ("roce", {}),
        ("ib", {}),
        ("efa", {"FI_EFA_USE_HUGE_PAGE": "0"}),
    ],
)
def test_each_fabric_sets_as_little_as_it_needs(fabric, own):
    status, line, variables = source(fabric)
    threads = variables.pop("OMP_NUM_THREADS")
    assert status == 0
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", **own}
    assert int(threads) >= 1
    assert f"fabric {fabric} (FABRIC), 127.0.0.1 by lo:" in line
    assert all(f" {name}={value}" in line for name, value in own.items())


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ([], "tcp (no RDMA device)"),
        ([("mlx5_0", "InfiniBand", "mlx5_core")], "ib (mlx5_0)"),
        ([("mlx5_0", "Ethernet", "mlx5_core")], "roce (mlx5_0)"),
        ([("rdmap0s6", "Unspecified", "efa")], "efa (rdmap0s6)"),
        ([("mlx5_0", "Ethernet", "mlx5_core"), ("mlx5_1", "InfiniBand", "mlx5_core")], "ib (mlx5_1)"),
    ],
)
def test_auto_finds_the_fabric(tmp_path, devices, found):
    for device in devices:
        plug_in(tmp_path, *device)
    status, line, _ = source("auto", tmp_path)
    assert status == 0
    assert f"fabric {found}," in line


def test_ethernet_ports_are_kept_out_of_infiniband(tmp_path):
    plug_in(tmp_path, "mlx5_0", "InfiniBand")
    plug_in(tmp_path, "mlx5_bond_0", "Ethernet")
    _, _, variables = source("auto", tmp_path)
    assert variables["NCCL_IB_HCA"] == "^mlx5_bond_0"


def test_nothing_is_overridden_that_is_set():
    own = {"NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "3"}
    _, line, variables = source("tcp", **own)
    assert variables == {**own, "NCCL_SOCKET_IFNAME": "=lo"}
    assert "NCCL_IB_DISABLE=0 (as set)" in line


def test_processes_share_the_nodes_cores():
    cores = len(os.sched_getaffinity(0))
    assert source("tcp")[2]["OMP_NUM_THREADS"] == str(cores)
    assert source("tcp", NPROC_PER_NODE=str(cores))[2]["OMP_NUM_THREADS"] == "1"
    assert source("tcp", SLURM_CPUS_PER_TASK="1")[2]["OMP_NUM_THREADS"] == "1"


def test_one_line_a_node():
    assert source("tcp", SLURM_LOCALID="0")[1].count("fabric") == 1
    assert source("tcp", SLURM_LOCALID="1")[1] == ""


@pytest.mark.parametrize(
    ("fabric", "env", "words"),
    [
        ("infiniband", {}, "error: FABRIC wants auto, ib, roce, efa or tcp, got 'infiniband'"),
        ("tcp", {"MASTER_ADDR": "no-such-host.invalid"}, "cannot resolve no-such-host.invalid"),
    ],
)
def test_a_refusal_is_one_line_and_status_2(fabric, env, words):
    status, text, _ = source(fabric, **env)
    assert status == 2
    assert words in text
    assert len(text.splitlines()) == 1


def test_the_interface_is_that_of_the_address():
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET" and psutil.net_if_stats()[name].isup:
                assert interface_to(address.address) == name


def test_a_name_that_is_the_loopback_here_gives_an_interface_that_others_reach(monkeypatch):
    # Debian's installer lets a host's own name stand for 127.0.1.1.
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 2, 17, "", ("127.0.1.1", 9))])
    ups = [name for name, state in psutil.net_if_stats().items() if state.isup and name != "lo"]
    assert interface_to("node-a") in (ups or ["lo"])
    assert interface_to("localhost") == "lo"


def test_no_such_host():
    with pytest.raises(UserError, match=r"cannot resolve no-such-host\.invalid"):
        interface_to("no-such-host.invalid")
