"""Weights in Hugging Face's format, safetensors: tensors by name, and no code that reading could run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.common.checkpoint.checkpoint import reason_of
from recipes.common.errors import UserError
from recipes.common.folders import check_file


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of all files that an index (.json) names, on the CPU.

    Raises:
        UserError: a file is missing or damaged, or the package safetensors is.
        OSError: a file cannot be read.
    """
    safetensors = _package(path)
    tensors: dict[str, Tensor] = {}
    try:
        names = {path.name}
        if path.suffix == ".json":
            names = set(json.loads(path.read_bytes())["weight_map"].values())
        for name in sorted(names):
            check_file(path.parent / name)
            open(path.parent / name, "rb").close()  # the package takes each error for "no such file"
            tensors |= safetensors.torch.load_file(path.parent / name)
    except FileNotFoundError as error:
        raise UserError(f"{path}: {reason_of(error)}; give a file that exists, or copy what is missing") from None
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {reason_of(error)}; it is damaged: copy it again") from None
    return tensors


def write_safetensors(weights: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a file; tied ones are written once for each name, since names cannot share a tensor there.

    Raises:
        UserError: the package safetensors is missing.
        OSError: the file cannot be written, or cannot hold a value.
    """
    safetensors = _package(path)
    own: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in weights.items():
        if not isinstance(value, Tensor):  # of get_extra_state()
            raise OSError(f"safetensors hold only tensors, and {name} is none")
        storage = value.untyped_storage().data_ptr()
        own[name] = (
            value.clone(memory_format=torch.contiguous_format) if storage in storages else value.contiguous()
        )
        storages.add(storage)
    try:
        safetensors.torch.save_file(own, path, metadata={"format": "pt"})  # transformers refuses files without it
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None
    except KeyError as error:
        raise OSError(f"safetensors have no {error.args[0]}") from None


def _package(path: Path) -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise UserError(f"{path.name} needs the package safetensors; pip install safetensors") from None
    return safetensors
