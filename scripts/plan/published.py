"""Compare the plan with published runs: ResNet-50 on 8, 64 and 2,528 H100, MLPerf training v4.0.

    make plan CHECK=mlperf

The submissions are NVIDIA's on Eos (eos_ngc24.04_mxnet, eos_n8 and eos_n316 in github.com/mlcommons/
training_results_v4.0). They exchange gradients in fp16 after backward (HOROVOD_NUM_GROUPS 1), over NVLink and
InfiniBand NDR. One prediction uses the run of 8 GPUs alone, as if a step shrank with its batch; the other also
uses the run of 64, which shows a step's fixed part. docs/plan.md has the table. Exit status 0; 2: bad usage.
"""

from __future__ import annotations

import sys

from recipes.common.errors import UserError
from scripts.launch.command import command
from scripts.launch.tables import Column, table
from scripts.plan.cost_model import Cluster, all_reduce, split_compute
from scripts.plan.fabrics import INTRA, node_link

RUNS = ((8, 408, 7150), (64, 50, 4910), (2528, 16, 2730))
"""Runs on nodes of 8 GPUs: number of GPUs, batch per GPU, and images/s per GPU."""

COLUMNS = (
    Column("GPUs", "gpus", "{:,}"),
    Column("images a GPU and step", "batch"),
    Column("images/s a GPU, published", "rate", "{:,}"),
    Column("predicted from 8 GPUs", "from_one", "{:,.0f}"),
    Column("error", "from_one_error", "{:+.1%}"),
    Column("predicted from 8 and 64", "from_two", "{:,.0f}"),
    Column("error", "from_two_error", "{:+.1%}"),
)


def exchange_s(gpus: int) -> float:
    """Predict the time to exchange the gradients of ResNet-50's 25,557,032 parameters in fp16."""
    return all_reduce(2 * 25_557_032, Cluster(gpus // 8, 8, node_link("ib-400", 8), INTRA["nvlink"])).seconds


def fixed_s() -> float:
    """Return the part of a step's computing that does not depend on the batch, from the batches of two runs."""
    (_, large, _), (_, small, _) = RUNS[:2]
    large_s, small_s = (batch / rate - exchange_s(gpus) for gpus, batch, rate in RUNS[:2])
    return large_s - large * (large_s - small_s) / (large - small)


def rows() -> list[dict[str, float | None]]:
    """Return the table: each run, with its predictions from the first run and from the first two."""
    first_gpus, first_batch, first_rate = RUNS[0]
    compute_s = first_batch / first_rate - exchange_s(first_gpus)
    found: list[dict[str, float | None]] = [dict(zip(("gpus", "batch", "rate"), run, strict=True)) for run in RUNS]
    for name, known, fixed in (("from_one", 1, 0.0), ("from_two", 2, fixed_s())):
        for i, (gpus, batch, rate) in enumerate(RUNS):
            step_s = split_compute(compute_s, fixed).scaled(batch / first_batch).total_s + exchange_s(gpus)
            predicted = None if i < known else batch / step_s
            found[i] |= {name: predicted, f"{name}_error": predicted and predicted / rate - 1}
    return found


@command
def main(argv: list[str]) -> None:
    """Print the table."""
    if argv:
        raise UserError(f"CHECK=mlperf takes no ARGS, got {' '.join(argv)}")
    print(table(COLUMNS, rows()))
    print(f"\nfixed part of a step, from 8 and 64 GPUs: {1e3 * fixed_s():.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
