"""Files written whole or not at all: beside their place, to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitscale.errors import UserError


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a file, which takes the place of one at `path` once it is complete on the disk.

    Args:
        path: The file; missing folders are made.
        write: Given the name to write to.

    Raises:
        UserError: It cannot be written; what was there before is intact.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}; nothing was changed") from None
    finally:
        aside.unlink(missing_ok=True)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write safetensors, for whom the umask lets read; the library's own files are for their owner alone."""
    save_file(dict(tensors), path, dict(metadata) if metadata else None)
    umask = os.umask(0o077)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a folder, which then appears at `path`, where there must be nothing but an empty folder.

    Raises:
        UserError: There is something already, or the folder cannot be written; nothing was changed.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists, and this format is a folder of its own; name a new one")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        write(aside)
        for file in aside.iterdir():
            _sync(file)
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}; nothing was changed") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
