"""Plan a job: its step time, traffic, memory, failures, hours and cost on 1 to NODES nodes.

    make plan RECIPE=ddp MODEL=resnet50 NODES=512 GPUS=8 FABRIC=ib-400
    make plan RECIPE=ddp MODEL=resnet50 NODES=64 FABRIC=tcp-100 ARGS="--compute-ms 120 --grad-compression fp16"
    make plan CHECK=1                                 compare predictions with real runs on this machine, as root
    make plan CHECK=mlperf                            compare them with published runs of 64 and 2,528 GPUs

Takes its own options and the recipe's. Prints a table over node counts; writes plan.json, table.md and plan.png to
runs/plan-001. docs/plan.md says how it computes, and how accurate it is. Exit status 0; 2: bad usage.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from recipes.common.arguments import (
    is_user_code,
    non_negative_float,
    one_of,
    option_text,
    positive_float,
    positive_int,
    whole_number,
)
from recipes.common.errors import UserError, as_user_error, nearest
from recipes.common.options import Options, check_batch
from recipes.common.parallel.groups import UNIT_BYTES
from recipes.common.world.places import place_of
from scripts.launch.command import CommandParser, check_recipe, check_writable, command, next_folder
from scripts.launch.recipe_options import read_option
from scripts.launch.tables import Column, duration, short_number, table
from scripts.plan import cost_model
from scripts.plan.cost_model import Cluster, Compute, Link, Method
from scripts.plan.fabrics import CONTROL_ALPHA_US, FABRICS, GPUS, INTRA, node_link
from scripts.plan.workload import Kind, Workload, count_workload, kind_of, measure_compute

RECIPES = ("single", "ddp", "spawn", "apex", "horovod", "fsdp", "tensor")
"""Recipes whose gradient exchange the plan knows; spawn and apex exchange as ddp does."""

UNKNOWN = (
    "activation_checkpointing",
    "cpu_offload",
    "sequence_parallel",
    "loss_parallel",
    "fully_shard",
    "sync_batchnorm",
    "evaluate_every",
)
"""Options of these recipes whose savings and costs the plan does not know."""

LINEAR_LIMIT = 8192
"""The global batch up to which ResNet-50 on ImageNet keeps its accuracy by linear scaling with warm-up (Goyal et
al. 2017, https://arxiv.org/abs/1706.02677)."""

COLUMNS = (
    Column("nodes", "nodes", "{:,}"),
    Column("GPUs", "ranks", "{:,.0f}"),
    Column("global batch", "global_batch_size", "{:,.0f}"),
    Column("step, ms", "step_s", short_number, 1e3),
    Column("exposed, ms", "exposed_s", short_number, 1e3),
    Column("limit", "limit"),
    Column("efficiency", "efficiency", "{:.1%}"),
    Column("samples/s", "samples_per_s", "{:,.0f}"),
    Column("sent per node and step, MB", "sent_bytes_per_node", short_number, 1e-6),
    Column("memory of a GPU, GB", "memory_sum_bytes", short_number, 1e-9),
    Column("checkpoint every", "interval_s", duration),
    Column("useful time", "useful_share", "{:.1%}"),
    Column("job time", "hours", duration, 3600),
    Column("cost", "cost", "{:,.2f}"),
)

PANELS = {
    "Seconds per step": {"step_s": "a step", "compute_s": "its computing"},
    "What of it counts": {"efficiency": "scaling efficiency", "useful_share": "useful share of the time"},
    "The whole job": {"hours": "hours", "cost": "cost"},
}
"""Panels of the picture: for each title, the figures of a row that are drawn, with their labels."""

Row = dict[str, Any]

OWN_OPTIONS: dict[str, list[tuple[str, Any, Any, str, str]]] = {
    "cluster": [
        ("--nodes", whole_number(1, 100_000), 16, "N", "largest number of nodes"),
        ("--gpus", positive_int, 8, "G", "GPUs per node, one rank each"),
        ("--fabric", one_of(*FABRICS), None, "NAME", f"network (default: ib-400): {', '.join(FABRICS)}"),
        ("--alpha-us", non_negative_float, None, "US", "latency of a hop, instead of the fabric's"),
        ("--gbit", positive_float, None, "GBIT", "usable Gbit/s of a node, instead of the fabric's"),
        ("--intra", one_of(*INTRA), "nvlink", "NAME", f"links within a node: {', '.join(INTRA)}"),
    ],
    "what a rank computes": [
        ("--local-batch-size", positive_int, 128, "N", "samples per rank and step, also those of --compute-ms"),
        ("--compute-ms", positive_float, None, "MS", "known time of a step in one pass, without exchange"),
        ("--fixed-ms", non_negative_float, 0.0, "MS", "part of --compute-ms that a smaller batch does not save"),
        ("--gpu-type", one_of(*GPUS), "h100", "NAME", f"GPU, for an estimate: {', '.join(GPUS)}"),
        ("--utilisation", positive_float, 0.15, "X", "share of the GPU's peak, for the estimate"),
    ],
    "data": [
        ("--num-classes", positive_int, None, "N", "classes, instead of the data set's"),
        ("--samples", positive_int, None, "N", "samples per epoch, instead of the data set's"),
        ("--images-per-s", positive_float, None, "X", "images that a node can decode per second"),
        ("--storage-gb-s", positive_float, None, "X", "GB/s that all nodes together can read"),
    ],
    "failures and money": [
        ("--mtbf-gpu-hours", positive_float, 50_000.0, "H", "GPU hours between failures that end a job"),
        ("--restart-s", non_negative_float, 300.0, "S", "seconds from a failure until training continues"),
        ("--checkpoint-gb-s", positive_float, 1.0, "X", "GB/s of a node to and from storage, for checkpoints"),
        ("--copy-gb-s", positive_float, 5.0, "X", "GB/s of the copy that steps wait for"),
        ("--price", non_negative_float, 2.5, "X", "price of a GPU hour"),
        ("--output", Path, None, "DIR", "output folder (runs/plan-001)"),
    ],
}
"""By group: flag, type, default, metavar, help."""


def parse_args(argv: Sequence[str]) -> tuple[Namespace, Options]:
    """Return the plan's own options and the recipe's; raises UserError."""
    epilog = "Options of the recipe are accepted, too, such as --model resnet50 --amp bf16"
    parser = CommandParser("python -m scripts.plan", __doc__, epilog)
    parser.add_argument("recipe", nargs="?", default="", metavar="RECIPE")
    parser.add_argument("--measure", action="store_true", help="measure the computing time on one device here")
    for title, own in OWN_OPTIONS.items():
        group = parser.add_argument_group(title)
        for flag, convert, default, metavar, text in own:
            group.add_argument(flag, type=convert, default=default, metavar=metavar, help=text)
    args, words = parser.parse_known_args(list(argv))
    recipe = check_recipe(args.recipe)
    check_own(args, recipe)
    args.fabric = args.fabric or (None if args.gbit else "ib-400")
    args.is_fixed_batch = bool(read_option("--global-batch-size", "", words))
    if not read_option("--data", "", words):
        words = ["--data", "imagefolder", *words]
    try:
        options: Options = importlib.import_module(f"recipes.{recipe}.train").options(words)
    except UserError as error:  # its hint covers only the recipe's options
        unknown = re.match(r"unknown option ([^;]+)", str(error))
        if unknown and (hint := nearest(unknown[1], parser.flags(), cutoff=0.7)):
            raise UserError(f"unknown option {unknown[1]}{hint}; --help lists all") from None
        raise
    if getattr(options, "opt_level", "O0") != "O0":  # apex has this option instead of --amp
        options = replace(options, amp="fp16")
    check_layout(args, method_of(args, options), options)
    check_writable(args.output)
    return args, options


def check_own(args: Namespace, recipe: str) -> None:
    """Raise UserError if the plan does not know the recipe, or if its own options do not combine."""
    if recipe not in RECIPES:
        raise UserError(f"RECIPE {recipe} cannot be planned; one of {', '.join(RECIPES)} can")
    if recipe == "single" and args.nodes * args.gpus > 1:
        raise UserError("RECIPE single has one process; use NODES=1 GPUS=1, or RECIPE=ddp")
    if args.compute_ms and args.measure:
        raise UserError("--compute-ms and --measure both say how long a step takes; give one")
    if args.fixed_ms > (args.compute_ms or 0):
        raise UserError("--fixed-ms is a part of --compute-ms; raise --compute-ms")
    if args.utilisation > 1:
        raise UserError("--utilisation is a share, at most 1")
    if not args.fabric and bool(args.gbit) != (args.alpha_us is not None):
        raise UserError("--gbit and --alpha-us belong together where there is no FABRIC")


def check_layout(args: Namespace, method: Method, options: Options) -> None:
    """Raise UserError if the GPUs do not form replicas, or if the plan does not know an option."""
    size, gpus = method.tensor_parallel, args.gpus
    if size > 1 and args.measure:
        raise UserError("--measure computes a whole model; give the --compute-ms of a rank's part")
    if size % gpus and gpus % size:
        raise UserError(f"--tensor-parallel {size} and GPUS={gpus}: neither divides the other")
    unknown = [f"--{name.replace('_', '-')}" for name in UNKNOWN if getattr(options, name, False)]
    if is_user_code(options.optimizer):
        unknown.append(f"--optimizer {options.optimizer}")
    if method.grad_compression == "powersgd":
        unknown.append("--grad-compression powersgd")
    if unknown:
        raise UserError(f"{unknown[0]}: the plan does not know what it saves and costs; drop it")


def cluster_of(args: Namespace, nodes: int) -> Cluster:
    """Return a cluster of so many nodes, by --fabric, --gbit, --alpha-us and --intra."""
    link = node_link(args.fabric, args.gpus) if args.fabric else Link(0.0, 0.0)
    alpha_s = link.alpha_s if args.alpha_us is None else args.alpha_us * 1e-6
    rate = args.gbit * 1e9 / 8 if args.gbit else link.bytes_per_s
    return Cluster(nodes, args.gpus, Link(alpha_s, rate), INTRA[args.intra])


def method_of(args: Namespace, options: Options) -> Method:
    """Return how the recipe exchanges gradients with its options."""
    is_half = getattr(options, "opt_level", "") in ("O2", "O3")  # apex: the model and its gradients
    compression = "fp16" if is_half else getattr(options, "compression", "none")
    known: dict[str, Any] = {"grad_compression": compression} | vars(args) | vars(options)
    return Method(**{one.name: known[one.name] for one in fields(Method) if one.name in known})


def compute_of(args: Namespace, options: Options, kind: Kind, workload: Workload) -> tuple[Compute, str]:
    """Return a rank's computing time in a step of --local-batch-size, and where it is from, as text."""
    if args.compute_ms:
        return cost_model.split_compute(args.compute_ms / 1e3, args.fixed_ms / 1e3), "given by --compute-ms"
    if args.measure:
        device = torch.device("cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu")
        compute = measure_compute(options, kind, args.local_batch_size, device)
        return compute, f"measured here: {place_of(device).device}"
    peaks = GPUS[args.gpu_type].tflops
    # Without --amp, torch computes convolutions in TF32 if the GPU has it, and the rest only with --tf32.
    share = workload.convolution_share if options.tf32 is None else float(options.tf32)
    share = share if options.amp == "none" else 1.0
    tflops = 1 / (share / peaks[options.amp] + (1 - share) / peaks["fp32"])
    seconds = workload.flops_per_sample * args.local_batch_size / (tflops * 1e12 * args.utilisation)
    peak = f"the {tflops:.4g} TFLOP/s of one {args.gpu_type.upper()}"
    return cost_model.split_compute(seconds), f"ESTIMATED: {args.utilisation:.0%} of {peak}; better measure it"


def global_batch_of(args: Namespace, options: Options, kind: Kind, method: Method, ranks: int) -> int:
    """Return the samples of a step on so many ranks; raises UserError if they do not fit the batch or data."""
    shards, parts = method.shards(ranks), ranks // method.tensor_parallel
    for name, size in (("--tensor-parallel", method.tensor_parallel), ("--replicas", method.replicas)):
        if ranks % size:
            raise UserError(f"{name} {size} does not divide {ranks} ranks; change it, NODES or GPUS")
    if shards % args.gpus and args.gpus % shards:
        what = f"{shards} ranks of a replica and GPUS={args.gpus}: neither divides the other"
        raise UserError(f"--replicas {method.replicas}: {what}; change one of them")
    global_batch = options.global_batch_size if args.is_fixed_batch else args.local_batch_size * parts
    try:
        check_batch(replace(options, global_batch_size=global_batch), parts, kind.num_samples)
    except UserError as error:
        given = "" if args.is_fixed_batch else f"--local-batch-size {args.local_batch_size} on {parts} ranks: "
        raise UserError(f"{given}{error}") from None
    return global_batch


def plan_row(
    nodes: int, args: Namespace, options: Options, kind: Kind, workload: Workload, compute: Compute
) -> Row:
    """Return the figures of one number of nodes; raises UserError as global_batch_of()."""
    cluster, method = cluster_of(args, nodes), method_of(args, options)
    ranks, shards = cluster.ranks, method.shards(cluster.ranks)
    parts = ranks // method.tensor_parallel  # all ranks of a replica of tensor have the same samples
    global_batch = global_batch_of(args, options, kind, method, ranks)
    group = options.batchnorm_group or 1
    local = group * math.ceil(global_batch / group / parts)  # all ranks wait for the largest share
    # Each rank runs the optimizer on its own part of the state.
    compute = replace(compute, optimizer_s=compute.optimizer_s / (ranks if method.zero else shards))
    decode_s = local * args.gpus / args.images_per_s if args.images_per_s else 0.0
    read_s = local * ranks * kind.sample_bytes / (args.storage_gb_s * 1e9) if args.storage_gb_s else 0.0
    control_s = CONTROL_ALPHA_US * 1e-6 if args.recipe != "horovod" else 0.0
    method = replace(method, sums=workload.sums_bytes(method, local))
    passes = options.accumulate_steps
    own, even = (compute.scaled(size / args.local_batch_size, passes) for size in (local, global_batch / parts))
    found = cost_model.step(workload.gradients, own, cluster, method, control_s, input_s=max(decode_s, read_s))
    epoch_steps = kind.num_samples // global_batch
    steps = options.total_steps(epoch_steps)
    failures = failure_figures(args, options, workload, cluster, found.step_s, epoch_steps)
    hours = steps * found.step_s / 3600 / max(failures["useful_share"], 1e-9)
    memory = workload.memory_bytes(options, method, local, ranks)
    return {
        "nodes": nodes,
        "ranks": ranks,
        "global_batch_size": global_batch,
        **asdict(found),
        "efficiency": even.total_s / found.step_s,
        "samples_per_s": global_batch / found.step_s,
        "checkpoint_every_steps": max(1, round(failures["interval_s"] / found.step_s)),
        **failures,
        "steps": steps,
        "hours": hours,
        "cost": hours * ranks * args.price,
        "memory_bytes": memory,
        "memory_sum_bytes": sum(memory.values()),
        "sent_in_replica_bytes": cost_model.ring_bytes(sum(method.sums), method.tensor_parallel),
        "sent_to_replicas_bytes": cost_model.ring_bytes(workload.parameter_bytes, parts) if method.sums else 0,
    }


def failure_figures(
    args: Namespace, options: Options, workload: Workload, cluster: Cluster, step_s: float, epoch_steps: int
) -> dict[str, float]:
    """Return the time and rank 0's memory that checkpoints take, and the useful share of time with failures."""
    method, is_sharded = method_of(args, options), options.sharded_checkpoints
    entire = workload.whole or workload
    whole, messages = entire.checkpoint_bytes(options), entire.tensors(options)
    shards = method.shards(cluster.ranks)
    own = workload.checkpoint_bytes(options, shards) if is_sharded else whole
    # Rank 0 gathers each tensor of a whole model; with --zero, all states, with votes after 1, 2, 4 ... units.
    (group, _), gathered = cluster.split(max(shards, method.tensor_parallel)), whole
    if method.zero:
        group, gathered = cluster, workload.state_bytes(options)
        messages = 3 + 2 * math.ceil(math.log2(group.ranks + gathered / UNIT_BYTES))
    gathered *= group.ranks > 1 and not is_sharded
    once_s, more_s = (cost_model.all_reduce(x, group, "ring", part=0.5).seconds for x in (gathered, 0))
    gather_s = once_s + (messages - 1) * more_s if gathered else 0.0
    rate = args.checkpoint_gb_s * 1e9
    write_s = own * (group.gpus if is_sharded else 1) / rate  # nodes write in parallel
    # An asynchronous one blocks training while it is copied. Until it is written, a failure also loses that time.
    copied, later_s = (own, write_s) if options.async_checkpoints else (0.0, 0.0)
    cost_s = gather_s + (copied / (args.copy_gb_s * 1e9) if copied else write_s)
    # Rank 0 reads the checkpoint and broadcasts it. Of shards, each rank reads a share to check it, then its part.
    restore_s = 2 * write_s
    if not is_sharded:
        restore_s = whole / rate + cost_model.all_reduce(whole, cluster, "ring", part=0.5).seconds
    mtbf_s = args.mtbf_gpu_hours * 3600 / cluster.ranks
    # The recipes also write one at the end of each epoch. Each one waits until the one before it is written.
    due_s = options.checkpoint_every * step_s or max(cost_model.daly_interval_s(cost_s, mtbf_s), later_s)
    interval_s = min(due_s, epoch_steps * step_s)
    cost_s += max(0.0, later_s - interval_s)
    return {
        "mtbf_s": mtbf_s,
        "checkpoint_bytes": whole,
        "checkpoint_file_bytes": own,
        "checkpoint_host_bytes": copied + gathered,
        "checkpoint_cost_s": cost_s,
        "checkpoint_write_s": write_s,
        "checkpoint_restore_s": restore_s,
        "interval_s": interval_s,
        "useful_share": cost_model.useful_share(interval_s, cost_s, mtbf_s, args.restart_s + later_s),
    }


def advice(row: Row, args: Namespace, kind: Kind) -> list[str]:
    """Return the job's length, and advice on the learning rate, at the largest number of nodes."""
    batch = row["global_batch_size"]
    epoch_steps = kind.num_samples // batch
    texts = [
        f"global batch {batch:,}: {epoch_steps:,} steps an epoch, {row['steps']:,} in the job's "
        f"{row['steps'] / epoch_steps:,.1f} epochs. Linear scaling: --lr R --scale-lr, where R is the rate that "
        f"is good for 256 samples (0.1 for ResNet-50), gives R x {batch / 256:g}; warm up over 5 epochs: "
        "--warmup-epochs 5"
    ]
    if batch > LINEAR_LIMIT:
        nodes = max(1, LINEAR_LIMIT * row["nodes"] // batch)
        where = "" if args.is_fixed_batch else f"; at {args.local_batch_size} samples a rank that is {nodes} nodes"
        texts.append(
            f"warning: on ImageNet, ResNet-50 keeps its accuracy by linear scaling up to about {LINEAR_LIMIT:,}"
            f"{where}. Other data and models have other limits (https://arxiv.org/abs/1811.03600)"
        )
    return texts


def memory_line(rows: Sequence[Row], args: Namespace) -> str:
    """Return a line on a GPU's memory at the largest number of nodes, and the numbers where it does not fit."""
    last, room, fits = rows[-1], GPUS[args.gpu_type].memory_gb, ""
    if not (args.compute_ms or args.measure):
        fix = "use more nodes" if args.recipe == "fsdp" else "raise --accumulate-steps"
        batch = "--global-batch-size" if args.is_fixed_batch else "--local-batch-size"
        full = [f"{row['nodes']:,}" for row in rows if row["memory_sum_bytes"] > 0.95e9 * room]
        fits = f" of {room:g} on one {args.gpu_type.upper()}"
        if full:
            nodes = f"{', '.join(full)} node{'s' * (full != ['1'])}"
            fits += f"; DOES NOT FIT on {nodes}: lower {batch}, or {fix}"
    nodes = f"{last['nodes']:,} node{'s' * (last['nodes'] > 1)}"
    parts = (f"{name.replace('_', ' ')} {size / 1e6:,.1f}" for name, size in last["memory_bytes"].items() if size)
    return (
        f"memory of a GPU on {nodes}, estimated: {short_number(last['memory_sum_bytes'] / 1e9)} GB{fits} "
        f"(in MB: {', '.join(parts)}; without the libraries' own)"
    )


def checkpoint_line(row: Row, options: Options) -> str:
    """Return a line on a checkpoint's size and times."""
    whole, own, held = (row[f"checkpoint_{name}bytes"] / 1e6 for name in ("", "file_", "host_"))
    waits_s, write_s, restore_s = (row[f"checkpoint_{name}_s"] for name in ("cost", "write", "restore"))
    writes = f", and writes {own:,.1f} MB" if options.sharded_checkpoints else ""
    return (
        f"checkpoint of {whole:,.1f} MB: steps wait {waits_s:.3g} s for it, it is written in {write_s:.3g} s and "
        f"restored in {restore_s:.3g} s; rank 0 holds {held:,.1f} MB of main memory for it{writes}"
    )


def make_plan(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], Path | None]:
    """Return the plan, the lines that describe it, and the folder of --output; raises UserError."""
    args, options = parse_args(argv)
    kind = kind_of(options, args.num_classes, args.samples)
    if (args.images_per_s or args.storage_gb_s) and not kind.sample_bytes:
        raise UserError(f"--images-per-s, --storage-gb-s: --data {options.data} lies on the device; drop them")
    workload = count_workload(options, kind)
    whole = workload.whole or workload
    compute, source = compute_of(args, options, kind, workload)
    counts = sorted({2**i for i in range(args.nodes.bit_length())} | {args.nodes})
    rows, left_out = [], {}
    for nodes in counts:
        try:
            rows.append(plan_row(nodes, args, options, kind, workload, compute))
        except UserError as error:
            left_out[nodes] = error
    if not rows:
        raise left_out[counts[0]]
    last, link, fabric = rows[-1], cluster_of(args, 1).network, args.fabric or "own"
    lines = [
        f"plan {args.recipe} {options.model}: {whole.parameters:,} parameters, samples {kind.data.input}, "
        f"{short_number(workload.flops_per_sample / 1e9)} GFLOP a sample on a rank",
        f"compute {short_number(1e3 * compute.total_s)} ms a step of {args.local_batch_size} samples, {source}",
        f"fabric {fabric}: {link.bytes_per_s * 8e-9:,.1f} Gbit/s for a node, {link.alpha_s * 1e6:g} us a hop; "
        f"in a node {args.intra}; {args.gpus} GPU{'s' * (args.gpus > 1)} a node",
        memory_line(rows, args),
        checkpoint_line(last, options),
        *advice(last, args, kind),
    ]
    if last["sent_in_replica_bytes"]:
        inside, outside = (last[f"sent_{where}_bytes"] / 1e6 for where in ("in_replica", "to_replicas"))
        lines.append(f"a rank sends {inside:,.2f} MB in a step within its replica, {outside:,.2f} MB to others")
    if left_out:
        lines.append(f"note: left out {[*left_out]} nodes, {max(left_out)} because {left_out[max(left_out)]}")
    plan = {
        "recipe": args.recipe,
        "model": options.model,
        "parameters": whole.parameters,
        "gradient_bytes": workload.parameter_bytes,
        "flops_per_sample": workload.flops_per_sample,
        "compute": {**asdict(compute), "source": source},
        "fabric": {"name": fabric, **asdict(link), "intra": args.intra},
        "options": {name: option_text(value) for name, value in {**vars(options), **vars(args)}.items()},
        "rows": rows,
    }
    return plan, lines, args.output


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Plot step time, efficiency and cost over the number of nodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, len(PANELS))
    for axis, (name, curves) in zip(axes, PANELS.items(), strict=True):
        for key, label in curves.items():
            axis.plot([row["nodes"] for row in rows], [row[key] for row in rows], "o-", label=label)
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="nodes")
        axis.legend(fontsize=8)
    axes[-1].set_yscale("log")
    figure.savefig(path, dpi=110)


@command
def main(argv: list[str]) -> None:
    """Make the plan, write its files and print it."""
    plan, lines, folder = make_plan(argv)
    folder, text = folder or next_folder("plan"), table(COLUMNS, plan["rows"])
    with as_user_error("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
        (folder / "table.md").write_text(f"{text}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
        plot(plan["rows"], f"{plan['recipe']} {plan['model']}, {plan['fabric']['name']}", folder / "plan.png")
    print("\n".join([*lines, "", text, "", f"wrote {os.path.relpath(folder)}/plan.json, table.md and plan.png"]))


if __name__ == "__main__":
    sys.exit(main())
