"""Models in the formats of other tools. What a format cannot say is refused, never left to its defaults.

How that is known: the file is read back before it is written, and must be the same model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.position import has_class_token
from vitscale.weights.adapt import FREE
from vitscale.weights.bigvision import from_bigvision, to_bigvision
from vitscale.weights.content import Preprocessing, Weights
from vitscale.weights.huggingface import from_huggingface, to_huggingface
from vitscale.weights.io import save_model
from vitscale.weights.mmpretrain import from_mmpretrain, to_mmpretrain
from vitscale.weights.names import unwrapped
from vitscale.weights.onnx import write_onnx
from vitscale.weights.write import save_tensors, write_file, write_folder

Format: TypeAlias = Literal["vitscale", "timm", "huggingface", "mmpretrain", "bigvision", "onnx"]

_RESAMPLE = {"nearest": 0, "bilinear": 2, "bicubic": 3}


def export_model(
    path: str | Path,
    state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    format: Format,
    preprocessing: Preprocessing | None,
    class_names: Sequence[str] | None,
) -> None:
    """Write a model for another tool to load.

    Args:
        path: The file; with `huggingface` a folder, where there must be nothing yet.
        state: The tensors under vitscale's names, wrappers' prefixes allowed.
        config: The model that they are of.
        format: `vitscale` and `timm` are safetensors, `mmpretrain` is a .pth, `bigvision` a .npz in float32, and `onnx`
            takes float32 images of any batch.
        preprocessing: What the model expects of images.
        class_names: What the outputs are called.

    Raises:
        UserError: The format has no place for this model, or the file cannot be written.
    """
    if format == "vitscale" or format == "timm":
        save_model(path, state, config, preprocessing=preprocessing, class_names=class_names, names=format)
        return
    plain, path = unwrapped(state), Path(path)
    if format == "onnx":
        write_onnx(path, plain, config, preprocessing=preprocessing, class_names=class_names)
        return
    if format == "huggingface":
        tensors, description = to_huggingface(plain, config, class_names)
        _same_model(config, plain, from_huggingface(tensors, description, {}), "Hugging Face")
        write_folder(path, lambda folder: _write_huggingface(folder, tensors, description, preprocessing))
    elif format == "mmpretrain":
        tensors = to_mmpretrain(plain, config)
        _same_model(config, plain, from_mmpretrain(tensors), "mmpretrain")
        write_file(path, lambda aside: torch.save({"state_dict": tensors}, aside))
    else:
        arrays = {name: tensor.float() for name, tensor in to_bigvision(plain, config).items()}
        _same_model(config, plain, from_bigvision(arrays), "big_vision")
        write_file(path, lambda aside: _write_npz(aside, arrays))


def _same_model(config: ModelConfig, state: Mapping[str, Tensor], read: Weights, tool: str) -> None:
    """Compare a model with what is read of its description and tensors in another tool's format."""
    read_back = read.config
    names = [field.name for field in fields(ModelConfig) if field.name not in FREE - {"image_size", "num_classes"}]
    other = [
        f"{name}: {_said(config, name)} (there: {_said(read_back, name)})"
        for name in names
        if _said(config, name) != _said(read_back, name)
    ]
    if other:
        raise UserError(f"{tool} has no such model, and would compute something else: {', '.join(other)}")
    assert all(torch.equal(read.state[name].to(tensor.dtype), tensor.cpu()) for name, tensor in state.items())


def _said(config: ModelConfig, name: str) -> Any:
    """A field, with what it means where it is unset."""
    if name == "class_token":
        return has_class_token(config)
    if name == "final_norm" and config.final_norm is None:
        return "pooled" if config.pool == "gap" else "tokens"
    if name == "image_size" and config.pos_embed != "learned":
        return None  # no tensor depends on it
    if name == "pool" and not config.num_classes:
        return None  # nothing is pooled where there is no classifier
    if name == "pos_embed_prefix" and not has_class_token(config) and not config.num_registers:
        return None  # there is no token before the patches
    return getattr(config, name)


def _write_huggingface(
    folder: Path, tensors: dict[str, Tensor], description: dict[str, Any], preprocessing: Preprocessing | None
) -> None:
    save_tensors(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    if preprocessing is None:
        return
    size = description["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    crops = preprocessing.crop_mode == "center"
    shortest = round(min(height, width) / preprocessing.crop_pct)
    processor = {
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": shortest} if crops else {"height": height, "width": width},
        "resample": _RESAMPLE[preprocessing.interpolation],
        "do_center_crop": crops,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def _write_npz(path: Path, arrays: Mapping[str, Tensor]) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **{name: tensor.numpy() for name, tensor in arrays.items()})
