"""DDP against the one-process run: the same numbers at any world size."""

import pytest

from tests.support import accuracies, largest_difference, losses, train, weights

STEPS = ("--max-steps", "60", "--seed", "1")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train("single", tmp_path_factory.mktemp("single"), 1, *STEPS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_step_equals_single(single, tmp_path, world_size):
    run = train("ddp", tmp_path, world_size, *STEPS)
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert accuracies(run) == accuracies(single)
    assert largest_difference(weights(run), weights(single)) < 1e-5
