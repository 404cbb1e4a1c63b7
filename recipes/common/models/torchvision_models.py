"""--model NAME: torchvision's models. Their import takes over a second, paid only by those who use one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torchvision import models

from recipes.common.data import Data
from recipes.common.errors import UserError, nearest

SMALL_IMAGE = 64
"""Up to this image size, a ResNet gets the stem of He et al.'s CIFAR variant instead of ImageNet's."""


def build_torchvision_model(name: str, others: Sequence[str], data: Data) -> nn.Module:
    """Return a classification model of torchvision, on the CPU, for the data's image size and channels.

    Raises UserError if torchvision does not have the name (with the nearest of its names and of `others`), or the
    model does not accept the images.
    """
    names = models.list_models(module=models)
    if name not in names:
        hint = nearest(name, [*others, *names])
        raise UserError(f"--model: torchvision has no classification model {name!r}{hint}")
    settings: dict[str, object] = {"num_classes": data.num_classes}
    if name.startswith("vit_"):
        settings["image_size"] = data.image_size
    if name in ("googlenet", "inception_v3"):
        # torchvision trained its weights of these two on pixels from -1 to 1, to which transform_input maps ours.
        settings.update(aux_logits=False, init_weights=True, transform_input=data.channels == 3)
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
    """Make the first convolution take the data's number of channels."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if first.in_channels != channels:
        first.in_channels = channels
        first.weight = nn.Parameter(torch.empty(first.out_channels, channels, *first.kernel_size))
        first.reset_parameters()
