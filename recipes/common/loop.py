"""The loop that all recipes share: epochs of steps, votes, logs, evaluation and checkpoints.

A recipe provides a Technique, which computes and exchanges the gradients of a pass; everything else is here.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes.common.arguments import is_user_code
from recipes.common.data import Batch, Data, Split, unread_folder
from recipes.common.errors import UserError, may_pass
from recipes.common.job import Job
from recipes.common.metrics import add_batch, averages, new_totals
from recipes.common.models.models import build_model
from recipes.common.models.rank_dependence import buffer_digests, warnings_after_passes, warnings_before_training
from recipes.common.optim import Clip, autocast, clip_gradients, learning_rate, optimizer_step, set_learning_rate
from recipes.common.options import HALVES, Options, check_batch
from recipes.common.process.signals import FAIL, GO, STOP, Stop, vote_interval
from recipes.common.record.record import Record, open_run
from recipes.common.seeding import choose_kernels, seed_step
from recipes.common.task import SKIPPED
from recipes.common.world.agreement import (
    load_same_data,
    raise_on_all_ranks,
    run_on_all_ranks,
    shard,
    take_rank_0s_values,
)
from recipes.common.world.peers import Peers
from recipes.common.world.places import Place, place_of
from recipes.common.world.tree import broadcast_tree

if TYPE_CHECKING:
    from recipes.common.checkpoint.reading import ShardCheck

Content = dict[str, Any]
"""The content of a checkpoint."""

Check = Callable[[Sequence[Tensor]], bool]
"""Returns whether a step with these gradients may change the weights."""

TUNING = (
    "warning: --compile-mode max-autotune tries many kernels before the first step and evaluation, for minutes; "
    "raise --timeout-s if ranks then wait too long"
)


@dataclass(frozen=True)
class Technique:
    """The part of training that differs between recipes. All ranks call each function, in the same order."""

    forward_backward: Callable[[Tensor, Tensor, bool], Tensor]
    """Add a pass's gradients to the step's: (inputs, targets, is_last). Return the detached loss: this rank's part
    of the global batch's mean. After a step's last pass, all ranks hold the global batch's gradients."""
    module: nn.Module
    """The module that computes the output; train() and eval() are called on it."""
    predict: Callable[[Tensor], Tensor | None] | None = None
    """Return the model's output for some inputs, or None on a rank that has none. Default: call `module`."""
    update: Callable[[Job, Check], None] | None = None
    """Step the optimizer if the gradients pass the check, and clear them. Default: optimizer_step()."""
    shard: Callable[[Tensor], Tensor] | None = None
    """Return this rank's share of a batch's indices. Default: split them by rank."""
    sync_buffers: Callable[[], None] | None = None
    """Give all ranks rank 0's batch-norm statistics. Default: broadcast each buffer."""
    sum_statistics: Callable[[Tensor], None] | None = None
    """Overwrite a tensor with its sum over the replicas. Default: the sum over all ranks,
    divided by the ranks of a replica."""
    read_batches: Callable[[Split, Iterable[Tensor], int], Iterator[Batch]] = lambda split, shares, epoch: (
        split.batches(shares, epoch)
    )
    """Yield the batches of this rank's shares: (split, shares, epoch)."""
    counts_skipped: bool = True
    """Whether to count the samples that this rank could not read; of ranks that read the same ones, one does."""
    gather_state: Callable[[], Content | None] | None = None
    """Return on rank 0 the whole `model` or `optimizer` for a checkpoint, if it holds only a part; or on each rank
    its part of a sharded checkpoint. Called before each checkpoint. Default: rank 0 holds both."""
    check_optimizer: Callable[[Options, Optimizer], None] = lambda args, optimizer: None
    """Raise UserError if the user's optimizer keeps what gather_state() or a resume cannot handle."""


def load_checked_data(args: Options, recipe: str, peers: Peers, stop: Stop, replicas: int | None = None) -> Data:
    """Load the data, and check that all ranks have the same; call it on all ranks.

    `replicas` is the number of shares of the batch (default: the number of ranks). Raises UserError on all ranks
    if one of them cannot load the data, if ranks differ, or if the batch does not fit.
    """
    choose_kernels(args)
    data = load_same_data(args, recipe, peers, on_bad_image=stop.fail)
    run_on_all_ranks(lambda: check_batch(args, replicas or peers.world_size, len(data.train)), peers)
    return data


def load_data_and_model(
    args: Options, recipe: str, peers: Peers, stop: Stop, replicas: int | None = None
) -> tuple[Data, nn.Module]:
    """Return load_checked_data() and the model on this rank's device, with the same weights on all ranks.

    Call it on all ranks. Raises UserError as load_checked_data(), build_model(), checkpoint_blocks(),
    take_rank_0s_values(), and check_parts() of batch norm.
    """
    replicas = replicas or peers.world_size
    data = load_checked_data(args, recipe, peers, stop, replicas)
    # Every rank draws the same weights from --seed.
    model = run_on_all_ranks(lambda: build_model(args, data, peers.device), peers)
    if args.activation_checkpointing:
        from recipes.common.models.blocks import checkpoint_blocks

        run_on_all_ranks(lambda: checkpoint_blocks(model, args), peers)
    if args.batchnorm_group:
        from recipes.common.models.batchnorm import set_groups

        set_groups(model, args, peers, replicas)
    model = model.to(peers.device)
    take_rank_0s_values(args, model, peers)
    parts = replicas * args.accumulate_steps
    if args.global_batch_size < 2 * parts:
        from recipes.common.models.batchnorm import check_parts

        run_on_all_ranks(lambda: check_parts(model, args, parts, data), peers)
    return data, model


def begin_run(
    job: Job,
    keep_own: Callable[[Any], Any] = lambda content: content,
    own_shards: Callable[[Any], Any] | None = None,
) -> None:
    """Open the run's record on rank 0 and restore its checkpoint on all ranks; call it on all ranks.

    `keep_own` returns what this rank keeps of a checkpoint's content (default: all). `own_shards` sets, before
    tensors are sent, what this rank keeps of each: see broadcast_tree(). If it is given, the tensors of a sharded
    checkpoint are not sent: keep_own reads them from the files.

    Raises UserError if the record cannot be opened, or the checkpoint does not fit; or as gather_places().
    """
    peers = job.peers
    resumes, content = open_record(job, reads_shards=own_shards is not None)

    def take_over() -> None:
        if job.args.sharded_checkpoints:
            check_folder(job.folder)
        if content:
            from recipes.common.restore import restore

            restore(job, keep_own(content))

    try:
        if resumes:
            from recipes.common.restore import fit_weights

            with peers.watch("checkpoint", computes=True):
                content = run_on_all_ranks(lambda: fit_weights(job, content), peers)
            content = broadcast_tree(content, peers, own_shards)
        run_on_all_ranks(take_over, peers)
    except UserError:
        if job.record:
            job.record.discard()
        raise
    run_on_all_ranks(job.begin_record, peers)  # after the restore: it deletes what --overwrite replaces
    peers.watch.follow(lambda: job.position.step, job.folder)
    tuning = TUNING if job.args.compile_mode == "max-autotune" else ""
    taken = content["taken"] if content and "taken" in content else ""
    warnings = () if job.args.evaluate else (short_run(job), half_weights(job), *warnings_before_training(job))
    for text in filter(None, (taken, unread_folder(job.args), tuning, *warnings)):
        job.say(text)


def short_run(job: Job) -> str:
    """Return a warning if the run is new and ends within its warm-up, else ""."""
    warmup, total = job.warmup_steps, job.total_steps
    if warmup <= total or job.position.step:
        return ""
    what = f"the run ends after {total} steps, within the warm-up of {warmup}"
    epochs, fix = job.args.warmup_epochs, f"give --warmup-steps {total // 10}"
    if epochs is not None:
        fix = f"lower --warmup-epochs {epochs:g}"
    return f"warning: {what}, so the learning rate stays below --lr; {fix}"


def half_weights(job: Job) -> str:
    """Return a warning if a built-in optimizer updates weights of the user's model that have 16 bits, else ""."""
    halves = getattr(job.model, HALVES, [])
    if not halves or is_user_code(job.args.optimizer):
        return ""
    name, dtype = halves[0]
    fix = "build the model in float32 (dtype=torch.float32); with mixed precision, it still computes in 16 bits"
    return f"warning: {name} is trained in {dtype}, which loses small updates; {fix}"


def open_record(job: Job, reads_shards: bool) -> tuple[bool, Content | None]:
    """Open the run's record on rank 0; return whether the job resumes, and on rank 0 the content to resume from.

    `reads_shards`: whether each rank reads its own part of a sharded checkpoint. Call it on all ranks.
    """
    peers, places = job.peers, gather_places(job)

    def open_on_rank_0(check: ShardCheck | None = None) -> tuple[Record | None, Content | None]:
        if peers.rank:
            return None, None
        return open_run(job.args, job.recipe, places, check if reads_shards else None)

    def read_and_open() -> tuple[Record | None, Content | None]:
        from recipes.common.checkpoint.shard_files import share_checks

        return share_checks(open_on_rank_0, peers, job.args.timeout_s, job.disk_s)

    read_or_open = read_and_open if job.args.may_start_from_file else open_on_rank_0
    job.record, content = run_on_all_ranks(read_or_open, peers)
    with peers.watch("checkpoint"):
        own = (job.record.folder, content is not None) if job.record else (job.folder, False)
        job.folder, resumes = peers.broadcast_object(own)
    return resumes, content


def check_folder(folder: Path) -> None:
    """Raise UserError if this rank does not see the run's folder, which rank 0 has opened."""
    fix, host = "let all ranks share --runs-dir, or drop --sharded-checkpoints", socket.gethostname()
    try:
        folder.stat()  # not is_dir(), which takes any error for "no" from Python 3.14 on
    except FileNotFoundError:
        raise UserError(f"no {folder} on {host}, where rank 0 has the run; {fix}") from None
    except OSError as error:
        what = f"cannot read {folder} on {host}: {error.strerror}; {fix}"
        raise UserError(what, is_passing=may_pass(error)) from None


def gather_places(job: Job) -> list[Place]:
    """Return where each rank is and, if there are several hosts, which network NCCL uses; call it on all ranks.

    Raises UserError on all ranks if FABRIC asks for a fabric and NCCL uses TCP.
    """
    with job.peers.watch("places"):
        places = job.peers.gather_objects(place_of(job.device))
        if places[0].index is None:  # CPUs
            return places
        from recipes.common.world.transport import gather_networks

        return gather_networks(places, job.device, job.peers)


def train_epochs(job: Job, technique: Technique) -> None:
    """Train and evaluate until the last epoch or a stop signal; write a checkpoint after each evaluation.

    With --evaluate, only evaluate, once. Raises on all ranks the UserError that one of them reported.
    """
    job.stop.listen()
    try:
        if job.args.evaluate:
            if (result := evaluate(job, technique)) is not None:
                job.end_evaluation(result)
            return
        job.begin_profile()
        while not job.is_complete:
            result = None
            if train_until_evaluation(job, technique) != STOP:
                raise_on_all_ranks(job.stop.error, job.peers)
                result = evaluate_or_save(job, technique)
            is_best = result is not None and job.end_evaluation(result)
            save_checkpoint(job, technique, is_best)
            raise_on_all_ranks(job.stop.error, job.peers)
            if result is None:  # a stop signal has ended the training, or the evaluation
                return
    except UserError:
        if job.args.sharded_checkpoints and job.writer:
            with job.peers.watch("checkpoint", computes=True):
                job.writer.wait()  # ranks need each other for it
        raise
    except SystemExit as error:  # of the user's code: this rank would end as if all were well
        from recipes.common.user_code import refusal

        refused = refusal(f"rank {job.peers.rank} left the job", error)
        refused.on_one_rank = True
        raise refused from error
    except Exception as error:
        error.add_note(f"on rank {job.peers.rank}, after step {job.position.step}")  # Python prints it, last
        raise


def evaluate_or_save(job: Job, technique: Technique) -> dict[str, float] | None:
    """Evaluate as evaluate() does; if that fails, write a checkpoint of the trained steps first, for a resume."""
    try:
        with job.peers.watch.mark("evaluation"):
            return evaluate(job, technique)
    except Exception as error:
        if isinstance(error, UserError) and not error.on_one_rank:
            save_checkpoint(job, technique)
        elif not technique.gather_state:  # that needs all ranks, and the others may not have failed
            job.save()
            if job.writer:
                job.writer.wait()  # this rank ends alone, and its launcher may not wait
        raise


def train_until_evaluation(job: Job, technique: Technique) -> int:
    """Train up to the next evaluation, or until a vote ends it; return the last vote: GO, STOP or FAIL."""
    args, position, peers = job.args, job.position, job.peers
    take_share = technique.shard or own_shard(peers)
    decision = GO
    technique.module.train()
    job.begin_steps()
    shares = (take_share(split_into_groups(batch, args)).flatten() for batch in job.global_batches())
    batches = technique.read_batches(job.data.train, shares, position.epoch)
    for inputs, targets in job.profile.mark_data(batches) if job.profile else batches:
        # Vote: each rank sends 4 bytes; the result is read after backward, so that no rank waits for it.
        finish_vote = job.begin_vote() if job.is_vote_due() else None
        seed_step(args.seed, position.step, job.draws_as, job.devices)
        job.guard.keep_buffers(technique.module)
        buffers_before = buffer_digests(job.model) if job.has_unseen_passes and job.passes > 1 else {}
        with peers.watch.mark("forward and backward"):
            loss_sum = run_passes(job, technique, inputs, targets)
        if finish_vote:
            with peers.watch("stop vote"):
                decision = finish_vote()
        if decision == FAIL:
            break
        check_first_passes(job, technique, buffers_before)
        rate = learning_rate(args, position.step, job.total_steps, job.warmup_steps)
        set_learning_rate(job.optimizer, rate)
        if is_user_code(args.optimizer):
            # It may draw, as for stochastic rounding: on all ranks the same, and no numbers of any step's passes.
            seed_step(args.seed, -1 - position.step, 0, job.devices)
        with peers.watch.mark("optimizer"), job.watch_gpu():
            (technique.update or update)(job, partial(job.check_gradients, loss_sum))
            job.guard.restore_buffers()
        check_first_update(job, technique)
        job.count_step()
        if job.is_log_due():
            log_loss(job, loss_sum, rate)
        if decision == STOP:
            break
        if job.is_checkpoint_due():
            save_checkpoint(job, technique)
        if job.profile:
            job.profile.end_step()
    job.pause()
    return decision


def check_first_passes(job: Job, technique: Technique, buffers_before: dict[str, str]) -> None:
    """After the first step's passes, warn about the user's model and task; call it on all ranks."""
    if job.has_unseen_passes:
        job.has_unseen_passes = False
        for text in warnings_after_passes(job, not technique.sync_buffers, buffers_before):
            job.say(text)


def log_loss(job: Job, loss_sum: Tensor, rate: float) -> None:
    """Log the step just done: the ranks' parts of its loss, added up, and its learning rate. Call on all ranks."""
    # Log: sums the ranks' parts of the global batch's loss: 4 bytes a rank, once in --log-every steps.
    with job.peers.watch("metrics"):
        job.peers.sum_tensor(loss_sum)
        loss = loss_sum.item()
    if not loss:
        warn_if_none_counts(job)
    job.log_step(loss, rate)


def count_targets(job: Job, targets: Tensor) -> Tensor:
    """Return the task's count() of the global batch: a float32 scalar on the device. Call it on all ranks.

    It is NaN, and so is the step's loss, if a rank's count is negative or not finite.
    """
    count = torch.as_tensor(job.data.task.count(targets), dtype=torch.float32, device=job.device).sum()
    count = torch.where((count >= 0) & count.isfinite(), count, math.nan)
    # Loss: sums how many targets of each rank count, 4 bytes a rank: a mean of the ranks' means is not the mean.
    with job.peers.watch("targets"):
        job.peers.sum_tensor(count)
    # Ranks of a replica have the same targets, or equal parts of them.
    return count * min(job.replicas, job.peers.world_size) / job.peers.world_size


def warn_if_none_counts(job: Job) -> None:
    """Warn, once, if no target of a step whose loss is 0 counts."""
    if job.counts_targets and not job.target_count and not job.has_warned:
        job.has_warned = True
        what = f"no target of step {job.position.step} counts (those of class {SKIPPED} do not)"
        job.say(f"warning: {what}, so its loss is 0")


def run_passes(job: Job, technique: Technique, inputs: Tensor, targets: Tensor) -> Tensor:
    """Add the gradients of a step's passes; return this rank's part of the loss. Call it on all ranks."""
    loss_sum, passes = torch.zeros((), device=job.device), job.args.accumulate_steps
    if job.counts_targets:
        job.target_count = count_targets(job, targets)
    parts = [split_into_groups(tensor, job.args).tensor_split(passes) for tensor in (inputs, targets)]
    for number, part in enumerate(zip(*parts, strict=True), 1):
        some_inputs, some_targets = (groups.flatten(0, 1) for groups in part)
        loss_sum += technique.forward_backward(some_inputs, some_targets, number == passes)
        job.end_pass()
    return loss_sum


def split_into_groups(samples: Tensor, args: Options) -> Tensor:
    """Return B samples as (B / G, G, ...), G = --batchnorm-group (default: 1): ranks and passes get whole rows."""
    return samples.unflatten(0, (-1, args.batchnorm_group or 1))


def own_shard(peers: Peers) -> Callable[[Tensor], Tensor]:
    """Return a function that returns this rank's share of the indices."""
    return lambda indices: shard(indices, peers.rank, peers.world_size)


def update(job: Job, check: Check, clip: Clip = clip_gradients) -> None:
    """Step the optimizer if the gradients, which are the same on all ranks, pass the check."""
    parameters = job.model.parameters()
    job.grad_norm = optimizer_step(job.args, parameters, job.optimizer, job.scaler, check, clip)


def check_first_update(job: Job, technique: Technique) -> None:
    """Raise UserError after the first step if a checkpoint could not restore what the user's optimizer keeps."""
    if job.is_unseen_optimizer:
        job.is_unseen_optimizer = False
        check_optimizer(job, technique)


def check_optimizer(job: Job, technique: Technique) -> None:
    """Raise UserError if a checkpoint could not restore what the user's optimizer keeps after a step."""
    from recipes.common.user_code import check_optimizer_state

    check_optimizer_state(job.args, job.optimizer)
    technique.check_optimizer(job.args, job.optimizer)


@torch.no_grad()
def evaluate(job: Job, technique: Technique) -> dict[str, float] | None:
    """Return test_loss and the task's metrics over the whole test set, each sample counted once.

    Return None if a stop signal has ended the evaluation; a resumed run repeats it. Call it on all ranks.

    Raises on all ranks the UserError that one of them reported, or an error of the task's code.
    """
    peers, task = job.peers, job.data.task
    if job.record:
        job.record.progress.begin_evaluation()
    sync_statistics(job, technique)
    (technique.sync_buffers or (lambda: broadcast_buffers(technique.module, peers)))()
    technique.module.eval()
    totals = new_totals(task, job.device)
    every = vote_interval(peers.world_size, step_s=0.0)
    for number, (is_counted, (inputs, targets)) in enumerate(read_test_batches(job, technique)):
        # Vote: each rank sends 4 bytes, as in training: after a stop signal, an evaluation may take too long.
        finish_vote = None if number % every else peers.begin_vote(job.stop.vote)
        output = predict(job, technique, inputs)
        if output is not None and is_counted:
            try:
                add_batch(totals, task, output, targets)
            except Exception as error:
                from recipes.common.user_code import refusal

                what = f"--task {type(task).__name__} in the evaluation"
                job.stop.fail(refusal(what, error, "fix it, then add --resume auto"))
        if finish_vote:
            with peers.watch("stop vote"):
                decision = finish_vote()
            if decision == STOP:
                return None
            if decision == FAIL:
                break
    raise_on_all_ranks(job.stop.error, peers)
    if technique.counts_skipped:
        totals[2] += job.data.train.skipped + job.data.test.skipped
    # Evaluation: adds up the sums and counts of all ranks, some 40 bytes a rank; averages are taken after it.
    with peers.watch("evaluation"):
        peers.sum_tensor(totals)
        # The task's derive() may fail on only one rank.
        return run_on_all_ranks(lambda: averages(totals / job.ranks_per_sample, task, len(job.data.test)), peers)


def read_test_batches(job: Job, technique: Technique) -> Iterator[tuple[bool, Batch]]:
    """Return this rank's batches of the test set, and whether each is counted; call it on all ranks.

    All ranks get the same number of batches: a rank with fewer repeats a sample, which is not counted.
    """
    peers, test, epoch = job.peers, job.data.test, job.position.epoch
    share = (technique.shard or own_shard(peers))(torch.arange(len(test)))
    batches = [batch for batch in share.split(job.eval_batch_size) if len(batch)]
    # Evaluation: if passes exchange weights, all ranks must run as many: a few bytes a rank to agree on that.
    with peers.watch("evaluation"):
        most = max(peers.gather_objects(len(batches)))
    read = technique.read_batches(test, batches, epoch)
    # A sample, as not all models take empty batches, or zeros, such as a length of 0.
    first = [torch.zeros(1, dtype=torch.int64)] * (most - len(batches))
    repeated = technique.read_batches(test.unreported(), first, epoch) if first else ()
    return itertools.chain(zip(itertools.repeat(True), read), zip(itertools.repeat(False), repeated))


def predict(job: Job, technique: Technique, inputs: Tensor) -> Tensor | None:
    """Return the model's output for some inputs, or None on a rank that has none."""
    if technique.predict:
        return technique.predict(inputs)
    with autocast(job.args, job.device):
        return technique.module(inputs)


def sync_statistics(job: Job, technique: Technique) -> None:
    """Average the running statistics of --batchnorm-group, if given, over the replicas; call it on all ranks."""

    def sum_over_ranks(tensor: Tensor) -> None:
        # Batch norm: sums the ranks' running statistics, 16 bytes a channel.
        with job.peers.watch("statistics"):
            job.peers.sum_tensor(tensor)
        tensor *= job.replicas / job.peers.world_size  # each rank of a replica has the statistics of its groups

    if job.args.batchnorm_group:
        from recipes.common.models.batchnorm import average_statistics

        average_statistics(job.model, job.args, technique.sum_statistics or sum_over_ranks)


def broadcast_buffers(module: nn.Module, peers: Peers) -> None:
    """Give all ranks rank 0's batch-norm statistics: each rank has statistics of its own batches."""
    for buffer in module.buffers():
        # Evaluation: rank 0 sends its buffers to all others.
        with peers.watch("evaluation"):
            peers.broadcast_tensor(buffer)


def save_checkpoint(job: Job, technique: Technique, is_best: bool = False) -> None:
    """Write a checkpoint on rank 0, or a sharded one on all ranks; a failure becomes a vote. Call on all ranks.

    Raises UserError on all ranks as check_optimizer().
    """
    with job.peers.watch.mark("checkpoint"):
        sync_statistics(job, technique)
        job.wait_for_checkpoint()  # the one before: they are written one at a time
        if is_user_code(job.args.optimizer):
            # Its state may have changed since the first step.
            run_on_all_ranks(lambda: check_optimizer(job, technique), job.peers)
        job.save(is_best, technique.gather_state() if technique.gather_state else None)
        if not job.trains_during_save:
            job.wait_for_checkpoint()
