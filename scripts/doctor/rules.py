"""What is wrong, and what to do about it: pure functions of the nodes' facts.

Each rule takes a Case and yields findings; RULES lists the rules in the order of a report, causes before effects.
A finding is one line that names the nodes. "error" makes the doctor exit with status 1, "warning" does not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from recipes.common.process.open_files import OTHER_FILES, STORE_CONNECTIONS
from scripts.doctor import floors
from scripts.doctor.case import Case, Facts, Finding, Findings
from scripts.doctor.node import ECC_FIELD, HOT_FIELDS

MIB = 1024 * 1024
SHM_BYTES = 512 * MIB
"""Docker and Kubernetes default to 64 MiB: a few batches of a data loader, or NCCL's buffers of one node."""

OPEN_FILES = 1024
LOCKED_BYTES = 1024 * MIB
FREE_BYTES = {"runs": 1024 * MIB, "tmp": 64 * MIB}
CLOCK_S = 1.0
SLOW_LINK = 1 / 3
"""Fraction of the median below which a link or a node is slow; other load on a node can halve a measurement."""

SLOW_LINKS_SHOWN = 8
SLOW_GPU = 0.75
DRIVERS = {"12": 525, "13": 580}
"""The oldest driver for each major version of CUDA without cuda-compat (NVIDIA's CUDA compatibility guide)."""


def attendance(case: Case) -> Findings:
    """Report nodes that did not connect, were rejected or were lost, and orders that were skipped."""
    for rank, line in sorted(case.refused):
        what = f"node 0 rejected node {rank} at {line}"
        fix = "give each node of the job the same NNODES and RDZV_ID and its own NODE_RANK"
        yield case.error((rank,), what, fix)
    for rank in sorted({*range(1, case.nnodes)} - {*case.facts, *case.lost, *dict(case.refused)}):
        what = f"node {rank} did not connect to {case.master} within {case.wait_s:.0f} s"
        fix = "see its own log: is it up, does MASTER_ADDR lead to node 0 there, does a firewall drop the port"
        if own := case.messages.get(rank):
            what, fix = f"node {rank} did not connect to {case.master}; it says: {own}", "its own log has more"
        yield case.error((rank,), what, fix)
    for order in case.skipped:
        what = f"there was no time left to ask for {order}"
        yield case.error((), what, "fix what took so long, and run it again")
    for rank, (order, why) in sorted(case.lost.items()):
        what = f"{case.name(rank)} connected, and failed at the request for {order}: {why}"
        fix = "see its own log: was it stopped, is it out of memory, does it run another revision"
        yield case.error((rank,), what, fix)


def node_errors(case: Case) -> Findings:
    """Report what a node could not find out about itself."""
    remedies = {
        "network": "fix the name in DNS or /etc/hosts, or the variable",
        "gpus": "see nvidia-smi and dmesg there; reset the GPU or restart the node",
        "disk": "mount the folder there, or choose another --runs-dir",
        "names": "see the name server (/etc/resolv.conf) there",
    }
    for rank, errors in case.each("errors"):
        for part, why in errors.items():
            yield case.error(rank, f"{part}: {why}", remedies.get(part, "fix that"))


def names(case: Case) -> Findings:
    """Report names of nodes that do not resolve to them."""
    found: dict[tuple[int, str, str], list[int]] = {}
    for viewer, rank, peer in case.each_pair():
        own = {*case.network(rank)["addresses"]}
        leads_there = any(isinstance(result, list) and own & {*result} for result in peer["names"].values())
        # Nodes of one machine share the viewer's own name. Otherwise one name that leads there is enough.
        if leads_there or case.machine(rank) == case.machine(viewer):
            continue
        name_of, address = case.name(rank), case.network(rank)["address"]
        for name, result in peer["names"].items():
            what = f" cannot resolve the name of {name_of}: {name} ({result})"
            fix = "add it to DNS or to /etc/hosts of every node"
            if isinstance(result, list):
                leads_to = f"leads to {', '.join(result)}, which is not its address ({address} is)"
                what, fix = f": the name {name} of {name_of} {leads_to}", "fix DNS or /etc/hosts"
            found.setdefault((rank, what, fix), []).append(viewer)
    for (rank, what, fix), viewers in found.items():
        yield case.error((rank, *viewers), case.names(viewers) + what, fix)


def outliers(values: Mapping[int, Any]) -> tuple[Any, list[int], dict[Any, list[int]]]:
    """Return the most frequent value (in a tie the greater one), its nodes, and the other values with theirs."""
    found: dict[Any, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    usual = max(found, key=lambda value: (len(found[value]), value), default=None)
    return usual, found.pop(usual, []), found


def links_up(case: Case) -> Findings:
    """Report interfaces that are down, and MTUs that differ."""
    networks = dict(case.each("network"))
    for rank, network in networks.items():
        if not network["is_up"]:
            yield case.error(rank, f"{network['interface']} is down", f"ip link set {network['interface']} up")
    if len({case.machine(rank) for rank in networks}) < 2:
        return
    usual, most, others = outliers({rank: network["mtu"] for rank, network in networks.items()})
    for mtu, ranks in sorted(others.items()):
        interface = case.network(ranks[0])["interface"]
        what = f"{case.names(ranks)}: the MTU of {interface} is {mtu}, on {case.names(most)} {usual}"
        fix = f"ip link set {interface} mtu {usual} there, and the same on the switch's ports"
        yield case.error(ranks, what, fix)


def ports(case: Case) -> Findings:
    """Report ports that do not answer, in one or both directions, and paths that lose large packets."""
    broken = {(viewer, other): found for viewer, other, found in case.each_pair() if found["stage"] != "done"}
    large = {pair: found for pair, found in broken.items() if found["stage"] == "large"}
    mtus = "/".join(sorted({str(case.network(rank)["mtu"]) for _, rank in large}))
    fix = f"the path carries less than its MTU of {mtus}: lower that on all nodes, or fix what lies between"
    yield from cut_off(case, large, "small packets pass and large ones do not", fix)
    small = {pair: found for pair, found in broken.items() if pair not in large}
    fix = "let all TCP ports between nodes through (firewall, security group, NetworkPolicy); see ip route"
    yield from cut_off(case, small, "connections fail", fix)


def cut_off(case: Case, broken: Mapping[tuple[int, int], Facts], what: str, fix: str) -> Findings:
    """Report each node that is cut off from all others, then the remaining broken pairs (viewer, other)."""
    ranks = sorted(case.peers)
    apart = [r for r in ranks if all((r, o) in broken or (o, r) in broken for o in ranks if o != r)]
    if len(ranks) < 3:
        apart = []
    elif apart == ranks:
        why = next(iter(broken.values()))["why"]
        yield case.error(ranks, f"{case.names(ranks)}: between all of them {what} ({why})", fix)
        return
    for rank in apart:
        mine = {pair: found for pair, found in broken.items() if rank in pair}
        way = " and ".join(sorted({"to" if viewer == rank else "from" for viewer, _ in mine}, reverse=True))
        where = f"{case.name(rank)} at {case.network(rank)['address']}: {way} all other nodes"
        others = [other for other in ranks if other != rank]
        yield case.error((rank, *others), f"{where} {what} ({next(iter(mine.values()))['why']})", fix)
    rest: dict[tuple[int, str], list[int]] = {}
    for (viewer, rank), found in broken.items():
        if not {viewer, rank} & {*apart}:
            back = case.peers.get(rank, {}).get(str(viewer), {}).get("stage")
            is_one_way = found["stage"] != "large" and back == "done"
            why = found["why"] + ("; the other way works" if is_one_way else "")
            rest.setdefault((viewer, why), []).append(rank)
    for (viewer, why), others in rest.items():
        where = case.names(others)
        if len(others) == 1:
            where += f" at {case.network(others[0])['address']}, port {broken[viewer, others[0]]['port']}"
        yield case.error((viewer, *others), f"{case.name(viewer)} to {where}: {what} ({why})", fix)


def clocks(case: Case) -> Findings:
    """Report clocks that differ by more than CLOCK_S and the possible error of the measurement."""
    middle, whom = 0.0, "node 0"
    if len(case.clocks) > 2:
        middle, whom = median(offset for offset, _ in case.clocks.values()), "most other nodes"
    for rank, (offset, error) in sorted(case.clocks.items()):
        ahead = offset - middle
        if abs(ahead) - error > CLOCK_S:
            what = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {whom}"
            yield case.error(rank, what, "start chrony or systemd-timesyncd there (chronyc makestep)")


def limits(case: Case) -> Findings:
    """Report limits that are too low: open files, and locked memory on nodes with RDMA devices."""
    # By default, a Slurm job has the limits of the shell that submitted it, whatever slurmd's are.
    where = "of slurmd or containerd, with sbatch --propagate=NONE"
    for rank, found in case.each("limits"):
        files, locked = found["open_files"], found["locked_bytes"]
        if 0 <= files < OPEN_FILES:
            what = f"a process may open {files} files only"
            fix = f"ulimit -n 65536 (limits.conf, LimitNOFILE= {where}); at least {OPEN_FILES}"
            yield case.error(rank, what, fix)
        ranks = case.nnodes * int(case.fact(rank, "variables", {}).get("NPROC_PER_NODE") or 1)
        needed = STORE_CONNECTIONS * (ranks + case.nnodes) + OTHER_FILES
        if rank == 0 and 0 <= found.get("most_files", -1) < needed:  # the soft limit is raised where it matters
            most = f"a process may open {found['most_files']} files at most"
            what = f"{most}, and its store for {ranks} ranks needs {needed}"
            yield case.error(rank, what, f"ulimit -Hn {needed} or more (limits.conf, LimitNOFILE= {where})")
        rdma = case.fact(rank, "rdma")
        if rdma and 0 <= locked < LOCKED_BYTES and case.may_use_rdma(rank):
            what = f"a process may lock {locked // 1024} KiB of memory, too little for {rdma[0]}"
            fix = f"ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity {where})"
            yield case.error(rank, what, fix)


def disks(case: Case) -> Findings:
    """Report too little shared memory or free disk space, and runs folders that cannot be written."""
    for rank, disk in case.each("disk"):
        shm = disk["shm_bytes"]
        if shm is not None and shm < SHM_BYTES:
            what = f"/dev/shm has {shm // MIB} MiB"
            fix = "docker run --shm-size 8g; in Kubernetes a Memory emptyDir; mount -o remount,size=8G /dev/shm"
            yield case.error(rank, what, fix)
        for place, use, choice in (
            ("runs", "where records and checkpoints go", "--runs-dir"),
            ("tmp", "for temporary files", "TMPDIR"),
        ):
            free = disk[f"{place}_free_bytes"]
            if free < FREE_BYTES[place]:
                what = f"{disk[place]}, {use}, has {free // MIB} MiB free"
                yield case.error(rank, what, f"make room, or choose another {choice}")
    for rank, written in sorted(case.written.items()):
        if written.get("error"):
            what = f"{case.name(rank)} cannot write {case.runs_dir(rank)}: {written['error']}"
            fix = "make room, fix the folder's permissions, its mount or access point (k8s/README.md)"
            yield case.error((rank,), what, f"{fix}, or choose another --runs-dir")


def shared_folder(case: Case) -> Findings:
    """Report nodes that do not see the files that they or nodes of lower rank wrote to the runs folder."""
    for rank, seen in sorted(case.seen.items()):
        missing = [writer for writer in case.probed() if writer not in seen and writer <= rank]
        if missing:
            what = f"{case.name(rank)} cannot see what {case.name(missing[0])} wrote to {case.runs_dir(rank)}"
            fix = "mount the same file system there on every node, or choose a --runs-dir on one"
            yield case.error((rank,), what, fix)


OWN_IMAGE = "make setup on each node, or the same image everywhere"
SAME_REVISION = "check out the same revision, or use the same image"
VERSIONS: dict[str, tuple[Callable[[Facts], str | None], str]] = {
    "torch": (lambda facts: (facts.get("torch") or {}).get("version"), OWN_IMAGE),
    "NCCL": (lambda facts: (facts.get("torch") or {}).get("nccl"), OWN_IMAGE),
    "python": (lambda facts: facts.get("python"), "use the same Python on each node, or the same image"),
    "driver": (
        lambda facts: ", ".join(sorted({gpu["driver_version"] for gpu in facts.get("gpus") or []})),
        "install the same NVIDIA driver on each node",
    ),
    "our revision": (lambda facts: facts.get("revision"), f"{SAME_REVISION} (give a new build a new tag)"),
    "our code": (lambda facts: facts.get("code"), f"files of recipes/ or scripts/ differ: {SAME_REVISION}"),
}


def versions(case: Case) -> Findings:
    """Report versions that differ between nodes."""
    differing = []
    for what, (read, remedy) in VERSIONS.items():
        known = {rank: value for rank, facts in case.facts.items() if (value := read(facts))}
        usual, most, others = outliers(known)
        if not others or (what == "our code" and "our revision" in differing):
            continue
        differing.append(what)
        for value, ranks in others.items():
            text = f"{case.names(ranks)}: {what} is {value}, on {case.names(most)} {usual}"
            yield case.error(ranks, text, remedy)


def torch_works(case: Case) -> Findings:
    """Report a torch that does not work, devices with wrong results, and GPUs slower than others of their kind."""
    speeds: dict[str, list[tuple[float, int, str]]] = {}
    for rank, torch in case.each("torch"):
        if "error" in torch:
            yield case.error(rank, f"torch does not work: {torch['error']}", "make setup there, or fix PYTHON")
            continue
        if not torch["gloo"]:
            yield case.error(rank, "torch has no gloo", "install torch from PyPI: make setup")
        for device in torch["devices"]:
            if device.get("error") or not device["is_right"]:
                why = device.get("error") or "a product of matrices is wrong"
                what, fix = f"{device['device']} ({device['name']}): {why}", "take the device out of service"
                if re.search("no kernel image|ARCH_MISMATCH", why):
                    fix = "this torch has no kernels for this GPU: install one that has (docker/README.md)"
                yield case.error(rank, what, fix)
            elif device["tflops"]:
                speeds.setdefault(device["name"], []).append((device["tflops"], rank, device["device"]))
    for name, found in speeds.items():
        usual = median(speed for speed, _, _ in found)
        for speed, rank, device in found:
            if speed < SLOW_GPU * usual:
                what = f"{device} ({name}) does {speed:.0f} Tflop/s, others of its kind {usual:.0f}"
                fix = "see its clocks, power and temperature (nvidia-smi -q -d PERFORMANCE), and who else uses it"
                yield case.error(rank, what, fix)


def driver_remedy(driver: str, cuda: str | None) -> str:
    """Return the remedy if a driver is too old for this CUDA, else ""."""
    major = (cuda or "").split(".")[0]
    least, number = DRIVERS.get(major, 0), driver.split(".")[0]
    if not number.isdigit() or int(number) >= least:
        return ""
    older = f"install {least} or later, or a torch of an older CUDA (docker/README.md)"
    return f"driver {driver} is too old for CUDA {cuda}: {older}"


def gpus_visible(case: Case) -> Findings:
    """Report GPUs that torch does not see, too few GPUs, and GPUs that differ between nodes."""
    counts: dict[int, tuple[int, str]] = {}
    for rank in sorted(case.facts):
        torch, listed = case.fact(rank, "torch"), case.fact(rank, "gpus")
        if "error" in (torch or {}) or (torch is None and "gpus" in case.fact(rank, "errors", {})):
            continue
        devices = [d for d in torch["devices"] if d["device"] != "cpu"] if torch else listed or []
        counts[rank] = (len(devices), ", ".join(sorted({device["name"] for device in devices})))
        if torch is None:  # --quick: only nvidia-smi's list
            continue
        variables = case.fact(rank, "variables", {})
        nproc, visible = int(variables.get("NPROC_PER_NODE") or 1), variables.get("CUDA_VISIBLE_DEVICES")
        if listed and not devices and visible in ("", "-1"):  # as users ask for CPUs
            what = f"nvidia-smi lists {len(listed)} GPUs and CUDA_VISIBLE_DEVICES is {visible!r}: all use the CPU"
            yield case.warning(rank, what, "unset it, or start no more nodes on a machine than it has GPUs")
        elif listed and not devices:
            what = f"nvidia-smi lists {len(listed)} GPUs and torch {torch['version']} sees none"
            fix = f"CUDA_VISIBLE_DEVICES is {visible!r}: correct it"
            if visible in (None, "NoDevFiles"):  # the latter is how Slurm says that a job has no GPU
                fix = "ask for GPUs; with MIG, for an instance" if torch["cuda"] else "install a torch with CUDA"
            if why := torch.get("cuda_error"):
                what, fix = f"{what} ({why})", "see its driver and, with NVSwitch, its fabric manager"
            fix = driver_remedy(listed[0].get("driver_version", ""), torch["cuda"]) or fix
            yield case.error(rank, what, fix)
        elif devices and len(devices) < nproc:
            what = f"{nproc} processes for {len(devices)} GPUs: recipes refuse to start"
            fix = f"NPROC_PER_NODE={len(devices)}, or ask for {nproc} GPUs that each process of the node can see"
            yield case.error(rank, what, fix)
    usual, _, others = outliers(counts)
    for (count, kinds), ranks in others.items():
        own, other = f"{count} GPUs {kinds}".rstrip(), f"{usual[0]} {usual[1]}".rstrip()
        what = f"{case.names(ranks)}: {own}, other nodes {other}"
        fix = "ask for nodes of one kind (a constraint, a node selector), or see why some are missing"
        yield case.error(ranks, what, fix)


def broken_gpus(case: Case) -> Findings:
    """Report GPUs with uncorrected ECC errors, and GPUs that nvidia-smi calls lost or in need of a reset."""
    for rank, name, gpu in case.each_gpu():
        errors = gpu.get(ECC_FIELD, "")
        if errors.isdigit() and int(errors):
            what = f"{name} has {errors} uncorrected ECC errors"
            yield case.error(rank, what, "reset it or replace it (nvidia-smi -q -d ECC)")
        if lost := re.search(r"\[(GPU is lost|GPU requires reset|Unknown Error)\]", " ".join(gpu.values())):
            yield case.error(rank, f"{name}: nvidia-smi says {lost[1]}", "see dmesg; restart the node")


def gpu_health(case: Case) -> Findings:
    """Report GPUs that nvidia-smi shows as broken, as throttled, or with memory in use already."""
    yield from broken_gpus(case)
    for rank, name, gpu in case.each_gpu():
        if ECC_FIELD not in gpu:
            what = f"{name}: nvidia-smi does not report its ECC errors and clocks"
            yield case.warning(rank, what, "see nvidia-smi --help-query-gpu for what this driver calls them")
        if hot := [words for key, words in HOT_FIELDS.items() if gpu.get(key) == "Active"]:
            what = f"{name} is throttled: {', '.join(hot)}, {gpu.get('temperature.gpu')} C"
            yield case.error(rank, what, "see to its cooling and power (nvidia-smi -q -d PERFORMANCE)")
        used, total = gpu.get("memory.used", ""), gpu.get("memory.total", "")
        if used.isdigit() and total.isdigit() and int(used) > 0.1 * int(total):
            what = f"{name}: {used} of {total} MiB are in use already"
            yield case.warning(rank, what, "see nvidia-smi for the processes that hold it")


def fabrics(case: Case) -> Findings:
    """Report nodes with GPUs on which fabric.sh has chosen another network for NCCL than on most."""
    found = {rank: case.ranks[rank].get("fabric", {}).get("FABRIC_USED") for rank in sorted(case.ranks)}
    used = {rank: text for rank, text in found.items() if text and case.fact(rank, "gpus")}
    _, most, others = outliers({rank: text.split()[0] for rank, text in used.items()})
    for ranks in others.values():
        usual = f"and {used[most[0]]} on {case.names(most)}"
        what = f"NCCL would use {used[ranks[0]]} on {case.names(ranks)}, {usual}, and cannot connect the two"
        fix = "fix the node that lacks the others' network, or leave it out; or set one FABRIC on all, such as tcp"
        yield case.error(ranks, what, fix)


def collectives(case: Case) -> Findings:
    """Report ranks that were not started or did not finish."""
    stuck: dict[tuple[str, str], list[int]] = {}
    for node, found in sorted(case.ranks.items()):
        if found.get("error"):
            yield case.error(node, f"no ranks were started: {found['error']}", "fix that first")
    for node, rank in case.each_rank():
        if rank["stage"] != "done":
            stuck.setdefault((rank["stage"], rank.get("error", "no end")), []).append(node)
    for (stage, why), nodes in stuck.items():
        count = f"{len(nodes)} ranks" if len(nodes) > 1 else "a rank"
        what = f"{case.names(sorted(set(nodes)))}: {count} did not get past {stage}: {why}"
        fix = "other findings may be the cause; else NCCL_DEBUG=INFO, or make run RECIPE=probe, shows what fails"
        yield case.error(sorted(set(nodes)), what, fix)


def sums(case: Case) -> Findings:
    """Report all-reduces that gave an incorrect sum."""
    wrong: dict[int, list[str]] = {}
    for node, rank in case.each_rank():
        if rank.get("wrong_elements"):
            wrong.setdefault(node, []).append(str(rank["rank"]))
    if len(wrong) == len(case.ranks) > 1:
        what = "all nodes received an incorrect sum from the all-reduce: one of them sends wrong values"
        fix = "run the doctor on halves of the nodes until one is left, and take that out"
        yield case.error([*wrong], what, fix)
        wrong = {}
    for node, ranks in wrong.items():
        what = f"rank {', '.join(ranks)} received an incorrect sum from the all-reduce"
        fix = "its memory, GPU or link is broken, or its torch is not that of the others: take it out"
        yield case.error(node, what, fix)
    maps = [rank["map"] for _, rank in case.each_rank() if rank.get("map")]
    for size, total in sorted({(one["world_size"], one["sum"]) for one in maps}):
        if total != size * (size + 1) // 2:
            what = f"the all-reduce of 1..{size} gave {total}: the ranks are not one group"
            yield case.error((), what, "see the launcher's variables: NNODES, NODE_RANK, NPROC_PER_NODE")


def lower_of_both(seen: Iterable[tuple[int, Mapping[Any, float]]]) -> dict[tuple[int, int], float]:
    """Return the lower of both ends' speeds for each pair, from (node, its speeds to other nodes)."""
    found: dict[tuple[int, int], float] = {}
    for node, speeds in seen:
        for other, speed in speeds.items():
            pair = (min(node, int(other)), max(node, int(other)))
            found[pair] = min(speed, found.get(pair, speed))
    return found


def links(case: Case) -> dict[tuple[int, int], float]:
    """Return the Gbit/s of each pair of nodes that was measured, the lower of what both ends saw."""
    return lower_of_both((node, rank.get("links_gbit_s", {})) for node, rank in case.each_rank())


def bandwidth(case: Case) -> Findings:
    """Report nodes, and links between two nodes, that are much slower than the others."""
    found = {  # nodes of one machine communicate through memory, not over a link
        pair: speed for pair, speed in links(case).items() if case.machine(pair[0]) != case.machine(pair[1])
    }
    if len(found) < 3:
        return
    best: dict[int, float] = {}
    for pair, speed in found.items():
        for node in pair:
            best[node] = max(speed, best.get(node, 0.0))
    usual = median(best.values())
    slow = {node for node, speed in best.items() if speed < SLOW_LINK * usual}
    for node in sorted(slow):
        speeds = f"at best {best[node]:.2f} Gbit/s to another node, the others {usual:.2f}"
        fix = "see its cable, port, duplex (ethtool), the interface chosen, and what else sends there"
        yield case.error((node,), f"{case.name(node)} is slow: {speeds}", fix)
    usual = median(found.values())
    narrow = sorted((v, pair) for pair, v in found.items() if not slow & {*pair} and v < SLOW_LINK * usual)
    for speed, (a, b) in narrow[:SLOW_LINKS_SHOWN]:
        what = f"between {case.name(a)} and {case.name(b)} only {speed:.2f} Gbit/s, elsewhere {usual:.2f}"
        yield case.warning((a, b), what, "see the switches and routes between these two")
    if len(narrow) > SLOW_LINKS_SHOWN:
        ranks = sorted({rank for _, pair in narrow for rank in pair})
        what = f"{len(narrow)} links in all are that slow, between {len(ranks)} nodes"
        fix = "see the switches between groups of nodes; links_gbit_s of --json has them all"
        yield case.warning(ranks, what, fix)


RULES: tuple[Callable[[Case], Findings], ...] = (
    *(attendance, node_errors, names, links_up, ports, clocks, limits, disks, shared_folder, versions),
    *(torch_works, gpus_visible, gpu_health, floors.kernel_log, floors.gpu_floors),
    *(fabrics, collectives, sums, floors.transport, floors.rails, bandwidth),
)
"""Rules on nodes, on GPUs, and on the ranks of the doctor's own job."""


def judge(case: Case) -> list[Finding]:
    """Apply all RULES and return the findings in that order, but errors first."""
    found = [finding for rule in RULES for finding in merged(case, rule.__name__, rule(case))]
    return sorted(found, key=lambda finding: finding.severity != "error")


def merged(case: Case, rule: str, findings: Findings) -> Findings:
    """Yield a rule's findings, with one in place of those that say the same of more than four nodes."""
    same: dict[tuple[bool, str, str, str], list[Finding]] = {}
    for finding in findings:
        name = case.name(finding.nodes[0]) if len(finding.nodes) == 1 else ""
        is_own = bool(name) and finding.what.startswith(name)
        what = finding.what[len(name) :] if is_own else finding.what
        same.setdefault((is_own, finding.severity, what, finding.remedy), []).append(finding)
    for (is_own, severity, what, remedy), ones in same.items():
        if is_own and len(ones) > 4:
            nodes = tuple(node for one in ones for node in one.nodes)
            ones = [Finding(severity, nodes, case.names(nodes) + what, remedy)]
        yield from (replace(one, rule=rule) for one in ones)


def tally(findings: Sequence[Finding]) -> Counter[str]:
    """Count the findings of each severity."""
    return Counter(finding.severity for finding in findings)
