"""Models by name: what fits the data, and the warning about those that draw random numbers."""

import dataclasses

import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from recipes.common.data.imagefolder import MEAN, STD
from recipes.common.models.models import build_model
from recipes.common.models.rank_dependence import dropout_warning
from recipes.common.task import Classification
from recipes.single.train import options
from tests.conftest import refused
from tests.tiny import tiny_data


class TestModels:
    @pytest.mark.parametrize("size", [8, 11, 12, 28, 32, 64])
    @pytest.mark.parametrize("channels", [1, 3])
    def test_lenet_fits_any_size(self, size, channels):
        data = tiny_data(channels=channels, size=size)
        model = build_model(options([]), data)
        assert model(torch.zeros(2, channels, size, size)).shape == (2, 10)

    def test_lenet_on_mnist_is_the_one_of_the_paper(self):
        model = build_model(options([]), tiny_data(size=28))
        assert sum(parameter.numel() for parameter in model.parameters()) == 61_706

    @pytest.mark.parametrize(
        ("name", "channels", "size"),
        [*(("resnet18", *s) for s in [(1, 8), (3, 96), (3, 32)]), ("mobilenet_v2", 3, 32), ("vit_b_16", 3, 32)],
    )
    def test_torchvision_models_fit(self, name, channels, size):
        data = tiny_data(channels=channels, size=size, classes=7)
        model = build_model(options(["--model", name]), data).to("meta").eval()
        assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, 7)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_googlenet_gets_the_pixels_that_its_published_weights_expect(self, channels):
        model = build_model(options(["--model", "googlenet"]), tiny_data(channels=channels, size=64)).eval()
        seen = []
        model.conv1.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        mean, std = (values.reshape(1, 3, 1, 1) / 255 for values in (MEAN, STD))
        pixels = torch.rand(1, channels, 64, 64)
        with torch.no_grad():
            model((pixels - mean) / std if channels == 3 else pixels)
        expected = 2 * pixels - 1 if channels == 3 else pixels
        torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-5)

    def test_resnet_keeps_its_own_stem_for_large_images(self):
        for size, kernel in ((32, 3), (96, 7)):
            model = build_model(options(["--model", "resnet18"]), tiny_data(channels=3, size=size))
            assert model.conv1.kernel_size == (kernel, kernel)

    @pytest.mark.parametrize(
        ("name", "size", "words"),
        [
            ("lenet", 7, "needs images of 8 pixels and more, got 7"),
            ("vit_b_16", 28, "--model vit_b_16 does not take images of 28x28"),
            ("alexnet", 8, "--model alexnet does not take images of 8x8"),
            ("resnet19", 32, "torchvision has no classification model 'resnet19'; did you mean 'resnet1"),
            ("lenett", 32, "did you mean 'lenet'?"),
        ],
    )
    def test_what_does_not_fit_is_refused_in_one_line(self, name, size, words):
        with refused(words):
            build_model(options(["--model", name]), tiny_data(channels=3, size=size))

    def test_weights_depend_on_the_seed_alone(self):
        torch.manual_seed(99)
        one = build_model(options(["--seed", "5"]), tiny_data())
        torch.manual_seed(98)
        two, other = (build_model(options(["--seed", seed]), tiny_data()) for seed in ("5", "6"))
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
        assert not torch.equal(next(one.parameters()), next(other.parameters()))

    def test_channels_last_changes_the_layout_alone(self):
        plain, other = (build_model(options(argv), tiny_data(channels=3)) for argv in (["--no-channels-last"], []))
        assert other.features[3].weight.is_contiguous(memory_format=torch.channels_last)
        # With one input channel, weights of torch's own strides are in both layouts, and bf16 is a fifth slower.
        model = build_model(options([]), tiny_data(channels=1))
        strides = [p.stride()[1:] for p in model.parameters() if p.ndim == 4]
        assert strides == [(1, 5, 1), (1, 30, 6)]
        assert torch.equal(plain.features[3].weight, other.features[3].weight)

    def test_a_buffer_of_your_own_model_that_is_a_view_gets_memory_for_its_own_numbers(self):
        """A broadcast writes to all its elements, and a resume copies into them. Neither knows a conjugate."""
        words = ["--model", f"{__name__}:with_views_as_buffers"]
        model = build_model(options(words), dataclasses.replace(tiny_data(), task=Classification()))
        model.load_state_dict(model.state_dict())
        assert [b.untyped_storage().nbytes() for b in model.buffers()] == [32, 16, 8, 36]
        assert [model.wave.is_conj(), model.wave.tolist()] == [False, [1 - 1j, 1 - 1j]]
        assert [model.phase.is_neg(), model.phase.tolist()] == [False, [-1, -1]]


def with_views_as_buffers(data):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model.register_buffer("scale", torch.ones(1).expand(8))
    model.register_buffer("wave", torch.full((2,), 1 + 1j).conj())
    model.register_buffer("phase", torch.full((2,), 1 + 1j).conj().imag)
    model[1].register_buffer("mask", torch.ones(1).expand(9), persistent=False)
    return model


def test_a_model_that_draws_numbers_has_a_warning():
    drawing = (
        *(nn.Dropout(0.1), nn.Dropout2d(), nn.MultiheadAttention(4, 2, dropout=0.1)),
        *(nn.LSTM(2, 2, num_layers=2, dropout=0.1), StochasticDepth(0.1, "row")),
    )
    for layer in drawing:
        said = dropout_warning(nn.Sequential(nn.Linear(2, 2), layer))
        assert said.startswith("warning: dropout draws other numbers on each rank")
    still = (nn.Dropout(0), nn.MultiheadAttention(4, 2), nn.LSTM(2, 2), nn.Linear(2, 2), StochasticDepth(0, "row"))
    assert [dropout_warning(nn.Sequential(layer)) for layer in still] == [""] * 5
