"""The options of the pipeline recipe, and what does not combine."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.common.errors import UserError
from recipes.common.options import Options, one_of, option, positive_int

PARTS_PER_STAGE = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Interleaved, stage r of p holds parts r and p + r: half the bubble for twice the messages."""


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Pipeline."""

    stages: int = option(2, positive_int, "devices that a replica spans", "P")
    num_microbatches: int = option(4, positive_int, "equal pieces of a replica's batch", "M")
    schedule: str = option(
        "1f1b",
        one_of(*PARTS_PER_STAGE),
        "gpipe: all forward passes first; 1f1b: alternating, at most P microbatches in memory; interleaved: 1f1b "
        "with two parts a stage",
    )
    split: str = option(
        "ranks",
        one_of("ranks", "in-process"),
        "ranks: a process for each stage; in-process: the whole model in each process, on P devices",
    )
    balance: str = option(
        "parameters",
        one_of("parameters", "cost"),
        "what the parts have in equal amounts: parameters, or cost (time measured on a microbatch)",
    )

    def check(self) -> None:
        """Raise UserError where options do not combine."""
        super().check()
        microbatches, stages = self.num_microbatches, self.stages
        rounds = max(1, microbatches // stages)
        if self.on_nonfinite != "stop":
            raise UserError(f"--on-nonfinite {self.on_nonfinite}: a stage sees its own gradients only; use stop")
        if self.records_graphs:
            # A microbatch's gradients and outputs lie in the graph's memory: see Options.check().
            what = "a CUDA graph overwrites the outputs and gradients of the microbatch before"
            raise UserError(f"--compile-mode {self.compile_mode}: {what}; use --compile-mode default")
        if self.amp == "fp16":
            raise UserError("--amp fp16: the stages would scale their losses apart; use --amp bf16")
        if self.sync_batchnorm:
            raise UserError(
                "--sync-batchnorm: a pipeline normalises each microbatch by itself; use --batchnorm-group"
            )
        if self.split == "ranks" and self.schedule == "1f1b" and microbatches < stages:
            fix = f"use at least {stages}, or --schedule gpipe"
            raise UserError(f"--num-microbatches {microbatches} are too few for 1f1b with {stages} stages; {fix}")
        if self.split == "ranks" and self.schedule == "interleaved" and (stages < 2 or microbatches % rounds):
            fix = f"use 2 stages or more and --num-microbatches {max(2, stages) * rounds}"
            raise UserError(f"--schedule interleaved: {microbatches} microbatches for {stages} stages; {fix}")


def count_stages(args: PipelineOptions) -> int:
    """Return how many processes a replica spans; one that is split within its process takes one."""
    return 1 if args.split == "in-process" else args.stages


def check_replicas(world_size: int, stages: int) -> None:
    """Raise UserError where the processes do not make up whole replicas."""
    if world_size % stages:
        below = world_size // stages * stages
        either = f"{below} or {below + stages}" if below else f"{stages}"
        raise UserError(
            f"--stages {stages} needs a multiple of {stages} processes, got {world_size}; "
            f"start {either}, or give --stages {world_size}"
        )
