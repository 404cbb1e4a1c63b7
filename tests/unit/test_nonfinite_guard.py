"""What a step's norm and loss decide, without any process group."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from recipes.common.errors import UserError
from recipes.common.nonfinite import Guard, NonFiniteError
from recipes.common.optim import clip_gradients
from recipes.common.skipping import SkippingGuard
from recipes.common.world.agreement import raise_first

SCALER = torch.amp.GradScaler("cpu", enabled=False)
NAN, ONE = torch.tensor(float("nan")), torch.tensor(1.0)


class Stop:
    error = None

    def fail(self, error):
        self.error = self.error or error


def guard_of(mode):
    return {"stop": Guard, "skip": SkippingGuard}[mode](torch.device("cpu"), Stop(), SCALER)


@pytest.mark.parametrize(("first", "later", "what"), [(ONE, NAN, "a gradient"), (NAN, ONE, "the loss")])
def test_a_gpu_is_asked_only_when_it_is_waited_for_and_knows_the_first_bad_step(first, later, what):
    guard = guard_of("stop")
    guard._is_lazy = True  # as on a GPU
    for step, gradient, loss in [(1, ONE, ONE), (2, NAN, first), (3, NAN, later)]:
        assert guard.check_gradients(step, loss, [gradient])
    assert guard.stop.error is None
    guard.read_back(3)
    assert str(guard.stop.error).startswith(f"{what} of step 2 is not finite; no checkpoint was written since")


@pytest.mark.parametrize(("mode", "sees_all"), [("stop", False), ("skip", True)])
def test_to_leave_a_step_out_all_gradients_are_looked_at(mode, sees_all):
    guard = guard_of(mode)
    assert guard.check_gradients(1, ONE, [ONE, NAN]) is not sees_all
    assert not guard.check_gradients(2, ONE, [NAN, ONE])


class Averaged(nn.Module):
    """Keeps a running mean in place or in a new tensor."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.ones(2))

    def forward(self, inputs):
        mean = self.mean if self.in_place else self.mean.clone()
        self.mean = mean.lerp_(inputs.mean(0), 0.5)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_skipped_step_leaves_buffers_as_they_were(in_place):
    guard, model = guard_of("skip"), nn.Sequential(Averaged(in_place))
    before = model[0].mean
    for step, value in enumerate((3.0, math.nan, math.nan, 5.0), 1):
        guard.keep_buffers(model)
        model(torch.full((4, 2), value))
        assert guard.check_gradients(step, ONE, [torch.tensor(value)]) is math.isfinite(value)
        guard.restore_buffers()
    assert model[0].mean.tolist() == [3.5, 3.5]
    assert (model[0].mean is before) == in_place


def test_spoilt_weights_are_not_saved():
    guard = guard_of("stop")
    assert guard.is_sound(4, [ONE, ONE])
    assert not guard.is_sound(5, [ONE, NAN])
    assert guard_of("stop").is_sound(5, [torch.ones(2, dtype=torch.complex64)])
    assert not guard_of("stop").is_sound(5, [torch.complex(torch.ones(2), torch.full((2,), math.nan))])
    assert str(guard.stop.error).startswith("a gradient of step 5 is not finite; it has corrupted the weights")
    assert not guard.is_sound(6, [ONE])


def test_weights_on_several_devices_are_read_together():
    """A pipeline's model is on several GPUs; fake tensors have devices, but no values to read."""
    with FakeTensorMode():
        model = [torch.ones(3, device=name) for name in ("cuda:0", "cuda:1", "cpu")]
        with pytest.raises(DataDependentOutputException):
            guard_of("stop").is_sound(4, model)


def test_a_gradient_on_another_gpu_than_the_loss_is_checked():
    """As in a pipeline within a process, whose last GPU has GPT's tied matrix, the first parameter."""
    with FakeTensorMode():
        guard = Guard(torch.device("cuda:0"), Stop(), SCALER)
        loss, gradient = (torch.ones((), device=name) for name in ("cuda:0", "cuda:1"))
        assert guard.check_gradients(1, loss, [gradient])


def test_a_collapsed_loss_scale_fails():
    guard = guard_of("skip")
    guard.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    guard.read_back(20)
    assert guard.stop.error is None
    guard.scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    guard.read_back(21)
    assert "step 21 is not finite; the loss scale has collapsed to 0.5, so steps" in str(guard.stop.error)
    assert not guard.is_sound(21, [ONE])


def test_skips_in_a_row_are_bounded_and_a_good_step_starts_again():
    guard = guard_of("skip")
    for step in range(10):
        assert not guard.check_gradients(step, NAN, [NAN])
    assert guard.check_gradients(10, ONE, [ONE])
    for step in range(10):
        assert not guard.check_gradients(step, NAN, [NAN])
    assert guard.stop.error is None
    assert not guard.check_gradients(21, NAN, [NAN])
    assert guard.skipped == 20
    assert guard.stop.error.status == 1


def test_the_line_names_the_ranks_whose_own_loss_was_bad():
    errors = [NonFiniteError(7, False, "hint"), None, NonFiniteError(7, True, "hint")]
    sent = pickle.loads(pickle.dumps(errors))
    with pytest.raises(NonFiniteError, match=r"^the loss of step 7 is not finite on rank 2; hint$"):
        raise_first(sent)
    with pytest.raises(NonFiniteError, match=r"^a gradient of step 7 is not finite; hint$"):
        raise_first([errors[0], None])
    with pytest.raises(NonFiniteError, match=r"^the loss of step 7 is not finite on ranks 0-8190; hint$"):
        raise_first([NonFiniteError(7, True, "hint")] * 8191 + [None])


def test_other_errors_keep_their_rank_and_status():
    with pytest.raises(UserError, match=r"^rank 1: no space$") as caught:
        raise_first(pickle.loads(pickle.dumps([None, UserError("no space")])))
    assert caught.value.status == 2
    passing = UserError("no answer")
    passing.status = 1
    with pytest.raises(UserError, match=r"^rank 1: no answer$") as caught:
        raise_first(pickle.loads(pickle.dumps([None, passing])))
    assert caught.value.status == 1
    raise_first([None, None])


def test_an_error_that_names_its_rank_is_not_given_another():
    """Ranks hear of a failed sharded checkpoint from each other, and one of them may vote on it first."""
    with pytest.raises(UserError, match=r"^rank 2: no space$"):
        raise_first([None, UserError("rank 2: no space"), UserError("rank 2: no space")])


@pytest.fixture
def torch_2_11(monkeypatch):
    """Make torch's functions refuse sparse gradients, as in torch 2.11."""
    norm = nn.utils.get_total_norm

    def refuse(tensors, *args, **options):
        if any(tensor.is_sparse for tensor in tensors):
            raise NotImplementedError("Could not run 'aten::linalg_vector_norm'")
        return norm(tensors, *args, **options)

    monkeypatch.setattr(nn.utils, "get_total_norm", refuse)


@pytest.mark.usefixtures("torch_2_11")
@pytest.mark.parametrize("choice", ["stop", "skip"])
@pytest.mark.parametrize(("value", "is_allowed"), [(1.0, True), (math.nan, False)])
def test_a_sparse_gradient_is_checked(choice, value, is_allowed):
    gradient = torch.sparse_coo_tensor([[1]], [[value, 1.0]], (4, 2), check_invariants=True)
    assert guard_of(choice).check_gradients(1, ONE, [gradient]) is is_allowed


@pytest.mark.usefixtures("torch_2_11")
def test_a_sparse_gradient_is_clipped():
    weights = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False)
    sparse, dense = (module.weight for module in weights)
    sparse.grad = torch.sparse_coo_tensor([[1, 1]], [[3.0, 0.0], [0.0, 4.0]], (4, 2), check_invariants=True)
    dense.grad = torch.tensor([[0.0, 12.0]])
    assert float(clip_gradients([sparse, dense], 1.0)) == 13
    assert torch.allclose(sparse.grad.to_dense()[1], torch.tensor([3 / 13, 4 / 13]))
    assert torch.allclose(dense.grad, torch.tensor([[0.0, 12 / 13]]))


def test_a_step_without_gradients_is_allowed():
    assert guard_of("stop").check_gradients(1, ONE, [])
