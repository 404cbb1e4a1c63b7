"""One process, one device: the baseline whose loss curve every other recipe repeats.

    make run RECIPE=single
    .venv/bin/python -m recipes.single.train

Success: the last line is `result recipe=single world_size=1 test_accuracy=0.98.. samples_per_s=...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from recipes.common.job import Job
from recipes.common.loop import Technique, begin_run, load_data_and_model, train_epochs
from recipes.common.models.models import compile_forward
from recipes.common.optim import autocast, build_optimizer, build_scaler
from recipes.common.options import Options, parse
from recipes.common.process.entry import run_main
from recipes.common.process.signals import Stop
from recipes.common.world.devices import choose_devices
from recipes.common.world.peers import Peers

options = partial(parse, Options, "single", __doc__)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the options in argv."""
    args = options(argv)
    stop = Stop()
    device = choose_devices(args.device)[0]
    alone = Peers(device)
    data, model = load_data_and_model(args, "single", alone, stop)
    compile_forward(model, args)
    optimizer, scaler = build_optimizer(args, model, alone), build_scaler(args, device)
    job = Job(args, "single", data, alone, model, optimizer, scaler, stop)

    def forward_backward(inputs: Tensor, targets: Tensor, is_last: bool) -> Tensor:
        """Accumulate the gradients of one pass; return its loss."""
        with autocast(args, device):
            loss = job.loss(model(inputs), targets)
        scaler.scale(loss).backward()
        return loss.detach()

    begin_run(job)
    train_epochs(job, Technique(forward_backward, model))
    job.finish()


if __name__ == "__main__":
    raise SystemExit(run_main(main))
