"""One step folder of a checkpoint: its index, and whether what the index says is there.

`index.json` names the size and the sha256 of every other file of the folder, and for each tensor the flat ranges that
it was saved in; it carries a sha256 of itself. It may come from anywhere: it is checked before it is believed, and
names only files of its own folder. Reads no tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitscale.errors import UserError

FORMAT, VERSION = "vitscale-checkpoint", 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_CHUNK = 1 << 22  # bytes


class CheckpointError(UserError):
    """A checkpoint could not be written or is not whole; raised on every rank."""


def read_index(path: Path) -> dict[str, Any]:
    """The index of a step folder: `files` and `tensors`.

    Raises:
        CheckpointError: There is none, or it is damaged, of a newer format, names files elsewhere, or has gaps.
    """
    try:
        index: dict[str, Any] = json.loads((path / "index.json").read_text())
        digest = index.pop("sha256")
        if digest != _digest(index):
            raise CheckpointError(f"{path}/index.json is damaged: its checksum differs")
        if (index["format"], index["version"]) != (FORMAT, VERSION):
            found = f"{index['format']} {index['version']}"
            raise CheckpointError(f"{path} has format {found}; this vitscale reads {VERSION}")
        _check(path, index)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} holds no index.json; it is not a checkpoint") from error
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/index.json is damaged ({error})") from error
    return index


def write_index(path: Path, *, files: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write the index of a folder whose other files are complete.

    Raises:
        CheckpointError: The ranges do not cover every tensor exactly once.
    """
    body = {"format": FORMAT, "version": VERSION, "files": files, "tensors": tensors}
    _check(path, body)
    write_json(path / "index.json", {**body, "sha256": _digest(body)})


def verify(path: Path, *, checksums: bool = True, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a step folder: files that miss, or differ from the index in size or checksum.

    Args:
        path: The step folder.
        checksums: Read the files too; without, a changed bit is not seen.
        rank: Which share of the files is read, of `ranks`.
        ranks: See `rank`.
    """
    try:
        index = read_index(path)
    except CheckpointError as error:
        return [error.message]
    problems = []
    for place, (name, entry) in enumerate(sorted(index["files"].items())):
        file = path / name
        try:
            size = file.stat().st_size
            if size != entry["bytes"]:
                problems.append(f"{name} has {size} bytes, the index says {entry['bytes']}")
            elif checksums and place % ranks == rank and sha256(file) != entry["sha256"]:
                problems.append(f"{name} is damaged: its checksum is not that of the index")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` and wait until it is on the disk."""
    text = json.dumps(value)
    try:
        path.write_text(text)
    except OSError as error:  # of a full disk Python does not say which file
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The checksum of a file of any size, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check(path: Path, index: Mapping[str, Any]) -> None:
    """Raise on what the checksum cannot tell: names outside of the folder, ranges that do not add up."""
    files: dict[str, Any] = index["files"]
    named = {*files, *(file for tensor in index["tensors"].values() for file, _, _ in tensor["ranges"])}
    for name in sorted(named):
        if not _PLAIN_NAME.fullmatch(name) or name not in files:
            raise CheckpointError(f"{path}/index.json names {name!r}, which is no file of that folder")
    for name, tensor in index["tensors"].items():
        end = 0
        for _, start, length in tensor["ranges"]:
            if start != end or length < 1:
                break
            end += length
        else:
            if end == math.prod(tensor["shape"]):
                continue
        raise CheckpointError(f"{path}: {name} is not whole: its ranges do not cover every value exactly once")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
