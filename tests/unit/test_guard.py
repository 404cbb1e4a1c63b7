"""What a step's norm and loss decide, without any process group."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from recipes.common.errors import UserError
from recipes.common.nonfinite import Guard, NonFiniteError, raise_first

NAN, ONE = torch.tensor(float("nan")), torch.tensor(1.0)


class Stop:
    error = None

    def fail(self, error):
        self.error = self.error or error


def guard_of(mode):
    return Guard(SimpleNamespace(on_nonfinite=mode), torch.device("cpu"), Stop())


def test_a_gpu_is_asked_only_when_it_is_waited_for_and_knows_the_first_bad_step():
    guard = guard_of("stop")
    guard._is_lazy = True  # as on a GPU
    for step, norm, loss in [(1, ONE, ONE), (2, NAN, ONE), (3, NAN, NAN)]:
        assert guard.allows(step, loss, norm)
    assert guard.stop.error is None
    guard.settle()
    assert str(guard.stop.error).startswith("a gradient of step 2 is not finite; no checkpoint was written since")


def test_skips_in_a_row_are_bounded_and_a_good_step_starts_again():
    guard = guard_of("skip")
    for step in range(10):
        assert not guard.allows(step, NAN, NAN)
    assert guard.allows(10, ONE, ONE)
    for step in range(10):
        assert not guard.allows(step, NAN, NAN)
    assert guard.stop.error is None
    assert not guard.allows(21, NAN, NAN)
    assert guard.skipped == 20
    assert guard.stop.error.status == 1


def test_the_line_names_the_ranks_whose_own_loss_was_bad():
    errors = [NonFiniteError(7, False, "hint"), None, NonFiniteError(7, True, "hint")]
    sent = pickle.loads(pickle.dumps(errors))
    with pytest.raises(NonFiniteError, match=r"^the loss of step 7 is not finite on rank 2; hint$"):
        raise_first(sent)
    with pytest.raises(NonFiniteError, match=r"^a gradient of step 7 is not finite; hint$"):
        raise_first([errors[0], None])


def test_other_errors_keep_their_rank_and_status():
    with pytest.raises(UserError, match=r"^rank 1: no space$") as caught:
        raise_first(pickle.loads(pickle.dumps([None, UserError("no space")])))
    assert caught.value.status == 2
    raise_first([None, None])
