"""Model files: written whole or not at all, and recognised by what is in them, whatever they are called.

What vitscale writes is a safetensors file with one entry `vitscale` in its metadata, a JSON object:

    version         1
    names           whose names the tensors bear: "vitscale" or "timm"
    model           every field of the model
    preprocessing   mean, std, interpolation, crop_pct, crop_mode, or null
    class_names     what the classifier's outputs are called, in their order, or null

Read are these, and timm's Vision Transformers: safetensors, or what `torch.save` wrote (.pth, .pt, .bin, .pth.tar),
of which nothing but tensors and plain values is ever unpickled.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitscale.config.load import model_from_dict, model_to_dict
from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.position import image_height_width
from vitscale.weights.adapt import expected_shapes, misfits
from vitscale.weights.names import unwrapped
from vitscale.weights.timm import from_timm, is_timm, timm_config, to_timm

Interpolation: TypeAlias = Literal["nearest", "bilinear", "bicubic"]
CropMode: TypeAlias = Literal["center", "squash"]

_VERSION = 1
_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Where training scripts keep the weights in a saved dictionary, in timm's order: the averaged ones first."""

_TOOLS = (
    ("vit.embeddings.", "a Hugging Face ViT"),
    ("deit.embeddings.", "a Hugging Face DeiT"),
    ("embeddings.patch_embeddings.", "a Hugging Face ViT"),
    ("backbone.layers.", "an mmpretrain model"),
    ("encoder.layers.encoder_layer_", "a torchvision ViT"),
    ("visual.", "a CLIP model"),
    ("layer1.0.conv1.", "a ResNet"),
)


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How images became what the model was trained on.

    Attributes:
        mean: Subtracted from pixels in 0..1, per channel.
        std: Divided by after that, per channel.
        interpolation: Kind of resizing.
        crop_pct: Side of the centre crop over the shorter side of the resized image.
        crop_mode: `center` resizes the shorter side and cuts the centre out; `squash` resizes the whole image to the
            size wanted, whatever its aspect.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation
    crop_pct: float
    crop_mode: CropMode = "center"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a model file holds.

    Attributes:
        state: The tensors under vitscale's names, in the file's dtypes, on the host.
        config: The model that they are of.
        preprocessing: None where the file does not say.
        class_names: None where the file does not say.
        source: What the file was recognised as, in words.
    """

    state: dict[str, Tensor]
    config: ModelConfig
    preprocessing: Preprocessing | None
    class_names: tuple[str, ...] | None
    source: str


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
        UserError: The file cannot be written; what was there before is intact.
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
    tensors = to_timm(plain) if names == "timm" else plain
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _write(Path(path), tensors, {"format": "pt", "vitscale": json.dumps(header)})


def load_weights(path: str | os.PathLike[str]) -> Weights:
    """Read a model file of vitscale or of timm's ViT, telling which by its content.

    Raises:
        UserError: It cannot be read, or is something else; the message says what it looks like.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == "safetensors":
        state, metadata = _read_safetensors(path)
        source = "safetensors"
    else:
        state, source = _read_torch(path)
        metadata = {}
    try:
        state = unwrapped(state)
        if "vitscale" in metadata:
            return _from_header(state, metadata["vitscale"])
        if is_timm(state):
            return _from_timm(state, source)
    except UserError as error:
        raise UserError(f"{path}: {error.message}") from None
    raise UserError(f"{path} {_looks_like(state)}; vitscale reads its own model files and timm's ViTs")


def _from_header(state: dict[str, Tensor], text: str) -> Weights:
    try:
        header = json.loads(text)
        if header["version"] > _VERSION:
            raise UserError(
                f"written in version {header['version']} of the format, and this vitscale reads up to {_VERSION}; "
                "install a newer one"
            )
        config = model_from_dict(header["model"])
        preprocessing = _preprocessing(header["preprocessing"]) if header["preprocessing"] else None
        class_names = tuple(map(str, header["class_names"])) if header["class_names"] is not None else None
        names = header["names"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the description of the model in the file is damaged: {type(error).__name__}: {error}"
        ) from None
    state = from_timm(state) if names == "timm" else state
    problems = misfits(state, expected_shapes(config))
    if problems:
        raise UserError(f"the tensors are not those of the model that the file describes: {'; '.join(problems)}")
    return Weights(
        state=state,
        config=config,
        preprocessing=preprocessing,
        class_names=class_names,
        source=f"vitscale model file{' under timm names' if names == 'timm' else ''}, {_describe(config)}",
    )


def _preprocessing(fields: Mapping[str, Any]) -> Preprocessing:
    if fields["interpolation"] not in get_args(Interpolation):
        raise ValueError(f"interpolation {fields['interpolation']!r}")
    if fields.get("crop_mode", "center") not in get_args(CropMode):
        raise ValueError(f"crop_mode {fields['crop_mode']!r}")
    return Preprocessing(
        mean=tuple(map(float, fields["mean"])),
        std=tuple(map(float, fields["std"])),
        interpolation=fields["interpolation"],
        crop_pct=float(fields["crop_pct"]),
        crop_mode=fields.get("crop_mode", "center"),
    )


def _from_timm(state: dict[str, Tensor], source: str) -> Weights:
    config = timm_config(state)
    return Weights(
        state=from_timm(state),
        config=config,
        preprocessing=None,
        class_names=None,
        source=f"timm ViT ({source}), {_describe(config)}, its grid of positions taken as square",
    )


def _describe(config: ModelConfig) -> str:
    height, width = image_height_width(config)
    name = config.name or f"{config.embed_dim} wide, {config.depth} blocks, {config.num_heads} heads"
    return f"{name} at {height}x{width} with {config.num_classes} classes"


def _kind(path: Path) -> Literal["safetensors", "torch"]:
    """What can be read of the file at all, from its first bytes."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the model file in it")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 100_000_000:
        return "safetensors"
    if start.startswith(b"PK\x03\x04"):
        try:
            with ZipFile(path) as archive:
                names = archive.namelist()
        except BadZipFile:
            raise UserError(f"{path} is cut short: a zip archive without its end; copy it again") from None
        if any(name.endswith("/data.pkl") for name in names):
            return "torch"
        if any(name.endswith(".npy") for name in names):
            raise UserError(f"{path} looks like a NumPy archive (.npz) of JAX weights, which is not read yet")
        raise UserError(f"{path} looks like a zip archive, but not like one of torch.save")
    if start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "torch"
    raise UserError(f"{path} {_first_bytes(start)}; a model file is safetensors or what torch.save wrote")


def _first_bytes(start: bytes) -> str:
    if not start:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS, not the file itself; run `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "looks like a web page: probably a failed download"
    if start.startswith(b"\x89HDF"):
        return "looks like an HDF5 file of Keras"
    return f"begins with {start[:8]!r}"


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} looks like safetensors, but cannot be read: {error}; copy it again") from None


def _read_torch(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors in a file of torch.save, and where they stood; an `argparse.Namespace` may stand beside them."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path} cannot be read as weights alone ({reason}); where you trust it, load it with torch and save "
            "its state_dict with safetensors"
        ) from None
    source = "torch.save"
    for name in _CONTAINERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content, source = content[name], f"{source}, {name}"
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}, source


def _looks_like(state: Mapping[str, Tensor]) -> str:
    if not state:
        return "holds no tensors"
    for sign, tool in _TOOLS:
        if any(name.startswith(sign) for name in state):
            return f"looks like {tool}, which is not read yet"
    examples = ", ".join(repr(name) for name in list(state)[:3])
    return f"holds {len(state)} tensors such as {examples}, which is no ViT known here"


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Beside, to the disk, then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, aside, metadata)
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}; nothing was changed") from None
    finally:
        aside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
