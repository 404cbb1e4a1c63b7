"""Hold the plan to published runs: ResNet-50 on 8, 64 and 2,528 H100, MLPerf training v4.0.

    make plan CHECK=mlperf

The submissions are NVIDIA's on Eos (eos_ngc24.04_mxnet, eos_n8 and eos_n316 in github.com/mlcommons/
training_results_v4.0): their images/s, and the batch of a GPU in their configurations. Gradients travel as fp16
after backward (HOROVOD_NUM_GROUPS 1), over NVLink and InfiniBand NDR as fabrics.py has them.

Two predictions. One knows the run of 8 GPUs alone, and takes a step to shrink with the batch; kernels do not. The
other also knows the run of 64, which tells what of a step is fixed. docs/plan.md has the table.
Exit status 0; 2: bad usage.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from recipes.common.errors import UserError
from scripts.launch.command import Column, command, table
from scripts.plan.fabrics import FABRICS, INTRA, network
from scripts.plan.model import Cluster, all_reduce_s, split_compute

GRADIENT_BYTES = 2 * 25_557_032
"""ResNet-50's parameters in fp16."""

COLUMNS = (
    Column("GPUs", "gpus", "{:,}"),
    Column("images a GPU and step", "batch"),
    Column("images/s a GPU, published", "rate", "{:,}"),
    Column("predicted from 8 GPUs", "from_one", "{:,.0f}"),
    Column("error", "from_one_error", "{:+.1%}"),
    Column("predicted from 8 and 64", "from_two", "{:,.0f}"),
    Column("error", "from_two_error", "{:+.1%}"),
)


@dataclass(frozen=True)
class Run:
    """A published run on nodes of 8 GPUs."""

    gpus: int
    batch: int  # of a GPU
    rate: int  # images/s of a GPU

    @property
    def exchange_s(self) -> float:
        """The plan's time of the gradients' exchange."""
        fabric = network(FABRICS["ib-400"], 8, None)
        return all_reduce_s(GRADIENT_BYTES, Cluster(self.gpus // 8, 8, fabric, INTRA["nvlink"]))

    @property
    def compute_s(self) -> float:
        """What the exchange leaves of the published step."""
        return self.batch / self.rate - self.exchange_s


RUNS = (Run(8, 408, 7150), Run(64, 50, 4910), Run(2528, 16, 2730))


def fixed_s(large: Run, small: Run) -> float:
    """Return the part of a step's computing that does not depend on the batch, from two batches."""
    return large.compute_s - large.batch * (large.compute_s - small.compute_s) / (large.batch - small.batch)


def rows() -> list[dict[str, float | None]]:
    """Return the table: each run, and what predictions from the first run and from the first two make of it."""
    first, second, _ = RUNS
    found: list[dict[str, float | None]] = [asdict(run) for run in RUNS]
    for name, known, fixed in (("from_one", 1, 0.0), ("from_two", 2, fixed_s(first, second))):
        for i, run in enumerate(RUNS):
            compute = split_compute(first.compute_s, fixed).scaled(run.batch / first.batch)
            rate = run.batch / (compute.total_s + run.exchange_s)
            figures = (rate, rate / run.rate - 1) if i >= known else (None, None)
            found[i] |= zip((name, f"{name}_error"), figures, strict=True)
    return found


@command
def main(argv: list[str]) -> None:
    """Print the table."""
    if argv:
        raise UserError(f"CHECK=mlperf takes no ARGS, got {' '.join(argv)}")
    print(table(COLUMNS, rows()))
    print(f"\nfixed part of a step, from 8 and 64 GPUs: {1e3 * fixed_s(*RUNS[:2]):.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
