"""Models fitted to the data: LeNet, a small vision transformer, torchvision's by name, GPTs, and your own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from recipes.common.arguments import is_user_code
from recipes.common.data import Data
from recipes.common.errors import UserError
from recipes.common.options import Options
from recipes.common.seeding import seed_all

CPU = torch.device("cpu")


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
            # ReLU after pooling gives the same result as ReLU before it, for a quarter of the work.
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
        # He et al. 2015: ReLUs then keep the scale of activations, and training starts without a plateau. The last
        # layer keeps torch's smaller weights, so that the first predictions are nearly uniform.
        for module in [*self.features, *self.classifier[:-1]]:
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, S, S) to logits (B, num_classes)."""
        return self.classifier(self.features(images))


def _vit(channels: int, image_size: int, num_classes: int) -> nn.Module:
    from recipes.common.models.vit import VisionTransformer

    return VisionTransformer(channels, image_size, num_classes)


BUILT_IN_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {"lenet": LeNet, "vit-tiny": _vit}
MIN_IMAGE_SIZE = {"lenet": 8, "vit-tiny": 2}
GPTS = {
    "gpt-tiny": {"width": 64, "depth": 4, "heads": 4},  # 0.2 M parameters
    "gpt-small": {"width": 768, "depth": 12, "heads": 12},  # 85 M, and the vocabulary's 768 each: GPT-2 small
    "gpt-medium": {"width": 1024, "depth": 24, "heads": 16},  # 302 M: GPT-2 medium
    "gpt-xl": {"width": 2048, "depth": 24, "heads": 16},  # 1.2 G: GPT-3 XL
}
GPT_NAMES = " or ".join(", ".join(GPTS).rsplit(", ", 1))


def build_model(args: Options, data: Data, device: torch.device = CPU) -> nn.Module:
    """Return --model on the CPU, with weights drawn from --seed: the same on every rank.

    Raises UserError if torchvision does not have the name (with the nearest one), the model does not accept the
    data, or the user's code does not fit together. `device` is where the model will run.
    """
    model = make_model(args, data)
    if args.has_user_code:
        from recipes.common.models.user_model import check_fit, check_memory, check_on

        check_memory(model, args)
        check_on(device, partial(check_fit, device=device), model, args, data)
    if args.channels_last:
        # Module.to() would also convert the weights of 3-D convolutions, which have no such layout. contiguous()
        # would leave the strides of weights with one input channel, which PyTorch takes for its own layout.
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.ndim == 4:
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
        if is_user_code(args.model):
            from recipes.common.models.user_model import check_channels_last, check_on

            check_on(device, check_channels_last, model, args, data)
    return model


def compile_forward(module: nn.Module, args: Options) -> None:
    """With --compile, compile a module's forward(), without the hooks around it, such as FSDP's.

    module.compile() traces hooks and forward() in one frame. Where torch skips that frame (2.11 always, later ones
    because of FSDP's hooks), it compiles nothing of a class of its own, such as nn.Sequential.
    """
    if args.compile:
        module.forward = torch.compile(module.forward, mode=args.compile_mode)


def make_model(args: Options, data: Data) -> nn.Module:
    """Return --model, built by its name or by the user's function; raises UserError as build_model() does."""
    torch.manual_seed(args.seed)  # GPUs, too
    seed_all(args.seed)
    has_tokens = data.kind in ("tokens", "bytes")
    if is_user_code(args.model):
        from recipes.common.models.user_model import build_user_model

        model: nn.Module = build_user_model(args, data)
    elif args.model in GPTS:
        if not has_tokens:
            fix = "use --data text or tokens"
            raise UserError(f"--model {args.model} takes tokens, and --data {args.data} has none; {fix}")
        from recipes.common.models.gpt import GPT

        model = GPT(data.num_classes or 0, **GPTS[args.model])
    elif data.has_images:
        model = _image_model(args, data)
    else:
        fix = f"use {GPT_NAMES}" if has_tokens else "give your own by --model package.module:function"
        raise UserError(f"--model {args.model} takes images, and --data {args.data} has {data.input}; {fix}")
    return model


def _image_model(args: Options, data: Data) -> nn.Module:
    if args.model not in BUILT_IN_MODELS:
        from recipes.common.models.torchvision_models import build_torchvision_model

        return build_torchvision_model(args.model, [*BUILT_IN_MODELS, *GPTS], data)
    if data.image_size < (least := MIN_IMAGE_SIZE[args.model]):
        raise UserError(f"--model {args.model} needs images of {least} pixels and more, got {data.image_size}")
    return BUILT_IN_MODELS[args.model](data.channels, data.image_size, data.num_classes or 0)
