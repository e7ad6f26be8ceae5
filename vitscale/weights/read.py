"""The tensors in a file of weights, of whatever tool: safetensors, what `torch.save` wrote, a NumPy archive.

Which of these a file is, its first bytes tell, not its name. A folder is read where it is one of Hugging Face's: a
`config.json` beside weights in one file or in several with an index. Nothing but tensors and plain values is ever
unpickled, and arrays of objects are refused.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitscale.errors import UserError

Kind: TypeAlias = Literal["safetensors", "torch", "npz"]

_CONTAINERS = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "state_dict", "model")
"""Where training scripts keep the weights in a saved dictionary, in timm's order: the averaged ones first."""

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""What weights are called in a folder of Hugging Face, and in what order it looks for them."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What was found in a file or folder.

    Attributes:
        tensors: By their names in the file, in its dtypes, on the host.
        kind: How the tensors are stored.
        source: The same in words, and where in the file they stood.
        metadata: Texts that a safetensors file carries.
        description: `config.json` beside the weights, where there is one; empty otherwise.
        preprocessor: `preprocessor_config.json` beside the weights, likewise.
    """

    tensors: dict[str, Tensor]
    kind: Kind
    source: str
    metadata: dict[str, str] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)


def read_content(path: Path) -> Content:
    """Read all tensors of a file, or of a folder with a `config.json`.

    Raises:
        UserError: It cannot be read; the message says what it looks like.
    """
    if not path.is_dir():
        return _read_file(path, beside=path.parent)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is a folder without a config.json; name the model file in it")
    for name in _WEIGHTS:
        if (path / name).is_file():
            if not name.endswith(".json"):
                return _read_file(path / name, beside=path)
            return _read_parts(path / name, beside=path)
    raise UserError(f"{path} holds a config.json but no weights; looked for {', '.join(_WEIGHTS)}")


def _read_file(path: Path, *, beside: Path) -> Content:
    kind = _kind(path)
    metadata: dict[str, str] = {}
    source: str = kind
    if kind == "safetensors":
        tensors, metadata = _read_safetensors(path)
    elif kind == "torch":
        tensors, source = _read_torch(path)
    else:
        tensors = _read_npz(path)
    return Content(
        tensors=tensors,
        kind=kind,
        source=source,
        metadata=metadata,
        description=_read_json(beside / "config.json"),
        preprocessor=_read_json(beside / "preprocessor_config.json"),
    )


def _read_parts(index: Path, *, beside: Path) -> Content:
    """Weights in several files, and an index that says which tensor is in which."""
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not all(Path(str(name)).name == name for name in where.values()):
        raise UserError(f"{index} does not say which file of this folder each tensor is in (weight_map)")
    parts = [_read_file(beside / name, beside=beside) for name in dict.fromkeys(where.values())]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    absent = [name for name in where if name not in tensors]
    if absent:
        raise UserError(f"{index} promises tensors that its files do not hold: {', '.join(absent)}; copy them again")
    return Content(
        tensors=tensors,
        kind=parts[0].kind,
        source=f"{parts[0].kind} in {len(parts)} parts",
        description=parts[0].description,
        preprocessor=parts[0].preprocessor,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def _kind(path: Path) -> Kind:
    """What can be read of the file at all, from its first bytes."""
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
            return "npz"
        raise UserError(f"{path} looks like a zip archive, but not like one of torch.save or NumPy")
    if start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        return "torch"
    raise UserError(f"{path} {_first_bytes(start)}; a model file is safetensors, .npz, or what torch.save wrote")


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


def _read_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of numbers in a NumPy archive; JAX's bfloat16, which NumPy stores as nameless two bytes, is known."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return {name: _tensor(array) for name, array in arrays.items()}
    except (ValueError, OSError, EOFError, BadZipFile, TypeError) as error:
        raise UserError(f"{path} looks like a NumPy archive, but cannot be read as numbers alone: {error}") from None


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
