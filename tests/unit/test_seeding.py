"""Random numbers and the order of samples, as functions of the seed, the step and the rank."""

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.common.seeding import hash_seed, permutation, seed_step

CPU = torch.device("cpu")


class TestSeeding:
    def test_permutations_are_whole_and_differ(self):
        orders = [permutation(100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        for order in orders:
            assert sorted(order.tolist()) == list(range(100))
        assert len({tuple(order.tolist()) for order in orders}) == 4
        assert torch.equal(permutation(100, 1, 1), orders[3])

    def test_a_permutation_takes_no_more_memory_than_itself(self):
        """Of 100 million samples, each rank would take 3.3 GB for its 0.8 GB, in each epoch."""
        made = []

        class Made(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                made.append(func(*args, **(kwargs or {})))
                return made[-1]

        with Made():
            permutation(1000, 0, 0)
        assert sum({tensor.data_ptr(): tensor.nbytes for tensor in made}.values()) == 8 * 1000

    @pytest.mark.parametrize("size", [12, 14])
    def test_blocks_stay_together(self, size):
        order = permutation(size, 1, 0, 4).tolist()
        assert sorted(order) == list(range(size))
        starts = [order.index(first) for first in range(0, size, 4)]
        assert sorted(starts) != starts, "in another order"
        for first, start in zip(range(0, size, 4), starts, strict=True):
            block = list(range(first, min(first + 4, size)))
            assert order[start : start + len(block)] == block

    def test_permutation_is_the_same_in_every_version(self):
        """A checkpoint must always continue with the same samples: their order is part of its format."""
        assert permutation(10, 0, 0).tolist() == [2, 1, 7, 8, 6, 0, 3, 5, 9, 4]
        assert (hash_seed(0, 0), hash_seed(1, 2, 3)) == (6017775124710473527, 7510213797696614745)

    def test_mix_spreads_close_numbers(self):
        values = {hash_seed(seed, step, rank) for seed in range(8) for step in range(32) for rank in range(8)}
        assert len(values) == 8 * 32 * 8
        assert all(0 <= value < 2**63 for value in values)
        ones = sum(value.bit_count() for value in values) / len(values)
        assert ones == pytest.approx(31.5, abs=0.3)  # 2048 values: a standard deviation of 4 / sqrt(2048) = 0.09

    def test_a_step_draws_the_same_again_and_ranks_differ(self):
        def draw(*place):
            seed_step(*place, [CPU])
            return [*torch.rand(2).tolist(), np.random.rand(), random.random()]

        assert draw(0, 5, 1) == draw(0, 5, 1)
        assert len({tuple(draw(seed, step, rank)) for seed in (0, 1) for step in (5, 6) for rank in (0, 1)}) == 8
