"""The environment of a node by fabric: what each kind sets, what /sys shows, and that the user's word counts."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from recipes.common.errors import UserError
from scripts.doctor import collectives_job, node
from scripts.doctor.collectives_job import fabric_variables
from scripts.launch import interface
from scripts.launch.cores import count_cores
from scripts.launch.fabric import fabric_environment
from scripts.launch.interface import interface_to
from tests.conftest import refused
from tests.support import ROOT, write_program

LIBRARIES = ("NCCL_", "GLOO_", "FI_", "OMP_")
NAMES = (*LIBRARIES, "SLURM_", "OMPI_", "FABRIC", "CPU_REQUEST", "NPROC_PER_NODE", "MASTER_ADDR")


def source(fabric, sysfs="/nowhere", **env):
    """Source fabric.sh as launch.sh does; return its status, its line, and the libraries' variables.

    A variable that is None is not set.
    """
    status, line, found = source_for_all(fabric, sysfs, **env)
    return status, line, {name: value for name, value in found.items() if name.startswith(LIBRARIES)}


def source_for_all(fabric, sysfs="/nowhere", **env):
    """Return the status, the line and all variables, as source()."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    clean |= {"PYTHON": sys.executable, "FABRIC": fabric, "SYSFS": str(sysfs), "DEVFS": f"{sysfs}/dev"}
    clean |= {"LD_LIBRARY_PATH": f"{sysfs}/lib", "PATH": f"{sysfs}/bin:{os.environ['PATH']}", **env}
    clean = {name: value for name, value in clean.items() if value is not None}
    command = ["bash", "-c", "set -euo pipefail; source scripts/launch/fabric.sh; env --null >&2"]
    result = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=30)
    found = dict(item.split("=", 1) for item in result.stderr.split("\0") if "=" in item)
    return result.returncode, result.stdout + (result.stderr if result.returncode else ""), found


def plug_in(sysfs, name, link_layer, driver="mlx5_core", state="4: ACTIVE"):
    """Make a device in /sys/class/infiniband, its /dev/infiniband/uverbs, and the libraries that NCCL loads."""
    port = sysfs / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{link_layer}\n")
    (port / "state").write_text(f"{state}\n")
    device = port.parents[1] / "device"
    (device / "infiniband_verbs" / f"uverbs_{name}").mkdir(parents=True)
    (device / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    for folder in ("dev/infiniband", "lib", "bin"):
        (sysfs / folder).mkdir(parents=True, exist_ok=True)
    if not (sysfs / "bin/ldconfig").is_symlink():
        (sysfs / "bin/ldconfig").symlink_to("/bin/true")  # hides this machine's own libraries
        (sysfs / "bin/hostname").symlink_to("/bin/false")  # minimal images have none
    (sysfs / "dev/infiniband" / f"uverbs_{name}").touch()
    for library in ("libibverbs.so.1", "libnccl-net.so"):
        (sysfs / "lib" / library).touch()


LAYERS = {"ib": "InfiniBand", "roce": "Ethernet", "efa": "Unspecified"}


@pytest.mark.parametrize(
    ("fabric", "own"),
    [
        ("tcp", {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}),
        ("roce", {}),
        ("ib", {}),
        ("efa", {"FI_EFA_USE_HUGE_PAGE": "0"}),
    ],
)
def test_each_fabric_sets_as_little_as_it_needs(fabric, own, tmp_path):
    if fabric != "tcp":
        plug_in(tmp_path, "a", LAYERS[fabric], "efa" if fabric == "efa" else "mlx5_core")
    status, line, variables = source(fabric, tmp_path)
    threads = variables.pop("OMP_NUM_THREADS")
    assert status == 0
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", **own}
    assert int(threads) >= 1
    assert f"fabric {fabric} (FABRIC), 127.0.0.1 by lo:" in line
    assert all(f" {name}={value}" in line for name, value in own.items())


def rails(names, link_layer="InfiniBand", driver="mlx5_core"):
    return [(name, link_layer, driver) for name in names.split()]


DGX = rails("mlx5_0 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_9 mlx5_10 mlx5_11")
MACHINES = {
    "DGX H100, storage on Ethernet": (DGX + rails("mlx5_1 mlx5_2 mlx5_7 mlx5_8", "Ethernet"),
        ("ib (mlx5_0)", "^=mlx5_1,mlx5_2,mlx5_7,mlx5_8")),
    "DGX H100, storage on InfiniBand": (DGX + rails("mlx5_1 mlx5_2 mlx5_7 mlx5_8"), ("ib (mlx5_0)", None)),
    "HGX, a bond for storage": (
        rails("mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7 mlx5_8") + rails("mlx5_bond_0", "Ethernet"),
        ("ib (mlx5_1)", "^=mlx5_bond_0")),
    "HGX, ConnectX ports on Ethernet only": (
        rails("mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_7 mlx5_8", "Ethernet"),
        ("roce (mlx5_0)", None)),
    "Azure ND H100 v5": (rails("mlx5_ib0 mlx5_ib1 mlx5_ib2 mlx5_ib3 mlx5_ib4 mlx5_ib5 mlx5_ib6 mlx5_ib7")
        + rails("mlx5_an0", "Ethernet"), ("ib (mlx5_ib0)", "^=mlx5_an0")),
    "AWS p5": (rails("rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0", "Unspecified", "efa"), ("efa (rdmap79s0)", None)),
    "AWS p4d, kernel names": (rails("efa_0 efa_1 efa_2 efa_3", "Unspecified", "efa"), ("efa (efa_0)", None)),
    "GCP A3 High, gVNIC only": ([], ("tcp (no RDMA device)", None)),
    "GCP A3 Ultra": (rails("mlx5_0 mlx5_1 mlx5_2 mlx5_3", "Ethernet"), ("roce (mlx5_0)", None)),
    "a virtual machine": ([], ("tcp (no RDMA device)", None)),
}  # fmt: skip
"""/sys/class/infiniband after the makers' documentation: devices, the fabric to be found, and NCCL_IB_HCA."""


@pytest.mark.parametrize("machine", MACHINES)
def test_auto_finds_the_fabric_and_its_compute_rails(tmp_path, machine):
    devices, (found, hcas) = MACHINES[machine]
    for device in devices:
        plug_in(tmp_path, *device)
    status, line, variables = source("auto", tmp_path)
    assert status == 0
    assert f"fabric {found}," in line
    assert variables.get("NCCL_IB_HCA") == hcas
    if hcas:
        used = {name for name, _, _ in devices if selects(hcas, name)}
        assert used == {name for name, layer, _ in devices if layer == "InfiniBand"}


def test_infiniband_for_storage_is_kept_out_of_roce(tmp_path):
    """NCCL calls both of them IB, and would use all ports."""
    for device in rails("mlx5_0 mlx5_1", "Ethernet") + rails("mlx5_2"):
        plug_in(tmp_path, *device)
    status, _, variables = source("roce", tmp_path)
    assert (status, variables["NCCL_IB_HCA"]) == (0, "^=mlx5_2")


def test_iwarp_is_no_roce(tmp_path):
    """It has a uverbs device and an active Ethernet port, too, and NCCL fails on it."""
    plug_in(tmp_path, "irdma0", "Ethernet", "irdma")
    node_type = tmp_path / "class/infiniband/irdma0/node_type"
    node_type.write_text("4: RNIC\n")
    status, line, variables = source("auto", tmp_path)
    assert (status, variables["NCCL_IB_DISABLE"]) == (0, "1")
    assert "fabric tcp (no RDMA device)" in line
    status, line, _ = source("roce", tmp_path)
    assert (status, "FABRIC=roce cannot be used: no roce device" in line) == (2, True)
    plug_in(tmp_path, "mlx5_0", "InfiniBand")
    assert source("auto", tmp_path)[2]["NCCL_IB_HCA"] == "^=irdma0"


FAULTS = {
    "the pod has the machine's /sys and no device": (
        lambda root, name: (root / "dev/infiniband" / f"uverbs_{name}").unlink(),
        "/dev/infiniband/uverbs_a of a does not open",
    ),
    "the cable is out": (
        lambda root, name: (root / "class/infiniband" / name / "ports/1/state").write_text("1: DOWN\n"),
        "no port of a is active",
    ),
    "an image without libraries": (
        lambda root, name: [path.unlink() for path in (root / "lib").iterdir()],
        "a needs ",
    ),
}


@pytest.mark.parametrize("fabric", ["ib", "roce", "efa"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fabric_that_cannot_be_used_is_not_taken(tmp_path, fabric, fault):
    """With FABRIC=auto the node uses TCP and says why; a fabric that was asked for is refused."""
    break_it, reason = FAULTS[fault]
    plug_in(tmp_path, "a", LAYERS[fabric], "efa" if fabric == "efa" else "mlx5_core")
    break_it(tmp_path, "a")
    status, line, variables = source("auto", tmp_path)
    assert (status, variables["NCCL_IB_DISABLE"]) == (0, "1")
    assert f"fabric tcp ({reason}" in line
    status, line, _ = source(fabric, tmp_path)
    # A start on another node may find a port. The pod's devices and the image's libraries are the same there.
    assert (status, len(line.splitlines())) == (1 if "is active" in reason else 2, 1)
    assert f"FABRIC={fabric} cannot be used: {reason}" in line
    assert line.endswith("; set FABRIC=tcp on all nodes\n")


@pytest.mark.parametrize("has_library", [True, False])
def test_a_library_is_looked_for_without_ld_library_path_too(tmp_path, has_library):
    plug_in(tmp_path, "a", "InfiniBand")
    ldconfig = tmp_path / "bin/ldconfig"
    ldconfig.unlink()
    write_program(ldconfig, f"printf '\\t%s\\n' {'libibverbs.so.1' if has_library else 'libc.so.6'}")
    status, line, _ = source("ib", tmp_path, LD_LIBRARY_PATH=None)
    assert (status, len(line.splitlines())) == (0 if has_library else 2, 1)
    assert has_library is not ("FABRIC=ib cannot be used: a needs libibverbs1" in line)


def test_the_next_fabric_is_taken_where_the_fastest_cannot_be_used(tmp_path):
    plug_in(tmp_path, "mlx5_0", "InfiniBand", state="1: DOWN")
    plug_in(tmp_path, "mlx5_1", "Ethernet")
    assert "fabric roce (mlx5_1)" in source("auto", tmp_path)[1]


def test_the_sites_file_is_read_and_what_is_set_stays(tmp_path):
    site = tmp_path / "site.env"
    site.write_text("# ND H100 v5\nNCCL_TOPO_FILE=/opt/topo $HOME.xml\n\nNCCL_IB_HCA==mlx5_1\nFABRIC=tcp")
    status, line, variables = source("auto", tmp_path, SITE_ENV=str(site), NCCL_IB_HCA="=mlx5_0")
    assert status == 0
    assert "fabric tcp (FABRIC)" in line
    assert variables["NCCL_TOPO_FILE"] == "/opt/topo $HOME.xml", "data, not shell"
    assert variables["NCCL_IB_HCA"] == "=mlx5_0"
    refused = (("# A\nexport A=secret", "line 2 is not NAME=value"), ("ÉA=secret", "line 1 is not NAME=value"))
    for content, words in (*refused, (None, "cannot read")):
        site.unlink()
        if content:
            site.write_text(content)
        status, line, _ = source("auto", tmp_path, SITE_ENV=str(site), LC_ALL="C.UTF-8")
        assert (status, words in line, len(line.splitlines())) == (2, True, 1)
        assert "secret" not in line


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "windows"])
def test_a_sites_other_variables_are_printed_by_name(tmp_path, end):
    """The line is in each node's log, and the address of a proxy may have a password."""
    site = tmp_path / "site.env"
    own = b"# ours\n\nHTTPS_PROXY=http://me:secret@proxy\nHF_TOKEN=secret\nNCCL_DEBUG=WARN\nFABRIC=tcp\n"
    site.write_bytes(own.replace(b"\n", end))
    status, line, variables = source("auto", tmp_path, SITE_ENV=str(site), HTTPS_PROXY="", HF_TOKEN="own-secret")
    assert (status, variables["NCCL_DEBUG"], "secret" in line) == (0, "WARN", False), line
    assert "fabric tcp (FABRIC), " in line
    assert ": HTTPS_PROXY HF_TOKEN (as set) NCCL_DEBUG=WARN " in line


def test_the_remedy_for_a_fabric_of_the_sites_file_names_the_file(tmp_path):
    """The file's FABRIC would take the place of auto again."""
    site = tmp_path / "site.env"
    site.write_text("FABRIC=ib\n")
    status, line, _ = source("auto", tmp_path, SITE_ENV=str(site))
    assert (status, len(line.splitlines())) == (2, 1)
    assert line.endswith(f"no ib device; change it in {site}, or set FABRIC=tcp on all nodes\n")
    assert source("ib", tmp_path, SITE_ENV=str(site))[1].endswith("no ib device; set FABRIC=tcp on all nodes\n")
    assert source("tcp", tmp_path, SITE_ENV=str(site))[0] == 0


@pytest.mark.parametrize(
    ("fabric", "state", "own", "used"),
    [
        ("auto", "4: ACTIVE", {}, "ib (a)"),
        ("auto", "1: DOWN", {}, "tcp (no port of a is active)"),
        ("ib", "4: ACTIVE", {}, "ib (FABRIC)"),
        ("tcp", "4: ACTIVE", {}, "tcp (FABRIC)"),
        ("auto", "4: ACTIVE", {"NCCL_IB_DISABLE": "1"}, "tcp (NCCL_IB_DISABLE)"),
        ("auto", "4: ACTIVE", {"NCCL_IB_DISABLE": "0"}, "ib (a)"),
        ("auto", "1: DOWN", {"NCCL_NET": "Socket"}, ""),
    ],
)
def test_ranks_learn_what_was_chosen(tmp_path, fabric, state, own, used):
    """They compare it (recipes/common/world/devices.py). That of an outer shell is never kept."""
    plug_in(tmp_path, "a", "InfiniBand", state=state)
    for outer in ({}, {"FABRIC_USED": "efa (rdmap79s0)"}):
        status, _, found = source_for_all(fabric, tmp_path, **own, **outer)
        assert (status, found["FABRIC_USED"]) == (0, used)


def test_a_fault_that_another_node_may_not_have_is_no_refusal(tmp_path, monkeypatch):
    """Also where fabric.sh is not sourced by a shell, as under mpirun and in the doctor."""
    monkeypatch.setenv("SYSFS", str(tmp_path))
    monkeypatch.setenv("FABRIC", "roce")
    with pytest.raises(UserError, match="FABRIC=roce cannot be used: no roce device") as caught:
        fabric_environment()
    assert caught.value.status == 2
    plug_in(tmp_path, "a", "Ethernet", state="1: DOWN")
    with pytest.raises(UserError, match="FABRIC=roce cannot be used: no port of a is active") as caught:
        fabric_environment()
    assert caught.value.status == 1


def test_the_sites_fabric_reaches_the_ranks(tmp_path, monkeypatch):
    """The ranks compare it with the network that NCCL reports (recipes/common/world/transport.py)."""
    (tmp_path / "site.env").write_text("FABRIC=tcp\n")
    monkeypatch.delenv("FABRIC", raising=False)
    monkeypatch.setenv("SITE_ENV", str(tmp_path / "site.env"))
    assert fabric_environment()[0]["FABRIC"] == "tcp"
    assert fabric_variables()["FABRIC"] == "tcp"


def test_the_doctors_job_between_machines_has_the_settings_of_training(tmp_path, monkeypatch):
    """As scripts/launch.sh chooses; 0.0.0.0 is a name of this machine that does not say so."""
    for name in ("FABRIC", "SITE_ENV", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(collectives_job, "ROOT", tmp_path)  # without a site.env
    monkeypatch.setenv("SYSFS", str(tmp_path))
    for nnodes, master in (("1", "0.0.0.0"), ("2", "127.0.0.1"), ("2", "localhost")):
        monkeypatch.setenv("NNODES", nnodes)
        monkeypatch.setenv("MASTER_ADDR", master)
        assert fabric_variables() == {}
    monkeypatch.setenv("MASTER_ADDR", "0.0.0.0")
    found = fabric_variables()
    assert (found["FABRIC"], found["NCCL_IB_DISABLE"]) == ("auto", "1")
    assert found["FABRIC_USED"] == "tcp (no RDMA device)"
    assert found["NCCL_SOCKET_IFNAME"] == f"={found['GLOO_SOCKET_IFNAME']}" == f"={interface_to('0.0.0.0')}"


def test_variables_of_any_bytes_pass(monkeypatch):
    monkeypatch.setitem(os.environb, b"CITY", b"K\xf6ln")  # Latin-1
    assert fabric_environment(FABRIC="tcp")[0]["CITY"] == os.environ["CITY"]


def selects(user_list, device):
    """Return whether NCCL takes a device (parseStringList, matchIfList: src/misc/utils.cc, transport/net_ib)."""
    is_excluding = user_list.startswith("^")
    user_list = user_list.removeprefix("^")
    is_exact = user_list.startswith("=")
    names = user_list.removeprefix("=").split(",")
    return is_excluding != any(device == name if is_exact else device.startswith(name) for name in names)


def test_nothing_is_overridden_that_is_set():
    own = {"NCCL_IB_DISABLE": "0", "GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "3"}
    _, line, variables = source("tcp", **own)
    assert variables == {**own, "NCCL_SOCKET_IFNAME": "=lo"}
    assert "NCCL_IB_DISABLE=0 (as set)" in line
    assert source("tcp", NCCL_IB_DISABLE="1")[2]["NCCL_NET"] == "Socket"


def test_processes_share_the_nodes_cores():
    cores = count_cores()
    assert source("tcp")[2]["OMP_NUM_THREADS"] == str(cores)
    assert source("tcp", NPROC_PER_NODE=str(2 * cores))[2]["OMP_NUM_THREADS"] == "1"
    assert source("tcp", CPU_REQUEST="1")[2]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("content", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "250000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "50000 100000\n"}, 1),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("3:cpu:/y\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ("0::/../other\n", {}, 64),
    ],
)
def test_the_least_limit_of_cores_counts(monkeypatch, tmp_path, content, files, expected):
    """Quotas of this cgroup and of its ancestors, in both versions, on a machine of 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name in ("SLURM_CPUS_PER_TASK", "CPU_REQUEST"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cgroup").write_text(content)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_cores(tmp_path / "cgroup", tmp_path) == expected
    monkeypatch.setenv("CPU_REQUEST", "2")
    assert count_cores(tmp_path / "cgroup", tmp_path) == min(expected, 2)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert count_cores(tmp_path / "cgroup", tmp_path) == 1


def test_one_line_a_node():
    assert source("tcp", SLURM_LOCALID="0")[1].count("fabric") == 1
    assert source("tcp", SLURM_LOCALID="1")[1] == ""


@pytest.mark.parametrize(
    ("fabric", "env", "words"),
    [
        ("infiniband", {}, "error: FABRIC expects auto, ib, roce, efa or tcp, got 'infiniband'"),
        ("tcp", {"MASTER_ADDR": "no-such-host.invalid"}, "cannot resolve no-such-host.invalid"),
        ("tcp", {"MASTER_ADDR": "a" * 64, "RDZV_TIMEOUT_S": "300"}, "is not a host name"),
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


@pytest.fixture
def named_as_a_loopback(monkeypatch):
    """Let every name resolve to 127.0.1.1, as a host's own name does after Debian's installer."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 2, 17, "", ("127.0.1.1", 9))])


@pytest.fixture
def have(monkeypatch):
    """Return a function that gives this machine other interfaces, all of which are up."""

    def change(found):
        monkeypatch.setattr(interface, "interface_addresses", lambda *families: found)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys(found, Mock(isup=True)))

    return change


@pytest.mark.usefixtures("named_as_a_loopback")
def test_a_name_that_is_the_loopback_here_gives_an_interface_that_others_reach():
    ups = [name for name, state in psutil.net_if_stats().items() if state.isup and name != "lo"]
    assert interface_to("node-a") in (ups or ["lo"])
    assert interface_to("localhost") == "lo"


def test_a_name_that_is_ipv6s_loopback_here_gives_an_interface_that_others_reach(monkeypatch, have):
    monkeypatch.setattr(interface, "resolve", lambda *_: (socket.AF_INET6, ("::1", 9)))
    monkeypatch.setattr(interface, "local_end", lambda *_: "::1")
    have({"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fe80::1"]})
    assert interface_to("node-a") == "eth0"
    assert [interface_to(host) for host in ("localhost", "::1")] == ["lo", "lo"]


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("eth1\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n", "eth1"),
        ("eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n", "eth0"),
        ("ppp0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n", "eth0"),  # it has no address
    ],
    ids=["default route", "no default route", "default route elsewhere"],
)
@pytest.mark.usefixtures("named_as_a_loopback")
def test_the_default_routes_interface_or_a_real_one_is_preferred(monkeypatch, tmp_path, have, route, expected):
    have({"docker0": ["172.17.0.1"], "eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]})
    (tmp_path / "route").write_text(f"Iface\tDestination\tGateway\tFlags\n{route}")
    monkeypatch.setattr(interface, "ROUTES", tmp_path / "route", raising=False)
    assert interface_to("node-a") == expected


def test_an_address_without_a_way_to_it_is_one_line():
    with pytest.raises(UserError, match=r"cannot resolve no-such-host\.invalid"):
        interface_to("no-such-host.invalid")
    with refused(f"{socket.gethostname()} has no route to 255.255.255.255: "):  # refused without SO_BROADCAST
        interface_to("255.255.255.255")


@pytest.mark.usefixtures("named_as_a_loopback")
def test_an_interface_without_an_address_is_no_way_to_others(have):
    """The links of a bond or of InfiniBand are up, but have no address."""
    have({"lo": ["127.0.0.1"], "slave0": [], "bond0": ["10.0.0.1"]})
    assert interface_to("node-a") == "bond0"


def test_a_list_of_gloos_interfaces_is_read_by_whole_names(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing,lo")
    facts = node.network("127.0.0.1", 0)
    assert (facts["interface"], facts["address"]) == ("lo", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "l")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME=l is not an interface of this node"):
        node.network("127.0.0.1", 0)


def launch(python, **env):
    """Run launch.sh with a stand-in for Python; return what was printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith((*NAMES, "NNODES"))}
    own = {**clean, "PYTHON": str(python), **env}
    done = subprocess.run(
        ["scripts/launch.sh", "ddp"], cwd=ROOT, env=own, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "node-a"}, ("auto", "eth7")),
        ({"NNODES": "2", "MASTER_ADDR": "node-a", "RDZV_TIMEOUT_S": "7"}, ("auto", "eth7")),
        ({"NNODES": "2", "MASTER_ADDR": "node-a", "GLOO_SOCKET_IFNAME": "ib0"}, ("auto", "ib0")),
        ({"NNODES": "2", "MASTER_ADDR": "127.0.0.1"}, ("", "")),
        ({"NNODES": "1", "MASTER_ADDR": "node-a"}, ("", "")),
        ({}, ("", "")),
    ],
)
def test_several_machines_use_the_interface_between_them(tmp_path, env, expected):
    """Gloo alone would take the address of the host's own name, which may be a loopback."""
    python = write_program(
        tmp_path / "python",
        'case $2 in\n*interface) echo "$RDZV_TIMEOUT_S" >"$0.wait"; echo eth7 ;;\n*cores) echo 2 ;;\n'
        '*agent) echo "agent: $FABRIC $GLOO_SOCKET_IFNAME" ;;\nesac',
    )
    assert launch(python, **env).splitlines()[-1] == f"agent: {' '.join(expected)}"
    if expected[0]:  # MASTER_ADDR has as long to become a known name as node 0 to start
        assert Path(f"{python}.wait").read_text() == f"{env.get('RDZV_TIMEOUT_S', 300)}\n"


def test_an_interface_that_is_set_for_gloo_leaves_nccl_its_settings(tmp_path):
    """A site's module may set it, and nothing else."""
    plug_in(tmp_path, "mlx5_0", LAYERS["ib"])
    plug_in(tmp_path, "mlx5_1", LAYERS["roce"])
    python = write_program(
        tmp_path / "python",
        "case $2 in\n*interface) echo eth7 ;;\n*cores) echo 2 ;;\n"
        '*agent) echo "agent: $NCCL_IB_HCA $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME" ;;\nesac',
    )
    place = {"NNODES": "2", "MASTER_ADDR": "node-a", "GLOO_SOCKET_IFNAME": "ib0"}
    place |= {"SYSFS": str(tmp_path), "DEVFS": f"{tmp_path}/dev", "LD_LIBRARY_PATH": f"{tmp_path}/lib"}
    said = launch(python, **place, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert said.splitlines()[-1] == "agent: ^=mlx5_1 =eth7 ib0"
