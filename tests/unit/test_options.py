"""Options from the command line and from a file, and what is refused, in one line with the remedy."""

import contextlib
import dataclasses
import gc
import importlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from recipes.common.arguments import Parser, option, positive_int
from recipes.common.errors import UserError, nearest
from recipes.common.optim import learning_rate
from recipes.common.options import RunOptions, check_batch, parse
from recipes.common.process.entry import run_main
from recipes.ddp import train as ddp
from recipes.single import train as single
from scripts.launch.command import command
from tests.conftest import refused
from tests.support import ROOT

REFUSED = {
    "--epoch 3": "unknown option --epoch; did you mean '--epochs'?",
    "--sed=3": "unknown option --sed; did you mean '--seed'?",
    "--learning_rate 1": "unknown option --learning_rate; did you mean '--lr'?",
    "--bf16": "unknown option --bf16; did you mean '--amp'?",
    "-- --epochs 3": "unknown option --; leave it out; --help lists all",
    "epochs": "unexpected argument 'epochs'; options begin with --",
    "--data digit": "--data: invalid choice 'digit'; did you mean 'digits'? (choose from digits,",
    "--model mine.net": "function for your own, got 'mine.net'; did you mean 'mine:net'?",
    "--model a.mine.net": "did you mean 'a.mine:net'?",
    "--model mine.py": "--model: expects a name, or package.module:function for your own, got 'mine.py'",
    "--model mine:net()": "--model: expects a name, or package.module:function for your own, got 'mine:net()'",
    "--task mine.Task": "expects package.module:function for your own, got 'mine.Task'; did you mean 'mine:Task'?",
    "--optimizer adam": "did you mean 'adamw'?",
    "--lr-schedule constant --min-lr-share 0.1": "--min-lr-share 0.1 is for --lr-schedule cosine and linear; drop",
    "--optimizer adamw --momentum 0.5": "--momentum 0.5 is for sgd; drop it, or use --optimizer sgd",
    "--amp fp61": "did you mean 'fp16'?",
    "--lr-schedule cosin": "did you mean 'cosine'?",
    "--batchnorm-group 4 --sync-batchnorm": "statistics are over groups or the batch",
    "--batchnorm-group 1": "expects a whole number of at least 2, got '1'",
    "--compile-mode reduce-overhead": "is for compiled models; add --compile",
    "--compile --compile-mode max-autotune --accumulate-steps 2": (
        "--compile-mode max-autotune with --accumulate-steps 2: a CUDA graph overwrites the gradients of"
    ),
    "--sharded-checkpoints": "the ranks of this recipe hold no shards; drop it, or use fsdp, tensor, or context",
    "--evaluate": "--evaluate: it takes the weights of a file or a run; add --weights PATH",
    "--resume b.pt": "--resume: expects none or auto, got 'b.pt'; a new run: --start-from b.pt",
    "--weights a.pt --start-from b.pt": "--weights and --start-from: a run starts from one of the two; drop one",
    "--weights a.pt --evaluate --profile-steps 5": "--profile-steps: with --evaluate there are no steps; drop one",
    "--global-batch-size 0": "--global-batch-size: expects a whole number of at least 1, got '0'",
    "--image-size 100000": "--image-size: expects a whole number from 1 to 16384, got '100000'",
    "--vocab-size 9999999999": "--vocab-size: expects a whole number from 1 to 2147483648, got '9999999999'",
    "--num-samples 999999999999999": "--num-samples: expects a whole number from 1 to 2147483648",
    "--global-batch-size -1": "--global-batch-size",
    "--global-batch-size abc": "expects a whole number of at least 1, got 'abc'",
    "--global-batch-size 1.5": "expects a whole number of at least 1, got '1.5'",
    "--global-batch-size 1_0": "expects a whole number of at least 1, got '1_0'",
    "--epochs 0": "--epochs",
    "--lr 0": "--lr: expects a number above 0, got '0'",
    "--lr nan": "--lr",
    "--seed 9223372036854775808": "--seed: expects a whole number from 0 to 9223372036854775807",
    "--timeout-s 1e30": "--timeout-s: expects a number from 1 to 1e9",
    "--timeout-s 0.01": "--timeout-s: expects a number from 1 to 1e9",
    "--lr inf": "--lr: expects a number above 0, and at most 1e+30, got 'inf'",
    "--lr 1e300": "--lr: expects a number above 0, and at most 1e+30, got '1e300'",
    "--weight-decay 1e39": "--weight-decay: expects a number of at least 0, and at most 1e+30, got '1e39'",
    "--runs-dir ''": "--runs-dir: expects a path on a disk of this machine, got ''",
    "--runs-dir s3://bucket/runs": "expects a path on a disk of this machine, got 's3://bucket/runs'",
    "--weights ''": "--weights: expects a path",
    "--weights https://host/a.pt": "--weights: expects a path on a disk of this machine, got 'https://host/a.pt'",
    "--config ''": "--config: expects a path",
    "--data-dir ''": "--data-dir: expects a path, or a URL with a host, got ''",
    "--data-dir http://": "--data-dir: expects a path, or a URL with a host, got 'http://'",
    "--data-dir 'a\0b'": "--data-dir: expects a path",
    "--data shards --data-dir hdfs:///x": "--data-dir: expects a path, or a URL with a host, got 'hdfs:///x'",
    "--data-dir HTTPS://host/X": "--data-dir https://host/X: only shards can be read",
    "--momentum 1": "--momentum: expects a number of at least 0 and below 1, got '1'",
    "--accumulate-steps 0": "--accumulate-steps",
    "--workers -1": "--workers",
    "--workers=-1": "--workers: expects a whole number of at least 0, got '-1'",
    "--seed": "--seed: expected one argument",
    "--config": "--config: expected one argument",
    "--zero-lr=1": "unknown option --zero-lr",
    "--over": "unknown option --over",
    "--name a/b": "--name: expects at most 100 letters",
    "--name ..": "--name",
    "--name /etc": "--name",
    "--name .a": "--name",
    "--name ''": "--name",
    "--name 'a\nb'": "--name",
    f"--name {'a' * 101}": "--name",
    "--name '..\\a'": "--name",
}
"""What is refused, and a part of the line that says so."""


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused_in_one_line(case):
    with refused(REFUSED[case]):
        single.options(shlex.split(case))


GRAPHS = ["--compile", "--compile-mode", "reduce-overhead"]
GROUPS = ["--compile", "--batchnorm-group", "2"]
POWERSGD = ["--grad-compression", "powersgd"]


@pytest.mark.parametrize(
    ("recipe", "argv", "words"),
    [
        ("ddp", [*POWERSGD, "--amp", "fp16"], "all later steps; use --amp bf16"),
        ("spawn", [*POWERSGD, "--on-nonfinite", "skip"], "all later steps; drop one of the two"),
        *[
            (recipe, [*GRAPHS, *words], "a CUDA graph must not hold the collectives that forward() and")
            for recipe, words in [
                ("fsdp", ()),
                ("tensor", ()),
                ("context", ("--data", "text")),
                ("ddp", ("--sync-batchnorm", "--model", "resnet18")),
            ]
        ],
        ("pipeline", GRAPHS, "a CUDA graph overwrites the outputs"),
        ("single", [*GROUPS, "--accumulate-steps", "8"], "each of 8 passes is compiled by itself"),
        ("pipeline", [*GROUPS, "--num-microbatches", "8"], "use up to 7 passes, or drop --compile"),
        ("pipeline", ["--schedule", "interleaved", "--num-microbatches", "5"], "use 2 stages or more"),
        ("pipeline", ["--schedule", "1f1b", "--num-microbatches", "1"], "use at least 2, or --schedule gpipe"),
        ("pipeline", ["--amp", "fp16"], "use --amp bf16"),
        ("pipeline", ["--sync-batchnorm"], "use --batchnorm-group"),
        ("tensor", ["--amp", "fp16"], "does not take split and whole gradients together; use --amp bf16"),
        ("tensor", ["--sync-batchnorm"], "each replica normalises its own share; use --batchnorm-group"),
        ("context", ["--sync-batchnorm"], "this recipe has none; use RECIPE=ddp, or --batchnorm-group"),
        ("fsdp", ["--sync-batchnorm"], "fsdp normalises each rank's share by itself; use --batchnorm-group"),
        (
            "ddp",
            ["--batchnorm-group", "2", "--activation-checkpointing"],
            "blocks that run again would count their statistics twice; drop --activation-checkpointing",
        ),
        ("scratch", ["--allreduce", "rign"], "did you mean 'ring'?"),
        ("ddp", ["--grad-compression", "fp32"], "did you mean 'fp16'?"),
        ("ddp", ["--shuffle-block", "2"], "--shuffle-block 2 is for --data shards; drop it"),
        ("ddp", ["--num-samples", "5"], "--num-samples 5 is for --data synthetic; drop it"),
        (
            "ddp",
            ["--augment", "crop-flip"],
            "--augment crop-flip is for --data cifar10 and fashion-mnist; drop it",
        ),
        ("ddp", ["--eval-resize", "256"], "--eval-resize 256 is for --data imagefolder and shards; drop it"),
        (
            "ddp",
            ["--data", "shards", "--eval-resize", "223"],
            "--image-size 224 does not fit into it; use at least",
        ),
        ("ddp", ["--warmup-epochs", "5", "--warmup-steps", "3"], "--warmup-epochs 5 and --warmup-steps 3: both"),
        ("ddp", ["--beta2", "0.9"], "--beta2 0.9 is for adamw; drop it, or use --optimizer adamw"),
        ("ddp", ["--download"], "--download is for --data fashion-mnist and cifar10; drop it"),
        ("ddp", ["--data", "m:f", "--decode", "gpu"], "--decode gpu is for --data imagefolder and shards"),
        (
            "ddp",
            ["--data", "m:f", "--image-size", "128"],
            "--image-size 128 is for --data imagefolder and shards and",
        ),
        ("ddp", ["--data", "m:f", "--num-samples", "5"], "--num-samples 5 is for --data synthetic; drop it"),
        ("ddp", ["--data", "m:f", "--seq-len", "9"], "--seq-len 9 is for --data text and tokens; drop it"),
        ("ddp", ["--data", "m:f", "--skip-bad-images"], "--skip-bad-images is for --data imagefolder and shards"),
        ("ddp", ["--data", "m:f", "--download"], "--download is for --data fashion-mnist and cifar10; drop it"),
        ("ddp", ["--data", "shards", "--shuffle-block", "65"], "65: more images than --global-batch-size 64"),
    ],
)
def test_what_a_recipe_does_not_combine(recipe, argv, words):
    module = importlib.import_module(f"recipes.{recipe}.train")
    with refused(words):
        module.options(argv)


@pytest.mark.parametrize("recipe", ["tensor", "context"])
def test_a_replica_of_one_rank_may_record_graphs(recipe):
    module = importlib.import_module(f"recipes.{recipe}.train")
    assert module.options([*GRAPHS, f"--{recipe}-parallel", "1"]).records_graphs


def test_what_goes_together_is_taken():
    for name in ("a", "A-1", "run.2_b", "a" * 100, "1..2"):
        assert single.options(["--name", name]).name == name
    assert single.options([*GROUPS, "--accumulate-steps", "7"]).passes == 7
    on_cpu = [*GRAPHS, "--device", "cpu"]  # which records no graphs
    assert single.options([*on_cpu, "--accumulate-steps", "2"]).accumulate_steps == 2
    for recipe in ("fsdp", "pipeline"):
        importlib.import_module(f"recipes.{recipe}.train").options(on_cpu)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_refusal_is_one_line_of_rank_0_and_status_2_on_all(monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    assert run_main(lambda: ddp.options(["--powersgd-rank", "0"])) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    expected = "error: --powersgd-rank: expects a whole number of at least 1, got '0'\n"
    assert printed.err == (expected if rank == "0" else "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_is_one_write_also_without_buffers(stream):
    """Ranks of a node share a pipe, and two writes of two ranks may mix."""
    code = "import sys; from recipes.common.process.entry import run_main\n"
    code += f"run_main(lambda: print('a', 'b', file=sys.{stream}))"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a write is a message
    with ours, theirs:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, **{stream: theirs})
        ours.setblocking(False)
        assert ours.recv(100) == b"a b\n"


@pytest.mark.parametrize("run", [run_main, lambda main: command(lambda argv: main())([])])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_text_that_the_output_cannot_encode_is_escaped(monkeypatch, run, errors):
    """As with LANG=en_US, which means Latin-1, with LC_ALL=C, or for a name of other bytes than the locale's."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors=errors)
    monkeypatch.setattr(sys, "stdout", output)
    assert run(lambda: print("\u201c\xe9\udcff\u201d", flush=True)) == 0
    assert output.buffer.getvalue() == b"\\u201c\xe9\\udcff\\u201d\n"


def test_a_name_that_tensorboard_cannot_write_is_refused(tmp_path):
    """Without UTF-8, a name's bytes beyond ASCII reach Python as surrogates."""
    argv = ["--runs-dir", str(tmp_path / "r\udcc3\udcbcns")]
    with refused("TensorBoard writes only to names in UTF-8; choose another name, set LC_ALL"):
        single.options(argv)
    single.options([*argv, "--no-tensorboard"])
    single.options(["--runs-dir", str(tmp_path / "rüns")])


def test_collections_leave_out_what_torch_has_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    counts, kept = [], []

    def main():
        counts.append(gc.get_freeze_count())
        kept.extend([] for _ in range(1000))  # the first step imports torch._dynamo

    assert run_main(main) == 0
    assert counts[0] > 100_000
    assert gc.get_freeze_count() >= counts[0] + 1000


@pytest.mark.parametrize(
    ("version", "freezes"), [(None, 2), ("3.8.0", 2), ("3.9.0", 1), ("3.10.1+git", 1), ("main", 1)]
)
def test_objects_of_a_triton_that_lists_leaks_are_collected_at_the_end(monkeypatch, version, freezes):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version) if version else None)
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(1))
    assert run_main(lambda: None) == 0
    assert len(calls) == freezes


@pytest.mark.parametrize(
    ("argv", "lr", "weight_decay"),
    [
        ("", 0.02, 0.01),
        ("--model resnet50", 0.02, 1e-4),
        ("--model resnet50 --weight-decay 0.3", 0.02, 0.3),
        ("--model vit_b_16 --optimizer adamw", 0.001, 0.01),
        ("--model mine:net", 0.02, 0.01),
        ("--model mine:net --optimizer adamw --lr 5", 5, 0.01),
        ("--data text", 0.004, 0.01),
        ("--data tokens --model gpt-xl", 0.0002, 0.01),
        ("--data text --optimizer sgd", 0.02, 0.01),
        ("--data text --optimizer mine:opt", 0.004, 0.01),
        ("--optimizer mine:opt", 0.02, 0.01),
    ],
)
def test_default_rates_suit_the_model_and_the_optimizer(argv, lr, weight_decay):
    args = single.options(argv.split())
    assert (args.lr, args.weight_decay) == (lr, weight_decay)


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        ("", 40 * 7),
        ("--epochs 3", 21),
        ("--max-steps 1000", 1000),
        ("--max-steps 5 --epochs 3", 5),
        ("--max-steps 50 --epochs 3", 21),
        ("--data text", 300),
        ("--data text --epochs 3", 21),
        ("--data tokens --max-steps 1000", 1000),
    ],
)
def test_a_run_is_as_long_as_its_options_say(argv, steps):
    assert single.options(argv.split()).total_steps(7) == steps


@pytest.mark.parametrize(("argv", "steps"), [("", 11), ("--warmup-steps 9", 9), ("--warmup-epochs=2", 44)])
@pytest.mark.parametrize("line", ["warmup-epochs: 0.5", "warmup-steps: 11"])
def test_a_warm_up_on_the_command_line_replaces_the_files(tmp_path, line, argv, steps):
    (tmp_path / "c.yaml").write_text(line)
    args = single.options(["--config", str(tmp_path / "c.yaml"), *argv.split()])
    assert args.total_warmup_steps(22) == steps


@pytest.mark.parametrize(("argv", "steps"), [("", 100), ("--warmup-steps 9", 9), ("--warmup-epochs 0.5", 11)])
def test_the_warm_up_is_in_steps_or_epochs(argv, steps):
    assert single.options(argv.split()).total_warmup_steps(22) == steps


CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", [single, ddp])
def test_a_shipped_configuration_says_what_a_run_takes(path, recipe):
    args = vars(recipe.options(["--config", str(path)]))
    content = yaml.safe_load(path.read_text())
    assert {key: args[key.replace("-", "_")] for key in content} == content
    assert path.name in (ROOT / "recipes" / "README.md").read_text()


def test_the_shipped_configuration_of_imagenet_suits_8_and_64_gpus():
    config = "--config", str(ROOT / "recipes" / "configs" / "imagenet-resnet50.yaml")
    num_train, rates = 1_281_167, []
    for world_size, more, warmup_steps in ((8, (), 6255), (64, ("--global-batch-size", "8192"), 780)):
        args = single.options([*config, *more])
        check_batch(args, world_size, num_train)
        assert args.total_warmup_steps(num_train // args.global_batch_size) == warmup_steps
        assert args.global_batch_size == 128 * world_size
        rates.append(learning_rate(args, warmup_steps, 10**6, warmup_steps))
    assert rates == pytest.approx([0.4, 3.2])


def test_the_shipped_configuration_of_openwebtext_suits_8_gpus():
    """12 sequences a pass; train.bin has 9,035,582,198 tokens, and the epochs do not end the run."""
    args = single.options(["--config", str(ROOT / "recipes" / "configs" / "openwebtext-gpt-small.yaml")])
    num_train = 9_035_582_197 // args.seq_len
    check_batch(args, 8, num_train)
    assert args.global_batch_size == 8 * args.accumulate_steps * 12
    assert args.total_steps(num_train // args.global_batch_size) == 600_000


class TestConfig:
    def parse(self, tmp_path, text, *argv, recipe=single):
        (tmp_path / "c.yaml").write_text(text)
        return recipe.options(["--config", str(tmp_path / "c.yaml"), *argv])

    def test_the_file_sets_and_the_command_line_wins(self, tmp_path):
        text = "epochs: 3\nlr: 0.5\nglobal-batch-size: 32\naccumulate_steps: 2\n"
        text += "deterministic: true\ntensorboard: no\n"
        args = self.parse(tmp_path, text, "--lr", "0.25", "--no-deterministic")
        assert (args.epochs, args.lr, args.global_batch_size, args.accumulate_steps) == (3, 0.25, 32, 2)
        assert (args.deterministic, args.tensorboard) == (False, False)

    def test_the_place_of_config_on_the_command_line_does_not_matter(self, tmp_path):
        (tmp_path / "c.yaml").write_text("lr: 0.5\nseed: 4")
        args = single.options(["--lr", "0.25", f"--config={tmp_path / 'c.yaml'}"])
        assert (args.lr, args.seed) == (0.25, 4)

    def test_numbers_are_taken_as_they_are_written(self, tmp_path):
        """YAML reads 1.10 as 1.1, 012 as 10 and 2026-11-01 as a date."""
        args = self.parse(tmp_path, "name: 1.10\ndata-dir: 0x1F\nepochs: 012\nlr: 1e-3\nruns_dir: 2026-11-01")
        assert (args.name, str(args.data_dir), args.epochs) == ("1.10", "0x1F", 12)
        assert (args.lr, str(args.runs_dir)) == (0.001, "2026-11-01")

    def test_the_home_folder_is_written_as_a_tilde(self, tmp_path):
        """No shell expands one in a file, nor in --runs-dir=~/r: a folder named ~ would be made."""
        args = self.parse(tmp_path, "runs-dir: ~/r\nweights: ~/x.pt\ndata: shards\ndata-dir: ~/s\n")
        home = Path.home()
        assert (args.runs_dir, args.weights, args.data_dir) == (home / "r", home / "x.pt", home / "s")
        assert single.options(["--runs-dir=~"]).runs_dir == home
        assert single.options(["--runs-dir=./~"]).runs_dir == Path("~")

    def test_an_empty_file_says_nothing(self, tmp_path):
        assert self.parse(tmp_path, "# nothing\n").epochs == single.options([]).epochs

    def test_a_recipe_knows_its_own_options(self, tmp_path):
        assert self.parse(tmp_path, "zero: true\ngrad-compression: fp16", recipe=ddp).grad_compression == "fp16"
        with pytest.raises(UserError, match="unknown option 'zero'"):
            self.parse(tmp_path, "zero: true")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("epoch: 3", "unknown option 'epoch'; did you mean 'epochs'?; --help lists all"),
            ("config: other.yaml", "unknown option 'config'; --help lists all"),
            ("help: true", "unknown option 'help'"),
            ("no-download: true", "unknown option 'no-download'"),
            ("3: 4", "unknown option '3'"),
            ("- epochs", "must hold lines of the form `flag: value`"),
            ("just words", "must hold lines of the form `flag: value`"),
            ("a: [", "is not YAML"),
            ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
            ("!!map [a, b]", "is not YAML"),
            ("lr: !!float x", "is not YAML: could not convert string to float: 'x'"),
            ("epochs: " + "[" * 1000, "is not YAML: maximum recursion depth exceeded"),
            ("epochs: [1, 2]", "epochs expects one word or number, got ['1', '2']"),
            ("epochs:", "epochs expects one word or number, got None"),
            ("epochs: true", "epochs expects one word or number, got True"),
            ("zero: 3", "zero expects true or false, got '3'"),
            ("epochs: 0", "--epochs: expects a whole number of at least 1, got '0'"),
            ("data: digit", "did you mean 'digits'?"),
            ("name: ../../etc", "--name"),
            ("max-steps: 3\nmax_steps: 4", "max-steps is given twice; keep one"),
        ],
    )
    def test_bad_files_are_refused_in_one_line(self, tmp_path, text, words):
        with refused(words):
            self.parse(tmp_path, text, recipe=ddp)

    def test_a_missing_a_binary_and_a_folder_are_refused(self, tmp_path):
        (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
        for name, words in (("none", "No such file"), ("binary", "is not YAML"), (".", "Is a directory")):
            with pytest.raises(UserError, match=rf"^--config {re.escape(str(tmp_path / name))}:? {words}"):
                single.options(["--config", str(tmp_path / name)])


class TestBatch:
    def check(self, batch, accumulate, world_size, num_train):
        argv = ["--global-batch-size", str(batch), "--accumulate-steps", str(accumulate)]
        check_batch(single.options(argv), world_size, num_train)

    @pytest.mark.parametrize(
        ("case", "words"),
        [
            *((case, None) for case in [(64, 1, 4, 1437), (4, 1, 4, 4), (12, 3, 4, 12), (50, 1, 3, 50), (1,) * 4]),
            ((64, 1, 5, 4), "5 processes for 4 training samples; start at most 4"),
            ((3, 1, 4, 100), "--global-batch-size 3 is too small for 4 processes x 1 accumulation"),
            ((11, 3, 4, 100), "use at least 12"),
            ((101, 1, 1, 100), "--global-batch-size 101 is larger than the training set; use at most 100"),
        ],
    )
    def test_what_does_not_work_names_the_nearest_that_does(self, case, words):
        with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
            self.check(*case)


def test_help_is_printed_once_and_names_every_default(monkeypatch, capsys):
    texts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            ddp.options(["--help"])
        assert caught.value.code == 0
        texts.append(" ".join(capsys.readouterr().out.split()))
    assert [text.count("--global-batch-size N") for text in texts] == [2, 0], "in the usage and in the list"
    assert "samples per optimizer step over all ranks, whatever their number (default: 64)" in texts[0]
    assert "seed of weights, order and augmentation (default: 0)" in texts[0], "0 is a default, too"


def test_help_shows_no_empty_default(capsys):
    parser = Parser("prog", "What it does.")
    parser.add_argument("--empty", default="", help="a text")
    parser.add_argument("--full", default="x", help="another")
    parser.print_help()
    lines = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert lines == [["a", "text"], ["another", "(default:", "x)"]]


def test_without_horovod_its_recipe_says_how_to_build_it(monkeypatch):
    from recipes.horovod import train

    monkeypatch.setattr(train, "hvd", None)
    with pytest.raises(UserError, match=r"^Horovod is not built for this Python; run `make horovod`$"):
        train.main(["--epochs", "1"])
    with pytest.raises(UserError, match="unknown option --epoch"):
        train.main(["--epoch", "1"])


def test_nearest_names_one_word_or_none():
    assert nearest("digit", ["digits", "cifar10"]) == "; did you mean 'digits'?"
    assert nearest("zzz", ["digits"]) == ""


def test_a_recipe_without_the_future_import_has_its_options():
    """From Python 3.14 on, such a class computes its annotations only when they are asked for."""

    @dataclasses.dataclass(frozen=True)
    class MineOptions(RunOptions):
        width: int = option(8, positive_int, "width")

    args = parse(MineOptions, "mine", "", ["--width", "3"])
    assert (args.width, single.options([]).data_dir) == (3, Path("data"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 5
