"""Model files: written whole or not at all, and recognised by what is in them, whatever they are called.

What vitscale writes is a safetensors file with one entry `vitscale` in its metadata, a JSON object:

    version         1
    names           whose names the tensors bear: "vitscale" or "timm"
    model           every field of the model
    preprocessing   mean, std, interpolation, crop_pct, crop_mode, or null
    class_names     what the classifier's outputs are called, in their order, or null

Read are these and the Vision Transformers of other tools, each in a module of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from torch import Tensor

from vitscale.config.load import model_from_dict, model_to_dict
from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.weights.adapt import expected_shapes, misfits
from vitscale.weights.bigvision import from_bigvision
from vitscale.weights.content import Known, Preprocessing, Weights, describe, preprocessing_from
from vitscale.weights.huggingface import from_huggingface, is_huggingface
from vitscale.weights.mmpretrain import from_mmpretrain, is_mmpretrain
from vitscale.weights.names import unwrapped
from vitscale.weights.read import read_content
from vitscale.weights.timm import from_timm, from_timm_names, is_timm, to_timm
from vitscale.weights.write import save_tensors, write_file

_VERSION = 1
_NOTHING = Known()
_TOOLS = (
    ("encoder.layers.encoder_layer_", "a torchvision ViT"),
    ("visual.", "a CLIP model"),
    ("layer1.0.conv1.", "a ResNet"),
)


def save_model(
    path: str | os.PathLike[str],
    state: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    preprocessing: Preprocessing | None,
    class_names: Sequence[str] | None,
    names: Literal["vitscale", "timm"] = "vitscale",
) -> None:
    """Write a model; a file of that name is replaced once the new one is complete on the disk.

    Args:
        path: The file; missing folders are made.
        state: The tensors under vitscale's names, wrappers' prefixes allowed; dtypes are kept.
        config: The model that they are of.
        preprocessing: What the model expects of images.
        class_names: What the outputs are called; at most as many as there are outputs.
        names: Whose names the tensors bear in the file: with `timm`, timm's VisionTransformer loads it strictly.

    Raises:
        ValueError: `state` is not a model of `config`, or there are more names than classes.
        UserError: The file cannot be written, what was there before is intact; or timm has no such model.
    """
    plain = unwrapped(state)
    problems = misfits(plain, expected_shapes(config))
    if problems:
        raise ValueError(f"not the tensors of this model: {'; '.join(problems)}")
    if class_names is not None and len(class_names) > config.num_classes:
        raise ValueError(f"{len(class_names)} class names for {config.num_classes} outputs")
    header = {
        "version": _VERSION,
        "names": names,
        "model": model_to_dict(config),
        "preprocessing": asdict(preprocessing) if preprocessing else None,
        "class_names": list(class_names) if class_names is not None else None,
    }
    tensors = to_timm(plain, config) if names == "timm" else plain
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt", "vitscale": json.dumps(header)}
    write_file(Path(path), lambda aside: save_tensors(tensors, aside, metadata))


def load_weights(path: str | os.PathLike[str], known: Known = _NOTHING) -> Weights:
    """Read a model file of vitscale or another tool, telling which by its content.

    Known are timm, Hugging Face, mmpretrain, big_vision and vision_transformer.

    Args:
        path: The file; or a folder of Hugging Face, with its `config.json`.
        known: What the user says of a model whose file holds tensors alone.

    Raises:
        UserError: It cannot be read, or is something else; the message says what it looks like.
    """
    path = Path(path)
    content = read_content(path)
    try:
        if content.kind == "npz":
            return from_bigvision(content.tensors, known)
        state = unwrapped(content.tensors)
        says_itself = "vitscale" in content.metadata or is_huggingface(state)
        if says_itself and known.given():
            raise UserError(f"the file says itself what {', '.join(known.given())} of its model are; leave them out")
        if "vitscale" in content.metadata:
            return _from_header(state, content.metadata["vitscale"])
        if is_huggingface(state):
            return from_huggingface(state, content.description, content.preprocessor)
        if is_mmpretrain(state):
            return from_mmpretrain(state, known)
        if is_timm(state):
            return from_timm(state, content.description, content.source, known)
    except UserError as error:
        raise UserError(f"{path}: {error.message}") from None
    raise UserError(
        f"{path} {_looks_like(state)}; vitscale reads its own model files and those of timm, "
        "Hugging Face, mmpretrain and big_vision"
    )


def _from_header(state: dict[str, Tensor], text: str) -> Weights:
    try:
        header = json.loads(text)
        if header["version"] > _VERSION:
            raise UserError(
                f"written in version {header['version']} of the format, and this vitscale reads up to {_VERSION}; "
                "install a newer one"
            )
        config = model_from_dict(header["model"])
        preprocessing = preprocessing_from(header["preprocessing"]) if header["preprocessing"] else None
        class_names = tuple(map(str, header["class_names"])) if header["class_names"] is not None else None
        names = header["names"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the description of the model in the file is damaged: {type(error).__name__}: {error}"
        ) from None
    state = from_timm_names(state, config) if names == "timm" else state
    problems = misfits(state, expected_shapes(config))
    if problems:
        raise UserError(f"the tensors are not those of the model that the file describes: {'; '.join(problems)}")
    return Weights(
        state=state,
        config=config,
        preprocessing=preprocessing,
        class_names=class_names,
        source=f"vitscale model file{' under timm names' if names == 'timm' else ''}, {describe(config)}",
    )


def _looks_like(state: Mapping[str, Tensor]) -> str:
    if not state:
        return "holds no tensors"
    for sign, tool in _TOOLS:
        if any(name.startswith(sign) for name in state):
            return f"looks like {tool}, which is not read yet"
    examples = ", ".join(repr(name) for name in list(state)[:3])
    return f"holds {len(state)} tensors such as {examples}, which is no ViT known here"
