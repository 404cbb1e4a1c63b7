"""The wire: what the recipes send for a step, and how long it takes them on links of 1 Gbit/s.

    python -m scripts.bench wire
    python -m scripts.bench.wire --rounds 1 --only ddp-fp32,scratch    # a look at some of it

The recipes run as `make run` starts them, with a network for each node (scripts/lab/network.py, as root on Linux).
The model is resnet18 with 1,000 classes, 11.68 M parameters, on images of 16x16, two for each rank: gradients of
real size after as little computing as can be.

A timed run begins on links without a limit, which are narrowed on the way. A step takes at least the longer of
two, of the same run: its bytes on the link, and the steps on free links, which are the work of the cores, the
network's included. Four nodes share too few cores for their times to mean anything: there only bytes are measured.

Bytes are measured once, they do not vary by round: the difference of two runs that differ in --max-steps alone,
read from the counters of each node's interface before and after. What a run sends once (the meeting, the first
broadcast, the evaluation, the goodbye) is in both and goes away, and everything that a step sends stays:
gradients, votes, the headers of packets, and the notes that ranks leave in the store meanwhile. Reading the
counters while a job runs would cut steps in two.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench import programs
from scripts.bench.figures import Figure, spread, table, unmeasured
from scripts.lab import network
from scripts.launch.command import CommandParser, check_names, command, count, parse
from scripts.launch.runs import read_metrics

RATE, RATE_BITS = "1gbit", 1e9
PACKET, DATA = 1514, 1448
"""Bytes of a full packet on the link, and of the data in it. The link's speed is that of packets, as tbf counts
them; an interface's counters see what the kernel hands on, up to 64 kB with one header."""

NODES = (2, 4)
TIMED_NODES = 2
RANK_BATCH = 2
LOG_EVERY = 4
RUN_TIMEOUT_S = 300


MODEL, IMAGE_SIZE = "resnet18", 16
GRADIENT_BYTES = 4 * 11_681_832
"""Of resnet18 with 1,000 classes and the stem for small images, as recipes/common/models/models.py builds it."""

COUNTED = 8
"""Steps by which the runs differ that bytes are the difference of."""

FREE, NARROW = 12, 16
"""Steps of a timed run on free links, after its warm-up, and from where these are narrowed."""


def ring_bytes(nodes: int, gradient_bytes: int = GRADIENT_BYTES) -> float:
    """Return what a rank has to send at least for the sum of fp32 gradients: 2 (N-1)/N of their bytes."""
    return 2 * (nodes - 1) / nodes * gradient_bytes


@dataclass(frozen=True)
class Variant:
    """A recipe with options, and what is asked of its bytes."""

    name: str
    recipe: str
    options: tuple[str, ...] = ()
    goal: str = ""
    bytes_per_parameter: int = 4
    """On the wire: what the time of the wire alone follows from."""
    is_timed: bool = False
    """Whether its time is measured in every round."""
    warm: int = 4
    """Steps that are left out."""


VARIANTS = (
    Variant("ddp-fp32", "ddp", goal="<= 1.01", is_timed=True),
    Variant("ddp-fp16", "ddp", ("--grad-compression", "fp16"), "<= 1.01", 2, is_timed=True),
    Variant("ddp-bf16", "ddp", ("--grad-compression", "bf16"), "<= 1.01", 2),
    Variant("ddp-powersgd", "ddp", ("--grad-compression", "powersgd"), "", 0, warm=12),  # ten are in fp32
    Variant("horovod-fp32", "horovod", ("--compression", "none"), "<= 1.01", is_timed=True),
    Variant("horovod-fp16", "horovod", ("--compression", "fp16"), "<= 1.01", 2, is_timed=True),
    Variant("scratch", "scratch", goal="<= 1.01"),
)


@dataclass
class Measured:
    """What was seen of one variant on so many nodes."""

    variant: str
    nodes: int
    sent_bytes: list[float] = field(default_factory=list)
    """What each node sent for a step."""
    step_s: list[float] = field(default_factory=list)
    """By round, the median over the steps on narrow links."""
    free_s: list[float] = field(default_factory=list)
    """The same on links without a limit."""

    def ratios(self, bytes_per_parameter: int = 4) -> list[float]:
        """Return by node the bytes of a step over the ring limit."""
        limit = ring_bytes(self.nodes) / 4 * bytes_per_parameter
        return [sent / limit for sent in self.sent_bytes]


def command_of(variant: Variant, net: network.Network, nodes: int, steps: int, run: Path) -> list[str]:
    """Return what starts a run of a recipe."""
    launch = [sys.executable, "-m", "scripts.launch.local", variant.recipe, "--nodes", str(nodes)]
    launch += ["--nproc-per-node", "1", "--networks", net.option(), "--"]
    words = ["--model", MODEL, "--data", "synthetic", "--image-size", str(IMAGE_SIZE), "--num-samples", "1000"]
    words += ["--global-batch-size", str(RANK_BATCH * nodes), "--max-steps", str(steps), "--device", "cpu"]
    words += ["--log-every", str(LOG_EVERY), "--no-tensorboard", "--runs-dir", str(run.parent), "--name", run.name]
    # An untrained model on noise, in halves: gentle steps, so that nothing overflows.
    return [*launch, *words, "--lr", "0.001", "--overwrite", *variant.options]


def count_bytes(variant: Variant, net: network.Network, nodes: int, folder: Path) -> list[float]:
    """Return what each node sends for a step."""
    totals = []
    for steps in (variant.warm, variant.warm + COUNTED):
        before = [net.sent_bytes(node) for node in range(nodes)]
        programs.run(command_of(variant, net, nodes, steps, folder / "run"), timeout_s=RUN_TIMEOUT_S)
        totals.append([net.sent_bytes(node) - sent for node, sent in enumerate(before)])
        shutil.rmtree(folder / "run")  # a checkpoint of 93 MB
    return [(more - few) / COUNTED for few, more in zip(*totals, strict=True)]


def time_steps(variant: Variant, net: network.Network, nodes: int, folder: Path) -> tuple[float, float]:
    """Return the median seconds of a step on free links and on narrow ones, from one run."""

    def speeds() -> dict[int, float]:
        """Return the samples/s that the run has logged so far, by step: of the LOG_EVERY steps up to it."""
        rows = read_metrics(folder / "run", is_running=True)
        return {row["step"]: row["samples_per_s"] for row in rows if "loss" in row}

    last_free = variant.warm + FREE
    with ThreadPoolExecutor(1) as pool:
        command = command_of(variant, net, nodes, last_free + NARROW, folder / "run")
        job = pool.submit(programs.run, command, timeout_s=RUN_TIMEOUT_S)
        while last_free not in speeds():
            if job.done():
                job.result()  # raises what has ended it
                raise RuntimeError(f"{' '.join(command)} has ended before step {last_free}")
            time.sleep(0.05)
        free = [speed for step, speed in speeds().items() if step > variant.warm]
        for node in range(nodes):
            net.narrow(node, RATE, burst="256kb")
        mixed = max(speeds()) + LOG_EVERY
        job.result()
    narrow = [speed for step, speed in speeds().items() if step > mixed]
    for node in range(nodes):
        net.restore(node)
    shutil.rmtree(folder / "run")
    if len(narrow) < 2:
        raise RuntimeError(f"{variant.name}: its steps ended before the links were narrow; raise NARROW")
    free_s, narrow_s = (RANK_BATCH * nodes / median(found) for found in (free, narrow))
    return free_s, narrow_s


def wire(rounds: int, variants: Sequence[Variant], folder: Path) -> list[Measured]:
    """Measure all variants' bytes on all numbers of nodes, then times in turns; call it within own namespaces."""
    net = network.Network(max(NODES))
    found = {(v.name, nodes): Measured(v.name, nodes) for nodes in NODES for v in variants}
    for variant, one in zip([*variants] * len(NODES), found.values(), strict=True):
        one.sent_bytes = count_bytes(variant, net, one.nodes, folder)
        print(f"  {variant.name}, {one.nodes} nodes: {max(one.ratios()):.4f} of the ring's bytes", flush=True)
    for number in range(rounds):
        for variant in variants if number == 0 else [v for v in variants if v.is_timed]:
            free_s, step_s = time_steps(variant, net, TIMED_NODES, folder)
            one = found[variant.name, TIMED_NODES]
            one.free_s.append(free_s)
            one.step_s.append(step_s)
            times = f"{1e3 * step_s:.0f} ms, {1e3 * free_s:.0f} on free links"
            print(f"  {variant.name}, {TIMED_NODES} nodes: {times}", flush=True)
    return list(found.values())


def figures(found: Sequence[Measured], variants: Sequence[Variant]) -> list[Figure]:
    """Return the figures of what was measured."""
    by_name = {variant.name: variant for variant in variants}
    rows = [bytes_figure(measured, by_name[measured.variant]) for measured in found]
    rows += [time_figure(measured, by_name[measured.variant]) for measured in found if measured.step_s]
    timed = {measured.variant: measured for measured in found if measured.step_s}
    if {"horovod-fp16", "horovod-fp32"} <= set(timed):
        rows.append(halves_figure(timed["horovod-fp16"], timed["horovod-fp32"]))
    return rows


def bytes_figure(measured: Measured, variant: Variant) -> Figure:
    """Return the bytes of the node that sends most, over the ring limit; PowerSGD's over that of fp32."""
    width = variant.bytes_per_parameter
    ratios = measured.ratios(width or 4)
    return Figure(
        "wire",
        f"bytes sent, {variant.name}, {measured.nodes} nodes",
        max(ratios),
        min(ratios),
        max(ratios),
        variant.goal,
        f"ring limit, {8 * (width or 4)} bits",
        f"{max(measured.sent_bytes) / 1e6:.2f} MB per node and step",
        is_limit=bool(width),
        no_limit="" if width else "it sends less than the gradients",
    )


def time_figure(measured: Measured, variant: Variant) -> Figure:
    """Return the step's time over the longer of its bytes' on the link and the step's on links without a limit."""
    data_bytes = ring_bytes(measured.nodes) / 4 * variant.bytes_per_parameter
    wire_s = data_bytes * PACKET / DATA * 8 / RATE_BITS
    name = f"step at 1 Gbit/s, {variant.name}, {measured.nodes} nodes"
    milliseconds = f"{1e3 * median(measured.step_s):.0f} ms a step"
    if not wire_s:
        wire_s = max(measured.sent_bytes) * 8 / RATE_BITS
        note = f"seconds; {milliseconds}, of which its bytes take {1e3 * wire_s:.0f} ms"
        return Figure("wire", name, median(measured.step_s), note=note, no_limit="its bytes take no time")
    limits = [max(wire_s, free_s) for free_s in measured.free_s]
    ratios = [step_s / limit for step_s, limit in zip(measured.step_s, limits, strict=True)]
    note = (
        f"{milliseconds}, the wire alone {1e3 * wire_s:.0f} ms, the work alone {1e3 * median(measured.free_s):.0f}"
    )
    peer = "the longer of the wire and the cores' work"
    return Figure("wire", name, *spread(ratios), "<= 1.15", peer, f"{note} ms", is_limit=True)


def halves_figure(fp16: Measured, fp32: Measured) -> Figure:
    """Return the time of Horovod's step with fp16 over that with fp32."""
    ratios = [a / b for a, b in zip(fp16.step_s, fp32.step_s, strict=True)]
    note = f"{1e3 * median(fp16.step_s):.0f} and {1e3 * median(fp32.step_s):.0f} ms a step"
    name = f"horovod (gloo), step with fp16, {fp16.nodes} nodes"
    reason = "a ratio of two figures that have theirs"
    return Figure("wire", name, *spread(ratios), "<= 1.0", "step with fp32", note, no_limit=reason)


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Return the figures of this part; the work is done by a process in namespaces of its own."""
    if reason := network.why_not(narrow=True):
        return [unmeasured("wire", f"bytes sent, {variant.name}", reason, variant.goal) for variant in VARIANTS]
    variants = [v for v in VARIANTS if v.recipe != "horovod" or importlib.util.find_spec("horovod")]
    only = ["--only", ",".join(v.name for v in variants)]
    rows = programs.in_namespaces("scripts.bench.wire", rounds, folder, *only)
    found = [Measured(**row) for row in rows]
    left_out = [v for v in VARIANTS if v not in variants]
    return [
        *figures(found, variants),
        *(unmeasured("wire", f"bytes sent, {v.name}", "horovod is not installed", v.goal) for v in left_out),
    ]


@command
def main(argv: list[str]) -> int:
    """Measure in namespaces of this process's own."""
    names = [variant.name for variant in VARIANTS]
    parser = CommandParser("python -m scripts.bench.wire", (__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=count, default=1, help="medians are over them")
    parser.add_argument("--only", default=",".join(names), help="some of these, separated by commas")
    parser.add_argument("--result", type=Path, help="where the measurements go")
    args = parse(parser, argv)
    only = check_names("--only", args.only.split(","), names)
    variants = [variant for variant in VARIANTS if variant.name in only]

    def work(folder: Path) -> list[dict[str, Any]]:
        found = wire(args.rounds, variants, folder)
        print(table(figures(found, variants)))
        return [asdict(measured) for measured in found]

    return programs.measure_inside("scripts.bench.wire", argv, args.result, work)


if __name__ == "__main__":
    sys.exit(main())
