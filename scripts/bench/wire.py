"""The wire: what the recipes send for a step, and how long it takes them on links of 1 Gbit/s.

    python -m scripts.bench wire
    python -m scripts.bench.wire --rounds 1 --only ddp-fp32,scratch    # a look at some of it

The recipes run as `make run` starts them, with a network for each node (scripts/lab/network.py, as root on Linux).
The model is resnet18 with 1,000 classes, 11.68 M parameters, on images of 16x16, two for each rank: gradients of
real size after as little computing as can be.

What a step takes at least is the longer of two, of the same round: its bytes on the link, and the same step on
links without a limit, which is the work of the cores, the network's included.

Bytes are the difference of two runs that differ in --max-steps alone, read from the counters of each node's
interface before and after: what a run sends once (the meeting, the first broadcast, the evaluation, the goodbye)
is in both and goes away, and everything that a step sends stays: gradients, votes, the headers of packets, and the
notes that ranks leave in the store meanwhile. Reading the counters while a job runs would cut steps in two.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

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
RANK_BATCH = 2
LOG_EVERY = 4
RUN_TIMEOUT_S = 300


MODEL, IMAGE_SIZE = "resnet18", 16
GRADIENT_BYTES = 4 * 11_681_832
"""Of resnet18 with 1,000 classes and the stem for small images, as recipes/common/models/models.py builds it."""

FEW, MORE = 12, 32
"""Steps of the two runs. The few are left out of the time: warm-up, and PowerSGD's ten steps in fp32."""


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


VARIANTS = (
    Variant("ddp-fp32", "ddp", goal="<= 1.01", is_timed=True),
    Variant("ddp-fp16", "ddp", ("--grad-compression", "fp16"), "<= 1.01", 2, is_timed=True),
    Variant("ddp-bf16", "ddp", ("--grad-compression", "bf16"), "<= 1.01", 2),
    Variant("ddp-powersgd", "ddp", ("--grad-compression", "powersgd"), "", 0),
    Variant("horovod-fp32", "horovod", ("--compression", "none"), "<= 1.01", is_timed=True),
    Variant("horovod-fp16", "horovod", ("--compression", "fp16"), "<= 1.01", 2, is_timed=True),
    Variant("scratch", "scratch", goal="<= 1.01"),
)


@dataclass
class Measured:
    """What was seen of one variant on so many nodes."""

    variant: str
    nodes: int
    sent_bytes: list[list[float]] = field(default_factory=list)
    """By round, what each node sent for a step."""
    step_s: list[float] = field(default_factory=list)
    """By round, the median over the run."""
    free_s: list[float] = field(default_factory=list)
    """The same on links without a limit."""

    def ratios(self, bytes_per_parameter: int = 4) -> list[list[float]]:
        """Return by round and node the bytes of a step over the ring limit."""
        limit = ring_bytes(self.nodes) / 4 * bytes_per_parameter
        return [[sent / limit for sent in nodes] for nodes in self.sent_bytes]


def run(variant: Variant, net: network.Network, nodes: int, steps: int, runs: Path) -> tuple[list[int], float]:
    """Run a recipe; return the bytes that each node has sent in all, and the median seconds of a step."""
    name = f"{variant.name}-{nodes}-{steps}"
    words = ["--model", MODEL, "--data", "synthetic", "--image-size", str(IMAGE_SIZE), "--num-samples", "1000"]
    words += ["--global-batch-size", str(RANK_BATCH * nodes), "--max-steps", str(steps), "--device", "cpu"]
    words += ["--log-every", str(LOG_EVERY), "--no-tensorboard", "--runs-dir", str(runs), "--name", name]
    # An untrained model on noise, in halves: gentle steps, so that nothing overflows.
    words += ["--lr", "0.001", "--overwrite", *variant.options]
    before = [net.sent_bytes(node) for node in range(nodes)]
    launch = [sys.executable, "-m", "scripts.launch.local", variant.recipe, "--nodes", str(nodes)]
    launch += ["--nproc-per-node", "1", "--networks", net.option(), "--"]
    programs.run([*launch, *words], timeout_s=RUN_TIMEOUT_S)
    after = [net.sent_bytes(node) for node in range(nodes)]
    logged = read_metrics(runs / name)
    shutil.rmtree(runs / name)  # a checkpoint of 93 MB
    speeds = [line["samples_per_s"] for line in logged if "loss" in line and line["step"] > FEW]
    step_s = RANK_BATCH * nodes / median(speeds) if speeds else 0.0
    return [b - a for a, b in zip(before, after, strict=True)], step_s


def wire(rounds: int, variants: Sequence[Variant], folder: Path) -> list[Measured]:
    """Measure all variants on all numbers of nodes, in turns; call it within namespaces of its own."""
    net = network.Network(max(NODES))
    found = {(v.name, nodes): Measured(v.name, nodes) for v in variants for nodes in NODES}
    bases: dict[tuple[str, int], list[int]] = {}
    for number in range(rounds):
        for nodes in NODES:
            for variant in variants if number == 0 else [v for v in variants if v.is_timed]:
                key = (variant.name, nodes)
                if variant.bytes_per_parameter:
                    found[key].free_s.append(run(variant, net, nodes, MORE, folder)[1])
                for node in range(nodes):
                    net.narrow(node, RATE, burst="256kb")
                if number == 0:
                    bases[key], _ = run(variant, net, nodes, FEW, folder)
                sent, step_s = run(variant, net, nodes, MORE, folder)
                found[key].sent_bytes.append(
                    [(b - a) / (MORE - FEW) for a, b in zip(bases[key], sent, strict=True)]
                )
                found[key].step_s.append(step_s)
                for node in range(nodes):
                    net.restore(node)
                share = max(found[key].ratios()[-1])
                print(
                    f"  {variant.name}, {nodes} nodes: {share:.4f} of the ring's bytes, {1e3 * step_s:.0f} ms",
                    flush=True,
                )
    return list(found.values())


def figures(found: Sequence[Measured], variants: Sequence[Variant]) -> list[Figure]:
    """Return the figures of what was measured."""
    by_name = {variant.name: variant for variant in variants}
    rows = [bytes_figure(measured, by_name[measured.variant]) for measured in found]
    rows += [time_figure(measured, by_name[measured.variant]) for measured in found if measured.step_s]
    for nodes in NODES:
        pair = {m.variant: m for m in found if m.nodes == nodes and m.variant in ("horovod-fp16", "horovod-fp32")}
        if len(pair) == 2:
            rows.append(halves_figure(nodes, pair["horovod-fp16"], pair["horovod-fp32"]))
    return rows


def bytes_figure(measured: Measured, variant: Variant) -> Figure:
    """Return the bytes of the node that sends most, over the ring limit; PowerSGD's over that of fp32."""
    width = variant.bytes_per_parameter
    ratios = measured.ratios(width or 4)
    most = [max(nodes) for nodes in ratios]
    return Figure(
        "wire",
        f"bytes sent, {variant.name}, {measured.nodes} nodes",
        median(most),
        min(min(nodes) for nodes in ratios),
        max(most),
        variant.goal,
        f"ring limit, {8 * (width or 4)} bits",
        f"{median(max(nodes) for nodes in measured.sent_bytes) / 1e6:.2f} MB per node and step",
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
        wire_s = median(max(nodes) for nodes in measured.sent_bytes) * 8 / RATE_BITS
        note = f"seconds; {milliseconds}, of which its bytes take {1e3 * wire_s:.0f} ms"
        return Figure("wire", name, median(measured.step_s), note=note, no_limit="its bytes take no time")
    limits = [max(wire_s, free_s) for free_s in measured.free_s]
    ratios = [step_s / limit for step_s, limit in zip(measured.step_s, limits, strict=True)]
    note = (
        f"{milliseconds}, the wire alone {1e3 * wire_s:.0f} ms, the work alone {1e3 * median(measured.free_s):.0f}"
    )
    peer = "the longer of the wire and the cores' work"
    return Figure("wire", name, *spread(ratios), "<= 1.15", peer, f"{note} ms", is_limit=True)


def halves_figure(nodes: int, fp16: Measured, fp32: Measured) -> Figure:
    """Return the time of Horovod's step with fp16 over that with fp32."""
    ratios = [a / b for a, b in zip(fp16.step_s, fp32.step_s, strict=True)]
    note = f"{1e3 * median(fp16.step_s):.0f} and {1e3 * median(fp32.step_s):.0f} ms a step"
    name = f"horovod (gloo), step with fp16, {nodes} nodes"
    reason = "a ratio of two figures that have theirs"
    return Figure("wire", name, *spread(ratios), "<= 1.0", "step with fp32", note, no_limit=reason)


def measure(rounds: int, folder: Path) -> list[Figure]:
    """Return the figures of this part; the work is done by a process in namespaces of its own."""
    if reason := network.why_not(narrow=True):
        return [unmeasured("wire", f"bytes sent, {variant.name}", reason, variant.goal) for variant in VARIANTS]
    variants = [v for v in VARIANTS if v.recipe != "horovod" or importlib.util.find_spec("horovod")]
    only = ["--only", ",".join(v.name for v in variants)]
    rows = programs.in_namespaces("scripts.bench.wire", rounds, folder / "wire.json", *only)
    found = [Measured(**row) for row in rows]
    left_out = [v for v in VARIANTS if v not in variants]
    return [
        *figures(found, variants),
        *(unmeasured("wire", f"bytes sent, {v.name}", "horovod is not installed", v.goal) for v in left_out),
    ]


@command
def main(argv: list[str]) -> None:
    """Measure in namespaces of this process's own."""
    names = [variant.name for variant in VARIANTS]
    parser = CommandParser("python -m scripts.bench.wire", (__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=count, default=1, help="medians are over them")
    parser.add_argument("--only", default=",".join(names), help="some of these, separated by commas")
    parser.add_argument("--result", type=Path, help="where the measurements go")
    args = parse(parser, argv)
    only = check_names("--only", args.only.split(","), names)
    network.enter("scripts.bench.wire", argv)
    variants = [variant for variant in VARIANTS if variant.name in only]
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as folder:
        found = wire(args.rounds, variants, Path(folder))
    if args.result:
        args.result.write_text(json.dumps([asdict(measured) for measured in found]))
    else:
        print(table(figures(found, variants)))


if __name__ == "__main__":
    sys.exit(main())
