"""A model as a sequence of layers, for the code that splits it or checks it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from recipes.common.errors import UserError

FLATTENED_BEFORE = {"ResNet": "fc", "VGG": "classifier", "AlexNet": "classifier"}
"""torchvision families that are a sequence of layers except that forward() flattens before this child."""


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a model as a sequence: applying the modules in order equals model(images).

    The names are the whole model's: layer "layer1.0" holds the parameters "layer1.0.conv1.weight", ...

    Raises UserError if the model's forward() is more than a sequence of its parts.
    """
    family = type(model).__name__
    is_sequence = is_sequential(model) or getattr(model, "is_sequence", False)
    # A class of the user's may have the same name, and another forward().
    is_torchvisions = type(model).__module__.startswith("torchvision.models.")
    flattened_before = FLATTENED_BEFORE.get(family) if is_torchvisions else None
    if not is_sequence and not flattened_before:
        known = "lenet, vit-tiny, gpt-*, resnet*, resnext*, wide_resnet*, vgg* and alexnet"
        own = "your own that applies its children in order and has is_sequence = True"
        what = f"--model: {family} is not a plain sequence of layers and cannot be split"
        raise UserError(f"{what}; use {known}, or {own}")
    sequence: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():  # named_children() leaves out a module that occurs again
        if child is None:
            continue
        if name == flattened_before:
            sequence.append(("flatten", nn.Flatten()))
        inner = layers(child) if is_sequential(child) else [("", child)]
        sequence += [(f"{name}.{path}".removesuffix("."), module) for path, module in inner]
    return sequence


def sparse_embedding(model: nn.Module) -> str | None:
    """Return the name of an embedding that is trained with sparse gradients, "it" if it is the model, or None."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse and module.weight.requires_grad:
            return name or "it"
    return None


def containers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model and the sequences in it that layers() takes apart."""
    yield model
    for child in model.children():
        if is_sequential(child):
            yield from containers(child)


def is_sequential(module: nn.Module) -> bool:
    """Return whether a module applies its children in order: an nn.Sequential without a forward() of its own."""
    return getattr(module.forward, "__func__", None) is nn.Sequential.forward
