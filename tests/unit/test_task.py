"""Tasks, text, and GPTs: sums that ranks may add up, windows of whole files, a model that sees no future."""

import dataclasses
import errno
import math
import os
import string

import pytest
import torch
from torch.nn import functional

from recipes.common.data import Data, Spec, build_task, load_data
from recipes.common.data.text import SEPARATOR, TEST_SHARE, TextSplit, read_files, split_files
from recipes.common.errors import UserError
from recipes.common.language import TEMPERATURE, LanguageModel, generate
from recipes.common.loop import count_targets
from recipes.common.metrics import add_batch, averages, new_totals
from recipes.common.models.gpt import GPT, rotate
from recipes.common.models.layers import layers
from recipes.common.models.models import build_model
from recipes.common.models.user_model import check_task
from recipes.common.optim import build_optimizer, optimizer_state
from recipes.common.options import STANDARD_LIBRARY
from recipes.common.restore import load_optimizer_state
from recipes.common.task import SKIPPED, Classification, Task, in_float
from recipes.pipeline.partition import PartModule, merge_states, own_state, plan_parts, stages_of, state_of
from recipes.single.train import options
from tests.conftest import refused
from tests.tiny import ALONE, tiny_job

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """A folder of 40 texts of 100 to 490 bytes, and files that are left out."""
    for number in range(40):
        path = tmp_path / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(string.ascii_lowercase[number % 26] * (100 + 10 * number))
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    return tmp_path


def text_options(folder, *argv):
    return options(["--data", "text", "--data-dir", str(folder), "--seq-len", "16", *argv])


class TestText:
    def test_files_are_split_whole_and_every_byte_is_in_one_half(self, folder):
        files = read_files(folder)
        assert len(files) == 40
        assert [path for path, _ in files] == sorted(path for path, _ in files)
        train, test = split_files(files, folder)
        assert sorted(train + test) == sorted(content for _, content in files)
        assert sum(map(len, test)) >= TEST_SHARE * sum(len(content) for _, content in files)
        assert len(test) < 5

    @pytest.mark.parametrize(("number", "files"), [(errno.ENOENT, 39), (errno.ELOOP, 39), (errno.EIO, None)])
    def test_a_file_is_left_out_only_if_there_is_none(self, folder, monkeypatch, number, files):
        path, real = folder / read_files(folder)[3][0], os.stat

        def stat(target, **kwargs):
            if os.fspath(target) == str(path):
                raise OSError(number, os.strerror(number), str(target))
            return real(target, **kwargs)

        monkeypatch.setattr(os, "stat", stat)
        if files:
            assert len(read_files(folder)) == files
        else:
            with pytest.raises(UserError, match=r"--data text: cannot read .* \(Input/output error\)"):
                read_files(folder)

    def test_the_split_depends_on_names_alone(self, folder):
        files = read_files(folder)
        _, test = split_files(files, folder)
        other = split_files([(path, content.upper()) for path, content in files], folder)[1]
        assert other == [content.upper() for content in test]
        assert [(len(content) - 100) // 10 for content in test] == [0, 9]  # on every machine, in every process

    def test_a_file_with_most_of_the_bytes_is_for_training(self, tmp_path):
        for number in range(8):  # the hash puts one of the two names first
            names = [f"{name}-{number}.txt" for name in ("large", "small")]
            train, test = split_files([(names[0], b"x" * 1000), (names[1], b"x" * 10)], tmp_path)
            assert ([len(content) for content in train], [len(content) for content in test]) == ([1000], [10])

    def test_windows_follow_one_another_and_targets_are_one_byte_further(self):
        text = torch.arange(50, dtype=torch.uint8)
        split = TextSplit(text, 16)
        assert len(split) == 3
        ((inputs, targets),) = split.batches([torch.tensor([2, 0])], 0)
        assert inputs.tolist() == [list(range(32, 48)), list(range(16))]
        assert targets.tolist() == [list(range(33, 49)), list(range(1, 17))]
        assert inputs.dtype == targets.dtype == torch.int64

    def test_all_bytes_of_a_half_are_in_it_with_a_separator_after_each_file(self, folder):
        data = load_data(text_options(folder), CPU, print)
        train, test = split_files(read_files(folder), folder)
        for split, files in ((data.train, train), (data.test, test)):
            assert bytes(split.text.tolist()) == b"".join(content + SEPARATOR for content in files)
        assert (data.input, data.target) == (Spec((16,), torch.int64), Spec((16,), torch.int64))
        assert (data.kind, data.num_classes) == ("bytes", 256)

    def test_one_byte_changes_the_fingerprint(self):
        text = torch.arange(50, dtype=torch.uint8)
        before = TextSplit(text, 16).fingerprint()
        text[49] = 7
        assert TextSplit(text, 16).fingerprint() != before

    def test_the_standard_library_is_there_by_default(self):
        args = options(["--data", "text"])
        assert (args.data_dir, args.model, args.optimizer) == (STANDARD_LIBRARY, "gpt-tiny", "adamw")
        assert (args.epochs, args.max_steps) == (None, 300)
        data = load_data(args, CPU, print)
        assert len(data.train) * 128 > 5e6
        assert len(data.test) * 128 > TEST_SHARE * len(data.train) * 128 / 2

    @pytest.mark.parametrize(
        ("argv", "epochs", "steps"),
        [("--epochs 3", 3, None), ("--max-steps 7", None, 7), ("--epochs 3 --max-steps 7", 3, 7)],
    )
    def test_a_length_that_is_given_wins(self, argv, epochs, steps):
        args = options(["--data", "text", *argv.split()])
        assert (args.epochs, args.max_steps) == (epochs, steps)
        args = options(["--data", "digits"])
        assert (args.model, args.epochs, args.max_steps, args.optimizer) == ("lenet", 40, None, "sgd")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--data-dir nowhere", "--data text: cannot read nowhere (No such file or directory); give a folder"),
            ("--seq-len 9999", "too few for --seq-len 9999; add files, or use at most --seq-len"),
            ("--task classification", "does not fit --data text, whose targets are bytes"),
        ],
    )
    def test_what_cannot_work_is_one_line(self, folder, argv, message):
        with refused(message):
            load_data(text_options(folder, *argv.split()), CPU, print)

    def test_one_file_cannot_be_split(self, tmp_path):
        (tmp_path / "one.txt").write_text("text")
        with pytest.raises(UserError, match="holds 1 text files; at least 2 are needed"):
            load_data(text_options(tmp_path), CPU, print)

    @pytest.mark.parametrize(
        ("data", "model", "message"),
        [
            ("text", "lenet", "takes images, and --data text has int64 of shape (16,); use gpt-tiny"),
            ("digits", "gpt-tiny", "takes tokens, and --data digits has none; use --data text"),
        ],
    )
    def test_a_model_for_other_data_is_refused(self, folder, data, model, message):
        length = ["--seq-len", "16"] if data == "text" else []
        args = options(["--data", data, "--data-dir", str(folder), *length, "--model", model])
        with refused(f"--model {model} {message}"):
            build_model(args, load_data(args, CPU, print))


class TestSums:
    def test_those_of_a_batch_are_those_of_its_samples(self):
        language, classes = LanguageModel(8), Classification()
        logits, tokens = torch.randn(5, 8, 256), torch.randint(256, (5, 8))
        labels = torch.tensor([3, 1, SKIPPED, 0, 2])
        tokens[0, 2:] = tokens[3] = SKIPPED
        for task, output, target in ((language, logits, tokens), (classes, logits[:, 0, :4], labels)):
            rows = [(output[i : i + 1], target[i : i + 1]) for i in range(5)]
            assert task.loss_sum(output, target) == pytest.approx(float(sum(task.loss_sum(*row) for row in rows)))
            by_row = zip(*(task.metric_sums(*row) for row in rows), strict=True)
            assert [float(value) for value in task.metric_sums(output, target)] == [float(sum(v)) for v in by_row]
        assert classes.count(labels) == 4
        assert language.count(tokens) == 3.25

    def test_label_smoothing_spreads_a_share_of_each_target(self, folder):
        logits, labels = torch.randn(3, 4), torch.tensor([3, SKIPPED, 0])
        chances = logits.log_softmax(dim=1)[[0, 2]]
        expected = -0.9 * (chances[0, 3] + chances[1, 0]) - 0.1 * chances.mean(dim=1).sum()
        args = options(["--label-smoothing", "0.1"])
        task = load_data(args, CPU, print).task
        assert float(task.loss_sum(logits, labels)) == pytest.approx(float(expected))
        args = text_options(folder, "--label-smoothing", "0.1")
        with pytest.raises(UserError, match=r"^--label-smoothing 0\.1 is for --task classification; drop it$"):
            load_data(args, CPU, print)

    def test_the_loss_of_text_is_that_of_a_byte(self):
        task = LanguageModel(8)
        logits, tokens = torch.randn(5, 8, 256), torch.randint(256, (5, 8))
        expected = functional.cross_entropy(logits.reshape(40, 256), tokens.reshape(40))
        assert float(task.loss_sum(logits, tokens)) / 5 == pytest.approx(float(expected))
        assert task.derive({"loss": math.log(256)}) == {"bits_per_byte": pytest.approx(8)}
        assert (task.headline, task.unit, task.units_per_sample) == ("bits_per_byte", "tokens", 8)

    @pytest.mark.parametrize(("kind", "headline"), [("bytes", "bits_per_byte"), ("tokens", "bits_per_token")])
    def test_the_targets_choose_the_task(self, kind, headline):
        data = Data(None, None, Spec((8,), torch.int64), Spec((8,), torch.int64), 1000, kind)
        assert build_task(options([]), data.kind, data.target.shape).headline == headline
        assert build_task(options(["--task", "language-model"]), data.kind, data.target.shape).headline == headline

    def test_the_sample_is_the_same_for_the_same_weights(self):
        torch.manual_seed(0)
        model = GPT(256, width=16, depth=1, heads=2)
        first = LanguageModel(8).sample(model, CPU)
        assert first.startswith("a sample of what the model writes:\n")
        assert first == LanguageModel(8).sample(model, CPU)
        assert first != LanguageModel(8, seed=1).sample(model, CPU)

    def test_the_sample_leaves_the_terminal_as_it_is(self, monkeypatch):
        written = b"a\n\x1b[2J\tb\x07\x7f\xc3\xa9\xff\xc2\x9b"
        monkeypatch.setattr("recipes.common.language.generate", lambda *_: written)
        told = LanguageModel(8).sample(torch.nn.Identity(), CPU)
        assert told.partition("\n")[2] == "a\n\ufffd[2J\tb\ufffd\ufffd\xe9\ufffd\ufffd"

    def test_a_model_that_takes_one_length_alone_writes_what_it_writes_without_what_follows(self):
        torch.manual_seed(0)
        model = GPT(256, width=16, depth=1, heads=2)
        lengths = set()
        model.register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].shape))
        written = generate(model, b"a", 12, 8, 0, CPU)
        assert lengths == {(1, 8)}
        text = b"a"
        generator = torch.Generator().manual_seed(0)
        for _ in range(12):
            chances = (model(torch.tensor([list(text[-8:])]))[0, -1] / TEMPERATURE).softmax(dim=0)
            text += bytes([int(chances.multinomial(1, generator=generator))])
        assert written == text[1:]


def gpt(*argv):
    args = options(["--data", "text", "--seed", "1", *argv])
    spec = Spec((12,), torch.int64)
    data = Data(None, None, spec, spec, 256, "bytes", LanguageModel(12))
    return args, data, build_model(args, data)


class TestGPT:
    def test_no_place_sees_what_follows_it(self):
        _, _, model = gpt()
        tokens = torch.randint(256, (2, 12))
        changed = tokens.clone()
        changed[:, 7:] = (changed[:, 7:] + 1) % 256
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :7], after[:, :7])
        assert not torch.allclose(before[:, 7], after[:, 7])

    def test_the_same_byte_means_something_else_elsewhere(self):
        _, _, model = gpt()
        output = model(torch.tensor([[5, 9, 5, 5]]))[0]
        assert not torch.allclose(output[2], output[3])

    def test_rotation_keeps_lengths_and_shows_distances_alone(self):
        query, key = torch.randn(2, 1, 8)
        queries, keys = (rotate(vector.expand(20, 8), torch.arange(20)) for vector in (query, key))
        assert queries.norm(dim=1) == pytest.approx(query.norm().expand(20))
        products = queries @ keys.T
        assert products[3, 1] == pytest.approx(float(products[17, 15]), abs=1e-5)
        assert products[3, 1] != pytest.approx(float(products[3, 2]), abs=1e-3)

    def test_the_first_guess_is_even(self):
        _, data, model = gpt()
        tokens = torch.randint(256, (4, 13))
        loss = data.task.loss_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 4
        assert loss.item() == pytest.approx(math.log(256), rel=0.02)

    @pytest.mark.parametrize(
        ("name", "width", "depth"), [("gpt-small", 768, 12), ("gpt-medium", 1024, 24), ("gpt-xl", 2048, 24)]
    )
    def test_sizes_are_those_of_openais(self, name, width, depth):
        with torch.device("meta"):
            _, _, model = gpt("--model", name)
        per_block = 12 * width**2 + 4 * width  # attention 4, perceptron 8; two norms
        assert sum(p.numel() for p in model.parameters()) == depth * per_block + 256 * width + 2 * width

    @pytest.mark.parametrize("balance", ["parameters", "cost"])
    def test_parts_equal_the_model_and_share_the_tied_matrix(self, balance):
        args, data, model = gpt()
        tokens = torch.randint(256, (2, 12))
        expected = model(tokens)
        parts = plan_parts(model, 3, balance, args, data.input.zeros(1))
        modules = [PartModule(model, part, args, CPU) for part in parts]
        output = tokens
        for module, part in zip(modules, parts, strict=True):
            output = module(output)
            assert (output.shape[1:], output.dtype) == (part.output_shape, part.output_dtype)
        assert torch.equal(output, expected)
        several = {tuple(p.shape): stages for p, stages in stages_of(model, parts, 3).items() if len(stages) > 1}
        assert several == {(256, 64): {0, 2}}
        assert set.union(*stages_of(model, parts, 1).values()) == {0}

    def test_shares_make_up_the_whole_checkpoint(self):
        """The tied matrix is in the first share and in the last one, but only once in the whole."""
        args, data, model = gpt()
        parts = plan_parts(model, 2, "parameters", args, data.input.zeros(1))
        shares = [[PartModule(model, part, args, CPU)] for part in parts]
        whole = build_optimizer(args, model, ALONE)
        tokens = torch.randint(256, (2, 13))
        data.task.loss_sum(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        whole.step()
        states = []
        for share in shares:
            optimizer = build_optimizer(args, model, ALONE)
            content = own_state({"optimizer": optimizer_state(whole)}, model, share)
            load_optimizer_state(optimizer, content["optimizer"])
            states.append(state_of(share, model, optimizer))
        assert all(0 in state for _, state in states)
        assert {*states[0][1], *states[1][1]} == set(range(len(list(model.parameters()))))
        merged = merge_states(states, model, optimizer)
        assert merged["param_groups"] == whole.state_dict()["param_groups"]
        for number, values in whole.state_dict()["state"].items():
            assert torch.equal(merged["state"][number]["exp_avg"], values["exp_avg"])

    def test_names_of_layers_are_those_of_the_model(self):
        _, _, model = gpt()
        names = [f"{layer}.{key}" for layer, module in layers(model) for key in module.state_dict()]
        assert sorted(names) == sorted(model.state_dict())


def test_a_complex_output_keeps_its_imaginary_part():
    output = torch.tensor([1 + 2j])
    assert in_float(output) is output
    assert in_float(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32


class PerToken(Task):
    """Perplexity: the loss is divided by the tokens that count, not by the samples."""

    metrics = ("hits", "tokens")

    def loss_sum(self, output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    def metric_sums(self, output, target):
        return ((output.argmax(-1) == target).sum(), self.count(target))

    def count(self, target):
        return (target != SKIPPED).sum()

    def derive(self, averages):
        return {"perplexity": math.exp(averages["loss"]), "share": averages["hits"] / averages["tokens"]}


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2]])
def test_a_task_may_divide_by_another_number_than_samples(sizes):
    generator = torch.Generator().manual_seed(0)
    output, target = torch.randn(6, 4, 5, generator=generator), torch.randint(5, (6, 4), generator=generator)
    target[target == 4] = SKIPPED
    totals = new_totals(PerToken(), torch.device("cpu"))
    for some in zip(output.split(sizes), target.split(sizes), strict=True):
        add_batch(totals, PerToken(), *some)
    found = averages(totals, PerToken(), 6)
    loss = functional.cross_entropy(output.flatten(0, 1), target.flatten()).item()
    assert found["test_perplexity"] == pytest.approx(math.exp(loss))
    assert found["test_share"] == pytest.approx((output.argmax(-1) == target)[target >= 0].float().mean().item())


class Weighted(Task):
    """Each target is its sample's weight, and weights have no exact sums."""

    def loss_sum(self, output, target):
        return (output * target).sum()

    def count(self, target):
        return target.sum()


def test_a_task_may_divide_by_a_sum_of_weights():
    target = torch.arange(1, 3001) / 30000
    totals = new_totals(Weighted(), torch.device("cpu"))
    for some in target.split(7):
        add_batch(totals, Weighted(), torch.full_like(some, 2.5), some)
    assert averages(totals, Weighted(), 3000)["test_loss"] == pytest.approx(2.5)


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_a_count_that_is_no_number_of_samples_is_refused(count):
    class Miscounts(Classification):
        def count(self, target):
            return count

    outputs, labels = torch.randn(4, 3, requires_grad=True), torch.arange(4) % 3
    with pytest.raises(UserError, match=r"count\(\) is (-1|nan|inf); return how many samples count"):
        check_task(Miscounts(), outputs, labels)
    totals = new_totals(Miscounts(), torch.device("cpu"))
    add_batch(totals, Miscounts(), outputs.detach(), labels)
    with pytest.raises(UserError, match=r"--task Miscounts: count\(\) of a batch is negative or not finite"):
        averages(totals, Miscounts(), 4)
    job = tiny_job()
    job.data = dataclasses.replace(job.data, task=Miscounts())
    job.target_count = count_targets(job, labels)
    assert job.loss(outputs, labels).isnan()


def test_a_step_in_which_none_counts_trains_nothing():
    """Not even where loss_sum() is not 0."""
    job, outputs = tiny_job(), torch.randn(4, 3, requires_grad=True)
    job.data = dataclasses.replace(job.data, task=Classification())
    job.target_count = count_targets(job, torch.full((4,), SKIPPED))
    job.loss(outputs, torch.arange(4) % 3).backward()
    assert outputs.grad.count_nonzero() == 0
