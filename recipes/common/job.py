"""One training job as one rank sees it: where it stands, and which samples come next."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recipes.common.arguments import is_user_code
from recipes.common.checkpoint.checkpoint import CheckpointWriter, Position, pack
from recipes.common.data import EVAL_BATCH_SIZE, Data
from recipes.common.data.splits import Split
from recipes.common.errors import UserError
from recipes.common.metrics import Throughput, peak_memory_bytes
from recipes.common.nonfinite import Guard, finite_buffers
from recipes.common.optim import optimizer_state
from recipes.common.options import Options
from recipes.common.process.signals import Stop, vote_interval
from recipes.common.record.record import Record
from recipes.common.seeding import permutation
from recipes.common.task import has_own, in_float
from recipes.common.world.agreement import (
    SLOWEST,
    SLOWEST_SHARED,
    raise_on_all_ranks,
    run_on_all_ranks,
    wait_for_all,
)
from recipes.common.world.peers import Peers, largest_part_bytes, local_tensor

if TYPE_CHECKING:
    from recipes.common.profile import Profile


def draw_order(split: Split, args: Options, epoch: int) -> Tensor:
    """Return the samples' indices in the order of an epoch, the same on every rank: int64, shape (N,)."""
    order = permutation(len(split), args.seed, epoch, args.shuffle_block)
    return order if args.shuffle_block == 1 else split.storage_order()[order]


MOST_MS = 2**24 - 1
"""Longest step, in ms, that a vote can carry."""


@dataclass
class Job:
    """What training works on: the options, the data, the model and the rank's progress."""

    args: Options
    recipe: str
    data: Data
    peers: Peers
    model: nn.Module
    """The plain model; the recipe keeps its wrapper around it."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    stop: Stop
    devices: Sequence[torch.device] = ()
    """Devices of this process (default: peers.device)."""
    replicas: int = 0
    """Copies of the model that share out the batch (default: one per device)."""
    batch_parts: int = 0
    """Parts of the global batch that go through the model one by one (default: one per replica and pass)."""
    eval_batch_size: int = 0
    """Most samples of an evaluation's pass (default: as many as in a part of a batch, which fit in memory)."""
    ranks_per_sample: int = 1
    """Ranks that have equal parts of the same samples. In an evaluation, each counts a sample as one, with the
    mean of its part: sums and counts over all ranks are divided by this number."""
    record: Record | None = None
    """The run's record, on rank 0 only."""
    folder: Path = field(default_factory=Path)
    """The run's folder, on all ranks."""
    writer: CheckpointWriter | None = None
    """Writes checkpoints: on rank 0, or on all ranks if each one writes its own part."""
    profile: Profile | None = None
    """With --profile-steps, on rank 0 only."""
    position: Position = field(default_factory=Position)
    _order: tuple[int, Tensor] = (-1, torch.empty(0))
    """An epoch, and the order of its samples: an evaluation within the epoch does not draw it again."""
    _next_vote: int = 0
    _last_vote: tuple[int, float] = (0, 0.0)
    _finite_buffers: set[str] = field(default_factory=set)
    """On rank 0, the buffers that were finite before the training: see Guard.is_sound()."""
    _pass_ends: list[torch.cuda.Event] = field(default_factory=list)
    """On a GPU, the ends of the last two passes."""

    def __post_init__(self) -> None:
        self.device = self.peers.device
        self.devices = self.devices or [self.device]
        self.replicas = self.replicas or self.peers.world_size * len(self.devices)
        self.batch_parts = self.batch_parts or self.replicas * self.args.accumulate_steps
        part = -(-self.args.global_batch_size // self.batch_parts)
        self.eval_batch_size = self.eval_batch_size or min(EVAL_BATCH_SIZE, part)
        self.is_unseen_optimizer = is_user_code(self.args.optimizer)
        """Whether the first step has yet to show what the user's optimizer keeps for checkpoints."""
        self.has_unseen_passes = is_user_code(self.args.model) or is_user_code(self.args.task)
        """Whether the first step has yet to show if the user's model fits checkpoints, and losses depend on the
        ranks."""
        self.draws_as = self.peers.rank
        """The rank whose random numbers this rank draws in a step: see seed_step()."""
        may_differ = self.data.may_skip or is_user_code(self.args.task)
        self.counts_targets = may_differ and has_own(self.data.task, "count")
        """Whether the count of a step's targets may differ from the size of the global batch."""
        self.target_count: int | Tensor = self.args.global_batch_size
        """What the sum of the step's losses is divided by: the task's count() of the global batch."""
        self.grad_norm: Tensor | None = None
        """The norm of the last step's gradients before --clip-grad-norm."""
        self.has_warned = False
        """Whether a step without a target that counts has been warned of."""
        self.code, self.state_shapes = dict[str, str](), dict[str, tuple[int, ...]]()
        """Digests of the user's code, and the shapes of the model's state before the training."""
        if self.args.has_user_code:
            from recipes.common.user_code import own_code, state_shapes

            self.code, self.state_shapes = own_code(), state_shapes(self.model)
        self.throughput = Throughput(self.args.global_batch_size, self.device)
        self.guard = Guard(self.device, self.stop, self.scaler)
        if self.args.on_nonfinite == "skip":
            from recipes.common.skipping import SkippingGuard

            self.guard = SkippingGuard(self.device, self.stop, self.scaler)

    @property
    def passes(self) -> int:
        """Passes of a step through each copy of the model."""
        return self.batch_parts // self.replicas

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch; the samples left over differ from epoch to epoch."""
        return len(self.data.train) // self.args.global_batch_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.args.total_steps(self.steps_per_epoch)

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the warm-up."""
        return self.args.total_warmup_steps(self.steps_per_epoch)

    @property
    def epoch_end(self) -> int:
        """The step at which the current epoch is complete."""
        return min((self.position.epoch + 1) * self.steps_per_epoch, self.total_steps)

    @property
    def _evaluated(self) -> int:
        """The step of the last evaluation, where older checkpoints record only the completed epochs."""
        return max(self.position.evaluated_step, self.position.epoch * self.steps_per_epoch)

    @property
    def best(self) -> str:
        """The value that best.pt has of all evaluations, such as "lowest test_loss"."""
        task = self.data.task
        return f"{'highest' if task.higher_is_better else 'lowest'} test_{task.headline}"

    @property
    def next_evaluation(self) -> int:
        """The step after which the model is evaluated next: --evaluate-every steps on, or at the epoch's end."""
        every = self.args.evaluate_every
        if not every:
            return self.epoch_end
        earliest = max(self._evaluated + 1, self.position.step)
        return min(-(-earliest // every) * every, self.epoch_end)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done and the last epoch is evaluated; with --evaluate, the weights are."""
        if self.args.evaluate:
            return bool(self.position.averages)
        done = self.position.step
        return done >= self.total_steps and self.position.epoch * self.steps_per_epoch >= done

    def begin_record(self) -> None:
        """Begin this launch's record (Record.begin()); call it once all ranks have restored the checkpoint."""
        if self.record:
            self._finite_buffers = self._find_finite_buffers()
            self.record.begin(self.position.step, self._evaluated, self.total_steps, self.is_complete)

    def save(self, is_best: bool = False, state: dict[str, Any] | None = None) -> None:
        """Write a checkpoint if this rank keeps the record; a failure becomes this rank's vote.

        With --async-checkpoints, training that continues waits only for a copy of the state. A recipe whose ranks
        hold parts of the model or the optimizer passes the whole state dicts as `state`; or, for sharded
        checkpoints, this rank's part: then all ranks write.
        """
        own = state or {}
        is_sharded = "parts" in own
        if not self.record and not is_sharded:
            return
        state = {"model": self.model.state_dict(), **own}
        if is_sharded:
            weights = [local_tensor(parameter) for parameter in self.model.parameters()]
        else:
            weights = [state["model"][name] for name, _ in self.model.named_parameters()]
        # Rank 0's buffers are saved, and given to the other ranks before an evaluation.
        saved_buffers = self._finite_buffers & state["model"].keys()
        lost_buffers = sorted(saved_buffers - self._find_finite_buffers()) if saved_buffers else []
        is_sound = self.guard.is_sound(self.position.step, weights, lost_buffers)
        if not is_sound and not is_sharded:
            return
        content = pack(
            self.args,
            self.position,
            state["model"],
            state.get("optimizer") or optimizer_state(self.optimizer),
            self.scaler.state_dict(),
            timed=self.throughput.timed(),
            data=self.data.fingerprints,
            skipped_steps=self.guard.skipped,
            code=self.code,
            best=self.best,
        )
        if self.record and not self.writer:
            self.writer = CheckpointWriter(self.record.checkpoints.write, self.stop.fail)
        assert self.writer
        if is_sharded:
            content["parts"] = own["parts"] if is_sound else self.stop.error
        with self.peers.watch("checkpoint", computes=True):
            self.writer.begin(content, is_best, copies=self.trains_during_save)

    def _find_finite_buffers(self) -> set[str]:
        return finite_buffers((name, local_tensor(buffer)) for name, buffer in self.model.named_buffers())

    @property
    def trains_during_save(self) -> bool:
        """Whether training continues while the checkpoint of this step is written."""
        is_evaluated = self.position.step == self._evaluated
        goes_on = self.is_checkpoint_due() or (is_evaluated and not self.is_complete)
        return self.args.async_checkpoints and goes_on

    @property
    def disk_s(self) -> float:
        """The seconds that a checkpoint may take beyond --timeout-s: weights and two moments, on a slow disk."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters()) / SLOWEST

    @property
    def write_s(self) -> float:
        """The same of one that is written; sharded, that is the time of the largest part, or of all together."""
        if not self.args.sharded_checkpoints:
            return self.disk_s
        largest = 3 * sum(map(largest_part_bytes, self.model.parameters()))
        return max(largest / SLOWEST, self.disk_s * SLOWEST / SLOWEST_SHARED)

    def wait_for_checkpoint(self) -> None:
        """Wait on all ranks until the checkpoint being written is on the disk, or has failed."""
        wait_for_all(
            lambda bound_s: not self.writer or self.writer.wait(bound_s),
            self.peers,
            self.args.timeout_s,
            self.write_s,
        )

    def global_batches(self) -> Iterator[Tensor]:
        """Yield the indices of the global batches up to the next evaluation: int64, shape (global_batch_size,).

        They depend only on the data, the seed and the step: any number of ranks shares out the same batches.
        """
        size = self.args.global_batch_size
        if self._order[0] != self.position.epoch:
            self._order = -1, torch.empty(0)  # free the last one first: each takes 8 bytes per sample
            self._order = self.position.epoch, draw_order(self.data.train, self.args, self.position.epoch)
        _, order = self._order
        first_step = self.position.epoch * self.steps_per_epoch
        for step in range(self.position.step, self.next_evaluation):
            start = (step - first_step) * size
            yield order[start : start + size]

    def begin_steps(self) -> None:
        """Start the clock and the progress bar, before the steps that lead to an evaluation."""
        self.throughput.start()
        if self.record:
            done = self.position.step - self.position.epoch * self.steps_per_epoch
            steps = self.epoch_end - self.position.epoch * self.steps_per_epoch
            self.record.progress.begin_epoch(
                self.position.epoch + 1, steps, done, run_steps=self.total_steps, run_done=self.position.step
            )

    @property
    def _queues_exchanges(self) -> bool:
        """Whether ranks exchange between GPUs: a collective then returns before it is done."""
        return self.device.type == "cuda" and self.peers.world_size > 1

    def watch_gpu(self) -> contextlib.AbstractContextManager[None]:
        """Return a watch for work of only this rank that may wait for an exchange between GPUs."""
        return self.peers.watch("gradients") if self._queues_exchanges else contextlib.nullcontext()

    def end_pass(self) -> None:
        """If ranks exchange between GPUs, wait for the end of the pass before the one that has just been queued.

        The GPU has a whole pass to do meanwhile. Otherwise the host would queue further steps while an exchange
        hangs, and notice it only once it logs a loss, or the queue is full.
        """
        if self._queues_exchanges:
            if not self._pass_ends:
                self._pass_ends = [torch.cuda.Event(blocking=True) for _ in range(2)]  # no core spins
            self._pass_ends.reverse()
            latest, before = self._pass_ends
            latest.record(torch.cuda.current_stream(self.device))
            with self.peers.watch("gradients"):
                before.synchronize()

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.position.step += 1
        with self.peers.watch("gradients"):
            if self.is_log_due() or self._is_saved_after(self.position.step):
                self.guard.read_back(self.position.step)
            self.throughput.count_step()
        if self.record:
            self.record.progress.advance()

    def check_gradients(self, loss_sum: Tensor, gradients: Sequence[Tensor]) -> bool:
        """Check the averaged gradients before the step (see nonfinite.py); return whether to do the step."""
        step, before = self.position.step + 1, self.guard.skipped
        with self.peers.watch("gradients"):
            is_allowed = self.guard.check_gradients(step, loss_sum, gradients)
        if self.guard.skipped > before:
            self.say(f"warning: skipped step {step}: its loss or gradient is not finite")
        return is_allowed

    def begin_profile(self) -> None:
        """Begin --profile-steps on rank 0."""
        step, total = self.position.step, self.total_steps
        if self.record and self.args.profile_steps and step < total:
            from recipes.common.profile import Profile

            self.profile = Profile(self.args, step, total, self.peers, self.folder, self.say)

    def pause(self) -> None:
        """Stop the clock before work that is not training."""
        with self.peers.watch("gradients"):
            self.throughput.pause()

    def log_step(self, loss: float, rate: float) -> None:
        """Record the last step, the global batch's mean loss and the learning rate; print pending warnings."""
        self.guard.check_loss(self.position.step, loss)
        slow = self.data.train.take_warnings(self.throughput.seconds())
        for text in (*self.peers.watch.take_stragglers(), *slow):
            self.say(f"warning: {text}")
        more: dict[str, float] = {"skipped_steps": self.guard.skipped} if self.guard.skipped else {}
        if self.grad_norm is not None:
            more["grad_norm"] = float(self.grad_norm)
        speed = self.throughput.recent()
        rates = {"lr": rate, "samples_per_s": round(speed, 1), **self._units_per_s(speed)}
        step, epoch = self.position.step, self.position.epoch + 1
        self._write(lambda record: record.log_step(step=step, epoch=epoch, loss=loss, **rates, **more))

    def end_evaluation(self, averages: dict[str, float]) -> bool:
        """Record an evaluation, and count the epoch that it ends; return whether it is the best so far."""
        task = self.data.task
        headline = averages[f"test_{task.headline}"]
        kept = {name: value for name, value in averages.items() if name.startswith("test_")}
        step, ends_epoch = self.position.step, self.position.step == self.epoch_end
        epoch = 0 if self.args.evaluate else self.position.epoch + 1
        score = headline if task.higher_is_better else -headline
        is_best = self.position.record_evaluation(kept, score, ends_epoch)
        seconds = round(self.throughput.timed()["seconds"], 3)
        kind = "epoch" if ends_epoch or self.args.evaluate else "evaluation"
        self._write(lambda record: record.log_averages(kind, epoch=epoch, step=step, **averages, train_s=seconds))
        if not math.isfinite(headline):
            why = "look at the test data, and at what the model returns"
            self.say(f"warning: test_{task.headline} is {headline}: {why}")
        return is_best

    def _units_per_s(self, samples_per_s: float) -> dict[str, float]:
        """Return the speed in the task's unit, unless that is samples."""
        task = self.data.task
        if task.unit == "samples":
            return {}
        return {f"{task.unit}_per_s": round(samples_per_s * task.units_per_sample)}

    def finish(self, sample_on_all_ranks: bool = False) -> None:
        """Print the result of a completed run, or how to resume one that a signal has ended.

        Call it on all ranks. `sample_on_all_ranks`: whether the model's forward pass needs all of them. Raises
        UserError, on all ranks, if the last checkpoint or the result could not be written.
        """
        if self.profile:
            self.profile.close()
        self.wait_for_checkpoint()
        raise_on_all_ranks(self.stop.error, self.peers)
        if not self.is_complete:
            if self.record and (self.writer or self.args.evaluate):
                name = self.stop.signal.name if self.stop.signal else "a signal to another rank"
                self.record.leave(name, self.writer.newest if self.writer else None)
            return
        # The result first: the run is complete even if the sample fails.
        result = run_on_all_ranks(self._write_result, self.peers)
        if has_own(self.data.task, "sample"):
            from recipes.common.sample import make_sample

            timeout_s = self.args.timeout_s
            if text := make_sample(self.data.task, self.model, self.peers, sample_on_all_ranks, timeout_s):
                self.say(text)
        if self.record:
            self.record.print_result(result)

    def _write_result(self) -> dict[str, Any]:
        """Write result.json on rank 0; return its content ({} on other ranks)."""
        if not self.record:
            return {}
        task, score = self.data.task, self.position.best_score
        best = math.nan if score == -math.inf else score  # no evaluation has given a number
        result: dict[str, float | str] = {
            "world_size": self.peers.world_size,
            "step": self.position.step,
            "headline": f"test_{task.headline}",
            **self.position.averages,
        }
        if self.args.evaluate:
            return self.record.write_result(**result)
        skipped = {"skipped_steps": self.guard.skipped} if self.guard.skipped else {}
        stalls_s = self.writer.stalls_s if self.writer else []
        return self.record.write_result(
            **result,
            **{f"best_test_{task.headline}": best if task.higher_is_better else -best},
            samples_per_s=self.throughput.overall(),
            **self._units_per_s(self.throughput.overall()),
            samples=self.position.step * self.args.global_batch_size,
            epochs=self.position.step / self.steps_per_epoch,
            train_s=self.throughput.timed()["seconds"],
            sent_bytes_per_step=self.throughput.sent_per_step(),
            peak_memory_bytes=max(map(peak_memory_bytes, self.devices)),
            checkpoints=len(stalls_s),
            checkpoint_stall_s=sum(stalls_s) / max(len(stalls_s), 1),
            **skipped,
        )

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        self._write(lambda record: record.progress.say(text))

    def _write(self, action: Callable[[Record], None]) -> None:
        """Run an action on rank 0's record; a failure becomes that rank's vote, as the other ranks continue."""
        if self.record:
            try:
                action(self.record)
            except UserError as error:
                self.stop.fail(error)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return this rank's part of the global batch's mean loss, as the task defines it."""
        if not isinstance(output, Tensor):  # check_fit() has seen the model only in evaluation
            from recipes.common.user_code import name_of

            what = f"--model {self.args.model} returned {name_of(output)} in training"
            raise UserError(f"{what}; return a tensor with a row for each sample, as in evaluation")
        total, count = self.data.task.loss_sum(in_float(output), target), self.target_count
        if isinstance(count, Tensor):
            count = torch.where(count == 0, math.inf, count).to(total.device)  # the loss is 0 if none counts
        return total / count

    def is_vote_due(self) -> bool:
        """Return whether ranks vote in the current step: by vote_interval(), and before a checkpoint."""
        return self.position.step >= self._next_vote or self._is_saved_after(self.position.step + 1)

    def begin_vote(self) -> Callable[[], int]:
        """Send this rank's vote; return a function that waits for the others' and returns GO, STOP or FAIL.

        With the vote goes how long a step takes here: the slowest rank's decides when all vote again.
        """
        step, now = self.position.step, time.monotonic()
        last_step, last_time = self._last_vote
        step_ms = 1000 * (now - last_time) / (step - last_step) if step > last_step else MOST_MS
        self._last_vote = step, now
        finish_vote = self.peers.begin_vote(self.stop.vote * (MOST_MS + 1) + min(round(step_ms), MOST_MS))

        def finish() -> int:
            decision, slowest_ms = divmod(finish_vote(), MOST_MS + 1)
            self._next_vote = step + vote_interval(self.peers.world_size, slowest_ms / 1000)
            return decision

        return finish

    def is_log_due(self) -> bool:
        """Return whether to log the step just done."""
        return self.position.step % self.args.log_every == 0

    def is_checkpoint_due(self) -> bool:
        """Return whether the step just done calls for a checkpoint, besides the one after an evaluation."""
        return self.position.step < self.next_evaluation and self._is_saved_after(self.position.step)

    def _is_saved_after(self, step: int) -> bool:
        """Return whether a checkpoint follows a step of the current epoch."""
        every = self.args.checkpoint_every
        return step == self.next_evaluation or (bool(every) and step % every == 0)
