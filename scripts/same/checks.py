"""Check recorded runs of a script at several world sizes, and name what differs and why.

A difference counts if it exceeds the effect of rounding, which a control run measures: the script at one process
again, with its sums in another order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.same.causes import Finding
from scripts.same.printed import Series
from scripts.same.recorded_run import SKETCHES, Run, Step

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOOR_SHARE = 0.03
"""A difference below this times the square root of the precision always counts as rounding: 1e-5 in fp32."""

SAFETY = 30.0
"""Factor by which a difference has to exceed the control run's largest one up to that step."""

CHAOTIC = 1 / SAFETY
"""At this relative difference of the control run, even one as large as the gradient would count as rounding."""

MANY_STEPS = 100
"""From this step on, rounding alone may change the sign of a ReLU's input, and so the gradient by far more."""

RESUMED_SHARE = 1e-4
"""Relative difference that is allowed between a resumed run and one that was not stopped."""

Vector = NDArray[np.float64]


def difference(a: Vector, b: Vector) -> float:
    """Return the difference of two sketches relative to the second; inf if only one of them is finite."""
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return math.inf
    a, b = a[finite], b[finite]
    scale = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / scale if scale else float(np.any(a != b))


def rank_difference(records: Sequence[Step], name: str) -> float:
    """Return the largest difference of a sketch between any rank and the first."""
    return max(difference(record[name], records[0][name]) for record in records)


def weight_change(record: Step) -> Vector:
    """Return the change of the weights in a step, a sketch of shape (61,)."""
    return np.subtract(record["after"], record["weights"])


def factor_between(a: Vector, b: Vector) -> float:
    """Return c such that a = c b, or 0 if no c fits."""
    c = float(a @ b / (b @ b)) if np.any(b) else 0.0
    return c if math.isfinite(c) and c and difference(a, c * b) < 1e-3 else 0.0


def name_factor(c: float, world_size: int) -> str:
    """Return a factor as "2 times" or "1/2 of", and mention it if it is the square of the world size."""
    name = " (the square of the number of processes)" if math.isclose(c, world_size**2, rel_tol=0.01) else ""
    return f"1/{1 / c:.4g} of" if c < 1 else f"{c:.4g} times{name}"


def pair_steps(run: Run, reference: Run, start: int = 0) -> list[tuple[Step, Step]]:
    """Return rank 0's records of the steps that both runs have done, from step `start` of the reference on."""
    return [(ours[0], theirs[0]) for ours, theirs in zip(run.steps, reference.steps[start:], strict=False)]


def begins_differently(run: Run, reference: Run) -> bool:
    """Return whether the first step of two runs begins with different weights."""
    first = pair_steps(run, reference)[:1]
    return any(difference(ours["weights"], theirs["weights"]) > 1e-6 for ours, theirs in first)


def largest_gradient_difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of a gradient from one process's."""
    if not is_replicated(run, reference):
        return 0.0
    return max(difference(ours["final"], theirs["final"]) for ours, theirs in pair_steps(run, reference))


class Rounding:
    """The effect of rounding on a script at one process: the largest relative difference up to each step.

    `redrawn` is a run with other random numbers in each step: if it trains the same, they have no effect.
    """

    def __init__(self, first: Run, control: Run, redrawn: Run | None = None) -> None:
        used = {records[0]["low_precision"] for records in first.steps} or {"float32"}
        self.floor = FLOOR_SHARE * max(math.sqrt(EPS.get(name, EPS["float32"])) for name in used)
        pairs = pair_steps(control, first)
        changes = [(weight_change(again), weight_change(one)) for again, one in pairs]
        self.gradient = [*accumulate((difference(again["final"], one["final"]) for again, one in pairs), max)]
        self.update = [*accumulate((difference(again, one) for again, one in changes), max)]
        self.is_controlled = not pairs or control.rows(0) == first.rows(0)
        self.harmless = harmless_draws(first, redrawn, self.floor) if redrawn else set()
        self.printed = {}
        for name, series in first.series.items():
            excesses = series.excesses(control.series.get(name, series))
            finite = (0.0 if math.isinf(excess) else excess for excess in excesses)
            self.printed[name] = [*accumulate(finite, max)]

    def limit(self, measured: Sequence[float], i: int, scale: float = 1.0) -> float:
        """Return the largest difference that rounding explains for step or value i, whose magnitude is `scale`."""
        return max(self.floor * scale, SAFETY * measured[min(i, len(measured) - 1)] if measured else 0.0)


def draws_in_step(run: Run, with_collate: bool = True) -> set[str]:
    """Return the random generators from which the first step or, with_collate, a collate_fn draws on any rank."""
    collated = run.of("collated") if with_collate else []
    return {kind for record in chain(*run.steps[:1], *collated) for kind in record["moved"]}


def harmless_draws(first: Run, redrawn: Run, floor: float) -> set[str]:
    """Return the generators from which one process draws in its steps if other numbers change no gradient."""
    pairs = pair_steps(redrawn, first)
    # Generators that go on from other states may also shuffle later epochs otherwise.
    same = [pair for i, pair in enumerate(pairs) if redrawn.rows(i) == first.rows(i)]
    is_harmless = all(difference(again["final"], one["final"]) <= floor for again, one in same)
    return draws_in_step(first) if same[:1] == pairs[:1] and is_harmless else set()


def is_exchanged_in_step(run: Run) -> bool:
    """Return whether ranks step with different gradients and still have equal weights: step() exchanges them."""
    apart = {name: max((rank_difference(ranks, name) for ranks in run.steps), default=0.0) for name in SKETCHES}
    is_moved = any(np.any(weight_change(records[0])) for records in run.steps)
    return is_moved and apart["final"] > 1e-6 and max(apart["weights"], apart["after"]) <= 1e-12


def by_updates(run: Run) -> Run:
    """Return a run with each step's change of the weights in place of its gradient."""
    events = [
        [{**line, "final": weight_change(line)} if line["event"] == "step" else line for line in lines]
        for lines in run.events
    ]
    return replace(run, events=events)


def is_replicated(run: Run, first: Run) -> bool:
    """Return whether every rank holds the whole model, as one process does, and torch's optimizers step it."""
    if not run.steps or not first.steps or len(run.events) != run.world_size:
        return False
    return {record["shapes"] for record in run.steps[0]} == {record["shapes"] for record in first.steps[0]}


def step_name(record: Step, i: int) -> str:
    """Return a step's name in the verdict, counted from 1."""
    return f"step {i + 1}" + (f" (optimizer {record['optimizer'] + 1})" if record["optimizer"] else "")


# Checks of one run: do its ranks agree?


def check_ranks(run: Run) -> Iterator[Finding]:
    """Yield what differs between the ranks of one run, without a look at other runs."""
    if not any(np.any(record["final"]) for records in run.steps for record in records):
        yield Finding("zero-gradient", "all steps, gradient: zero")
    if (apart := rank_difference(run.steps[0], "weights")) > 1e-12:
        yield Finding("no-broadcast", f"step 1, weights: differ between ranks by {apart:.1e}")
    for i, records in enumerate(run.steps):
        where = step_name(records[0], i)
        rates = [record["lr"] for record in records]
        if any(rate != rates[0] for rate in rates):
            by_rank = ", ".join(" ".join(map(str, groups)) for groups in rates)
            yield Finding("unequal-learning-rates", f"{where}, learning rate: {by_rank} by rank")
            return
        if (apart := rank_difference(records, "final")) > 1e-6:
            what = f"{where}, gradient: differs between ranks by {apart:.1e} at optimizer.step()"
            yield Finding(why_not_synchronised(run, i), what)
            return


def why_not_synchronised(run: Run, i: int) -> str:
    """Return why gradients differ between ranks at step i."""
    records = run.steps[i]
    # One pass may precede the steps of several optimizers.
    first = next((ranks[0] for ranks in run.steps[i::-1] if ranks[0]["rows"]), records[0])
    if first["unsynced_forwards"]:
        return "no-sync-always"
    if not first["synced_forwards"]:  # counts passes through DistributedDataParallel
        return "around-ddp" if run.of("wrapped")[0] else "not-synchronised"
    is_unused = any(record["missing"] != records[0]["missing"] for record in records)
    return "unused-parameters" if is_unused else "not-synchronised"


def check_seeds(run: Run, harmless: set[str]) -> Finding | None:
    """Return a finding if ranks draw the same random numbers for different samples, other than harmless ones."""
    drawn = [{e["worker"]: e["states"] for e in reversed(lines)} for lines in run.of("augmentation")]
    for worker, states in drawn[0].items():
        if same := [kind for kind in states if all(o.get(worker, {}).get(kind) == states[kind] for o in drawn)]:
            what = f"first sample, augmentation: the state of {', '.join(same)} is equal on all ranks"
            return Finding("same-augmentation", what)
    records = run.steps[0]
    after = [record["random"] or {} for record in records]
    equal = {kind for kind in after[0] if all(other.get(kind) == after[0][kind] for other in after)}
    # A rank that draws alone, as for noise of differential privacy, draws other numbers than those that draw none.
    if same := sorted(equal.intersection(*(record["moved"] for record in records)) - harmless):
        what = f"step 1, random numbers of the step: {', '.join(same)} has equal states on all ranks"
        return Finding("same-augmentation", what)
    if records[0]["dropout"] and "torch" in equal:
        return Finding("same-dropout", "step 1, dropout: the generator's state is equal on all ranks")
    return None


def check_overlap(run: Run, first: Run) -> Finding | None:
    """Return a finding if ranks draw the same samples in an epoch; its last batch may be padded."""
    rows = [{row for record in own for row in record["rows"]} for own in zip(*run.steps, strict=True)]
    is_redundant = all(record["rows"] == run.steps[0][0]["rows"] for record in run.steps[0])
    if is_redundant or not has_one_data_set(run, first) or not any(rows[0] & own for own in rows[1:]):
        return None
    drawn = [epochs_of(run, rank) for rank in range(run.world_size)]
    if not any(drawn):
        drawn = [[own] for own in first_epoch_of_stream(run, first)]
    if any(max(epoch.values(), default=0) > 1 for epoch in chain(*drawn, epochs_of(first, 0))):
        return None  # with replacement
    for number, epoch in enumerate(zip(*drawn, strict=False), 1):
        if shared := sum(count > 1 for count in sum(epoch, Counter()).values()):
            return Finding("not-sharded", f"epoch {number}, samples: ranks share {shared}")
    return None


def epochs_of(run: Run, rank: int) -> list[Counter[Any]]:
    """Return how often a rank draws each sample in each epoch, without the epoch's last batch."""
    return [Counter(chain(*batches[:-1])) for batches in run.batches(rank).values()]


def first_epoch_of_stream(run: Run, first: Run) -> list[Counter[str]]:
    """Return the samples of each rank in the first epoch, if one process draws no sample twice in its first."""
    alone, *ranks = ([*chain(*(step["rows"] for step in own))] for own in (*first.of("step"), *run.of("step")))
    size = len(set(alone))
    return [Counter(rows[: size // run.world_size]) for rows in ranks] if size == len({*alone[:size]}) else []


def check_order(run: Run, first: Run) -> Finding | None:
    """Return a finding if an epoch repeats an order and the sampler repeats an epoch, or one process does not."""
    epoch = repeated_epoch(run)
    trained = run.batches(0)
    events = [event for event in run.of("shuffled")[0] if event["iteration"] in trained]
    shuffled = Counter((event["sampler"], event["epoch"]) for event in events)
    if epoch and (max(shuffled.values(), default=0) > 1 or not repeated_epoch(first)):
        return Finding("no-set-epoch", f"epoch {epoch}, order: that of epoch {epoch - 1}")
    return None


def repeated_epoch(run: Run) -> int:
    """Return the first epoch that repeats the unsorted order of 8 or more samples of the one before; 0 if none."""
    orders = [[*chain(*batches)] for batches in run.batches(0).values()]
    found = (i for i, (a, b) in enumerate(pairwise(orders), 2) if len(a) >= 8 and a == b and a != sorted(a))
    return next(found, 0)


# Checks against one process


def other_samples(run: Run, reference: Run) -> int | None:
    """Return the first step with other samples than the reference, 0 if only the number of steps differs."""
    for i in range(min(len(run.steps), len(reference.steps))):
        if run.rows(i) != reference.rows(i):
            return i
    return None if len(run.steps) == len(reference.steps) else 0


def needs_replay(run: Run, first: Run) -> bool:
    """Return whether one process has to, and can, be run again with the batches of this run."""
    if run.failure() or not run.batches(0) or not run.steps or not first.steps:
        return False
    # With tensor parallelism and pipelines, several ranks draw the same samples.
    is_divided = is_replicated(run, first) or not other_batch(run, first)
    return is_divided and has_one_data_set(run, first) and other_samples(run, first) is not None


def has_one_data_set(run: Run, first: Run) -> bool:
    """Return whether ranks load from data sets as large as those of one process, not from their own parts."""
    sizes = [{event["size"] for event in one.of("batch")[0]} for one in (run, first)]
    return sizes[0] == sizes[1]


def check_shards(run: Run, first: Run, is_divided: bool) -> Finding | None:
    """Return what is wrong with how samples are divided over ranks, or None; is_divided: as in compare_runs()."""
    i = other_samples(run, first)
    if i is None:
        return None
    where = f"step {i + 1}, samples"
    own: list[Counter[str]] = [Counter(record["rows"]) for record in run.steps[i]]
    if own[0] and all(rows == own[0] for rows in own):
        if own[0] == first.rows(i):
            return Finding("redundant", f"{where}: on each rank those of one process")
        return Finding("not-sharded", f"{where}: the same {len(own[0])} on all ranks")
    if is_divided and (batch := other_batch(run, first)):
        return Finding("batch-not-divided", batch)
    drawn, expected = ({row for i in range(len(one.steps)) for row in one.rows(i)} for one in (run, first))
    if drawn < expected and not is_cut(first) and not differs_by_epoch(run):
        lost = len(expected) - len(drawn)
        return Finding("dropped-samples", f"all steps, samples: {lost} of {len(expected)} are never drawn")
    return None


def differs_by_epoch(run: Run) -> bool:
    """Return whether whole epochs draw different samples: the tail that is dropped is then another each time."""
    epochs: dict[int, Counter[str]] = {}
    for i, records in enumerate(run.steps):
        epochs.setdefault(records[0]["iteration"], Counter()).update(run.rows(i))
    size = max(epoch.total() for epoch in epochs.values())
    return len({frozenset(epoch) for epoch in epochs.values() if epoch.total() == size}) > 1


def other_batch(run: Run, first: Run) -> str:
    """Return how many samples a step has, if one process has another number, else ""."""
    own, whole = run.rows(0).total(), first.rows(0).total()
    return f"step 1, samples: {own}, and {whole} at 1 process" if own != whole else ""


def is_in_other_order(run: Run, first: Run) -> bool:
    """Return whether ranks draw the samples of one process, each as often, in other steps."""
    drawn, expected = (sum((one.rows(i) for i in range(len(one.steps))), Counter()) for one in (run, first))
    return drawn == expected and other_samples(run, first) is not None


def name_samples(run: Run, first: Run) -> Finding:
    """Return how the samples of a run differ from those of one process."""
    if batch := other_batch(run, first):
        return Finding("other-batch", batch)
    i = other_samples(run, first) or 0
    return Finding("other-order", f"step {i + 1}, samples: not those of 1 process")


def is_cut(first: Run) -> bool:
    """Return whether a run ends within its first epoch, so that another order would leave out other samples."""
    sizes = {event["iteration"]: event["size"] for event in first.of("batch")[0]}
    iterations = {records[0]["iteration"] for records in first.steps}
    drawn = sum(first.rows(i).total() for i in range(len(first.steps)))
    return len(iterations) == 1 and drawn < 0.9 * sizes.get(iterations.pop(), 0)


def check_training(run: Run, reference: Run, rounding: Rounding, is_scaled: bool) -> Finding | None:
    """Return the first step and quantity that differ from those of one process on the same samples, or None.

    If the batch depends on the number of processes (is_scaled), the learning rate may, too.
    """
    if len(run.steps) != len(reference.steps):
        return Finding("other-steps", f"{len(run.steps)} optimizer steps, {len(reference.steps)} at 1 process")
    if is_in_other_order(run, reference):
        return check_rates(run, reference) or replace(name_samples(run, reference), cause="not-replayed")
    for i, (record, expected) in enumerate(pair_steps(run, reference)):
        where = step_name(record, i)
        apart = difference(record["final"], expected["final"])
        if apart > rounding.limit(rounding.gradient, i):
            return explain_gradient(run, reference, i, apart)
        for rate, right in zip(record["lr"], expected["lr"], strict=False):
            if not math.isclose(rate, right, rel_tol=1e-6, abs_tol=1e-12):
                times = name_factor(rate / right, run.world_size) if rate and right else "not"
                what = f"{where}, learning rate: {rate:.6g}, {times} that of 1 process"
                return Finding("scaled-with-batch" if is_scaled else "learning-rate-scaled", what)
        apart = difference(weight_change(record), weight_change(expected))
        if apart > max(rounding.limit(rounding.update, i), 10 * rounding.floor):
            return Finding(unknown_in(i), f"{where}, update of the weights: differs by {apart:.1e}")
    return None


def check_rates(run: Run, first: Run) -> Finding | None:
    """Return a finding if the learning rates of a group are those of one process times a factor at every step.

    If the batch depends on the number of processes, the learning rate may, too.
    """
    rates: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for record, expected in pair_steps(run, first):
        for group, pair in enumerate(zip(record["lr"], expected["lr"], strict=False)):
            rates.setdefault((record["optimizer"], group), []).append(pair)
    for (number, _), pairs in rates.items():
        c = factor_between(*np.array(pairs).T)
        if c and abs(c - 1) > 0.01 and not other_batch(run, first):
            where = f"all steps of optimizer {number + 1}" if number else "all steps"
            what = f"{where}, learning rate: {name_factor(c, run.world_size)} that of 1 process"
            return Finding("learning-rate-scaled", what)
    return None


def explain_gradient(run: Run, reference: Run, i: int, apart: float) -> Finding:
    """Return why the gradient of step i, which is equal on all ranks, differs from one process's."""
    records, expected = run.steps[i], reference.steps[i][0]
    final, where = records[0]["final"], step_name(records[0], i)
    c = factor_between(final, expected["final"])
    is_gathered = any(record["gathered"] for record in records)
    if c and abs(c - 1) > 0.01 and not (is_gathered and c < 1):
        return Finding("loss-scaled", f"{where}, gradient: {name_factor(c, run.world_size)} that of 1 process")
    if math.isinf(apart):
        kind = "finite" if np.isfinite(final).all() else "not finite"
        return Finding("unknown", f"{where}, gradient: {kind}, unlike at 1 process")
    if run.rows(i) != reference.rows(i):
        return Finding("other-samples", f"{where}, samples: not those of 1 process")
    what = f"{where}, gradient: differs by {apart:.1e} from that of 1 process"
    if records[0]["batch_norm"]:
        return Finding("batch-norm", what)
    if any(record["missing"] != expected["missing"] for record in records):
        return Finding("unused-parameters", what)
    # Such shares have an effect in the first step that has them; those of a later step are not the cause.
    cause, how = explain_shares(records)
    if cause and not any(explain_shares(earlier)[0] == cause for earlier in run.steps[:i]):
        return Finding(cause, f"{what}; {how}")
    cause = unknown_in(i)
    # Without DDP, each rank may clip its gradient before the exchange.
    is_open = cause == "unknown" and records[0]["synced_forwards"]
    return Finding(cause, what, i if is_open else None)


def is_mean_of_shares(run: Run, i: int, shares: Sequence[Run], rounding: Rounding) -> bool:
    """Return whether the gradient of step i is the mean of those that one process has on each rank's samples."""
    if any(len(share.steps) <= i for share in shares):
        return False
    mean = np.mean([share.steps[i][0]["final"] for share in shares], axis=0)
    return difference(run.steps[i][0]["final"], mean) <= rounding.limit(rounding.gradient, i)


def explain_shares(records: Sequence[Step]) -> tuple[str, str]:
    """Return why the ranks' losses of a step do not average to that of one process, and how that shows, or ""."""
    counts = [len(record["rows"]) for record in records]
    averaged = [*zip(*(record["averaged"] for record in records), strict=False)]  # for each of a step's losses
    # The rows of a batch of graphs are nodes: ranks may have unequally many for equally many targets.
    if len(set(counts)) > 1 and not (averaged and all(min(numbers) == max(numbers) for numbers in averaged)):
        return "mean-of-means", f"the ranks have {', '.join(map(str, counts))} samples"
    if 1 < (size := records[0]["contrasted"]) <= counts[0]:
        return "contrastive", f"a rank's {size} samples are each other's classes"
    for numbers in averaged:
        if min(numbers) != max(numbers):
            return "mean-of-means", f"the losses are over {min(numbers):g} to {max(numbers):g} targets"
    if any(record["gathered"] for record in records):
        return "gathered-without-gradient", "all_gather() gets a tensor that requires a gradient"
    return "", ""


def unknown_in(i: int) -> str:
    """Return the cause of a difference in step i, the first one, that none of the known causes explains."""
    return "unknown" if i < MANY_STEPS else "many-steps"


def check_printed(run: Run, first: Run, rounding: Rounding, is_proven: bool) -> Iterator[Finding]:
    """Yield the printed series that differ from those of one process.

    If is_proven, the gradients are known to equal those of one process, so that the printing is at fault.
    """
    for name, series in first.series.items():
        other = run.series.get(name, Series(name))
        if len(other.values) != len(series.values):
            yield Finding("unknown", f"{name}: {len(other.values)} values, {len(series.values)} at 1 process")
            continue
        pairs = zip(series.excesses(other), other.values, series.values, strict=True)
        for i, (excess, value, right) in enumerate(pairs):
            if math.isinf(excess) or excess > rounding.limit(rounding.printed.get(name, ()), i, abs(right)):
                cause = explain_printed(run, first, other, series) if is_proven else "unknown"
                yield Finding(cause, f"{name}, value {i + 1}: {value:.8g}, {right:.8g} at 1 process")
                break


def explain_printed(run: Run, first: Run, other: Series, series: Series) -> str:
    """Return why a printed series differs although training is the same."""
    ratios = [value / right for value, right in zip(other.values, series.values, strict=True) if right]
    if not all(map(math.isfinite, ratios)):
        return "unknown"
    if series.is_evaluation:
        cause = explain_evaluation(run, first, is_loss="loss" in series.name)
        # One rank's sum over the number of all samples, or a sum of means: by a rough factor, since shares differ.
        factors = (run.world_size, 1 / run.world_size)
        is_scaled = ratios and any(all(abs(ratio / c - 1) < 0.1 for ratio in ratios) for c in factors)
        return "printed-loss-scaled" if is_scaled and cause != "one-rank-evaluation" else cause
    for c in (run.world_size, 1 / run.world_size):
        if len(ratios) > 1 and all(math.isclose(ratio, c, rel_tol=0.01) for ratio in ratios):
            return "printed-loss-scaled"
    cause = explain_evaluation(run, first, is_loss=False) if is_unnamed_evaluation(series, first) else "unknown"
    return "one-rank-loss" if cause == "unknown" else cause


def explain_evaluation(run: Run, first: Run, is_loss: bool) -> str:
    """Return why an evaluation differs, judging by the samples that ranks evaluate and their collectives."""
    lines = [line for own in run.of("evaluation") for line in own]
    is_trimmed = any(line["is_trimmed"] for line in lines)
    are_unequal = len({number for line in lines for number in line["targets"]}) > 1
    # Lightning begins with a few batches, as a check.
    largest = [max(lines, key=lambda line: len(line["rows"]), default=None) for lines in run.of("evaluation")]
    whole = max(first.of("evaluation")[0], key=lambda line: len(line["rows"]), default=None)
    if not whole or not largest[0]:
        return "unknown"
    if not largest[0]["collectives"]:
        return "one-rank-evaluation"
    same_place = zip(first.of("evaluation")[0], *run.of("evaluation"), strict=False)
    is_repeated = (all(largest) and is_padded(whole, *largest)) or any(is_padded(*lines) for lines in same_place)
    # accelerate's gather_for_metrics() drops repeated samples; the loss of their batch is a mean over them, too.
    if is_repeated and not (is_trimmed and (are_unequal or not is_loss)):
        return "padded-evaluation"
    if len({len(line["rows"]) for line in largest if line}) > 1 or (is_loss and are_unequal):
        return "mean-of-means"
    return "unknown"


def is_padded(whole: dict[str, Any], *shares: Any) -> bool:
    """Return whether ranks evaluate the same samples as one process, and some of them twice."""
    drawn, expected = Counter(chain(*(share["rows"] for share in shares))), Counter(whole["rows"])
    return drawn.total() > expected.total() and set(drawn) == set(expected)


def is_unnamed_evaluation(series: Series, first: Run) -> bool:
    """Return whether a metric such as accuracy is printed once for each evaluation, and none by that name."""
    is_training = "loss" in series.name or "train" in series.name
    if is_training or any(other.is_evaluation for other in first.series.values()):
        return False
    return len(series.values) == len(first.of("evaluation")[0]) != len(first.steps)


def compare_runs(
    run: Run, first: Run, replay: Run | None, rounding: Rounding, is_divided: bool = False
) -> list[Finding]:
    """Return all differences between a run of several processes and one process.

    `replay` is a run of one process with the batches of `run`, if its own were different. If is_divided
    (GLOBAL_BATCH), a step has to have as many samples at every number of processes.
    """
    if failure := run.failure():
        return [failure]
    counts = [len(records) for records in run.of("step")]
    by_rank = Finding("other-steps", f"{', '.join(map(str, counts))} optimizer steps by rank")
    if any(counts) and not all(counts):
        return [by_rank]
    if not is_replicated(run, first):
        return [Finding("not-replicated", "weights"), *compare_parts(run, first, replay, rounding)]
    apart = list(check_ranks(run))
    overlap = check_overlap(run, first)
    findings = [*apart, *filter(None, [overlap, check_order(run, first), check_seeds(run, rounding.harmless)])]
    if len(set(counts)) > 1:
        findings.append(by_rank)
    if overlap:
        return findings
    shards = check_shards(run, first, is_divided) if rounding.is_controlled else None
    findings += filter(None, [shards])
    # Ranks that draw equal numbers in collate_fn, such as a size of all images, have the samples of one process.
    draws = draws_in_step(run, with_collate=other_samples(run, first) is not None)
    if not rounding.is_controlled or draws - rounding.harmless:
        rates = filter(None, [check_rates(run, first)])
        return [*findings, *rates, Finding("uncontrolled", "step 1, random numbers")]
    cause = shards.cause if shards else ""
    if apart or cause == "not-sharded":
        return findings
    reference = first
    if replay and cause != "redundant" and other_samples(run, replay) is None:
        reference = replay
        if not cause:
            findings.append(name_samples(run, first))
    if training := check_training(run, reference, rounding, is_scaled=bool(other_batch(run, first))):
        # Once the batch is divided, a rate that grows with it may be right.
        is_known = (cause, training.cause) == ("batch-not-divided", "scaled-with-batch")
        return findings if is_known else [*findings, training]
    chaotic = next((i for i, apart in enumerate(rounding.gradient) if apart >= CHAOTIC), None)
    if chaotic is not None:
        what = f"step {chaotic + 1}, gradient: differs by {rounding.gradient[chaotic]:.0e} in the control run"
        findings.append(Finding("chaotic", what))
    return [*findings, *check_printed(run, reference, rounding, is_proven=True)]


def compare_parts(run: Run, first: Run, replay: Run | None, rounding: Rounding) -> list[Finding]:
    """Return the differences between ranks that hold parts of a model, as in FSDP, and one process."""
    if found := [*filter(None, [check_order(run, first), check_rates(run, first)])]:
        return found
    if replay and other_samples(run, replay) is None:
        if wrong := check_overlap(run, first) or check_shards(run, first, is_divided=False):
            return [wrong]
        return [name_samples(run, first), *check_printed(run, replay, rounding, is_proven=False)]
    return [*check_printed(run, first, rounding, is_proven=False)]


# A resumed run


def check_resumed(resumed: Run, whole: Run, harmless: Set[str] = frozenset()) -> Finding | None:
    """Return the first difference between a resumed run and the run that was not stopped, or None.

    `harmless` are the generators whose numbers have no effect.
    """
    if failure := resumed.failure():
        return failure
    if not resumed.steps:
        return Finding("weights-not-resumed", "the resumed run makes no optimizer step")
    apart = rank_difference(resumed.steps[0], "weights")
    if apart > 1e-12 and rank_difference(whole.steps[0], "weights") <= 1e-12:  # else ranks hold parts of the model
        return Finding("weights-not-resumed", f"first resumed step, weights: differ between ranks by {apart:.1e}")
    begin = resumed.steps[0][0]["weights"]
    distances = [difference(begin, records[0]["weights"]) for records in whole.steps]
    start = int(np.argmin(distances))
    if distances[start] > 1e-6:
        what = f"first resumed step, weights: {distances[start]:.1e} from the nearest"
        return Finding("weights-not-resumed", what)
    if start == 0:
        return Finding("starts-over", "first resumed step, weights: those of step 1")
    return check_resumed_steps(resumed, whole, start, draws_in_step(whole) - harmless)


def check_resumed_steps(resumed: Run, whole: Run, start: int, drawn: Set[str]) -> Finding | None:
    """Return the first difference between a resumed run and the rest of the whole one, or None.

    If the generators from which steps draw have other states, another sample or update is only noted.
    """
    note, is_same_data = None, draws_same_batches(resumed, whole)
    for i, (record, expected) in enumerate(pair_steps(resumed, whole, start)):
        step = start + i + 1
        where = f"step {step}, resumed"
        is_redrawn = is_same_data and states_of(record, drawn) != states_of(expected, drawn)
        if not note and resumed.rows(i) != whole.rows(start + i):
            if seen := [j + 1 for j in range(start) if whole.rows(j) == resumed.rows(i)]:
                return Finding("data-repeated", f"{where}, samples: those of step {seen[-1]}")
            what = f"{where}, samples: not those of step {step} without a stop"
            if not is_redrawn:
                return Finding("other-data-after-resume", what)
            note = Finding("generators-not-resumed", what)
        rates, right = record["lr"], expected["lr"]
        if len(rates) != len(right) or not np.allclose(rates, right, rtol=1e-9, atol=1e-12):
            shown = [" ".join(f"{rate:.6g}" for rate in groups) for groups in (rates, right)]
            return Finding(
                "learning-rate-not-resumed", f"{where}, learning rate: {', '.join(shown)} without a stop"
            )
        moved = difference(weight_change(record), weight_change(expected))
        if not note and moved > RESUMED_SHARE:
            what = f"{where}, update of the weights: differs by {moved:.1e}"
            if not is_redrawn:
                return Finding("optimizer-not-resumed", what)
            note = Finding("generators-not-resumed", what)
    if (end := start + len(resumed.steps)) != len(whole.steps):
        what = f"{end} optimizer steps with the resumed ones, {len(whole.steps)} without a stop"
        return Finding("steps-not-resumed", what)
    return note or check_last_evaluation(resumed, whole)


def draws_same_batches(resumed: Run, whole: Run) -> bool:
    """Return whether a resumed run draws the batches with which the whole one ends, as far as they are known."""
    ours, theirs = ([*chain(*run.joint_batches().values())] for run in (resumed, whole))
    return ours == theirs[len(theirs) - len(ours) :]


def states_of(record: Step, kinds: Set[str]) -> dict[str, Any]:
    """Return the states that these generators had when a step began."""
    return {kind: state for kind, state in (record["random"] or {}).items() if kind in kinds}


def check_last_evaluation(resumed: Run, whole: Run) -> Finding | None:
    """Return a finding if a resumed run that has trained the same ends with a different evaluation."""
    for name, series in whole.series.items():
        other = resumed.series.get(name)
        if other and (series.is_evaluation or is_unnamed_evaluation(series, whole)):
            value, right = other.values[-1], series.values[-1]
            excess = series.excess(value, right, other)
            if math.isinf(excess) or excess > RESUMED_SHARE * abs(right):
                what = f"{name}, last value: {value:.8g}, {right:.8g} without a stop"
                return Finding("buffers-not-resumed", what)
    return None
