"""Models fitted to the data: LeNet, a small vision transformer, torchvision's by name, GPTs, and your own."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from recipes.common.data import Data
from recipes.common.errors import UserError, nearest
from recipes.common.options import Options, is_reference

SMALL_IMAGE = 64
"""Up to this side, a ResNet gets the stem of He et al.'s CIFAR variant instead of ImageNet's."""


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling, for square images of 8 pixels and more.

    Source: LeCun et al. 1998, Gradient-based learning applied to document recognition.
    """

    is_sequence = True

    def __init__(self, channels: int, image_size: int, num_classes: int) -> None:
        super().__init__()
        # A 5x5 kernel without padding needs 12 pixels to leave something to pool; smaller images are padded.
        padding = 0 if image_size >= 12 else 2
        self.features = nn.Sequential(
            # The largest of four and then ReLU is the same as ReLU of all four first, for a quarter of the work.
            nn.Conv2d(channels, 6, kernel_size=5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, kernel_size=5, padding=padding),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        side = (image_size // 2 - 4 + 2 * padding) // 2
        self.classifier = nn.Sequential(
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )
        # He et al. 2015: ReLUs then keep the scale of what passes, and training starts without a plateau. The last
        # layer keeps torch's smaller weights, so that the first guesses are even.
        for module in [*self.features, *self.classifier[:-1]]:
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, S, S) to logits (B, num_classes)."""
        return self.classifier(self.features(images))


class VisionTransformer(nn.Module):
    """A small vision transformer for square images of any size: at most 8 x 8 patches, pre-norm blocks.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, with the mean of all tokens in place of
    a class token as in Beyer et al. 2022, https://arxiv.org/abs/2205.01580.
    """

    is_sequence = True

    def __init__(
        self, channels: int, image_size: int, num_classes: int, width: int = 64, depth: int = 6, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(channels, image_size, width)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(depth)
            )
        )
        self.head = nn.Sequential(MeanToken(), nn.LayerNorm(width), nn.Linear(width, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, S, S) to logits (B, num_classes)."""
        return self.head(self.blocks(self.embedding(images)))


class PatchEmbedding(nn.Module):
    """Map images (B, C, S, S) to tokens (B, patches, width) that know their place."""

    def __init__(self, channels: int, image_size: int, width: int) -> None:
        super().__init__()
        patch = max(2, math.ceil(image_size / 8))  # 8 pixels: 4 x 4 patches of 2; 224: 8 x 8 of 28
        side = math.ceil(image_size / patch)
        padding = math.ceil((side * patch - image_size) / 2)
        self.project = nn.Conv2d(channels, width, kernel_size=patch, stride=patch, padding=padding)
        self.position = nn.Parameter(0.02 * torch.randn(1, side * side, width))

    def forward(self, images: Tensor) -> Tensor:
        """Cut into patches, project each, and add its position."""
        return self.project(images).flatten(2).transpose(1, 2) + self.position


class MeanToken(nn.Module):
    """Average tokens (B, T, width) to (B, width)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean of the tokens."""
        return tokens.mean(dim=1)


OWN_MODELS = {"lenet": LeNet, "vit-tiny": VisionTransformer}
MIN_IMAGE_SIZE = {"lenet": 8, "vit-tiny": 2}
GPTS = {
    "gpt-tiny": {"width": 64, "depth": 4, "heads": 4},  # 0.2 M parameters
    "gpt-small": {"width": 768, "depth": 12, "heads": 12},  # 85 M: GPT-2 small, but for its vocabulary
}


def build_model(args: Options, data: Data) -> nn.Module:
    """Return --model on the CPU, with weights drawn from --seed: the same on every rank.

    Raises:
        UserError: a name that torchvision does not have (with the nearest), data that the model does not take, or
            code of the user's that does not fit together.
    """
    model = make_model(args, data)
    check_model(model, args, data)
    return model.to(memory_format=torch.channels_last) if args.channels_last else model


def make_model(args: Options, data: Data) -> nn.Module:
    """Return --model as its name or the user's function makes it; raises UserError as build_model() does."""
    torch.manual_seed(args.seed)
    has_tokens = data.kind in ("tokens", "bytes")
    if is_reference(args.model):
        from recipes.common.models.own import build_own_model

        model: nn.Module = build_own_model(args, data)
    elif args.model in GPTS:
        if not has_tokens:
            raise UserError(f"--model {args.model} takes tokens, and --data {args.data} has none; use --data text")
        from recipes.common.models.gpt import GPT

        model = GPT(data.num_classes or 0, **GPTS[args.model])
    elif data.has_images:
        model = _image_model(args, data)
    else:
        fix = f"use {' or '.join(GPTS)}" if has_tokens else "give your own by --model package.module:function"
        raise UserError(f"--model {args.model} takes images, and --data {args.data} has {data.input}; {fix}")
    return model


def check_model(model: nn.Module, args: Options, data: Data) -> None:
    """Hold code of the user's to what the recipes expect; a model on the meta device, to shapes alone.

    Raises UserError if model, data and task do not fit together.
    """
    if any(is_reference(text) for text in (args.model, args.data, args.task)):
        from recipes.common.models.own import check_fit, check_sequence

        check_fit(model, args, data)
        if getattr(model, "is_sequence", False):
            check_sequence(model, [module for _, module in layers(model)], args, data)


def _image_model(args: Options, data: Data) -> nn.Module:
    if args.model not in OWN_MODELS:
        return _torchvision_model(args.model, data)
    if data.image_size < (least := MIN_IMAGE_SIZE[args.model]):
        raise UserError(f"--model {args.model} needs images of {least} pixels and more, got {data.image_size}")
    return OWN_MODELS[args.model](data.channels, data.image_size, data.num_classes or 0)


FLATTENED_BEFORE = {"ResNet": "fc", "VGG": "classifier", "AlexNet": "classifier"}
"""Families of torchvision that are a sequence of layers but for a flattening that forward() does itself."""


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model as a sequence: applying the modules in order equals model(images).

    The names are those of the whole model: layer "layer1.0" holds the parameters "layer1.0.conv1.weight", ...

    Raises UserError if the model's forward() is more than a sequence of its parts.
    """
    family = type(model).__name__
    is_sequence = isinstance(model, nn.Sequential) or getattr(model, "is_sequence", False)
    if not is_sequence and family not in FLATTENED_BEFORE:
        known = ", ".join([*OWN_MODELS, *GPTS, "resnet*, resnext*, wide_resnet*, vgg* and alexnet"])
        raise UserError(
            f"a {family} is no plain sequence of layers and cannot be split; --model may be {known}, or your "
            "own that applies its children in order and has is_sequence = True"
        )
    sequence: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        if name == FLATTENED_BEFORE.get(family):
            sequence.append(("flatten", nn.Flatten()))
        inner = layers(child) if isinstance(child, nn.Sequential) else [("", child)]
        sequence += [(f"{name}.{path}".removesuffix("."), module) for path, module in inner]
    return sequence


def _torchvision_model(name: str, data: Data) -> nn.Module:
    from torchvision import models  # over a second: paid only by those who use it

    names = models.list_models(module=models)
    if name not in names:
        raise UserError(f"--model: torchvision has no {name!r}{nearest(name, [*OWN_MODELS, *GPTS, *names])}")
    settings: dict[str, object] = {"num_classes": data.num_classes}
    if name.startswith("vit_"):
        settings["image_size"] = data.image_size
    if name in ("googlenet", "inception_v3"):
        settings.update(aux_logits=False, init_weights=True)
    refusal = f"--model {name} does not take images of {data.image_size}x{data.image_size}"
    try:
        model = models.get_model(name, weights=None, **settings)
        if isinstance(model, models.ResNet) and data.image_size <= SMALL_IMAGE:
            model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
            model.maxpool = nn.Identity()
        _fit_channels(model, data.channels)
        probe = copy.deepcopy(model).to("meta").eval()  # shapes only: no memory, no arithmetic
        probe(torch.empty(2, data.channels, data.image_size, data.image_size, device="meta"))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{refusal} ({reason}); use larger images or another model") from None
    return model


def _fit_channels(model: nn.Module, channels: int) -> None:
    """Let the first convolution read as many channels as the data have."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if first.in_channels != channels:
        first.in_channels = channels
        first.weight = nn.Parameter(torch.empty(first.out_channels, channels, *first.kernel_size))
        first.reset_parameters()
