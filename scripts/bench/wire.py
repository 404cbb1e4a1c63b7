"""The wire: what the recipes send for a step, and how long it takes them on links of 1 Gbit/s.

The recipes run as `make run` starts them, with a network for each node (scripts/bench/namespaces.py). The model
is resnet18 with 1,000 classes, 11.68 M parameters, on images of 16x16, two for each rank: gradients of real size
after as little computing as can be. With 32 and 64 for each rank, computing takes about as long as sending, and
twice as long: an exchange that did not hide behind it would show.

A timed run begins on links without a limit, which are narrowed on the way. A step takes at least the longer of two
times of the same round: forward, its bytes on the link, and the update of all weights, one after the other; and a
step on free links, which is the work of the cores, including the network's. scratch exchanges after backward: all
its computing is before or after its bytes. Horovod decides when to send a gradient, so its steps have another
goal: a bare loop with Horovod on the same links. On four nodes only bytes are measured: they share too few cores.

Bytes do not vary by round and are measured once: the difference of two runs that differ only in --max-steps, read
from the counters of each node's interface before and after. What a run sends once (rendezvous, first broadcast,
evaluation, end) cancels out; what each step sends remains: gradients, votes, packet headers, and the notes that
ranks leave in the store meanwhile. Reading the counters while a job runs would cut steps in two.
"""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from scripts.bench import programs
from scripts.bench.figures import Figure, ratio, unmeasured
from scripts.bench.programs import bare_step_ms, recipe_command
from scripts.lab.network import PAYLOAD_SHARE, Network
from scripts.launch.cores import count_cores
from scripts.launch.runs import read_metrics
from scripts.plan.cost_model import ring_bytes

RATE_MBIT = 1000
NODES = (2, 4)
TIMED_NODES = 2
RANK_BATCH = 2
LOG_EVERY = 4

BYTES_GOAL = "<= 1.01"

MODEL, IMAGE_SIZE = "resnet18", 16
PARAMETERS = 11_681_832
"""Of resnet18 with 1,000 classes and the stem for small images, as recipes/common/models/models.py builds it."""

COUNTED = 8
"""Steps by which the runs differ that bytes are the difference of."""

FREE, NARROW = 12, 16
"""Steps of a timed run on free links, after its warm-up, and from where these are narrowed."""


@dataclass(frozen=True)
class Variant:
    """A recipe with options, and what is asked of its bytes."""

    name: str
    recipe: str
    options: tuple[str, ...] = ()
    bytes_per_parameter: int = 4  # on the wire; 0: fewer than the gradients have
    is_timed: bool = False  # whether its time is measured in every round; else in the first
    warm: int = 4  # steps that are left out
    overlaps: bool = True  # whether it exchanges while it computes
    rank_batch: int = RANK_BATCH


VARIANTS = (
    Variant("ddp-fp32", "ddp", is_timed=True),
    Variant("ddp-fp32, 32 samples a rank", "ddp", is_timed=True, rank_batch=32),
    Variant("ddp-fp32, 64 samples a rank", "ddp", is_timed=True, rank_batch=64),
    Variant("ddp-fp16", "ddp", ("--grad-compression", "fp16"), bytes_per_parameter=2, is_timed=True),
    Variant("ddp-bf16", "ddp", ("--grad-compression", "bf16"), bytes_per_parameter=2),
    Variant("ddp-powersgd", "ddp", ("--grad-compression", "powersgd"), 0, warm=12),  # ten are in fp32
    Variant("horovod-fp32", "horovod", ("--compression", "none"), is_timed=True),
    Variant("horovod-fp16", "horovod", ("--compression", "fp16"), bytes_per_parameter=2, is_timed=True),
    Variant("scratch", "scratch", overlaps=False),
)


@dataclass
class Measured:
    """What was seen of one variant on so many nodes."""

    variant: Variant
    nodes: int
    sent_bytes: list[float]  # what each node sent for a step
    step_s: list[float] = field(default_factory=list)  # by round, the median over the steps on narrow links
    free_s: list[float] = field(default_factory=list)  # the same on links without a limit
    alone_s: list[float] = field(default_factory=list)  # beside no exchange: forward and update, or all computing
    bare_s: list[float] = field(default_factory=list)  # of a bare loop with Horovod, on narrow links

    def bytes_figure(self) -> Figure:
        """Return the bytes of the node that sends most, over the ring limit; PowerSGD's over that of fp32."""
        width = self.variant.bytes_per_parameter or 4
        limit = ring_bytes(width * PARAMETERS, self.nodes)
        name = f"bytes sent, {self.variant.name}, {self.nodes} nodes"
        note = f"{max(self.sent_bytes) / 1e6:.2f} MB per node and step"
        low, high = min(self.sent_bytes) / limit, max(self.sent_bytes) / limit
        peer = f"ring limit, {8 * width} bits"
        if self.variant.bytes_per_parameter:
            return Figure(name, high, low, high, BYTES_GOAL, peer, note, is_limit=True)
        return Figure(name, high, low, high, "", peer, note, no_limit="it sends less than the gradients")

    def time_figure(self) -> Figure:
        """Return a step's time over the least that its bytes on the link and its work allow."""
        wire_s = ring_bytes(self.variant.bytes_per_parameter * PARAMETERS, self.nodes) / PAYLOAD_SHARE
        wire_s *= 8 / (1e6 * RATE_MBIT)
        name = f"step at 1 Gbit/s, {self.variant.name}, {self.nodes} nodes"
        step_ms, free_ms, wire_ms = (1e3 * s for s in (median(self.step_s), median(self.free_s), wire_s))
        if not wire_s:
            wire_ms = 1e3 * max(self.sent_bytes) * 8 / (1e6 * RATE_MBIT)
            note = f"seconds; {step_ms:.0f} ms a step, of which its bytes take {wire_ms:.0f} ms"
            return Figure(name, step_ms / 1e3, note=note, no_limit="its bytes take no time")
        alone = "forward and update" if self.variant.overlaps else "computing"
        note = f"{step_ms:.0f} ms a step; sending takes {wire_ms:.0f} ms and cannot overlap with {alone}, "
        note += f"{1e3 * median(self.alone_s):.0f} ms; the cores' work takes {free_ms:.0f} ms"
        peer = f"the longer of {alone} with the wire, and the cores' work"
        limits = [max(alone_s + wire_s, free_s) for alone_s, free_s in zip(self.alone_s, self.free_s, strict=True)]
        values = ratio({"step": self.step_s, "limit": limits}, "step", "limit")
        goal = "" if self.bare_s else "<= 1.15"
        return Figure(name, *values, goal, peer, note, is_limit=True)

    def bare_figure(self) -> Figure:
        """Return a step's time divided by a bare Horovod loop's."""
        step_ms, bare_ms = 1e3 * median(self.step_s), 1e3 * median(self.bare_s)
        values = ratio({"step": self.step_s, "bare": self.bare_s}, "step", "bare")
        name = f"step at 1 Gbit/s, {self.variant.name}, {self.nodes} nodes: time"
        peer = "bare forward + backward + step with Horovod"
        return Figure(name, *values, "<= 1.05", peer, f"{step_ms:.0f} ms against {bare_ms:.0f} ms", is_limit=True)


def workload(variant: Variant, nodes: int) -> list[str]:
    """Return the options that say what is computed, in an epoch that is longer than a run."""
    batch = variant.rank_batch * nodes
    data = f"--model {MODEL} --data synthetic --image-size {IMAGE_SIZE} --num-samples {max(1000, 50 * batch)}"
    return f"{data} --global-batch-size {batch} --device cpu".split()


def command_of(variant: Variant, net: Network, nodes: int, steps: int, run: Path) -> list[str]:
    """Return what starts a run of a recipe."""
    # An untrained model on noise, in halves: gentle steps, so that nothing overflows.
    more = f"--max-steps {steps} --log-every {LOG_EVERY} --lr 0.001".split()
    return recipe_command(variant.recipe, run, [*workload(variant, nodes), *more, *variant.options], nodes, net)


def count_bytes(variant: Variant, net: Network, nodes: int, folder: Path) -> list[float]:
    """Return what each node sends for a step."""
    totals = []
    for steps in (variant.warm, variant.warm + COUNTED):
        before = [net.sent_bytes(node) for node in range(nodes)]
        programs.run(command_of(variant, net, nodes, steps, folder / "run"))
        totals.append([net.sent_bytes(node) - sent for node, sent in enumerate(before)])
        shutil.rmtree(folder / "run")  # a checkpoint of 93 MB
    return [(more - few) / COUNTED for few, more in zip(*totals, strict=True)]


def time_steps(variant: Variant, net: Network, nodes: int, folder: Path) -> tuple[float, float]:
    """Return the median seconds of a step on narrow links and on free ones, from one run."""

    def speeds() -> dict[int, float]:
        """Return the samples/s that the run has logged so far, by step: of the LOG_EVERY steps up to it."""
        rows = read_metrics(folder / "run", is_running=True)
        return {row["step"]: row["samples_per_s"] for row in rows if "loss" in row}

    last_free = variant.warm + FREE
    command = command_of(variant, net, nodes, last_free + NARROW, folder / "run")
    with ExitStack() as links, programs.running(command, lambda: last_free in speeds(), {}):
        free = [speed for step, speed in speeds().items() if step > variant.warm]
        links.enter_context(net.narrowed(nodes, RATE_MBIT))  # until the run has ended
        mixed = max(speeds()) + LOG_EVERY
    narrow = [speed for step, speed in speeds().items() if step > mixed]
    shutil.rmtree(folder / "run")
    if len(narrow) < 2:
        raise RuntimeError(f"{variant.name}: its steps ended before the links were narrow; raise NARROW")
    step_s, free_s = (variant.rank_batch * nodes / median(found) for found in (narrow, free))
    return step_s, free_s


def time_alone(variant: Variant, net: Network, nodes: int) -> float:
    """Return the seconds of a step without backward, or of all its computing, on all nodes at once."""
    flags = [*(["--without-backward"] if variant.overlaps else []), "--steps", "20"]
    return bare_step_ms(net, nodes, max(1, count_cores() // nodes), flags, workload(variant, nodes)) / 1e3


def time_bare(variant: Variant, net: Network, nodes: int) -> float:
    """Return the median seconds of a step of a bare loop with Horovod, on narrow links, as of the recipe's."""
    flags = ["--horovod", variant.options[-1], "--steps", str(NARROW)]
    options = [*workload(variant, nodes), "--log-every", str(LOG_EVERY)]
    with net.narrowed(nodes, RATE_MBIT):
        return bare_step_ms(net, nodes, max(1, count_cores() // nodes), flags, options, "median_ms") / 1e3


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Measure all variants' bytes on all numbers of nodes, then times in turns."""
    net, has_horovod = Network(max(NODES)), importlib.util.find_spec("horovod")
    variants = [variant for variant in VARIANTS if variant.recipe != "horovod" or has_horovod]
    found = []
    for nodes in NODES:
        for variant in variants:
            if nodes > TIMED_NODES and variant.rank_batch > RANK_BATCH:
                continue  # it sends the same bytes, and its times are of two nodes
            found.append(Measured(variant, nodes, count_bytes(variant, net, nodes, folder)))
            print(f"  {found[-1].bytes_figure().name}: {found[-1].bytes_figure().measured:.4f}", flush=True)
    timed = [one for one in found if one.nodes == TIMED_NODES]
    for number in range(rounds):
        alone_s: dict[tuple[bool, int], float] = {}
        for one in timed:
            work = (one.variant.overlaps, one.variant.rank_batch)
            if number == 0 or one.variant.is_timed:
                step_s, free_s = time_steps(one.variant, net, one.nodes, folder)
                one.step_s.append(step_s)
                one.free_s.append(free_s)
                if work not in alone_s:
                    alone_s[work] = time_alone(one.variant, net, TIMED_NODES)
                one.alone_s.append(alone_s[work])
                if one.variant.recipe == "horovod":
                    one.bare_s.append(time_bare(one.variant, net, one.nodes))
                print(f"  {one.variant.name}: {1e3 * step_s:.0f} ms, {1e3 * free_s:.0f} on free links", flush=True)
    missing = [variant for variant in VARIANTS if variant not in variants]
    return [
        *(one.bytes_figure() for one in found),
        *(one.time_figure() for one in timed),
        *(one.bare_figure() for one in timed if one.bare_s),
        *(unmeasured(f"bytes sent, {one.name}", "horovod is not installed", BYTES_GOAL) for one in missing),
    ]
