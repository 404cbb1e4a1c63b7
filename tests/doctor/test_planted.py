"""Faults planted for real, on nodes with networks of their own: the doctor names each, the node, and the remedy.

Faults that cannot be planted here (GPUs, their ECC errors and heat, a driver) are in test_rules.py, on facts. A
sitecustomize shifts the clock of the doctor's own process: CLOCK_REALTIME is the machine's and has no namespace.
"""

import re
import textwrap
import time

import pytest

from tests.conftest import need_namespaces
from tests.doctor.nodes import examine

pytestmark = pytest.mark.slow


def site(code):
    """Return bash that makes every Python on the node run these lines first."""
    return f"mkdir py && cat >py/sitecustomize.py <<'END'\n{textwrap.dedent(code)}\nEND\nexport PYTHONPATH=$PWD/py"


def line_about(report, words):
    """Return the only finding that contains these words."""
    (line,) = [line for line in report.findings if words in line]
    return line


def test_healthy_nodes():
    report = examine(3, "--quick")
    assert report.rules() == []
    assert set(report.statuses.values()) == {0}
    assert re.search(r"^node 2 \(n2\): 10\.79\.0\.3 by eth0 \(mtu 1500\)", report.outputs[0], re.MULTILINE)
    assert report.outputs[0].splitlines()[-1].startswith("doctor: all is well on 3 nodes")


@pytest.fixture(scope="module")
def many():
    """Plant ten faults at once, none of which hides another."""
    rdma = "mkdir -p sys/class/infiniband/mlx5_0 && export SYSFS=$PWD/sys && ulimit -l 64"
    clock = site("import time\nreal = time.time\ntime.time = lambda: real() + 30")
    return examine(
        4,
        "--quick",
        planted={
            1: f"mount -t tmpfs -o size=64m shm /dev/shm\nulimit -n 512\n{rdma}",
            2: f"mount -t tmpfs -o size=2m full runs\n{clock}",
            3: "mount -t tmpfs -o size=2g other runs\nexport SOURCE_REVISION=0123456789 GIT_DIR=/nowhere",
        },
        without_name=(1,),
        network="ip -n n3 link set eth0 mtu 1400",
    )


MANY = {
    "a name that no node knows": (
        "error: node 0 (n0), node 2 (n2), node 3 (n3) cannot resolve the name of node 1 (n1): n1 (",
        "add it to DNS or to /etc/hosts of every node",
    ),
    "another MTU": ("error: node 3 (n3): the MTU of eth0 is 1400, on ", "ip link set eth0 mtu 1500 there"),
    "a small /dev/shm": ("error: node 1 (n1): /dev/shm has 64 MiB", "--shm-size 8g"),
    "few open files": ("error: node 1 (n1): a process may open 512 files only", "ulimit -n 65536"),
    "little locked memory": ("error: node 1 (n1): a process may lock 64 KiB of memory", "ulimit -l unlimited"),
    "a small disk": ("error: node 2 (n2): ", "2 MiB free; make room, or choose another --runs-dir"),
    "a full disk": ("error: node 2 (n2) cannot write ", "No space left on device; make room"),
    "another folder": ("error: node 3 (n3) cannot see what node 0 (n0) wrote to ", "mount the same"),
    "a clock": ("error: node 2 (n2): its clock is ", " s ahead of most other nodes; start chrony"),
    "another revision": ("error: node 3 (n3): our revision is 0123456789, on ", "check out the same revision"),
}


@pytest.mark.parametrize("fault", MANY)
def test_one_of_many_faults_is_named_with_its_remedy(many, fault):
    begin, remedy = MANY[fault]
    (line,) = [line for line in many.findings if line.startswith(begin) and remedy in line]
    assert line.count("\n") == 0
    if fault == "a clock":  # measured over a connection, whose answers a busy machine delays
        assert float(line.removeprefix(begin).split()[0]) == pytest.approx(30, abs=0.5)


def test_many_faults_are_all_there_is(many):
    assert set(many.statuses.values()) == {1}
    found = [rule for rule in many.rules() if rule[0] != "shared_folder"]  # node 2's is not the others' either
    links = ("links_up", 3, 0, 1, 2) if ("links_up", 3, 0, 1, 2) in found else ("links_up", 3)
    disks, limits = [("disks", 1), ("disks", 2), ("disks", 2)], [("limits", 1), ("limits", 1)]
    assert found == [("clocks", 2), *disks, *limits, links, ("names", 1, 0, 2, 3), ("versions", 3)]


def test_a_port_that_is_blocked_one_way():
    need_namespaces("iptables")
    report = examine(3, "--quick", network="ip netns exec n2 iptables -A INPUT -s 10.79.0.2 -p tcp --syn -j DROP")
    assert report.rules() == [("ports", 1, 2)]
    one_way = r"error: node 1 \(n1\) to node 2 \(n2\) at 10\.79\.0\.3, port \d+: connections fail \(no answer; "
    assert re.match(one_way + r"the other way works\); let", report.findings[0])


def test_no_route_between_two_nodes():
    report = examine(3, "--quick", network="ip -n n1 route add blackhole 10.79.0.3")
    assert report.rules() == [("ports", 1, 2), ("ports", 2, 1)]
    assert "let all TCP ports between nodes through" in report.findings[0]


def test_a_path_that_loses_large_packets():
    """All interfaces have MTU 1500, but a port of the bridge carries only 1200: more than a node's facts here."""
    report = examine(3, "--quick", network="ip link set v2 mtu 1200")
    assert report.rules() == [("ports", 2, 0, 1)]
    line = line_about(report, "small packets pass and large ones do not")
    assert line.startswith("error: node 2 (n2) at 10.79.0.3: to and from all other nodes")
    assert "the path carries less than its MTU of 1500" in line


def test_a_node_that_never_comes():
    begin = time.monotonic()
    report = examine(3, "--quick", absent=(2,), wait_s=3)
    assert time.monotonic() - begin < 10
    assert report.rules() == [("attendance", 2)]
    assert report.findings[0].startswith("error: node 2 did not connect to n0:29500 within 3 s; see its own log")


def test_a_node_that_does_not_find_node_0_says_so_by_the_shared_folder():
    report = examine(2, "--quick", planted={1: "export MASTER_ADDR=nowhere"}, wait_s=3)
    assert report.rules() == [("attendance", 1)]
    assert "node 1 did not connect to n0:29500; it says: n1 cannot resolve nowhere" in report.findings[0]
    assert "fix DNS or /etc/hosts" in report.findings[0]
    assert "error: node 1 (n1): n1 cannot resolve nowhere" in report.outputs[1]


def test_nodes_of_another_job():
    report = examine(3, "--quick", planted={1: "export RDZV_ID=another", 2: "export NNODES=4"}, wait_s=3)
    assert report.rules() == [("attendance", 1), ("attendance", 2)]
    assert "node 1 at 10.79.0.2: it has another RDZV_ID" in report.findings[0]
    assert "node 2 at 10.79.0.3: it has NNODES 4, node 0 has 3" in report.findings[1]
    assert all("give each node of the job the same NNODES and RDZV_ID" in line for line in report.findings)


def test_an_interface_that_is_not_there():
    report = examine(2, "--quick", planted={1: "export NCCL_SOCKET_IFNAME==ib0"})
    assert report.rules() == [("node_errors", 1)]
    assert "NCCL_SOCKET_IFNAME==ib0 is not an interface of this node (it has " in report.findings[0]
    assert "or the variable" in report.findings[0]


WRONG_SUM = """
    # In the doctor's ranks alone: after an all-reduce of many elements one of them is another.
    if b"scripts.doctor.collectives" in open("/proc/self/cmdline", "rb").read():
        import torch.distributed as dist
        right = dist.all_reduce
        def wrong(tensor, *arguments, **options):
            right(tensor, *arguments, **options)
            if tensor.numel() > 1000:
                tensor[5] += 1
        dist.all_reduce = wrong
"""


def test_a_narrow_link_and_a_wrong_sum():
    """Test both in one run, because they need torch: node 2 sends and receives at 200 Mbit/s."""
    narrow = "root tbf rate 200mbit burst 128kbit latency 50ms"
    report = examine(
        3,
        planted={1: site(WRONG_SUM)},
        network=f"tc -n n2 qdisc add dev eth0 {narrow}\ntc qdisc add dev v2 {narrow}",
        timeout_s=150,
    )
    assert [rule for rule in report.rules() if rule != ("bandwidth", 0, 1)] == [("bandwidth", 2), ("sums", 1)]
    assert line_about(report, "slow").startswith("error: node 2 (n2) is slow: at best 0.")
    assert "see its cable, port, duplex (ethtool)" in line_about(report, "slow")
    assert "node 1 (n1): rank 1 received an incorrect sum from the all-reduce" in line_about(report, "sum")
    assert report.content["probe"]["sum"] == 6
    assert set(report.content["links_gbit_s"]) == {"0-1", "0-2", "1-2"}
