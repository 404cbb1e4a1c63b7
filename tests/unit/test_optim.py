"""The learning rate; the fused optimizer of GPUs, by the kernel of that name for CPUs and fake tensors; TF32."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.common.loop import short_run
from recipes.common.optim import build_optimizer, build_scaler, learning_rate, optimizer_state, optimizer_step
from recipes.common.restore import load_optimizer_state
from recipes.common.seeding import choose_kernels
from recipes.single import train as single
from tests.tiny import ALONE, tiny_job

CPU = torch.device("cpu")


def parameters_on(*devices):
    return nn.ParameterList(nn.Parameter(torch.ones(3, device=device)) for device in devices)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_parameters_on_gpus_are_updated_by_a_fused_kernel(name):
    args = single.options(["--optimizer", name])
    with FakeTensorMode():
        fused = [
            build_optimizer(args, parameters_on("cuda:0", "cuda:1"), ALONE),
            # The CPU has the parameters of a pipeline's other stages.
            build_optimizer(args, parameters_on("cuda:0", "cpu"), ALONE),
        ]
        waves = nn.ParameterList([torch.ones(3, dtype=torch.complex64, device="cuda:0")])  # no kernel takes these
        some, all_of_one, of_two = (parameters_on("cuda:0", "cuda:0") for _ in range(3))
        for parameter, mesh in ((some[0], "a"), *((p, "a") for p in all_of_one), *zip(of_two, "ab", strict=True)):
            parameter.device_mesh = mesh
        shards = build_optimizer(args, all_of_one, ALONE)
        others = [build_optimizer(args, own, ALONE) for own in (parameters_on("cpu"), waves, some, of_two)]
    assert all(one._step_supports_amp_scaling for one in fused)
    assert [one.param_groups[0]["fused"] for one in fused] == [True, True]
    assert shards.param_groups[0]["fused"] is (True if name == "adamw" else None)
    assert [one.param_groups[0]["fused"] for one in others] == [None] * 4


@pytest.fixture
def fused(monkeypatch):
    """Let parameters pass for a GPU's: the CPU has kernels of the same name that do the same."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)


@pytest.fixture
def garbage():
    """Fill memory that nobody has written with nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run_steps(argv, gradients):
    """Take a step with each gradient, multiplied by the loss scale; return the weights after each step."""
    args = single.options(["--lr", "0.5", *argv])
    [parameter] = parameters = nn.ParameterList([torch.ones(3)])
    optimizer, scaler = build_optimizer(args, parameters, ALONE), build_scaler(args, CPU)
    seen = []
    for gradient in gradients:
        parameter.grad = scaler.scale(torch.full((3,), gradient))
        optimizer_step(args, parameters, optimizer, scaler, lambda gradients: not scaler.is_enabled())
        seen.append(parameter.tolist())
    return seen, optimizer


@pytest.mark.parametrize("argv", [(), ("--clip-grad-norm", "1")], ids=["", "clip"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_overflows_leaves_nothing_behind(name, argv, garbage, monkeypatch):
    """torch's fused SGD would read its momentum from memory that the skipped step has not written."""
    argv = ("--amp", "fp16", "--optimizer", name, *argv)
    gradients = (math.inf, 2.0, -1.0, math.inf, 0.5)
    expected, _ = run_steps(argv, gradients)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    found, optimizer = run_steps(argv, gradients)
    assert optimizer.param_groups[0]["fused"] is True
    assert found[0] == [1.0] * 3
    # SGD's step is 0.5 (2 + 0.01), or 0.5 (1 / sqrt(3) + 0.01) if clipped once unscaled; AdamW's is 0.5 + 0.005.
    step = 0.505 if name == "adamw" else 0.5 * ((3**-0.5 if "--clip-grad-norm" in argv else 2) + 0.01)
    assert found[1] == pytest.approx([1 - step] * 3, abs=1e-5), "the scaler alone checks"
    assert found[3] == found[2]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


def steps_of_late(argv, monkeypatch, fused):
    """Return both weights after each of three steps; only in the last one, the second has a gradient."""
    args = single.options(["--lr", "0.5", "--weight-decay", "0", *argv])
    with monkeypatch.context() as patch:
        if fused:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        parameters = nn.ParameterList([torch.ones(3), torch.ones(3)])
        optimizer, scaler = build_optimizer(args, parameters, ALONE), build_scaler(args, CPU)
        seen = []
        for own in (parameters[:1], parameters[:1], parameters):
            for parameter in own:
                parameter.grad = torch.full((3,), 2.0)
            optimizer_step(args, parameters, optimizer, scaler, lambda gradients: True)
            seen.append([parameter.tolist() for parameter in parameters])
    assert optimizer.param_groups[0]["fused"] is (True if fused else None)
    return seen


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_parameter_whose_first_gradient_is_late_is_updated_by_a_fused_kernel(name, monkeypatch):
    """As of a branch that is drawn, or a layer that was frozen: torch's fused SGD takes all momentum or none."""
    found, expected = (steps_of_late(("--optimizer", name), monkeypatch, fused) for fused in (True, False))
    assert found[-1][1] != [1.0] * 3
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_a_fused_kernel_gets_no_sparse_gradient(momentum, fused):
    args = single.options(["--momentum", momentum, "--weight-decay", "0", "--lr", "1", "--model", "mine:net"])
    model = nn.Embedding(4, 2, sparse=True)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(args, model, ALONE)
    model(torch.tensor([1])).sum().backward()
    optimizer_step(args, model.parameters(), optimizer, build_scaler(args, CPU), lambda gradients: True)
    assert torch.allclose(before - model.weight, torch.tensor([0.0, 1, 0, 0]).unsqueeze(1).expand(4, 2))


def test_the_host_waits_for_no_fp16_step(fused, monkeypatch):
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: reads.append(tensor))
    _, optimizer = run_steps(("--amp", "fp16"), (math.inf, 1.0))
    assert optimizer.param_groups[0]["fused"] is True
    assert reads == []


def test_a_state_that_was_written_in_another_memory_format_is_loaded_in_that_of_the_weights(fused):
    """Horovod's weights are contiguous, ddp's are channels last, and one kernel cannot take both."""
    args = single.options([])
    shape = (4, 3, 2, 2)
    written = build_optimizer(args, nn.ParameterList([torch.ones(shape)]), ALONE)
    written.param_groups[0]["params"][0].grad = torch.randn(shape)
    written.step()
    weight = nn.Parameter(torch.ones(shape).contiguous(memory_format=torch.channels_last))
    optimizer = build_optimizer(args, nn.ParameterList([weight]), ALONE)
    load_optimizer_state(optimizer, written.state_dict())
    [momentum] = [values["momentum_buffer"] for values in optimizer.state.values()]
    [expected] = [values["momentum_buffer"] for values in written.state.values()]
    assert torch.equal(momentum, expected)
    assert momentum.stride() == weight.stride() != expected.stride()


def test_a_state_that_fits_is_not_copied():
    """It is as large as the weights, or twice as large."""
    weight = nn.Parameter(torch.ones(4, 3))
    saved = {"momentum_buffer": torch.randn(4, 3)}
    optimizer = build_optimizer(single.options([]), nn.ParameterList([weight]), ALONE)
    load_optimizer_state(optimizer, {"state": {0: saved}, "param_groups": [{"params": [0]}]})
    [values] = optimizer.state.values()
    assert values["momentum_buffer"] is saved["momentum_buffer"]


@pytest.fixture
def tf32():
    """Return a function that returns whether matrix products and convolutions may use TF32."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend, value in zip(backends, (False, True), strict=True):  # torch's defaults, whatever ran before
        backend.allow_tf32 = value
    yield lambda: tuple(backend.allow_tf32 for backend in backends)
    for backend, value in zip(backends, before, strict=True):
        backend.allow_tf32 = value


@pytest.mark.parametrize(
    ("argv", "expected"), [([], (False, True)), (["--tf32"], (True, True)), (["--no-tf32"], (False, False))]
)
def test_tf32_is_for_convolutions_unless_told_otherwise(argv, expected, tf32):
    args = single.options(argv)
    assert vars(args)["tf32"] == {"--tf32": True, "--no-tf32": False}.get("".join(argv))  # as in config.json
    choose_kernels(args)
    assert tf32() == expected


NO_DECAY = ["--no-decay-norm-bias", "--weight-decay", "0.5", "--momentum", "0.9", "--lr", "0.1"]


def small_model():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 3))


def test_norms_and_biases_do_not_decay():
    model = small_model()
    optimizer = build_optimizer(single.options(NO_DECAY), model, ALONE)
    for parameter in model.parameters():
        nn.init.ones_(parameter).grad = torch.zeros_like(parameter)
    optimizer.step()
    left = {name: parameter.unique().item() for name, parameter in model.named_parameters()}
    decayed = {name for name, value in left.items() if value == pytest.approx(1 - 0.1 * 0.5)}
    assert decayed == {"0.weight", "3.weight"}
    assert {left[name] for name in left.keys() - decayed} == {1.0}


def test_a_checkpoint_numbers_parameters_alike_with_and_without_their_decay():
    model = small_model()
    settings = [NO_DECAY[1:], NO_DECAY]
    optimizers = [build_optimizer(single.options(argv), model, ALONE) for argv in settings]
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number)
        optimizers[1].state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    content = optimizer_state(optimizers[1])
    (group,) = content["param_groups"]
    assert [*content["state"]] == group["params"] == [*range(6)]
    assert "places" not in group
    for optimizer in optimizers:
        optimizer.state.clear()
        load_optimizer_state(optimizer, content)
        assert [optimizer.state[p]["momentum_buffer"].mean().item() for p in model.parameters()] == [*range(6)]
        assert optimizer_state(optimizer)["state"].keys() == content["state"].keys()


def test_beta2_is_that_of_adamw():
    args = single.options(["--optimizer", "adamw", "--beta2", "0.95"])
    optimizer = build_optimizer(args, nn.Linear(2, 2), ALONE)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


class TestLearningRate:
    def test_warm_up_is_linear_then_cosine_to_zero(self):
        args = single.options(["--lr", "0.8", "--warmup-steps", "4"])
        rates = [learning_rate(args, step, 12, 4) for step in range(13)]
        assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert rates[4] == pytest.approx(0.8)
        assert rates[8] == pytest.approx(0.4)  # half way
        assert rates[6] == pytest.approx(0.8 * (1 + math.cos(math.pi / 4)) / 2)
        assert rates[12] == pytest.approx(0, abs=1e-12)

    def test_the_cosine_ends_at_a_share_of_the_peak(self):
        args = single.options(["--lr", "0.8", "--warmup-steps", "4", "--min-lr-share", "0.25"])
        rates = [learning_rate(args, step, 12, 4) for step in (0, 4, 8, 12)]
        assert rates == pytest.approx([0.2, 0.8, 0.5, 0.2])

    def test_linear_falls_to_a_share_of_the_peak(self):
        args = single.options(["--lr", "0.8", "--lr-schedule", "linear", "--min-lr-share", "0.25"])
        rates = [learning_rate(args, step, 12, 4) for step in (0, 4, 6, 8, 12)]
        assert rates == pytest.approx([0.2, 0.8, 0.65, 0.5, 0.2])

    def test_constant_stays(self):
        args = single.options(["--lr", "0.8", "--warmup-steps", "0", "--lr-schedule", "constant"])
        assert {learning_rate(args, step, 12, 0) for step in range(12)} == {0.8}

    @pytest.mark.parametrize(("batch", "rate"), [(256, 0.5), (64, 0.125), (1024, 2.0)])
    def test_the_linear_scaling_rule(self, batch, rate):
        argv = ["--lr", "0.5", "--scale-lr", "--global-batch-size", str(batch), "--warmup-steps", "0"]
        assert learning_rate(single.options(argv), 0, 10, 0) == pytest.approx(rate)

    def test_a_warm_up_longer_than_the_run(self):
        args = single.options(["--lr", "1", "--warmup-steps", "100"])
        assert learning_rate(args, 9, 10, 100) == pytest.approx(0.1)

    @pytest.mark.parametrize(
        ("argv", "fix"),
        [
            ("--epochs 9", "give --warmup-steps 2"),
            ("--max-steps 99", "give --warmup-steps 9"),
            ("--max-steps 4 --warmup-epochs 3", "lower --warmup-epochs 3"),
        ],
    )
    def test_a_warm_up_longer_than_the_run_is_warned_of(self, argv, fix):
        """An epoch has 3 steps."""
        assert short_run(tiny_job(*argv.split())).endswith(f"stays below --lr; {fix}")

    @pytest.mark.parametrize(("steps", "done"), [(100, 0), (50, 10)])
    def test_a_warm_up_that_ends_or_a_run_that_continues_is_not_warned_of(self, steps, done):
        job = tiny_job("--max-steps", str(steps))
        job.position.step = done
        assert not short_run(job)
