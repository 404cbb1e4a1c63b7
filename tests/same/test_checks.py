"""What make same makes of recorded steps and printed lines, without starting a process."""

import os
import pkgutil
import re
import signal
import sys
from contextlib import suppress
from inspect import getdoc
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes.common.errors import UserError
from scripts.same import checks, observe, script_job
from scripts.same.__main__ import Session, main, parse_args
from scripts.same.causes import CAUSES, Finding
from scripts.same.checks import Rounding, check_resumed, compare_runs, largest_gradient_difference
from scripts.same.printed import read_series
from scripts.same.recorded_run import Run, load
from tests.same.bugs import BUGS, NO_BUGS, RESUME_BUGS, plant
from tests.support import ROOT

PAGE = (ROOT / "docs" / "same.md").read_text(encoding="utf-8")
NUM_STEPS, SIZE = 4, 61


def test_only_the_first_samples_are_checked_for_random_numbers(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(observe, "checksums", lambda *_: calls.append(1) or {"torch": 0})
    samples = observe.SeededSamples(range(500), observe.Observer(tmp_path, 0))
    assert [samples[i] for i in range(500)] == list(range(500))
    assert len(calls) == 2 * observe.RANDOM_SAMPLES


def test_random_numbers_that_a_step_draws_on_a_gpu_are_noticed(tmp_path, monkeypatch):
    observer, model = observe.Observer(tmp_path, 0), torch.nn.Linear(2, 1)
    observer.stepping = [torch.optim.SGD(model.parameters())]
    on_gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [on_gpu.get_state()])
    for draws, moved in ((False, []), (True, ["cuda"])):
        observer.start_step()
        observer.see_batch(model, ((torch.ones(1, 2),), {}))
        if draws:
            torch.rand(1, generator=on_gpu)
        observer.capture()
        assert observer.record["moved"] == moved


def test_samples_are_those_of_the_model_that_lightning_s_training_step_calls(tmp_path):
    """With DDP, Lightning calls the whole module, whose forward() is the step; one process calls the step."""
    observer, model, points = observe.Observer(tmp_path, 0), torch.nn.Linear(2, 1), torch.rand(3, 2)

    def wrapped_forward(batch):
        return observer.call(torch.nn.Module.__call__, model, 2 * batch)

    whole = torch.nn.Sequential(model)
    whole.forward = wrapped_forward
    observer.call(torch.nn.Module.__call__, whole, points)
    assert observer.record["rows"] == observe.fingerprints(2 * points)


class Tagger(torch.nn.Module):
    """A model of padded tokens, called as those of transformers are."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 2)

    def forward(self, input_ids, attention_mask=None):
        return self.embedding(input_ids)


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_pads_a_sample_is_no_part_of_it_if_the_model_gets_a_mask(tmp_path, side):
    """A batch is padded to its longest sample: on several ranks, that is another one."""
    pad, model = 7, Tagger()
    padded = [5, 6, pad, pad] if side == "right" else [pad, pad, 5, 6]
    long = {"input_ids": torch.tensor([[1, 2, 3, 4], padded])}
    short = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    for mask in (long["input_ids"] != pad, (long["input_ids"] != pad).long()):
        observer = observe.Observer(tmp_path, 0)
        observer.see_batch(model, ((), {**long, "attention_mask": mask}))
        observer.see_batch(model, ((), short))
        assert observer.record["rows"][1] == observer.record["rows"][2]
    observer = observe.Observer(tmp_path, 0)
    observer.see_batch(model, ((), {**long, "attention_mask": (1.0 - mask) * -1e9}))  # it is added to scores
    assert observer.record["rows"] == observe.fingerprints(long["input_ids"])
    observer.see_batch(model, ((), {**long, "attention_mask": mask.to("meta")}))


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [((80, 60), (100, 140)), ((1, 80, 60), (70, 300)), ((6000,), (8000, 9000, 20000))],
)
def test_zeros_that_pad_a_sample_are_no_part_of_it(shape, lengths):
    """More of them would move the elements that are read, or those of the next row."""
    sample = torch.randn(1, *shape)
    padded = [torch.nn.functional.pad(sample, (0, length - shape[-1])) for length in lengths]
    higher = torch.nn.functional.pad(sample, (0, 0, 0, 7)) if len(shape) > 1 else sample
    ours = [observe.fingerprints(torch.cat([rows, rows + 1])) for rows in (sample, higher, *padded)]
    assert len({first for first, _ in ours}) == 1
    assert all(first != second for first, second in ours)


def test_samples_with_the_same_elements_in_other_places_are_told_apart():
    rows, ones = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), [torch.ones(size) for size in (8192, 12288)]
    padded = [torch.nn.functional.pad(one, (0, 16384 - len(one))) for one in ones]
    for samples in (torch.stack([rows, rows.T, rows.flip(0), rows.flip(1)]), torch.stack(padded)):
        assert len({*observe.fingerprints(samples)}) == len(samples)
    assert observe.fingerprints(torch.zeros(2, 3, 0)) == observe.fingerprints(torch.zeros(2, 4, 5))


def test_a_sketch_does_not_depend_on_the_default_device():
    tensor = torch.arange(100.0)
    with torch.device("meta"):
        assert sum(observe.sketch_all([tensor])) == 4950


def test_the_gradient_of_a_rank_s_own_part_of_a_tensor_is_recorded(tmp_path):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        weight, gradient = (
            DTensor.from_local(torch.full((3,), value), DeviceMesh("cpu", [0, 1]), run_check=False)
            for value in (1.0, 2.0)
        )
        parameter = torch.nn.Parameter(weight)
        parameter.grad = gradient
        observer = observe.Observer(tmp_path, 0)
        observer.before_step(torch.optim.SGD([parameter]), (), {})
    finally:
        dist.destroy_process_group()
    assert (sum(observer.record["weights"]), sum(observer.record["final"])) == (3, 6)


@pytest.mark.parametrize("gradient", [torch.eye(3), torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.complex64)])
def test_the_control_run_changes_gradients_by_a_rounding_error(tmp_path, gradient):
    observe.Observer(tmp_path, 0).round_differently([gradient, None])
    assert 0 < (gradient.to_dense() - torch.eye(3)).abs().max() < 10 * 2**-23


def test_the_control_run_of_mixed_precision_shows_what_adam_makes_of_rounding(tmp_path):
    """Its first update is the sign of the gradient, so that rounding turns that of elements near 0."""
    gradient = torch.randn(2_000_000, generator=torch.Generator().manual_seed(2))
    rounded = gradient + 1e-3 * torch.randn(2_000_000, generator=torch.Generator().manual_seed(1))  # bfloat16's
    control = gradient.clone()
    observer = observe.Observer(tmp_path, 0)
    observer.autocast = torch.bfloat16
    observer.round_differently([control])

    def moved(other):
        return checks.difference(other.sign().numpy(), gradient.sign().numpy())

    assert moved(rounded) > 10 * checks.FLOOR_SHARE * checks.EPS["bfloat16"] ** 0.5  # as no floor explains
    assert moved(rounded) < checks.SAFETY * moved(control)


def test_batches_without_values_are_left_out(tmp_path):
    """As those of a model that counts operations, and of gradients for each sample."""
    observer = observe.Observer(tmp_path, 0)
    model = torch.nn.Linear(2, 1)

    def call(batch, module=model):
        return observer.call(torch.nn.Linear.forward, module, batch)

    call(torch.ones(4, 2, device="meta"), torch.nn.Linear(2, 1, device="meta"))
    torch.vmap(lambda sample: call(sample[None]))(torch.ones(5, 2))
    call(torch.ones(3, 2))
    assert len(observer.record["rows"]) == 3


@pytest.mark.parametrize(
    ("line", "series"),
    [
        ("step 3 loss 2.10", {"loss": [2.10]}),
        ("Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.30", {"loss": [2.3]}),
        ("epoch 1 test_loss 0.5 test_accuracy 0.9", {"test_loss": [0.5], "test_accuracy": [0.9]}),
        ("Test set: Average loss: 0.05, Accuracy: 98/100", {"test_average_loss": [0.05], "test_accuracy": [98]}),
        ("step 1: train loss 4.1, val loss 4.2", {"train_loss": [4.1], "val_loss": [4.2]}),
        ("{'loss': 2.3e-05, 'grad_norm': 1.2}", {"loss": [2.3e-5]}),
        ("{'eval_loss': '4.605', 'epoch': '1'}", {"eval_loss": [4.605]}),
        ("loss tensor(2.3026, grad_fn=<NllLossBackward0>)", {"loss": [2.3026]}),
        ("epoch 0: {'eval_accuracy': np.float64(0.75)}", {"eval_accuracy": [0.75]}),
        ('{"samples_per_s": 3, "losses": [1.5, 0.002]}', {"loss": [1.5, 0.002]}),
        ('{"loss": 1.5, "val_accuracy": true, "test_loss": null, "train_loss": "n/a"}', {"loss": [1.5]}),
        ("[3/5] Loss_D: 0.5\tLoss_G: 1.25\tD(x): 0.4", {"loss_d": [0.5], "loss_g": [1.25]}),
        ("loss_classifier: 0.3 (0.4)  loss_box_reg: 0.1", {"loss_classifier": [0.3], "loss_box_reg": [0.1]}),
        ("\t Train loss/train/total: 1.5", {"train_loss_train_total": [1.5]}),  # MosaicML Composer
        ("saved model_loss_0.25.pt with loss_scale 65536 loss/scale: 65536", {}),
        ("result recipe=ddp world_size=2 samples_per_s=12", {}),
        ("lossless compression 3", {}),
        # PyTorch Ignite's examples
        (
            "INFO: Epoch[1]\n - Train metrics:\n \tAccuracy: 0.5\n\tLoss: 1.5\nINFO: next",
            {"accuracy": [0.5], "loss": [1.5]},
        ),
        ("- Test metrics:\n \tAccuracy: 0.5\n\tLoss: 1.5", {"test_accuracy": [0.5], "test_loss": [1.5]}),
        ("Test metrics:\nINFO: loss 1.5", {"loss": [1.5]}),
        # timm's results
        (
            '{\n  "train": {\n    "loss": 2.5\n  },\n  "validation": {\n    "loss": 1.5\n  }\n}',
            {"loss": [2.5], "test_loss": [1.5]},
        ),
        ('{\n  "validation": {\n    "loss": 1.5\n  },\n  "loss": 2.5\n}', {"test_loss": [1.5], "loss": [2.5]}),
    ],
)
def test_losses_are_read_under_their_usual_names(line, series):
    read = read_series(line)
    assert {name: found.values for name, found in read.items()} == series
    assert all(("test" in name or "val" in name) == found.is_evaluation for name, found in read.items())


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("loss 2.303 loss 0.012 loss 12.000", [1e-3, 1e-3, 1e-3]),
        ("loss 2.30e+00 loss 1.00e-07 loss nan", [1e-2, 1e-9, 1e-9]),
        ("acc 0.9375 acc 0.5 acc 1", [1e-4, 1e-4, 1e-3]),  # print() and %.4g drop trailing zeros
        ("loss 1.107 loss 0.01234 loss 0", [1e-3, 1e-5, 1e-5]),
        ("correct 9812 correct 40 accuracy 9812", [1]),
    ],
)
def test_a_number_is_as_exact_as_its_series_longest_ones(text, units):
    [series] = read_series(text).values()
    assert [series.unit(value, series) for value in series.values] == pytest.approx(units)


def test_a_pattern_names_what_it_finds():
    read = read_series("ce 2.5 top1 0.25 loss 9", r"ce (?P<loss>\S+) top1 (?P<val_top1>\S+)")
    assert {name: found.values for name, found in read.items()} == {"loss": [2.5], "val_top1": [0.25]}


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([""], "SCRIPT is empty; name the script: make same SCRIPT=train.py"),
        (["nowhere.py"], "SCRIPT nowhere.py: there is no such file; give its path from "),
        (["--", "{local_btach}"], "ARGS: unknown placeholder {local_btach}; did you mean 'local_batch'?; use {"),
        (["--", "{local_batch}"], "ARGS has {local_batch}: give the samples of a step, such as GLOBAL_BATCH=48"),
        (["--global-batch", "32", "--", "1"], "GLOBAL_BATCH is given, and ARGS has no {local_batch}: put it"),
        (["--global-batch", "32", "--", "{local_batch}"], "GLOBAL_BATCH 32: 3 processes do not divide it; use 36"),
        (["--world-sizes", "1 two"], "WORLD_SIZES expects numbers from 1 to 64, such as '1 2 3', got '1 two'"),
        (["--world-sizes", "1 ²"], "WORLD_SIZES expects numbers from 1 to 64, such as '1 2 3', got '1 ²'"),
        (["--world-sizes", "1"], "WORLD_SIZES has only 1; add another number of processes, such as '1 2'"),
        (["--resume", "yes"], "RESUME: invalid choice: 'yes' (choose from "),
        (["--stop-after", "0"], "STOP_AFTER expects a whole number of at least 1, got '0'"),
        (["--loss", "loss is \\S+"], "LOSS 'loss is \\\\S+': no group; give a regular expression such as"),
        (["--launch", "mpirun 'x"], 'LAUNCH "mpirun \'x": No closing quotation'),
        (["--loss", "("], "LOSS '(': missing ), unterminated subpattern at position 0; give a regular expression"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys, argv, error):
    script = [] if argv[0] in ("", "nowhere.py") else ["tests/same/right.py"]
    assert main([*script, *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {error}")


def test_the_script_and_its_folder_may_be_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORKDIR", "~")
    (tmp_path / "train.py").touch()
    args = parse_args(["~/train.py"])
    assert (args.script, args.workdir) == (str(tmp_path / "train.py"), tmp_path)
    monkeypatch.setenv("WORKDIR", "~/nowhere")
    with pytest.raises(UserError, match=r"WORKDIR .*/nowhere is not a folder; name the folder"):
        parse_args(["~/train.py"])


def test_commas_between_world_sizes_are_accepted():
    for text in ("1,2,4", "1, 2, 4", "2 4"):
        assert parse_args(["tests/same/right.py", "--world-sizes", text]).sizes == [1, 2, 4]


def test_options_in_place_of_a_script_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text("lr: 0.1\n")
    with pytest.raises(UserError, match=r"SCRIPT .*/options.yaml is YAML; name a Python file"):
        parse_args(["options.yaml"])


def test_braces_of_the_script_itself_are_kept(monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    started = []
    monkeypatch.setattr(script_job, "run", lambda words, *_, **__: started.append(words) or [0])
    words = ["--name", "{epoch}-{val_loss}-{batch}-{global_step}", "--size", "{world_size}"]
    Session(parse_args([str(tmp_path / "train.py"), "--", *words]), tmp_path).run(1)
    assert started[0][1:] == [*words[:3], "1"]


def test_who_waits_at_a_terminal_sees_each_run(monkeypatch, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(script_job, "run", lambda *_, **__: [0, 0])
    for is_terminal, said in ((True, "same: run 1, processes: 2, time limit: 600 s\n"), (False, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        Session(parse_args([str(tmp_path / "train.py")]), tmp_path).run(2)
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("0,1,2", ""),
        ("0,1", "warning: up to 3 processes and 2 GPUs: all runs use CPUs; WORLD_SIZES up to 2 use GPUs\n"),
        ("0", "warning: up to 3 processes and 1 GPU: all runs use CPUs\n"),
        ("", ""),
    ],
)
def test_all_runs_use_gpus_or_none_does(monkeypatch, capsys, gpus, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    script_job.choose_gpus(3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if said else gpus)
    assert capsys.readouterr().err == said


def test_the_fork_server_starts_whatever_the_length_of_tmpdir(monkeypatch, tmp_path):
    """The path of a socket has at most 107 bytes."""
    calls = []
    monkeypatch.setattr(script_job, "choose_socket_folder", lambda: calls.append("folder"))
    monkeypatch.setattr(script_job.forkserver, "ensure_running", lambda: calls.append("server"))
    monkeypatch.setattr(script_job.CONTEXT, "Process", lambda **_: calls.append("process") or Mock())
    monkeypatch.setattr(script_job, "wait", lambda *_: [0])
    assert script_job.run(["train.py"], "", 1, tmp_path / "run", 60.0) == [0]
    assert calls == ["folder", "server", "process"]


def test_ctrl_c_while_a_rank_is_started_ends_it(monkeypatch, tmp_path):
    """One that ignores Ctrl-C was left over, together with its fork server."""
    running = set()

    class Process:
        pid = None

        def __init__(self, target, args):
            self.rank = args[2]

        def start(self):
            running.add(self.rank)
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            self.pid = 1

        def kill(self):
            running.remove(self.rank)

    monkeypatch.setattr(script_job.CONTEXT, "Process", Process)
    monkeypatch.setattr(script_job.forkserver, "ensure_running", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        script_job.run(["train.py"], "", 2, tmp_path / "run", 60.0)
    assert not running


@pytest.mark.parametrize("name", [name for name, cause in CAUSES.items() if cause.doc])
def test_the_documentation_says_what_is_quoted(name):
    source, quote = CAUSES[name].doc.removesuffix("”").split(": “")
    assert quote in " ".join(getdoc(pkgutil.resolve_name(source)).split())


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize(
    ("given", "averaged"),
    [
        ({}, [2]),
        ({"weight": torch.ones(4) / 2}, [1]),
        ({"reduction": "sum"}, [2]),  # a script may divide it by them
        ({"reduction": "none"}, [2]),
        ({"size_average": False, "weight": torch.ones(4) / 2}, [2]),
        ({"reduce": False}, [2]),
        ({"size_average": True, "reduction": "sum"}, [2]),
        ({"reduce": True, "reduction": "sum"}, [2]),
    ],
)
def test_over_how_many_targets_a_loss_is_is_noted(tmp_path, given, averaged):
    observer = observe.Observer(tmp_path, 0)
    output, target = torch.zeros(3, 4, requires_grad=True), torch.tensor([1, -100, 2])
    observer.average(torch.nn.functional.cross_entropy, output, target, **given)
    assert observer.record["averaged"] == averaged


def test_the_verdict_says_at_how_many_processes_it_saw_what_it_shows(tmp_path):
    findings = [(2, Finding("many-steps", "step 150")), (3, Finding("many-steps", "step 120"))]
    session = Session(None, tmp_path, findings=findings)
    assert session.verdict()[0] == "differs at 2 and 3 processes, first at 2: step 150"
    session.findings = [(size, Finding("no-set-epoch", "epoch 2, order")) for size in (2, 3)]
    assert session.verdict()[0] == "differs at 2 and 3 processes: epoch 2, order"


def test_every_bug_can_be_planted_and_has_a_cause(tmp_path):
    named = BUGS | RESUME_BUGS
    for edits in [*NO_BUGS.values(), *(edits for bugs in named.values() for edits in bugs.values())]:
        compile(plant(edits, tmp_path).read_text(), "script.py", "exec")
    assert set(named) <= set(CAUSES)


def test_the_page_lists_the_bugs():
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|`]+) \|$", PAGE, re.MULTILINE)
    listed = {cause: names.split("; ") for cause, names in rows}
    assert listed == {cause: list(bugs) for cause, bugs in (BUGS | RESUME_BUGS).items()}


def record(world_size, gradients, rate=0.1, **fields):
    """Return a run whose ranks all have these gradients, (steps, 61), and have printed nothing."""
    events, weights = [], np.zeros(SIZE)
    for i, gradient in enumerate(gradients):
        after = weights - rate * gradient
        rows = [str(12 * i + row) for row in range(12)]
        shared = {
            "event": "step",
            "optimizer": 0,
            "lr": [rate],
            "final": gradient,
            "missing": [],
            "averaged": [],
            "contrasted": 0,
            "gathered": False,
        }
        shared |= {"weights": weights, "after": after, "shapes": 1, "low_precision": "float32", "moved": []}
        shared |= {
            "synced_forwards": 0,
            "batch_norm": False,
            "dropout": False,
            "random": {},
            "iteration": -1,
            **fields,
        }
        events.append([{**shared, "rows": rows[rank::world_size]} for rank in range(world_size)])
        weights = after
    return Run(world_size, [0] * world_size, [list(lines) for lines in zip(*events, strict=True)])


GRADIENTS = np.random.default_rng(0).normal(size=(NUM_STEPS, SIZE))


def disturb(size):
    return GRADIENTS * (1 + size * np.random.default_rng(1).normal(size=GRADIENTS.shape))


def printed(text, world_size=1):
    """Return a run with right gradients that has printed a text."""
    run = record(world_size, GRADIENTS)
    run.series = read_series(text)
    return run


def findings(run, first=None, control=None):
    first = first or record(1, GRADIENTS)
    return compare_runs(run, first, None, Rounding(first, control or first))


def causes(*runs):
    return [(finding.cause, finding.what.split(":")[0]) for finding in findings(*runs)]


RATE_OF = "step {}, learning rate"
RUNS = {
    "rounding": (record(2, disturb(3e-7)), []),
    "a factor": (record(2, 2 * GRADIENTS), [("loss-scaled", "step 1, gradient")]),
    "a share": (record(3, GRADIENTS / 3), [("loss-scaled", "step 1, gradient")]),
    "a square": (record(3, 9 * GRADIENTS), [("loss-scaled", "step 1, gradient")]),
    "the rate before what it changes": (record(2, GRADIENTS, 0.2), [("learning-rate-scaled", RATE_OF.format(1))]),
    "batch norm": (record(2, disturb(0.1), batch_norm=True), [("batch-norm", "step 1, gradient")]),
    "batch norm without an effect": (record(2, disturb(1e-7), batch_norm=True), []),
    "random numbers": (record(2, disturb(0.1), moved=["torch"]), [("uncontrolled", "step 1, random numbers")]),
}


def with_fields(run, i, **fields):
    """Return a run in whose step i each rank has recorded its own value of these fields."""
    for name, values in fields.items():
        for own, value in zip(run.steps[i], values, strict=True):
            own[name] = value
    return run


ALL_ROWS = [str(row) for row in range(12)]
OWN_RATES = with_fields(record(2, GRADIENTS), 1, lr=([0.1], [0.2]))
WHOLE_BATCHES = with_fields(record(2, GRADIENTS), 0, rows=(ALL_ROWS, ALL_ROWS))
RUNS |= {
    "own rates": (OWN_RATES, [("unequal-learning-rates", RATE_OF.format(2))]),
    "the whole batch on each rank": (WHOLE_BATCHES, [("redundant", "step 1, samples")]),
    "one draw": (
        record(2, GRADIENTS, moved=["torch"], random={"torch": 7, "numpy": 8}),
        [
            ("same-augmentation", "step 1, random numbers of the step"),
            ("uncontrolled", "step 1, random numbers"),
        ],
    ),
    "draws of one rank": (
        with_fields(record(2, GRADIENTS, random={"torch": 7}), 0, moved=(["torch"], [])),
        [("uncontrolled", "step 1, random numbers")],
    ),
    "one mask": (record(2, GRADIENTS, dropout=True, random={"torch": 7}), [("same-dropout", "step 1, dropout")]),
    "a mask for each rank": (
        with_fields(record(2, GRADIENTS, dropout=True), 0, random=({"torch": 7}, {"torch": 8})),
        [],
    ),
    "one state without an effect": (record(2, GRADIENTS, random={"torch": 7}), []),
    "parts of the model": (record(2, GRADIENTS, shapes=2), [("not-replicated", "weights")]),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_differs_is_named(name):
    run, found = RUNS[name]
    assert causes(run) == found


def test_draws_that_change_no_gradient_are_harmless():
    """As the choice among one size in torchvision's detection, with one seed on all ranks."""
    first, drawing = record(1, GRADIENTS, moved=["torch"]), {"moved": ["torch"], "random": {"torch": 7}}
    shuffled = record(1, np.concatenate([GRADIENTS[:1], disturb(0.1)[1:]]))  # other batches from step 2 on
    for i in range(1, NUM_STEPS):
        with_fields(shuffled, i, rows=[["x"]])
    for redrawn, run, found in (
        (first, record(2, disturb(3e-7), **drawing), []),
        (shuffled, record(2, disturb(3e-7), **drawing), []),
        (first, record(2, 2 * GRADIENTS, **drawing), ["loss-scaled"]),
        (record(1, disturb(0.1)), record(2, GRADIENTS, **drawing), ["same-augmentation", "uncontrolled"]),
        (first, record(2, GRADIENTS, moved=["numpy"]), ["uncontrolled"]),
    ):
        rounding = Rounding(first, first, redrawn)
        assert [one.cause for one in compare_runs(run, first, None, rounding)] == found


def test_samples_and_rates_are_compared_whatever_a_step_draws():
    first, draws = record(1, GRADIENTS, moved=["torch"]), {"moved": ["torch"]}
    assert causes(record(2, disturb(0.1), 0.2, **draws), first) == [
        ("learning-rate-scaled", "all steps, learning rate"),
        ("uncontrolled", "step 1, random numbers"),
    ]
    wide = record(2, disturb(0.1), **draws)
    for records in wide.steps:
        records[0]["rows"] = [*records[0]["rows"], "12", "13"]
    rounding = Rounding(first, first)
    found = [one.cause for one in compare_runs(wide, first, None, rounding, is_divided=True)]
    assert found == ["batch-not-divided", "uncontrolled"]
    alternating = [with_fields(record(n, GRADIENTS, **draws), 1, optimizer=[1] * n) for n in (1, 2)]
    with_fields(alternating[1], 1, lr=([0.2], [0.2]))  # the only step of the second optimizer, as of a GAN's
    assert causes(*reversed(alternating))[0] == ("learning-rate-scaled", "all steps of optimizer 2, learning rate")
    own_rates = with_fields(record(2, disturb(0.1), **draws), 1, lr=([0.2], [0.2]))  # as by a loss that is drawn
    assert causes(own_rates, first) == [("uncontrolled", "step 1, random numbers")]


def test_numbers_that_collate_fn_draws_are_harmless_if_they_give_the_same_samples():
    """As in training at several scales, where ranks draw one size."""
    for change, found in (("", ["loss-scaled"]), (" resized", ["uncontrolled"])):
        run = with_rows(record(2, 2 * GRADIENTS), lambda rows, rank, change=change: [row + change for row in rows])
        run.events[1].append({"event": "collated", "moved": ["random"]})
        assert [cause for cause, _ in causes(run)] == found


@pytest.mark.parametrize("factor", [0.5, 0.7])
def test_a_gather_without_gradient_is_named_also_if_it_scales_the_gradient(factor):
    wrong = factor * GRADIENTS if factor == 0.5 else disturb(0.1)
    assert causes(record(2, wrong, gathered=True)) == [("gathered-without-gradient", "step 1, gradient")]


def test_a_gather_of_what_requires_a_gradient_is_noted(tmp_path):
    observer = observe.Observer(tmp_path, 0)

    def all_gather(parts, tensor):
        pass

    output = torch.ones(4, 2, requires_grad=True)
    for tensor in (output.detach(), output.sum()):  # the latter is a loss, to be printed
        observer.count_collective(all_gather, [], tensor)
    with torch.no_grad():
        observer.count_collective(all_gather, [], output)
    assert not observer.record["gathered"]
    observer.count_collective(all_gather, [], tensor=output)
    assert observer.record["gathered"]


def test_a_pass_before_the_steps_of_several_optimizers_is_that_of_all():
    """As of a network and its sparse embedding, if DistributedDataParallel is told to leave out the latter."""
    run = record(2, GRADIENTS, synced_forwards=1, unsynced_forwards=0)
    for own in with_fields(run, 1, final=(GRADIENTS[1], GRADIENTS[2])).steps[1]:
        own.update(rows=[], synced_forwards=0, optimizer=1)
    run.events[0][:0] = [{"event": "wrapped"}]
    assert causes(run)[0] == ("not-synchronised", "step 2 (optimizer 2), gradient")


def test_a_gradient_that_is_always_zero_is_noted():
    run = record(2, 0 * GRADIENTS)
    assert [cause for cause, _ in causes(run, run)] == ["zero-gradient"]


def test_what_exceeds_rounding_is_found_in_its_first_step():
    gradients = GRADIENTS.copy()
    gradients[2] *= 1 + 1e-3 * np.arange(SIZE)
    assert causes(record(2, gradients)) == [("unknown", "step 3, gradient")]


@pytest.mark.parametrize(
    ("world_size", "step", "cause"),
    [
        (2, 50, "unknown"),
        (2, 150, "many-steps"),
        (5, 1, "mean-of-means"),  # the ranks have 3, 3, 2, 2 and 2 of 12 samples
        (5, 50, "unknown"),  # as in the steps before, whose gradients are right
        (5, 150, "many-steps"),
    ],
)
def test_what_first_differs_late_is_not_blamed_on_what_was_there_before(world_size, step, cause):
    gradients = np.tile(GRADIENTS[:1], (200, 1))
    wrong = gradients.copy()
    wrong[step - 1] *= 1 + 1e-3 * np.arange(SIZE)
    found = causes(record(world_size, wrong), record(1, gradients))
    assert found == [(cause, f"step {step}, gradient")]


@pytest.mark.parametrize(
    ("averaged", "cause"), [([[6, 2], [6, 2]], "unknown"), ([[6, 2], [6, 3]], "mean-of-means")]
)
def test_two_losses_of_a_step_may_be_means_over_different_numbers(averaged, cause):
    wrong = GRADIENTS.copy()
    wrong[0] *= 1 + 1e-3 * np.arange(SIZE)
    run = record(2, wrong)
    for rank, numbers in enumerate(averaged):
        run.steps[0][rank]["averaged"] = numbers
    assert causes(run, record(1, GRADIENTS)) == [(cause, "step 1, gradient")]


@pytest.mark.parametrize(("averaged", "cause"), [([[6], [6]], "unknown"), ([[], []], "mean-of-means")])
def test_unequal_numbers_of_nodes_with_equal_numbers_of_graphs_make_no_mean_of_means(averaged, cause):
    """PyTorch Geometric's batch of graphs has a row for each node."""
    run = record(2, disturb(0.1))
    for records in run.steps:
        records[0]["rows"].append(records[1]["rows"].pop())
        for one, numbers in zip(records, averaged, strict=True):
            one["averaged"] = numbers
    assert causes(run, record(1, GRADIENTS)) == [(cause, "step 1, gradient")]


def test_a_loss_that_is_no_mean_over_samples_is_known_by_the_gradients_of_the_ranks_shares():
    first, run = record(1, GRADIENTS), record(2, disturb(0.1), synced_forwards=1)
    [found] = findings(run, first)
    assert (found.cause, found.step) == ("unknown", 0)
    [found] = findings(record(2, disturb(0.1), synced_forwards=0), first)  # ranks may clip before they exchange
    assert (found.cause, found.step) == ("unknown", None)
    parts = [run.steps[0][0]["final"] + change for change in (GRADIENTS[1], -GRADIENTS[1])]
    shares, rounding = [record(1, [part]) for part in parts], Rounding(first, first)
    assert checks.is_mean_of_shares(run, 0, shares, rounding)
    assert not checks.is_mean_of_shares(run, 0, [shares[0], first], rounding)
    assert not checks.is_mean_of_shares(run, 1, shares, rounding)  # a share that does not come so far


def test_batches_of_a_rank_follow_those_of_all_from_a_step_on():
    run = with_batches(record(2, GRADIENTS), [[1], [3]], [[2], [4]])
    assert run.joint_batches() == {0: [[1, 2], [3, 4]]}
    assert run.share_batches(1, 0) == {0: [[2], [4]]}
    assert run.share_batches(1, 2) == {0: [[1, 2], [4]]}  # two steps a batch, as of a GAN
    assert run.share_batches(0, 3) == {0: [[1, 2], [3]]}


def test_how_large_rounding_is_comes_from_the_control_run():
    """The same difference passes if the control run varies more: the tolerance is then larger."""
    run, first = record(2, disturb(1e-3)), record(1, GRADIENTS)
    assert causes(run, first) == [("unknown", "step 1, gradient")]
    assert causes(run, first, record(1, disturb(2e-4))) == []


def test_what_is_not_finite_is_a_difference():
    gradients = GRADIENTS.copy()
    gradients[2:] = np.nan
    assert causes(record(2, gradients)) == [("unknown", "step 3, gradient")]
    assert causes(record(2, gradients), record(1, gradients)) == []


@pytest.mark.parametrize(
    ("one", "control", "two", "found"),
    [
        # print() drops zeros: 0.5 is as exact as the others.
        ("test_acc 0.5 test_acc 0.9375", "", "test_acc 0.5833333 test_acc 0.9375", ["unknown"]),
        ("test_acc 0.50 test_acc 0.94", "", "test_acc 0.51 test_acc 0.94", []),
        # If rounding changes a series, the tolerance of other series, and of its earlier values, stays the same.
        ("loss 2.1234 acc 0.0", "loss 2.1234 acc 0.1", "loss 2.9 acc 0.0", ["one-rank-loss"]),
        ("loss 2.1234 loss 1.5", "loss 2.1234 loss 1.9", "loss 2.3 loss 1.5", ["one-rank-loss"]),
        ("loss 2.5", "loss 2.5", "loss 5.0", ["one-rank-loss"]),  # a single value proves no factor
        ("loss 2.1234 loss 1.5", "loss 2.1234 loss 1.51", "loss 2.1234 loss 1.6", []),
        ("loss inf", "", "loss nan", ["unknown"]),
        ("loss 2.5 loss 2.4", "", "loss 2.5 loss nan", ["unknown"]),
    ],
)
def test_what_is_printed_is_compared_to_its_own_last_digit_and_rounding(one, control, two, found):
    seen = causes(printed(two, 2), printed(one), printed(control or one))
    assert [cause for cause, _ in seen] == found


def with_evaluations(run, *ranks, collectives=1, targets=(), is_trimmed=False):
    """Return a run whose ranks have evaluated these samples, by rank and evaluation."""
    others = {"collectives": collectives, "targets": [*targets], "is_trimmed": is_trimmed}
    for lines, evaluations in zip(run.events, ranks, strict=True):
        lines += [{"event": "evaluation", "rows": rows, **others} for rows in evaluations]
    return run


@pytest.mark.parametrize(
    ("ranks", "collectives", "cause"),
    [
        ((["0123"], ["0123"]), 0, "one-rank-evaluation"),
        ((["012"], ["342"]), 1, "padded-evaluation"),
        ((["0", "012"], ["1", "34"]), 1, "mean-of-means"),  # Lightning begins with a few samples
        ((["012"], ["345"]), 1, "unknown"),
        ((["01234"], []), 1, "unknown"),
        (([], ["01234"]), 1, "unknown"),
        ((["012340"], []), 1, "unknown"),
    ],
)
def test_why_an_evaluation_differs(ranks, collectives, cause):
    first = with_evaluations(printed("test_loss 1.25"), ["01", "01234"])
    run = with_evaluations(printed("test_loss 1.75", 2), *ranks, collectives=collectives)
    assert [found for found, _ in causes(run, first)] == [cause]


@pytest.mark.parametrize(
    ("name", "targets", "is_trimmed", "cause"),
    [
        ("test_loss", [3, 4], True, "mean-of-means"),  # HF Trainer's evaluation of unequally long texts
        ("test_accuracy", [3, 4], True, "unknown"),
        ("test_loss", [4], True, "padded-evaluation"),  # of classes: means over all of a batch
        ("test_loss", [3, 4], False, "padded-evaluation"),
    ],
)
def test_samples_that_accelerate_drops_again_do_not_pad_an_evaluation(name, targets, is_trimmed, cause):
    how = {"targets": targets, "is_trimmed": is_trimmed}
    first = with_evaluations(printed(f"{name} 1.25"), ["01234"], **how)
    run = with_evaluations(printed(f"{name} 1.75", 2), ["012"], ["342"], **how)
    assert [found for found, _ in causes(run, first)] == [cause]


@pytest.mark.parametrize(
    ("value", "collectives", "cause"),
    [
        (2.4, 1, "printed-loss-scaled"),
        (0.65, 1, "printed-loss-scaled"),
        (0.65, 0, "one-rank-evaluation"),
        (1.75, 1, "padded-evaluation"),
        (1.9, 1, "padded-evaluation"),
    ],
)
def test_an_evaluation_that_is_scaled_by_the_world_size_is_not_called_padded(value, collectives, cause):
    """Some of the samples count twice, too, which changes the value by far less."""
    first = with_evaluations(printed("test_loss 1.25"), ["01234"])
    run = with_evaluations(printed(f"test_loss {value}", 2), ["012"], ["342"], collectives=collectives)
    assert [found for found, _ in causes(run, first)] == [cause]


def test_why_one_of_two_evaluations_differs():
    """PyTorch Ignite's examples evaluate the training data, too, which are more."""
    first = with_evaluations(printed("test_loss 1.25"), ["01234567", "abc"])
    run = with_evaluations(printed("test_loss 1.75", 2), ["0123", "ab"], ["4567", "ca"])
    assert [found for found, _ in causes(run, first)] == ["padded-evaluation"]


def test_evaluations_of_several_data_sets_in_turn_are_recorded_each(tmp_path, monkeypatch):
    """PyTorch Ignite's examples evaluate training data, shuffled and cut, then test data, with no step between."""
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)  # it counts as a collective
    observer, model = observe.Observer(tmp_path, 0), torch.nn.Linear(1, 1).eval()
    batches = [torch.tensor([[float(i)]]) for i in range(3)]
    for observer.iteration, batch in ((4, batches[0]), (5, batches[1]), (4, batches[2])):
        observer.see_batch(model, ((batch,), {}))
        observer.count_collective(len, [])
    observer.end_evaluation()
    [lines] = load(tmp_path, 1, [0]).of("evaluation")
    assert [line["rows"] for line in lines] == [
        [row for batch in own for row in observe.fingerprints(batch)] for own in (batches[::2], batches[1:2])
    ]
    assert [line["collectives"] for line in lines] == [1, 1]


def test_how_ranks_join_their_evaluations_is_recorded(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)  # it counts as a collective
    observer, model = observe.Observer(tmp_path, 0), torch.nn.Linear(1, 4).eval()

    def gather_for_metrics():
        observer.count_collective(len, [])

    def collect_results_cpu():
        observer.count_barrier(len, [])

    def barrier():
        observer.count_barrier(len, [])

    for join in (gather_for_metrics, collect_results_cpu, barrier):
        with torch.no_grad():
            for labels in (torch.tensor([1, 2]), torch.tensor([1, -100])):
                batch = torch.ones(2, 1)
                observer.see_batch(model, ((batch,), {}))
                observer.average(torch.nn.functional.cross_entropy, model(batch), labels)
        join()
        observer.end_evaluation()
    [lines] = load(tmp_path, 1, [0]).of("evaluation")
    assert [(line["collectives"], line["is_trimmed"]) for line in lines] == [(1, True), (1, False), (0, False)]
    assert [line["targets"] for line in lines] == [[1, 2]] * 3


@pytest.mark.parametrize("is_before", [True, False])
def test_a_teacher_s_passes_are_no_evaluation(tmp_path, monkeypatch, is_before):
    """A teacher sees a batch before or after the model that is trained; the test data follow each epoch."""
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)  # it counts as a collective
    observer, student, teacher = observe.Observer(tmp_path, 0), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(student.parameters())
    data = [torch.full((1,), float(i)) for i in range(4)]
    train, test = (SimpleNamespace(_index_sampler=observe.Batches([[0, 1], [2, 3]], observer, 4)) for _ in "ab")

    def draw(loader):
        loader.draws = iter(loader._index_sampler)
        with suppress(StopIteration):
            while True:
                yield (torch.stack([data[i] for i in observer.next_batch(lambda own: next(own.draws), loader)]),)

    for _ in range(2):
        for batch in draw(train):
            for model in (teacher, student) if is_before else (student, teacher):
                with torch.set_grad_enabled(model is student):
                    observer.see_batch(model, (batch, {}))
            observer.before_step(optimizer, (), {})
            observer.after_step(optimizer, (), {})
        with torch.no_grad():
            for batch in draw(test):
                observer.see_batch(student, (batch, {}))
        observer.count_collective(len, [])
    observer.end_evaluation()
    [lines] = load(tmp_path, 1, [0]).of("evaluation")
    expected = [row for sample in data for row in observe.fingerprints(sample[None])]
    assert [(line["rows"], line["collectives"]) for line in lines] == [(expected, 1)] * 2


IMAGES = [torch.rand(3, 4, 5), torch.rand(3, 6, 4), torch.rand(3, 4, 4)]
IMAGES_OF_3 = [torch.rand(3, 4, 4)] * 3
TWO_INPUTS = [torch.rand(2, 7), torch.rand(2, 7, 3)]
INPUTS_OF_5 = [torch.rand(5, 7), torch.rand(5, 7, 3)]


@pytest.mark.parametrize(
    ("values", "counts", "found"),
    [
        ([IMAGES, [{"boxes": torch.rand(2, 4)}] * 3], [3], [image[None] for image in IMAGES]),
        ([[{"id": 1, "image": image} for image in IMAGES]], [3], [image[None] for image in IMAGES]),
        ([IMAGES[2:] * 3], [3], [IMAGES[2][None]] * 3),
        ([tuple(IMAGES[:1])], [1], [IMAGES[0][None]]),
        ([TWO_INPUTS], [2], TWO_INPUTS[:1]),
        (TWO_INPUTS, [2], TWO_INPUTS[:1]),
        ([torch.rand(()), {"ids": TWO_INPUTS[0]}], [2], TWO_INPUTS[:1]),
        ([IMAGES], [0], IMAGES[:1]),  # the number of samples is not known
        ([IMAGES], [3, 1], [image[None] for image in IMAGES]),  # the last batch has already been drawn
        ([IMAGES_OF_3], [3, 1], [image[None] for image in IMAGES_OF_3]),
        ([INPUTS_OF_5], [2, 5], INPUTS_OF_5[:1]),  # the batch before was a last one
        ([INPUTS_OF_5], [5, 2], INPUTS_OF_5[:1]),
        ([SimpleNamespace(store={"size": 5, "nodes": TWO_INPUTS[0]}), TWO_INPUTS[1]], [2], TWO_INPUTS[1:]),
        ([SimpleNamespace(store={"size": 5, "nodes": TWO_INPUTS[0]}), 1], [2], TWO_INPUTS[:1]),
        ([torch.nn.utils.rnn.pack_sequence([torch.rand(2, 3)] * 4, enforce_sorted=False)], [4], None),
        (["text", 3], [2], []),
    ],
)
def test_samples_are_found_in_lists_dicts_and_objects(values, counts, found):
    samples = observe.find_batch(values, counts) or observe.find_batch(values, counts, observe.MAX_DEPTH)
    expected = [values[0].data] if found is None else found
    assert len(samples) == len(expected)
    assert all(map(torch.equal, samples, expected))


def test_a_pattern_that_finds_no_number_is_refused():
    with pytest.raises(UserError, match=r"finds '2.3,', which is not a number; let its group match digits only"):
        read_series("loss is 2.3, step 4", r"loss is (\S+)")


def test_a_control_run_that_rounding_changes_beyond_recognition_is_noted():
    """All differences are within 30 times the control run's, which proves nothing."""
    found = causes(record(2, disturb(0.5)), record(1, GRADIENTS), record(1, disturb(0.1)))
    assert found == [("chaotic", "step 1, gradient")]


def test_what_only_the_replay_prints_is_compared():
    """One process with the batches of two ranks may reach a line that it does not reach with its own."""
    texts = ("loss 1.25", 1), ("loss 1.25 val_loss 2.5", 2), ("loss 1.25 val_loss 2.75", 1)
    first, run, replay = (printed(*text) for text in texts)
    for one in (one for records in (*run.steps, *replay.steps) for one in records):
        one["rows"] = [f"other {row}" for row in one["rows"]]
    *_, found = compare_runs(run, first, replay, Rounding(first, first))
    assert found.what == "val_loss, value 1: 2.5, 2.75 at 1 process"


def test_ranks_that_step_unequally_often_are_a_difference():
    run = record(2, GRADIENTS)
    run.events[1].append({**run.events[1][-1]})
    assert causes(run) == [("other-steps", "4, 5 optimizer steps by rank")]


def resumed_at(start, steps=NUM_STEPS, text="test_loss 1.25"):
    """Return a run of two ranks that resumes record(2, GRADIENTS) at a step, and prints its last evaluation."""
    run = printed(text, 2)
    run.events = [lines[start:steps] for lines in run.events]
    return run


@pytest.mark.parametrize(
    ("resumed", "cause"),
    [
        (resumed_at(2), None),
        (with_fields(resumed_at(2), 1, rows=(["40"], ["41"])), "other-data-after-resume"),
        (with_fields(resumed_at(2), 1, lr=([0.1 + 1e-12],) * 2), None),
        (with_fields(resumed_at(2), 1, lr=([0.2],) * 2), "learning-rate-not-resumed"),
        (with_fields(resumed_at(2), 1, lr=([0.1, 0.2],) * 2), "learning-rate-not-resumed"),
        (with_fields(resumed_at(2), 1, lr=([0.1, 0.1, 0.1],) * 2), "learning-rate-not-resumed"),
        (resumed_at(2, text="test_loss 9.00 test_loss 1.25"), None),
        (resumed_at(0), "starts-over"),
        (resumed_at(2, 3), "steps-not-resumed"),
        (resumed_at(2, text="test_loss 1.75"), "buffers-not-resumed"),
        (resumed_at(2, text="loss 1.75"), None),
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(resumed, cause):
    whole = printed("test_loss 1.25", 2)
    found = check_resumed(resumed, whole)
    assert (found and found.cause) == cause


def test_a_resumed_run_ends_with_the_same_metric_of_any_name_if_it_is_one_of_the_evaluation():
    resumed, whole = resumed_at(2, text="accuracy 0.75"), printed("accuracy 0.5", 2)
    assert check_resumed(resumed, whole) is None  # whatever it measures: nothing is evaluated
    found = check_resumed(resumed, with_evaluations(whole, ["01"], ["23"]))
    assert (found.cause, found.what) == (
        "buffers-not-resumed",
        "accuracy, last value: 0.75, 0.5 without a stop",
    )


def drawing(run, state, batches):
    """Return a run whose steps draw random numbers, from this state, after these batches of one sample."""
    run = with_rows(run, lambda rows, rank: [f"{row} with noise of {state}" for row in rows])
    for record in [record for records in run.steps for record in records]:
        record |= {"moved": ["torch"], "random": {"torch": state}}
    for own in run.events:
        own += [{"event": "batch", "iteration": -1, "indices": [i], "size": 48} for i in batches]
    return run


@pytest.mark.parametrize(
    ("state", "batches", "changes", "cause"),
    [
        (8, [2, 3], {}, "generators-not-resumed"),
        (8, [], {}, "generators-not-resumed"),  # a stream
        (7, [2, 3], {}, None),
        (7, [2, 3], {"rows": (["x"], ["y"])}, "other-data-after-resume"),
        (8, [0, 1], {}, "other-data-after-resume"),
        (8, [2, 3], {"lr": ([0.2], [0.2])}, "learning-rate-not-resumed"),
        (8, [2, 3], {"after": (GRADIENTS[0], GRADIENTS[0])}, "generators-not-resumed"),
    ],
)
def test_noise_of_other_states_of_the_generators_is_no_other_data(state, batches, changes, cause):
    """Many scripts of GANs and diffusion models save no generators' states."""
    whole = drawing(printed("test_loss 1.25", 2), 7, range(4))
    resumed = with_fields(drawing(resumed_at(2), state, batches), 1, **changes)
    found = check_resumed(resumed, whole)
    assert (found and found.cause) == cause


def test_an_update_that_differs_is_named_whatever_a_step_draws_without_an_effect():
    whole, resumed = drawing(record(2, GRADIENTS), 7, []), drawing(resumed_at(2), 8, [])
    for run in (whole, resumed):
        with_rows(run, lambda rows, rank: [row.split()[0] for row in rows])
    with_fields(resumed, 0, after=(GRADIENTS[0],) * 2)
    for harmless, cause in ({"torch"}, "optimizer-not-resumed"), (set(), "generators-not-resumed"):
        assert check_resumed(resumed, whole, harmless).cause == cause


def test_steps_that_are_missing_are_named_also_if_their_noise_differs():
    resumed = drawing(resumed_at(2, 3), 8, [3])
    assert check_resumed(resumed, drawing(record(2, GRADIENTS), 7, range(4))).cause == "steps-not-resumed"


def moved(values, share):
    """Return values that differ from these by a relative share."""
    return (values * (1 + share),) * 2


@pytest.mark.parametrize(
    ("i", "name", "change", "cause", "what"),
    [
        (
            0,
            "rows",
            lambda rows: (["0", "2", "4", "6", "8", "10"], ["1", "3", "5", "7", "9", "11"]),
            "data-repeated",
            "those of step 1",
        ),
        (
            1,
            "rows",
            lambda rows: (["40"], ["41"]),
            "other-data-after-resume",
            "not those of step 4 without a stop",
        ),
        (0, "weights", lambda weights: moved(weights, 1e-5), "weights-not-resumed", "1.0e-05 from the nearest"),
        (
            0,
            "weights",
            lambda weights: (weights, weights * 2),
            "weights-not-resumed",
            "differ between ranks by 1.0e+00",
        ),
        (1, "lr", lambda rates: ([0.1, 0.2],) * 2, "learning-rate-not-resumed", "0.1 0.2, 0.1 without a stop"),
        (
            1,
            "after",
            lambda weights: moved(weights, 1e-3),
            "optimizer-not-resumed",
            "update of the weights: differs by ",
        ),
    ],
)
def test_the_first_difference_of_a_resumed_run_is_named(i, name, change, cause, what):
    run = resumed_at(2)
    found = check_resumed(with_fields(run, i, **{name: change(run.steps[i][0][name])}), record(2, GRADIENTS))
    assert found.what.startswith(
        "first resumed step, weights: " if name == "weights" else f"step {3 + i}, resumed, "
    )
    assert found.cause == cause
    assert what in found.what


SAME_TORCH = [Finding("same-augmentation", "first sample, augmentation: the state of torch is equal on all ranks")]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        (([(0, 1, 2)], [(0, 1, 3)], [(0, 1, 4)]), SAME_TORCH),
        (([(0, 1, 2)], [(0, 1, 3)], [(0, 5, 4)]), []),
        (([(0, 1, 2), (1, 5, 2)], [(0, 3, 4), (1, 5, 4)], [(0, 6, 7), (1, 5, 7)]), SAME_TORCH),
        (([(0, 1, 2), (0, 5, 2)], [(0, 3, 4), (0, 5, 4)], [(0, 6, 7), (0, 5, 7)]), []),
        (([(0, 1, 2)], [(0, 1, 3)], [(1, 1, 4)]), []),
    ],
    ids=["all", "two", "another worker", "a later sample", "not that worker"],
)
def test_first_samples_that_draw_the_same_numbers_on_all_ranks_are_found(ranks, found):
    """Each event has the number of its worker, and a checksum of torch's and of numpy's state."""
    run = record(3, GRADIENTS)
    for lines, events in zip(run.events, ranks, strict=True):
        for worker, of_torch, of_numpy in events:
            states = {"torch": of_torch, "numpy": of_numpy}
            lines.append({"event": "augmentation", "worker": worker, "states": states})
    assert findings(run) == found


def test_a_loss_is_read_from_what_the_module_logging_writes(tmp_path):
    bar = "\r 50%|█████     | 5/10 [00:00<00:00, 20.12it/s, loss=1.5]"  # as many as the time allows
    text = f"{bar}{bar}\nINFO:root:step 1 loss 2.5\n{bar}step 2 loss 2 (9.5it/s)\n{bar}\r3it [1:00:01, loss=9]"
    text += "\nacc 93%|loss 1.5|lr 0.1\n| 50%| loss: 1 |\nstep 5 loss 0.5 [12:34, host]"
    for name in ("rank0.err", "rank0.out"):
        (tmp_path / name).write_text(text)
        assert load(tmp_path, 1, [0]).series["loss"].values == [2.5, 2, 1.5, 1, 0.5]
        (tmp_path / name).unlink()
    (tmp_path / "rank0.err").write_text(text)
    (tmp_path / "rank1.out").write_text("loss 3.5\n")
    assert load(tmp_path, 2, [0, 0]).series["loss"].values == [3.5], "another rank's output comes first"


def test_warnings_are_no_losses_where_a_pattern_finds_them_in_the_output(tmp_path):
    (tmp_path / "rank0.out").write_text("step 1 loss 2.5")
    (tmp_path / "rank0.err").write_text("UserWarning: mixed precision may cause loss of precision")
    assert load(tmp_path, 1, [0], r"loss (\S+)").series["loss"].values == [2.5]


@pytest.mark.parametrize(
    ("files", "series"),
    [
        ({"out": "test_loss 2.5", "report": '{"loss": 1.5}'}, {"loss": [1.5], "test_loss": [2.5]}),
        ({"out": "Namespace(aux_loss_weight=0.4)", "err": "loss 1.5"}, {"loss": [1.5], "aux_loss_weight": [0.4]}),
        (
            {"report": '{"wer": 0.25, "val": {"mAP": [0.5, 0.75], "split": "coco"}, "done": true}'},
            {"wer": [0.25], "val_map": [0.5, 0.75]},
        ),
        ({"out": '{"epoch_s": 2, "val": {"loss": 1.5, "epoch_s": 1}}'}, {"val_loss": [1.5]}),
        ({"out": "loss 2", "err": "loss 3", "report": '{"loss": 1.5}'}, {"loss": [1.5]}),
    ],
)
def test_metrics_of_several_files_are_all_read(tmp_path, files, series):
    """Such as the loss by SAME_REPORT and a printed evaluation, or log lines and a printed option."""
    for name, text in files.items():
        (tmp_path / f"rank0.{name}").write_text(text)
    assert {name: found.values for name, found in load(tmp_path, 1, [0]).series.items()} == series


def test_a_line_that_a_killed_rank_has_not_finished_is_left_out(tmp_path):
    (tmp_path / "rank0.jsonl").write_text('{"event": "end", "late": 0}\n{"event": "st')
    assert load(tmp_path, 1, [0]).events == [[{"event": "end", "late": 0}]]


def test_a_learning_rate_that_grows_with_the_batch_is_noted():
    run = record(2, GRADIENTS, rate=0.2)
    for records in run.steps:
        records[1]["rows"] = records[1]["rows"] * 3
    assert ("scaled-with-batch", "step 1, learning rate") in causes(run)
    assert "learning-rate-scaled" not in dict(causes(run))


def test_a_rate_that_grows_with_a_batch_that_is_to_be_divided_first_is_not_noted():
    run, replay, first = record(2, GRADIENTS, rate=0.2), record(1, GRADIENTS), record(1, GRADIENTS)
    for records in (*run.steps, *replay.steps):
        records[-1]["rows"] = [*records[-1]["rows"], "x", "y"]
    found = compare_runs(run, first, replay, Rounding(first, first), is_divided=True)
    assert [one.cause for one in found] == ["batch-not-divided"]


def test_rates_and_orders_are_compared_where_ranks_hold_parts_of_the_model():
    """As with ZeRO: its other losses are explained by the rate, which is named alone."""
    first = printed("loss 1.25")
    scaled = record(2, GRADIENTS, rate=0.2, shapes=2)
    scaled.series = read_series("loss 2.25")
    expected = [("not-replicated", "weights"), ("learning-rate-scaled", "all steps, learning rate")]
    assert causes(scaled, first) == expected
    repeated = with_fields(record(2, GRADIENTS, shapes=2), 1, iteration=(1, 1))
    order = [3, 1, 0, 2, 7, 5, 4, 6]
    for lines in repeated.events:
        for i in (-1, 1):
            lines.append({"event": "shuffled", "sampler": 1, "epoch": 0, "iteration": i})
            lines.append({"event": "batch", "iteration": i, "indices": order, "size": 8})
    assert causes(repeated, record(1, GRADIENTS))[1:] == [("no-set-epoch", "epoch 2, order")]


def test_ranks_that_hold_parts_of_the_model_print_what_one_process_does_with_their_batches():
    """As with FSDP and Lightning's samplers, which draw another order at one process."""

    def shares(rows, rank):
        return [f"a{rank}"]

    first = with_batches(printed("loss 1.25"), [[0, 1], [2, 3]])
    run = with_batches(record(2, GRADIENTS, shapes=2), [[4], [5]], [[6], [7]])
    assert not checks.needs_replay(run, first)  # more rows than at one process: as of ranks that draw the same
    run = with_rows(run, shares)
    assert checks.needs_replay(run, first)
    run.series = read_series("loss 1.5")
    for loss, rows, found in (
        (1.5, ["a0", "a1"], ["other-order"]),
        (1.75, ["a0", "a1"], ["other-order", "unknown"]),
        (1.5, ["a0", "a2"], ["unknown"]),
    ):
        replay = with_rows(printed(f"loss {loss}"), lambda _, rank, rows=rows: rows)
        compared = compare_runs(run, first, replay, Rounding(first, first))
        assert [one.cause for one in compared] == ["not-replicated", *found]


def test_ranks_that_hold_parts_of_the_model_and_draw_the_same_samples_are_found():
    """One process that trains on their batches prints the same."""
    first = with_batches(printed("loss 1.25"), [[0, 1], [2, 3]])
    for shares, found in ((["ab", "ab"], "the same 2 on all ranks"), (["ab", "bc"], "ranks share 1")):
        run = with_batches(record(2, GRADIENTS, shapes=2), [[0], [1], [2]], [[0], [3], [1]])
        run = with_rows(run, lambda _, rank, shares=shares: [*shares[rank]])
        run.series = read_series("loss 1.5")
        replay = with_rows(printed("loss 1.5"), lambda _, rank, shares=shares: [*shares[0], *shares[1]])
        compared = compare_runs(run, first, replay, Rounding(first, first))
        assert [one.cause for one in compared] == ["not-replicated", "not-sharded"]
        assert compared[1].what.endswith(found)


def test_equal_numbers_of_targets_make_no_mean_of_means():
    first = with_evaluations(printed("test_loss 1.25"), ["01234567"], targets=[8])
    run = with_evaluations(printed("test_loss 1.35", 2), ["0123"], ["4567"], targets=[4])
    assert [found for found, _ in causes(run, first)] == ["unknown"]


def test_gradients_that_are_not_compared_are_not_said_to_differ(tmp_path):
    (tmp_path / "train.py").touch()
    session = Session(parse_args([str(tmp_path / "train.py")]), tmp_path, largest=1.0, measured=1e-7)
    session.runs = [record(1, GRADIENTS)]
    assert "gradients differ" in "\n".join(session.verdict())
    for cause in ("uncontrolled", "not-replayed"):
        session.findings = [(2, Finding(cause, "step 1"))]
        assert session.verdict()[0].startswith("no difference found, but not all was compared")
        assert "gradients differ" not in "\n".join(session.verdict())


def test_samples_of_other_content_are_not_called_dropped():
    """Each rank may have changed its samples: then all samples of the one-process run are missing."""
    run = record(2, disturb(0.1))
    for step in run.steps[0]:
        step["rows"] = [f"moved {row}" for row in step["rows"]]
    assert causes(run) == [("other-samples", "step 1, samples")]


@pytest.mark.parametrize(
    ("epochs", "is_found"),
    [
        (["01234567", "01234567"], True),
        (["01234567", "01"], True),  # the run ends within its second epoch
        (["01234567", "01234568"], False),  # shuffled anew: only by chance is 9 left out twice
    ],
)
def test_a_tail_that_differs_by_epoch_is_not_dropped(epochs, is_found):
    first, run = record(1, GRADIENTS), record(2, GRADIENTS)
    for one, drawn in ((first, ["0123456789"] * 2), (run, epochs)):
        for i, records in enumerate(one.steps):
            rows = drawn[i // 2][i % 2 :: 2]
            for rank, own in enumerate(records):
                own.update(iteration=i // 2, rows=[*rows[rank :: one.world_size]])
    assert ("dropped-samples" in dict(causes(run, first))) == is_found


def test_the_learning_rates_of_all_groups_are_shown():
    run = with_fields(record(2, GRADIENTS), 1, lr=([0.1, 0.1], [0.1, 0.2]))
    assert findings(run)[0].what == "step 2, learning rate: 0.1 0.1, 0.1 0.2 by rank"


def test_fewer_steps_are_named():
    run = record(2, GRADIENTS[:-1])
    assert ("other-steps", "3 optimizer steps, 4 at 1 process") in causes(run)


def test_batches_are_joined_by_epoch_if_rank_0_alone_evaluates():
    """As in PyG's examples: the loader that rank 0 alone goes through counts, too."""
    events = [
        [
            {"event": "batch", "iteration": iteration, "indices": [10 * rank + iteration], "size": 8}
            for iteration in iterations
        ]
        + [{"event": "step", "iteration": iteration} for iteration in iterations[::stride]]
        for rank, (iterations, stride) in enumerate((((0, 1, 2), 2), ((0, 1), 1)))
    ]
    assert Run(2, [0, 0], events).joint_batches() == {0: [[0, 10]], 2: [[2, 11]]}


def test_the_epoch_of_a_sampler_of_any_class_is_recorded(tmp_path):
    """As of one that repeats each sample, or that wraps another one; those of an evaluation do not shuffle."""

    class Repeated(torch.utils.data.Sampler):
        epoch, shuffle = 0, True

        def __iter__(self):
            return iter([2, 1, 2, 1])

        def set_epoch(self, epoch):
            self.epoch = epoch

    observer, sampler = observe.Observer(tmp_path, 0), Repeated()
    for sampler.epoch, sampler.shuffle in ((0, True), (0, True), (3, True), (4, False)):
        [*observe.Batches(torch.utils.data.BatchSampler(sampler, 2, False), observer, 4)]
    events = load(tmp_path, 1, [0]).of("shuffled")[0]
    assert [(one["epoch"], one["iteration"]) for one in events] == [(0, 0), (0, 1), (3, 2)]


def with_batches(run, *ranks):
    """Return a run in which these indices, by rank, batch and sample, were drawn in one epoch of 12 samples."""
    for records, lines, batches in zip(zip(*run.steps, strict=True), run.events, ranks, strict=True):
        for record in records:
            record.update(iteration=0, rows=["0", str(len(lines))])
        lines[:0] = [{"event": "batch", "iteration": 0, "indices": indices, "size": 12} for indices in batches]
    return run


@pytest.mark.parametrize(
    ("one", "two", "is_found"),
    [
        ([[0, 1], [2, 3]], ([[0], [2], [4]], [[1], [3], [0]]), False),  # the last batch is padded
        ([[0, 1], [2, 3]], ([[0], [2], [4]], [[1], [0], [3]]), True),
        ([[0, 1], [0, 3], [4]], ([[0], [2], [4]], [[1], [0], [3]]), False),  # drawn with replacement
    ],
)
def test_ranks_that_draw_the_same_samples_before_the_last_batch_are_not_sharded(one, two, is_found):
    first = with_batches(record(1, GRADIENTS), one)
    run = with_batches(record(2, GRADIENTS), *two)
    for records in run.steps:
        records[1]["rows"] = ["0", "1"]
    shared = Finding("not-sharded", "epoch 1, samples: ranks share 1")
    assert (shared in findings(run, first)) == is_found


@pytest.mark.parametrize(
    ("epochs", "found"),
    [
        ((range(12), range(12, 24)), "not-replayed"),
        ((range(12), range(6, 18)), "not-sharded"),
    ],
)
def test_samples_of_a_stream_may_come_in_another_order(epochs, found):
    """A data set that is none by index: one process draws its 24 samples twice, and ranks in another order."""
    first, run = record(1, GRADIENTS), record(2, disturb(0.1))
    for i, (alone, ranks) in enumerate(zip(first.steps, run.steps, strict=True)):
        alone[0]["rows"] = [f"{(12 * i + k) % 24}" for k in range(12)]
        for own, epoch in zip(ranks, epochs, strict=True):
            own["rows"] = [f"{([*epoch] * 2)[6 * i + k]}" for k in range(6)]
    assert [one.cause for one in findings(run, first)] == [found]
    for own in [own for ranks in run.steps for own in ranks]:
        own["lr"] = [0.3]
    scaled = "learning-rate-scaled" if found == "not-replayed" else found
    assert [one.cause for one in findings(run, first)] == [scaled]


def test_ranks_that_draw_the_whole_batch_or_from_their_own_data_share_no_samples():
    batches = [[0, 1], [2, 3], [4, 5]]
    first = with_batches(record(1, GRADIENTS), batches)
    assert causes(with_batches(record(2, GRADIENTS), batches, batches), first) == [
        ("redundant", "step 1, samples")
    ]
    run = with_batches(record(2, GRADIENTS), batches, batches)
    for number, lines in enumerate(run.events):
        for line in lines:
            line.update({"size": 6} if line["event"] == "batch" else {"rows": ["0", f"{number}"]})
    assert "not-sharded" not in dict(causes(run, first))


def with_rows(run, change):
    """Return a run with these changes of each rank's samples in each step: change(rows, rank)."""
    for records in run.steps:
        for rank, one in enumerate(records):
            one["rows"] = change(one["rows"], rank)
    return run


@pytest.mark.parametrize(
    ("change", "of_replay", "found"),
    [
        (lambda rows, rank: [f"a{row}" for row in rows], None, ["other-order", "loss-scaled"]),
        (lambda rows, rank: [f"a{row}" for row in rows], lambda rows, rank: [f"b{row}" for row in rows], []),
        (
            lambda rows, rank: rows[rank:],
            lambda rows, rank: rows[:1] + rows[2:],
            ["dropped-samples", "loss-scaled"],
        ),
    ],
    ids=["its batches", "others", "lost samples"],
)
def test_one_process_with_the_batches_of_the_ranks_is_the_reference(change, of_replay, found):
    run = with_rows(record(2, GRADIENTS), change)
    replay = with_rows(record(1, 2 * GRADIENTS), of_replay or change)
    first = record(1, GRADIENTS)
    assert [one.cause for one in compare_runs(run, first, replay, Rounding(first, first))] == found


def test_ranks_that_all_train_on_the_whole_batch_are_compared_with_that_batch():
    first, doubled = record(1, GRADIENTS), [[str(12 * i + row) for row in range(12)] for i in range(NUM_STEPS)]
    run = record(2, GRADIENTS)
    for records, rows in zip(run.steps, doubled, strict=True):
        for one in records:
            one["rows"] = rows
    replay = with_rows(record(1, 2 * GRADIENTS), lambda rows, _: rows * 2)
    found = compare_runs(run, first, replay, Rounding(first, first))
    assert [one.cause for one in found] == ["redundant"]


def test_the_largest_difference_is_that_of_ranks_that_hold_the_whole_model():
    first = record(1, GRADIENTS)
    assert largest_gradient_difference(record(2, 2 * GRADIENTS), first) == pytest.approx(1)
    assert largest_gradient_difference(record(2, 2 * GRADIENTS, shapes=2), first) == 0


@pytest.mark.parametrize(
    ("matmul", "conv", "autocast", "device", "ndim", "expected"),
    [
        ("none", "tf32", None, "cuda", 4, "tf32"),  # torch's defaults
        ("none", "tf32", None, "cuda", 2, "float32"),
        ("tf32", "none", None, "cuda", 2, "tf32"),
        ("tf32", "tf32", None, "cpu", 4, "float32"),
        ("tf32", "tf32", torch.bfloat16, "cuda", 4, "bfloat16"),
    ],
)
def test_the_lowest_precision_in_use(monkeypatch, matmul, conv, autocast, device, ndim, expected):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=matmul))
    monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=conv))
    weight = SimpleNamespace(dtype=torch.float32, device=SimpleNamespace(type=device), ndim=ndim)
    assert observe.Observer.low_precision(SimpleNamespace(autocast=autocast), [weight]) == expected
