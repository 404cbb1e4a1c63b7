"""Compare recorded runs of a script at several world sizes, and name what differs and why.

Reads what scripts/same/observe.py has recorded; runs nothing. A difference counts where it exceeds what rounding
does, which a control run measures: the script at one process once more, with its sums in another order.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.same.causes import CAUSES
from scripts.same.printed import Reader, Series

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOOR_SHARE = 0.03
"""A difference below this times the root of the precision always counts as rounding: 1e-5 in fp32."""

SAFETY = 30.0
"""By how much a difference has to exceed the control run's largest so far."""

CHAOTIC = 1 / SAFETY
"""From this relative difference of the control run on, one as large as the gradient itself would be rounding."""

RESUMED_SHARE = 1e-4
"""A relative difference that a resumed run may have from one that was not stopped."""

Vector = NDArray[np.float64]
Step = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something that differs: a key of CAUSES, and where it was seen first."""

    cause: str
    world_size: int
    what: str
    """The step and the quantity, with its value."""

    @property
    def is_note(self) -> bool:
        """Whether training is right all the same."""
        return CAUSES[self.cause].is_note


@dataclass
class Run:
    """What the ranks of a run have recorded and printed."""

    world_size: int
    statuses: list[int | None] = field(default_factory=list)
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    error: str = ""
    """The last line of a failed rank's standard error."""

    def of(self, event: str) -> list[list[dict[str, Any]]]:
        """Return each rank's events of a kind."""
        return [[line for line in lines if line["event"] == event] for lines in self.events]

    @property
    def steps(self) -> list[list[Step]]:
        """The optimizer steps of each rank."""
        return self.of("step")

    @property
    def num_steps(self) -> int:
        """How many steps every rank has done."""
        return min((len(steps) for steps in self.steps), default=0)

    def at(self, i: int) -> list[Step]:
        """Return step i of each rank."""
        return [steps[i] for steps in self.steps]

    def rows(self, i: int) -> Counter[str]:
        """Return the samples that went into step i on all ranks."""
        return Counter(row for step in self.at(i) for row in step["rows"])

    def batches(self) -> dict[int, list[list[int]]]:
        """Return the training batches of all ranks together, by loader iteration."""
        trained = {line["iteration"] for line in self.of("trained")[0]}
        found: dict[int, list[list[int]]] = {}
        for iteration in sorted(trained):
            by_rank = [[e["indices"] for e in lines if e["iteration"] == iteration] for lines in self.of("batch")]
            parts = zip(*by_rank, strict=False)
            found[iteration] = [[index for part in batch for index in part] for batch in parts]
        return found

    def failure(self) -> Finding | None:
        """Return why the run did not end well, None where it did."""
        if not any(status != 0 for status in self.statuses):
            return None
        if "finished reduction in the prior iteration" in self.error:
            return Finding(
                "unused-parameters", self.world_size, f"after step {self.num_steps}: {self.error[:150]}"
            )
        if None in self.statuses:
            return Finding("hung", self.world_size, f"after step {self.num_steps}")
        return Finding("failed", self.world_size, f"after step {self.num_steps}: {self.error[:300]}")


def load(folder: Path, world_size: int, statuses: Sequence[int | None], pattern: str = "") -> Run:
    """Return what a run has left in its folder; `pattern` finds the losses, "" by their usual names."""
    run = Run(world_size, list(statuses))
    for rank in range(world_size):
        path = folder / f"rank{rank}.jsonl"
        whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")  # a rank may have been killed
        run.events.append([json.loads(line) for line in whole.splitlines()])
    run.events = [lines for lines in run.events if lines] or [[]]
    for rank in range(world_size):
        reader = Reader(pattern)
        for suffix in ("report", "out"):
            path = folder / f"rank{rank}.{suffix}"
            if path.exists() and not reader.series:
                reader.read(path.read_text(errors="replace"))
        if reader.series:
            run.series = reader.series
            break
    errors = [path.read_text(errors="replace") for path in sorted(folder.glob("rank*.err"))]
    ends = [text.strip().splitlines()[-1] for text in errors if text.strip()]
    said = [line for text in errors for line in text.splitlines() if "RuntimeError: Expected to have" in line]
    run.error = next(iter(said or [line for line in ends if "Connection" not in line] or ends), "")
    return run


def vector(step: Step, name: str) -> Vector:
    """Return a sketch as an array, (61,)."""
    return np.array(step[name], dtype=np.float64)


def difference(a: Vector, b: Vector) -> float:
    """Return the difference of two sketches relative to the second; inf where only one of them is finite."""
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return math.inf
    a, b = a[finite], b[finite]
    scale = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / scale if scale else float(np.any(a != b))


def factor_between(a: Vector, b: Vector) -> float:
    """Return c such that a = c b, 0 where no c fits."""
    c = float(a @ b / (b @ b)) if np.any(b) else 0.0
    return c if math.isfinite(c) and c and difference(a, c * b) < 1e-3 else 0.0


def name_factor(c: float, world_size: int) -> str:
    """Return "2 times" or "1/2 of", and whether that is the square of the world size."""
    if not c:
        return ""
    name = " (the square of the number of processes)" if math.isclose(c, world_size**2, rel_tol=0.01) else ""
    return f"1/{1 / c:.4g} of" if c < 1 else f"{c:.4g} times{name}"


def floor_of(run: Run) -> float:
    """Return the relative difference that is rounding in the precision of a run."""
    used = {step["low_precision"] for steps in run.steps for step in steps} or {"float32"}
    return FLOOR_SHARE * max(math.sqrt(EPS.get(name, 2.0**-23)) for name in used)


class Rounding:
    """What rounding does to a script at one process: the largest relative difference up to each step."""

    def __init__(self, first: Run, control: Run) -> None:
        self.floor = floor_of(first)
        self.is_controlled = True
        self.gradient, self.update = [0.0], [0.0]
        for i in range(min(first.num_steps, control.num_steps)):
            (one,), (other,) = first.at(i)[:1], control.at(i)[:1]
            self.gradient.append(max(self.gradient[-1], difference(vector(other, "final"), vector(one, "final"))))
            self.update.append(max(self.update[-1], difference(update(other), update(one))))
            self.is_controlled = self.is_controlled and (i > 0 or first.rows(0) == control.rows(0))
        self.printed: dict[str, list[float]] = {}
        for name, series in first.series.items():
            again, largest = control.series.get(name, series), 0.0
            self.printed[name] = []
            for a, b in zip(again.values, series.values, strict=False):
                if math.isfinite(a) and math.isfinite(b):
                    largest = max(largest, abs(a - b) - series.unit(b, again))
                self.printed[name].append(largest)

    def chaotic_step(self) -> int | None:
        """Return the first step at which rounding alone changes the gradient beyond recognition, None for none."""
        return next((i for i, apart in enumerate(self.gradient[1:]) if apart >= CHAOTIC), None)

    def printed_limit(self, name: str, i: int, right: float) -> float:
        """Return the largest difference that value i of a series may have, besides that of its last digit."""
        measured = self.printed.get(name) or [0.0]
        return max(self.floor * abs(right), SAFETY * measured[min(i, len(measured) - 1)])

    def limit(self, measured: list[float], i: int) -> float:
        """Return the largest difference that step i may have."""
        return max(self.floor, SAFETY * measured[min(i + 1, len(measured) - 1)])


def update(step: Step) -> Vector:
    """Return the change of the weights in a step, (61,)."""
    return vector(step, "after") - vector(step, "weights")


def is_replicated(run: Run, first: Run) -> bool:
    """Whether every rank holds the whole model, as one process does, and torch's optimizers step it."""
    if not run.num_steps or not first.num_steps or len(run.steps) != run.world_size:
        return False
    return {step["shapes"] for step in run.at(0)} == {step["shapes"] for step in first.at(0)}


def step_name(step: Step, i: int) -> str:
    """Return how a step is called in the verdict, counted from 1."""
    return f"step {i + 1}" if not step["optimizer"] else f"step {i + 1} (optimizer {step['optimizer'] + 1})"


# Checks of one run: do its ranks agree?


def check_ranks(run: Run) -> list[Finding]:
    """Return what is wrong between the ranks of a run, whatever other runs do."""
    findings = []
    w, first = run.world_size, run.at(0)
    initial = [vector(step, "weights") for step in first]
    spread = max(difference(weights, initial[0]) for weights in initial)
    if spread > 1e-12:
        findings.append(Finding("no-broadcast", w, f"step 1, weights: differ between ranks by {spread:.1e}"))
    for i in range(run.num_steps):
        steps = run.at(i)
        rates = [step["lr"] for step in steps]
        if any(rate != rates[0] for rate in rates):
            what = f"{step_name(steps[0], i)}, learning rate: {', '.join(str(rate[0]) for rate in rates)} by rank"
            return [*findings, Finding("unequal-learning-rates", w, what)]
        finals = [vector(step, "final") for step in steps]
        spread = max(difference(final, finals[0]) for final in finals)
        if spread > 1e-6:
            what = f"{step_name(steps[0], i)}, gradient: differs between ranks by {spread:.1e} at optimizer.step()"
            return [*findings, Finding(why_not_synchronised(run, i), w, what)]
    return findings


def why_not_synchronised(run: Run, i: int) -> str:
    """Return the cause of gradients that differ between ranks at step i."""
    steps = run.at(i)
    step = steps[0]
    if step["unsynced_forwards"]:
        return "no-sync-always"
    is_own = all(
        s["local"] is not None and difference(vector(s, "final"), vector(s, "local")) < 1e-6 for s in steps
    )
    if not is_own:
        return "unused-parameters" if any(s["missing"] != step["missing"] for s in steps) else "not-synchronised"
    following = run.at(i + 1)[0]["late"] if i + 1 < run.num_steps else run.of("end")[0][0]["late"]
    if step["exchanged"] >= step["numel"] / 2:
        return "exchange-unused"
    if following >= step["numel"] / 2:
        return "exchange-after-step"
    return "around-ddp" if "wrapped" in {e["event"] for e in run.events[0]} else "not-synchronised"


def check_seeds(run: Run) -> list[Finding]:
    """Return whether ranks draw the same random numbers for different samples."""
    if run.world_size == 1:
        return []
    drawn = [{e["worker"]: e["states"] for e in reversed(lines)} for lines in run.of("augmentation")]
    for worker, states in drawn[0].items():
        same = [kind for kind in states if all(o.get(worker, {}).get(kind) == states[kind] for o in drawn)]
        if same:
            what = f"first sample, augmentation: the state of {', '.join(same)} is equal on all ranks"
            return [Finding("same-augmentation", run.world_size, what)]
    step = run.at(0)
    moved = {kind for s in step for kind in s["moved"]}
    after = [s["random"] or {} for s in step]
    if any(all(other.get(kind, other) == after[0].get(kind) for other in after) for kind in moved):
        what = f"step 1, random numbers of the step: {', '.join(sorted(moved))} has equal states on all ranks"
        return [Finding("same-augmentation", run.world_size, what)]
    if step[0]["dropout"] and all(other.get("torch") == after[0].get("torch") for other in after):
        return [
            Finding("same-dropout", run.world_size, "step 1, dropout: the generator's state is equal on all ranks")
        ]
    return []


def check_order(run: Run, first: Run) -> list[Finding]:
    """Return whether later epochs repeat the order of the first."""
    if not repeats_order(run):
        return []
    seen = Counter[tuple[int, int]]()
    for event in run.of("sampler")[0]:
        key = (event["sampler"], event["epoch"])
        seen[key] += 1
        if event["shuffle"] and seen[key] > 1:
            what = f"epoch {event['epoch'] + 2}, order: that of the first"
            return [Finding("no-set-epoch", run.world_size, what)]
    if repeats_order(first):
        return []
    return [Finding("no-set-epoch", run.world_size, "epoch 2, order: that of the first")]


def repeats_order(run: Run) -> bool:
    """Whether two successive epochs begin with the same batches, of at least 8 samples."""
    orders = []
    for iteration in sorted({line["iteration"] for line in run.of("trained")[0]}):
        batches = [event["indices"] for event in run.of("batch")[0] if event["iteration"] == iteration]
        orders.append([index for batch in batches for index in batch])
    return any(len(a) >= 8 and len(a) == len(b) and a == b and a != sorted(a) for a, b in pairwise(orders))


# Checks against one process


def same_samples(run: Run, reference: Run) -> int | None:
    """Return the first step whose samples differ from the reference's, None where none do."""
    for i in range(min(run.num_steps, reference.num_steps)):
        if run.rows(i) != reference.rows(i):
            return i
    return None


def check_shards(run: Run, first: Run) -> list[Finding]:
    """Return what is wrong with how samples are divided over ranks."""
    i = same_samples(run, first)
    if i is None and run.num_steps == first.num_steps:
        return []
    w, steps = run.world_size, run.at(i or 0)
    own: list[Counter[str]] = [Counter(step["rows"]) for step in steps]
    if own[0] and all(rows == own[0] for rows in own):
        if own[0] == first.rows(i or 0):
            return [Finding("redundant", w, f"step {(i or 0) + 1}, samples: on each rank those of one process")]
        return [Finding("not-sharded", w, f"step {(i or 0) + 1}, samples: the same {len(own[0])} on all ranks")]
    findings = []
    drawn, expected = (sum((r.rows(i) for i in range(r.num_steps)), Counter[str]()) for r in (run, first))
    lost = set(expected) - set(drawn)
    if lost and set(drawn) < set(expected) and not is_cut(first):
        what = f"all steps, samples: {len(lost)} of {len(expected)} are never drawn"
        findings.append(Finding("dropped-samples", w, what))
    return findings


def is_cut(first: Run) -> bool:
    """Whether a run ends in the middle of its first epoch, where another order leaves out other samples."""
    sizes = {e["iteration"]: e["size"] for e in first.of("batch")[0]}
    last = first.steps[0][-1]["iteration"]
    if last not in sizes:
        return False
    drawn = sum(len(s["rows"]) for s in first.steps[0] if s["iteration"] == last)
    return drawn < 0.9 * sizes[last] and len({s["iteration"] for s in first.steps[0]}) == 1


def check_training(run: Run, reference: Run, rounding: Rounding) -> list[Finding]:
    """Return the first step and quantity in which training differs from one process's on the same samples."""
    w = run.world_size
    if run.num_steps != reference.num_steps:
        what = f"{run.num_steps} optimizer steps, {reference.num_steps} at 1 process"
        return [Finding("other-steps", w, what)]
    for i in range(run.num_steps):
        step, expected = run.at(i)[0], reference.at(i)[0]
        where = step_name(step, i)
        for rate, right in zip(step["lr"], expected["lr"], strict=False):
            if not math.isclose(rate, right, rel_tol=1e-6, abs_tol=1e-12):
                times = name_factor(rate / right, w) if right else "not"
                what = f"{where}, learning rate: {rate:.6g}, {times} that of 1 process"
                return [Finding("learning-rate-scaled", w, what)]
        found = difference(vector(step, "final"), vector(expected, "final"))
        if found > rounding.limit(rounding.gradient, i):
            return [explain_gradient(run, reference, i, found)]
        found = difference(update(step), update(expected))
        if found > max(rounding.limit(rounding.update, i), 10 * rounding.floor):
            return [Finding("unknown", w, f"{where}, update of the weights: differs by {found:.1e}")]
    return []


def explain_gradient(run: Run, reference: Run, i: int, found: float) -> Finding:
    """Return why the gradient of step i, the same on all ranks, is not that of one process."""
    w, steps = run.world_size, run.at(i)
    step, expected = steps[0], reference.at(i)[0]
    where = f"{step_name(step, i)}, gradient"
    c = factor_between(vector(step, "final"), vector(expected, "final"))
    if c and abs(c - 1) > 0.01:
        return Finding("loss-scaled", w, f"{where}: {name_factor(c, w)} that of 1 process")
    if math.isinf(found):
        is_whole = np.isfinite(vector(step, "final")).all()
        return Finding(
            "unknown", w, f"{where}: {'finite, not so' if is_whole else 'not finite, unlike'} at 1 process"
        )
    what = f"{where}: differs by {found:.1e} from that of 1 process"
    sizes = {sum(s["sizes"]) for s in steps}
    if run.rows(i) != reference.rows(i):
        return Finding("other-samples", w, f"{step_name(step, i)}, samples: not those of 1 process")
    if step["batch_norm"]:
        return Finding("batch-norm", w, what)
    if any(s["missing"] != step["missing"] for s in steps) or step["missing"] != expected["missing"]:
        return Finding("unused-parameters", w, what)
    if len(sizes) > 1:
        counts = ", ".join(str(sum(s["sizes"])) for s in steps)
        return Finding("mean-of-means", w, f"{what}; the ranks have {counts} samples")
    return Finding("unknown", w, what)


def check_printed(run: Run, first: Run, rounding: Rounding, is_proven: bool) -> list[Finding]:
    """Return what is printed otherwise than at one process.

    Args:
        run: the run of several ranks.
        first: that of one process.
        rounding: what rounding does.
        is_proven: whether the gradients are known to be those of one process: then what is printed is at fault.
    """
    findings = []
    for name, series in first.series.items():
        other = run.series.get(name)
        if other is None or len(other.values) != len(series.values):
            count = len(other.values) if other else 0
            what = f"{name}: {count} values, {len(series.values)} at 1 process"
            findings.append(Finding("unknown", run.world_size, what))
            continue
        pairs = list(zip(other.values, series.values, strict=True))
        i = next(
            (
                i
                for i, (value, right) in enumerate(pairs)
                if is_apart(value, right, series.unit(right, other), rounding.printed_limit(name, i, right))
            ),
            None,
        )
        if i is not None:
            value, right = pairs[i]
            what = f"{name}, value {i + 1}: {value:.8g}, {right:.8g} at 1 process"
            ratios = [value / right for value, right in pairs if right]
            findings.append(Finding(explain_printed(run, first, series, ratios, is_proven), run.world_size, what))
    return findings


def is_apart(value: float, right: float, unit: float, limit: float) -> bool:
    """Whether two printed numbers differ by more than one unit of their last digit and a limit."""
    if math.isfinite(value) and math.isfinite(right):
        return abs(value - right) > 1.01 * unit + limit
    return str(value) != str(right)


def explain_printed(run: Run, first: Run, series: Series, ratios: list[float], is_proven: bool) -> str:
    """Return why a series is printed otherwise, where training is the same."""
    w = run.world_size
    if not is_proven or not all(map(math.isfinite, ratios)):
        return "unknown"
    if series.is_evaluation:
        return explain_evaluation(run, first)
    for c in (w, 1 / w):
        if len(ratios) > 1 and all(math.isclose(ratio, c, rel_tol=0.01) for ratio in ratios):
            return "printed-loss-scaled"
    return "one-rank-loss"


def explain_evaluation(run: Run, first: Run) -> str:
    """Return why an evaluation differs, by the samples that ranks evaluate and what they exchange."""
    by_rank, (whole, *_) = run.of("evaluation"), first.of("evaluation")
    if not whole or not by_rank[0]:
        return "unknown"
    drawn = Counter(row for lines in by_rank for row in lines[0]["rows"]) if all(by_rank) else Counter()
    expected = Counter(whole[0]["rows"])
    if not by_rank[0][0]["collectives"]:
        return "one-rank-evaluation"
    if drawn.total() > expected.total() and set(drawn) == set(expected):
        return "padded-evaluation"
    return "mean-of-means" if len({len(lines[0]["rows"]) for lines in by_rank if lines}) > 1 else "unknown"


def compare(run: Run, first: Run, replay: Run | None, rounding: Rounding) -> list[Finding]:
    """Return all that a run at several processes does otherwise than one process.

    Args:
        run: the run of several ranks.
        first: that of one process.
        replay: one process that has drawn the batches of `run`, where its own were others.
        rounding: what rounding does at one process.
    """
    w = run.world_size
    if failure := run.failure():
        return [failure]
    if not is_replicated(run, first):
        return [Finding("not-replicated", w, "weights"), *check_printed(run, first, rounding, is_proven=False)]
    findings = [*check_ranks(run), *check_order(run, first), *check_seeds(run)]
    if len({len(steps) for steps in run.steps}) > 1:
        counts = ", ".join(str(len(steps)) for steps in run.steps)
        findings.append(Finding("other-steps", w, f"{counts} optimizer steps by rank"))
    if not rounding.is_controlled or any(step["moved"] for step in run.at(0)):
        return [*findings, Finding("uncontrolled", w, "step 1, random numbers")]
    findings += check_shards(run, first)
    causes = {finding.cause for finding in findings}
    blocking = {"no-broadcast", "unequal-learning-rates", "not-synchronised", "no-sync-always", "around-ddp"}
    blocking |= {"exchange-unused", "exchange-after-step", "not-sharded", "unused-parameters"}
    if causes & blocking:
        return findings
    i = same_samples(run, first)
    is_other = (i is not None or run.num_steps != first.num_steps) and "redundant" not in causes
    reference = first
    if is_other and replay is not None and same_samples(run, replay) is None:
        reference = replay
        padded = draws_twice(run) and not draws_twice(first)
        if "dropped-samples" not in causes:
            kind = "padded-training" if padded else "other-order"
            findings.append(Finding(kind, w, f"step {(i or 0) + 1}, samples: not those of 1 process"))
    training = check_training(run, reference, rounding)
    findings += training
    if not training and (i := rounding.chaotic_step()) is not None:
        apart = rounding.gradient[i + 1]
        findings.append(
            Finding("chaotic", w, f"step {i + 1}, gradient: differs by {apart:.0e} in the control run")
        )
    return findings if training else findings + check_printed(run, reference, rounding, is_proven=True)


def draws_twice(run: Run) -> bool:
    """Whether a sample is drawn more than once in the first epoch."""
    drawn = [index for batch in next(iter(run.batches().values()), []) for index in batch]
    return len(set(drawn)) < len(drawn)


def needs_replay(run: Run, first: Run) -> bool:
    """Whether one process has to be run again with the batches of a run, and can be."""
    if run.failure() or not is_replicated(run, first) or not run.batches():
        return False
    sizes = [{e["size"] for e in r.of("batch")[0]} for r in (run, first)]
    if sizes[0] != sizes[1]:  # ranks have data sets of their own
        return False
    return same_samples(run, first) is not None or run.num_steps != first.num_steps


def dump_batches(run: Run) -> str:
    """Return the batches of a run for the variable SAME_REPLAY of the observer, as JSON."""
    return json.dumps(run.batches())


def largest_difference(run: Run, reference: Run) -> float:
    """Return the largest relative difference of a gradient from one process's."""
    if not is_replicated(run, reference):
        return 0.0
    pairs = ((run.at(i)[0], reference.at(i)[0]) for i in range(min(run.num_steps, reference.num_steps)))
    return max(difference(vector(step, "final"), vector(expected, "final")) for step, expected in pairs)


# A resumed run


def check_resumed(resumed: Run, whole: Run) -> list[Finding]:
    """Return what a resumed run does otherwise than the run that was not stopped."""
    w = resumed.world_size
    if failure := resumed.failure():
        return [failure]
    if not resumed.num_steps or not whole.num_steps:
        return [Finding("weights-not-resumed", w, "the resumed run makes no optimizer step")]
    begin = vector(resumed.at(0)[0], "weights")
    apart = [difference(begin, vector(whole.at(i)[0], "weights")) for i in range(whole.num_steps)]
    start = int(np.argmin(apart))
    if apart[start] > 1e-6:
        return [
            Finding("weights-not-resumed", w, f"first resumed step, weights: {apart[start]:.1e} from the nearest")
        ]
    if start == 0:
        return [Finding("starts-over", w, "first resumed step, weights: those of step 1")]
    for i in range(min(resumed.num_steps, whole.num_steps - start)):
        step, expected = resumed.at(i)[0], whole.at(start + i)[0]
        where = f"step {start + i + 1}, resumed"
        if resumed.rows(i) != whole.rows(start + i):
            seen = [j for j in range(start) if whole.rows(j) == resumed.rows(i)]
            cause = "data-repeated" if seen else "other-data-after-resume"
            again = (
                f"those of step {seen[-1] + 1}" if seen else f"not those of step {start + i + 1} without a stop"
            )
            return [Finding(cause, w, f"{where}, samples: {again}")]
        if step["lr"] != expected["lr"] and not np.allclose(step["lr"], expected["lr"], rtol=1e-9):
            rates = f"{step['lr'][0]:.6g}, {expected['lr'][0]:.6g} without a stop"
            return [Finding("learning-rate-not-resumed", w, f"{where}, learning rate: {rates}")]
        if (apart_by := difference(update(step), update(expected))) > RESUMED_SHARE:
            what = f"{where}, update of the weights: differs by {apart_by:.1e}"
            return [Finding("optimizer-not-resumed", w, what)]
    if resumed.num_steps != whole.num_steps - start:
        what = (
            f"{start + resumed.num_steps} optimizer steps with the resumed ones, {whole.num_steps} without a stop"
        )
        return [Finding("steps-not-resumed", w, what)]
    return check_last_evaluation(resumed, whole)


def check_last_evaluation(resumed: Run, whole: Run) -> list[Finding]:
    """Return whether a resumed run that has trained the same ends with another evaluation."""
    for name, series in whole.series.items():
        other = resumed.series.get(name)
        if not series.is_evaluation or other is None:
            continue
        value, right = other.values[-1], series.values[-1]
        if is_apart(value, right, series.unit(right, other), RESUMED_SHARE * abs(right)):
            what = f"{name}, last value: {value:.8g}, {right:.8g} without a stop"
            return [Finding("buffers-not-resumed", resumed.world_size, what)]
    return []
