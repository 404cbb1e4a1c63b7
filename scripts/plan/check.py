"""Hold the plan's step time and bytes to real runs of the ddp recipe, on nodes with a network each on one machine.

    make plan CHECK=1
    python -m scripts.plan.check --nodes 2 4 --mbit 100 1000 --rounds 5

Each node is a network namespace (as root on Linux) whose link lets a set rate through; its rank is the recipe's
own code over gloo. The prediction knows nothing of those runs. It is made of how long as many processes as there
are nodes take to compute a step, side by side on these cores, without any exchange; of what all-reduces of one
number and of a bucket's size take on those links, alone and beside computing; and of how much they slow computing
down. docs/plan.md has the figures.
Exit status 0; 1: a run failed; 2: bad usage, or no root.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from recipes.common.errors import UserError
from recipes.common.options import non_negative_float, positive_int
from scripts.lab import network
from scripts.launch.command import CommandParser, command, parse
from scripts.plan.model import Cluster, Compute, Link, Method, step

MODULE = "scripts.plan.check"

PACKET_SHARE = 1448 / 1514
"""Of the bytes that a limited link counts: it cuts what it sends into packets of 1,500 bytes."""

MODEL = "squeezenet1_1"
"""1.2 M parameters in 26 layers of about the same work: buckets come all along backward."""

IMAGE_SIZE, LOCAL_BATCH, BUCKET_MB = 64, 4, 1.0

MOST_LOAD = 0.95
TIMEOUT_S = 300.0


def words_of_recipe(args: Namespace, nodes: int, folder: Path) -> list[str]:
    """Return the ddp recipe's options: the same samples a rank at any number of nodes."""
    words = ["--data", "synthetic", "--image-size", str(IMAGE_SIZE), "--num-samples", "1000"]
    words += ["--model", args.model, "--bucket-cap-mb", str(BUCKET_MB)]
    words += ["--global-batch-size", str(nodes * LOCAL_BATCH), "--no-tensorboard", "--log-every", "1000"]
    return [*words, "--device", "cpu", "--runs-dir", str(folder), "--overwrite", "--no-async-checkpoints"]


def run_point(
    net: network.Network, nodes: int, mbit: float, args: Namespace, gradient_bytes: int, folder: Path
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return what a prediction may know, and by compression a real step's time and the first node's bytes."""
    kinds = args.compression if nodes > 1 else ["none"]
    request = {
        "options": words_of_recipe(args, nodes, folder),
        "compression": kinds,
        "steps": args.steps,
        "local_batch_size": LOCAL_BATCH,
        "bucket_bytes": int(BUCKET_MB * 2**20),
        "gradient_bytes": gradient_bytes,
        "result": str(folder / "probe.json"),
    }
    limited = range(nodes if mbit else 0)
    for node in limited:
        net.narrow(node, f"{mbit:g}mbit")
    threads = max(1, len(os.sched_getaffinity(0)) // nodes)
    try:
        net.run_ranks([sys.executable, "-m", "scripts.plan.ranks", json.dumps(request)], nodes, threads, TIMEOUT_S)
    finally:
        for node in limited:
            net.restore(node)
    # A limited link cuts what it sends into packets before it is counted, an unlimited one after that.
    headless = PACKET_SHARE if mbit else 1.0
    real = {}
    for kind in kinds:
        result = json.loads((folder / kind / "result.json").read_text())
        step_s = nodes * LOCAL_BATCH / result["samples_per_s"]
        real[kind] = {"step_s": step_s, "sent_bytes": result["sent_bytes_per_step"] * headless}
    return json.loads((folder / "probe.json").read_text()), real


def predict(probe: dict[str, float], gradients: Sequence[Any], nodes: int, compression: str) -> dict[str, float]:
    """Return the plan's step time and bytes of a node, from what was measured apart from such a step."""
    bucket = BUCKET_MB * 2**20
    hops = 2 * (nodes - 1)
    compute = Compute(probe["forward_s"], probe["backward_s"], probe["optimizer_s"])
    if not hops:
        cluster = Cluster(1, 1, Link(0.0, 1.0))
    else:
        alpha_s = probe["small_s"] / hops
        rate, busy_rate = (
            hops / nodes * bucket / max(probe[key] - probe["small_s"], 1e-9)
            for key in ("bucket_s", "busy_bucket_s")
        )
        load = max(0.0, 1 - compute.total_s / probe["busy_step_s"])
        compute = replace(compute, load=min(MOST_LOAD, load))
        busy = Link(alpha_s, min(rate, busy_rate))
        cluster = Cluster(nodes, 1, Link(alpha_s, rate), loaded=busy)
    method = Method("ddp", compression, bucket_bytes=BUCKET_MB * 2**20, algorithm="ring")
    found = step(gradients, compute, cluster, method, control_alpha_s=cluster.network.alpha_s)
    return {"step_s": found.step_s, "sent_bytes": found.sent_bytes_per_node, "compute_s": found.compute_s}


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options; raises UserError."""
    parser = CommandParser(f"python -m {MODULE}", (__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=positive_int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument(
        "--mbit", type=non_negative_float, nargs="+", default=[100, 300, 1000], metavar="X", help="0: no limit"
    )
    parser.add_argument("--compression", nargs="+", default=["none"], metavar="KIND", help="none, fp16, bf16")
    parser.add_argument("--model", default=MODEL, help="of the recipe's")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="medians are over them")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="of a run (about four seconds of them)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="all figures, as JSON")
    args = parse(parser, argv)
    if max(args.nodes) > 64:
        raise UserError(f"--nodes: at most 64 on one machine, got {max(args.nodes)}")
    return args


def measure(args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return prediction and truth of every point: lists over the rounds."""
    from recipes.ddp import train
    from scripts.plan.workload import kind_of, look_at

    options = train.options(words_of_recipe(args, 1, folder))
    gradients = look_at(options, kind_of(options, 1000, 1000)).gradients
    gradient_bytes = sum(gradient.nbytes for gradient in gradients)
    net = network.Network(max(args.nodes))
    points: dict[tuple[int, float, str], dict[str, Any]] = {}
    for _ in range(args.rounds):
        for nodes in args.nodes:
            for mbit in args.mbit if nodes > 1 else [0.0]:
                probe, runs = run_point(net, nodes, mbit, args, gradient_bytes, folder)
                for kind, real in runs.items():
                    new = {
                        "nodes": nodes,
                        "mbit": mbit,
                        "compression": kind,
                        "predicted": [],
                        "real": [],
                        "probes": [],
                    }
                    point = points.setdefault((nodes, mbit, kind), new)
                    point["predicted"].append(predict(probe, gradients, nodes, kind))
                    point["real"].append(real)
                    point["probes"].append(probe)
                    print(line_of(point), flush=True)
    return list(points.values())


def error_of(point: dict[str, Any], key: str = "step_s") -> list[float]:
    """Return predicted over real of each round, less one."""
    pairs = zip(point["predicted"], point["real"], strict=True)
    return [expected[key] / real[key] - 1 if real[key] else 0.0 for expected, real in pairs]


def line_of(point: dict[str, Any]) -> str:
    """Return a point's figures so far in words."""
    predicted, real = (1e3 * median(one["step_s"] for one in point[kind]) for kind in ("predicted", "real"))
    compute = 1e3 * median(one["compute_s"] for one in point["predicted"])
    rate = f"{point['mbit']:g} Mbit/s" if point["mbit"] else "no limit"
    sent = f"{median(error_of(point, 'sent_bytes')):+.1%}" if point["nodes"] > 1 else "-"
    return (
        f"{point['nodes']} nodes, {rate}, {point['compression']}: computing {compute:.0f} ms, step predicted "
        f"{predicted:.0f} ms, real {real:.0f} ms, error {median(error_of(point)):+.1%}, of the bytes {sent}"
    )


@command
def main(words: list[str]) -> int:
    """Measure every point and say how far off the plan is."""
    args = parse_args(words)
    if reason := network.why_not():
        raise UserError(f"the plan cannot be checked here: {reason}")
    network.enter(MODULE, words)
    with tempfile.TemporaryDirectory(prefix="plan-check-") as folder:
        try:
            points = measure(args, Path(folder))
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if args.result:
        args.result.write_text(json.dumps(points, indent=2) + "\n")
    print("\n".join(["", *(line_of(point) for point in points)]))
    worst = max(abs(median(error_of(point))) for point in points)
    print(f"largest error of a step time: {worst:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
