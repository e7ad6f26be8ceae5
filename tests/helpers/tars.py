"""Tars, images and class folders that the tests of shards read."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image


def make_tar(path: Path, members: Iterable[tuple[str, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar of regular files, written by `tarfile`."""
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def image_bytes(number: int, *, format: str = "PNG") -> bytes:
    """A small image that differs from number to number."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (number % 256, number // 256 % 256, 128)).save(file, format)
    return file.getvalue()


def labelled(numbers: Iterable[int], *, classes: int = 3) -> list[tuple[str, bytes]]:
    """Members of samples `s000, s001, ...`: an image and a label each."""
    return [
        member
        for number in numbers
        for member in (
            (f"s{number:03d}.cls", str(number % classes).encode()),
            (f"s{number:03d}.png", image_bytes(number)),
        )
    ]


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    """`root/<class>/<number>.png`, as many as `counts` says."""
    number = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for place in range(count):
            (root / name / f"{place:03d}.png").write_bytes(image_bytes(number))
            number += 1
    return root
