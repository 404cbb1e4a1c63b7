"""Rehearse a job: its step time, traffic, memory, failures, hours and cost on 1 to NODES nodes.

    make plan RECIPE=ddp MODEL=resnet50 NODES=512 GPUS=8 FABRIC=ib-400
    make plan RECIPE=ddp MODEL=resnet50 NODES=64 FABRIC=tcp-100 ARGS="--compute-ms 120 --grad-compression fp16"
    make plan CHECK=1                                 hold predictions to real runs on this machine, as root
    make plan REHEARSE=1024                           run the recipe's own code at that world size in one process

Takes its own options and those of the recipe, which mean the same here. Prints a table over node counts; writes
runs/plan-001/: plan.json, table.md, plan.png. docs/plan.md says how it computes, and how far to believe it.
Exit status 0; 2: bad usage.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from recipes.common.entry import USAGE_STATUS
from recipes.common.errors import UserError, nearest
from recipes.common.options import (
    Options,
    Parser,
    non_negative_float,
    one_of,
    positive_float,
    positive_int,
)
from recipes.common.signals import vote_interval
from scripts.compare import next_folder
from scripts.local import ROOT, check_recipe
from scripts.plan.fabrics import CONTROL_ALPHA_US, FABRICS, GPUS, INTRA, Fabric, network
from scripts.plan.model import (
    ALGORITHMS,
    Cluster,
    Compute,
    Method,
    daly_interval_s,
    split_compute,
    step,
    useful_share,
)
from scripts.plan.show import Row, plot, table
from scripts.plan.workload import Kind, Workload, estimate_compute, kind_of, look_at, measure_compute

RECIPES = ("single", "dataparallel", "ddp", "spawn", "apex", "horovod", "scratch")
"""Those whose exchange of gradients is known; spawn's and apex's is DDP's."""

ONE_NODE = ("single", "dataparallel")
MOST_NODES = 100_000

LINEAR_LIMIT, LARS_LIMIT = 8192, 32_768
"""Global batches up to which ResNet-50 on ImageNet kept its accuracy: by linear scaling with warm-up (Goyal et al.
2017, https://arxiv.org/abs/1706.02677), by LARS (You et al. 2017, https://arxiv.org/abs/1708.03888)."""


def build_own_parser() -> Parser:
    """Return the parser of the plan's own options."""
    parser = Parser("python -m scripts.plan", (__doc__ or "").split("\n")[0])
    parser.add_argument("recipe", nargs="?", default="", metavar="RECIPE")
    group = parser.add_argument_group("cluster")
    group.add_argument("--nodes", type=positive_int, default=16, metavar="N", help="nodes, up to which to plan")
    group.add_argument("--gpus", type=positive_int, default=8, metavar="G", help="GPUs of a node, a rank each")
    group.add_argument("--fabric", type=one_of(*FABRICS), help=f"between nodes: {', '.join(FABRICS)}")
    group.add_argument("--alpha-us", type=non_negative_float, metavar="US", help="a hop's latency instead")
    group.add_argument("--gbit", type=positive_float, metavar="GBIT", help="a port's rate instead")
    group.add_argument("--ports", type=positive_int, metavar="N", help="of a node (the fabric's usual number)")
    group.add_argument("--efficiency", type=positive_float, metavar="X", help="share of the rate that arrives")
    group.add_argument("--intra", type=one_of(*INTRA), default="nvlink", help=f"in a node: {', '.join(INTRA)}")
    words = ("auto", *ALGORITHMS)
    group.add_argument("--algorithm", type=one_of(*words), default="auto", help=f"one of {', '.join(words)}")
    group = parser.add_argument_group("what a rank computes")
    group.add_argument(
        "--local-batch-size",
        type=positive_int,
        default=128,
        metavar="N",
        help="samples of a rank and step; with --global-batch-size: those that --compute-ms is for",
    )
    group.add_argument("--compute-ms", type=positive_float, metavar="MS", help="of a step without exchange, known")
    group.add_argument("--measure", action="store_true", help="measure it here, on one device")
    group.add_argument("--gpu-type", type=one_of(*GPUS), default="h100", help=f"else estimate: {', '.join(GPUS)}")
    group.add_argument("--utilisation", type=positive_float, default=0.15, metavar="X", help="of the GPU's peak")
    group = parser.add_argument_group("data")
    group.add_argument("--num-classes", type=positive_int, metavar="N", help="instead of the data set's")
    group.add_argument("--samples", type=positive_int, metavar="N", help="of an epoch, instead of the data set's")
    group.add_argument("--images-per-s", type=positive_float, metavar="X", help="that a node can decode")
    group.add_argument("--storage-gb-s", type=positive_float, metavar="X", help="that all nodes together can read")
    group = parser.add_argument_group("failures and money")
    group.add_argument(
        "--mtbf-gpu-hours",
        type=positive_float,
        default=50_000.0,
        metavar="H",
        help="GPU hours between failures that end a job",
    )
    group.add_argument(
        "--restart-s", type=non_negative_float, default=300.0, metavar="S", help="until steps go on"
    )
    group.add_argument("--checkpoint-gb-s", type=positive_float, default=1.0, metavar="X", help="to write them")
    group.add_argument(
        "--copy-gb-s", type=positive_float, default=5.0, metavar="X", help="copied while steps wait"
    )
    group.add_argument("--price", type=non_negative_float, default=2.5, metavar="X", help="of a GPU hour")
    group.add_argument("--output", type=Path, metavar="DIR", help="where the plan goes (runs/plan-001)")
    return parser


def parse_args(argv: Sequence[str]) -> tuple[Namespace, Options]:
    """Return the plan's own options and the recipe's; raises UserError."""
    parser = build_own_parser()
    args, words = parser.parse_known_args(list(argv))
    recipe = check_recipe(args.recipe)
    if recipe not in RECIPES:
        raise UserError(f"RECIPE {recipe} cannot be planned; one of {', '.join(RECIPES)} can")
    if args.nodes > MOST_NODES:
        raise UserError(f"NODES wants at most {MOST_NODES}, got {args.nodes}")
    if args.nodes > 1 and recipe in ONE_NODE:
        raise UserError(f"RECIPE {recipe} is for one node; use NODES=1, or RECIPE=ddp")
    if recipe == "single" and args.gpus > 1:
        raise UserError("RECIPE single has one process; use GPUS=1, or RECIPE=ddp")
    if args.compute_ms and args.measure:
        raise UserError("--compute-ms and --measure both say how long a step computes; give one")
    if args.fabric is None and not (args.gbit and args.alpha_us is not None):
        if args.gbit or args.alpha_us is not None:
            raise UserError("--gbit and --alpha-us belong together where there is no FABRIC")
        args.fabric = "ib-400"
    if not any(word.split("=")[0] == "--data" for word in words):
        words = ["--data", "imagefolder", *words]
    try:
        options: Options = importlib.import_module(f"recipes.{recipe}.train").options(words)
    except UserError as error:
        found = re.match(r"unknown option (\S+?)[;]", str(error))
        hint = nearest(found[1], parser.flags(), cutoff=0.7) if found else ""
        raise (
            UserError(f"unknown option {found[1]}{hint}; --help lists all") if found and hint else error
        ) from None
    args.is_fixed_batch = any(word.split("=")[0] == "--global-batch-size" for word in words)
    return args, options


def cluster_of(args: Namespace, nodes: int) -> Cluster:
    """Return a cluster of so many nodes."""
    fabric = FABRICS[args.fabric] if args.fabric else Fabric(args.alpha_us, args.gbit, False, 1.0, "as given")
    given = {"alpha_us": args.alpha_us, "gbit": args.gbit, "share": args.efficiency}
    fabric = replace(fabric, **{name: value for name, value in given.items() if value is not None})
    return Cluster(nodes, args.gpus, network(fabric, args.gpus, args.ports), INTRA[args.intra])


def method_of(args: Namespace, options: Options) -> Method:
    """Return how the recipe exchanges gradients under its options."""
    compression = getattr(options, "grad_compression", getattr(options, "compression", "none"))
    is_cpu = options.device == "cpu"
    cap_mb = getattr(options, "bucket_cap_mb", None)  # without one, as the recipe's wrap() has it
    return Method(
        args.recipe,
        compression,
        powersgd_rank=getattr(options, "powersgd_rank", 4),
        bucket_bytes=(cap_mb or (4 if is_cpu else 25)) * 2**20,
        first_bucket_bytes=None if cap_mb or is_cpu else 2**20,
        waits=is_cpu and compression == "powersgd",
        allreduce=getattr(options, "allreduce", "ring"),
        piece_bytes=getattr(options, "piece_kib", 1024) * 1024,
        zero=getattr(options, "zero", False),
        algorithm=args.algorithm,
    )


def compute_of(args: Namespace, options: Options, kind: Kind, workload: Workload) -> tuple[Compute, str]:
    """Return what a rank computes in a step of --local-batch-size, and how that is known."""
    if args.compute_ms:
        return split_compute(args.compute_ms / 1e3), f"given: --compute-ms {args.compute_ms:g}"
    if args.measure:
        device = torch.device("cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu")
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        return measure_compute(options, kind, args.local_batch_size, device), f"measured here: {name}"
    tflops = GPUS[args.gpu_type].tflops[options.amp]
    seconds = estimate_compute(workload, args.local_batch_size, tflops, args.utilisation)
    text = f"ESTIMATED: {args.utilisation:.0%} of the {tflops:g} TFLOP/s of a {args.gpu_type}; better measure it"
    return split_compute(seconds), text


def plan_row(
    nodes: int, args: Namespace, options: Options, kind: Kind, workload: Workload, compute: Compute
) -> Row | None:
    """Return the figures of one number of nodes; None if the global batch leaves a rank without a sample."""
    cluster = cluster_of(args, nodes)
    global_batch = options.global_batch_size if args.is_fixed_batch else args.local_batch_size * cluster.ranks
    if global_batch < cluster.ranks or global_batch > kind.num_samples:
        return None
    local = math.ceil(global_batch / cluster.ranks)  # the largest share is what all wait for
    own = compute.scaled(local / args.local_batch_size)
    decode_s = local * args.gpus / args.images_per_s if args.images_per_s else 0.0
    read_s = global_batch * kind.sample_bytes / (args.storage_gb_s * 1e9) if args.storage_gb_s else 0.0
    control = CONTROL_ALPHA_US * 1e-6 if args.recipe in ("ddp", "spawn", "apex", "scratch") else 0.0
    found = step(
        workload.gradients, own, cluster, method_of(args, options), control, input_s=max(decode_s, read_s)
    )
    alone_s = compute.scaled(global_batch / cluster.ranks / args.local_batch_size).total_s
    steps = options.epochs * (kind.num_samples // global_batch)
    steps = min(steps, options.max_steps or steps)
    failures = failure_figures(args, options, workload, cluster.ranks)
    hours = steps * found.step_s / 3600 / max(failures["useful_share"], 1e-9)
    memory = workload.memory_bytes(options, local, cluster.ranks)
    return {
        "nodes": nodes,
        "ranks": cluster.ranks,
        "global_batch_size": global_batch,
        **asdict(found),
        "efficiency": alone_s / found.step_s,
        "samples_per_s": global_batch / found.step_s,
        "checkpoint_every_steps": max(1, round(failures["interval_s"] / found.step_s)),
        **failures,
        "steps": steps,
        "hours": hours,
        "cost": hours * cluster.ranks * args.price,
        "memory_bytes": {**memory, "sum": sum(memory.values())},
    }


def failure_figures(args: Namespace, options: Options, workload: Workload, ranks: int) -> dict[str, float]:
    """Return the mean time between failures, the best interval of checkpoints, and what is left of the time."""
    mtbf_s = args.mtbf_gpu_hours * 3600 / ranks
    size = workload.checkpoint_bytes(options)
    write_s = size / (args.checkpoint_gb_s * 1e9)
    # An asynchronous one holds training up while it is copied; until it is on the disk, a failure loses one more.
    cost_s = size / (args.copy_gb_s * 1e9) if options.async_checkpoints else write_s
    restart_s = args.restart_s + (write_s if options.async_checkpoints else 0.0)
    interval_s = max(daly_interval_s(cost_s, mtbf_s), write_s if options.async_checkpoints else 0.0)
    return {
        "mtbf_s": mtbf_s,
        "checkpoint_cost_s": cost_s,
        "interval_s": interval_s,
        "useful_share": useful_share(interval_s, cost_s, mtbf_s, restart_s),
    }


def advice(row: Row, args: Namespace, options: Options, kind: Kind) -> list[str]:
    """Return what to make of the global batch and the learning rate at the largest number of nodes."""
    batch = row["global_batch_size"]
    epoch_steps = kind.num_samples // batch
    texts = [
        f"global batch {batch:,}: {epoch_steps:,} steps an epoch. Linear scaling: --lr R --scale-lr, where R is "
        f"the rate that is good for 256 samples (0.1 for ResNet-50), gives R x {batch / 256:g}; warm up over 5 "
        f"epochs: --warmup-steps {5 * epoch_steps}"
    ]
    if batch > LINEAR_LIMIT:
        known = "LARS kept it up to 32,768" if batch <= LARS_LIMIT else "LARS has been shown up to 32,768"
        nodes = max(1, LINEAR_LIMIT // (args.gpus * args.local_batch_size))
        texts.append(
            f"warning: on ImageNet, ResNet-50 keeps its accuracy by linear scaling up to about {LINEAR_LIMIT:,} "
            f"({known}, with an optimizer that is not in the recipes); at {args.local_batch_size} samples a rank "
            f"that is {nodes} nodes. Other data and models have other limits (https://arxiv.org/abs/1811.03600)"
        )
    if row["limit"] == "vote":
        texts.append(
            f"note: the vote on stopping, 4 bytes around a gloo ring of {row['ranks']:,} ranks in every "
            f"{vote_interval(row['ranks'])} steps, takes longer than the step beside which it goes on"
        )
    if epoch_steps < 20:
        texts.append(f"warning: {epoch_steps} steps an epoch are too few for schedules in epochs")
    return texts


def memory_line(row: Row, args: Namespace) -> str:
    """Return the memory of a GPU in words."""
    parts = {name.replace("_", " "): size / 1e9 for name, size in row["memory_bytes"].items() if size}
    whole = parts.pop("sum")
    texts = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    room = GPUS[args.gpu_type].memory_gb
    fits = "" if args.compute_ms or args.measure else f" of {room:g} on a {args.gpu_type}"
    if not (args.compute_ms or args.measure) and whole > 0.95 * room:
        fits += "; DOES NOT FIT: lower --local-batch-size, or raise --accumulate-steps"
    return f"memory of a GPU, estimated: {whole:.1f} GB{fits} ({texts}; without the libraries' own)"


def make_plan(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], Path | None]:
    """Return the plan, the lines that tell it, and where it shall go; raises UserError."""
    args, options = parse_args(argv)
    kind = kind_of(options, args.num_classes, args.samples)
    workload = look_at(options, kind)
    compute, source = compute_of(args, options, kind, workload)
    counts = sorted({2**i for i in range(args.nodes.bit_length())} | {args.nodes})
    found = [plan_row(nodes, args, options, kind, workload, compute) for nodes in counts]
    rows = [row for row in found if row]
    if not rows:
        raise UserError("the global batch leaves ranks without a sample, or is larger than the data, on one node")
    last, where = rows[-1], cluster_of(args, 1)
    fabric = args.fabric or "own"
    lines = [
        f"plan {args.recipe} {options.model}: {workload.parameters:,} parameters, images of {kind.image_size}, "
        f"{workload.flops_per_sample / 1e9:.1f} GFLOP a sample forward and backward",
        f"compute {1e3 * compute.total_s:.1f} ms a step of {args.local_batch_size} samples, {source}",
        f"fabric {fabric}: {where.network.bytes_per_s * 8e-9:,.1f} Gbit/s for a node, "
        f"{where.network.alpha_s * 1e6:g} us a hop; in a node {args.intra}; {args.gpus} GPUs a node",
        memory_line(last, args),
        *advice(last, args, options, kind),
    ]
    if len(rows) < len(counts):
        lines.append(f"note: left out {counts[len(rows) :]} nodes: the batch or the data do not go round there")
    plan = {
        "recipe": args.recipe,
        "model": options.model,
        "parameters": workload.parameters,
        "gradient_bytes": workload.parameter_bytes,
        "flops_per_sample": workload.flops_per_sample,
        "compute": {**asdict(compute), "source": source},
        "fabric": {"name": fabric, **asdict(where.network), "intra": args.intra},
        "options": {name: str(value) for name, value in {**options.as_dict(), **vars(args)}.items()},
        "rows": rows,
    }
    return plan, lines, args.output


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print, write; return the exit status."""
    try:
        plan, lines, folder = make_plan(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_STATUS
    folder = folder or next_folder("plan")
    folder.mkdir(parents=True, exist_ok=True)
    text = table(plan["rows"])
    (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
    (folder / "table.md").write_text(f"{text}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    plot(plan["rows"], f"{plan['recipe']} {plan['model']}, {plan['fabric']['name']}", folder / "plan.png")
    print("\n".join([*lines, "", text, ""]))
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    print(f"wrote {shown}/plan.json, table.md and plan.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
