"""What is to be packed: a list of images with labels; here from class folders. And what an image is by its first bytes.

source/<class>/**/<image>      hidden files and folders are passed over, links are followed
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vitscale.data.find import INDEX, read_index
from vitscale.errors import UserError, did_you_mean

_SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test"))
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
    (b"\0\0\0\x0cJXL ", "jxl"),
    (b"\xff\x0a", "jxl"),
)


Labels: TypeAlias = list[int] | list[tuple[int, ...]]
"""A label for each image, or several for each."""


@dataclass(frozen=True)
class Source:
    """Images in a fixed order, with the class list their labels point into.

    Attributes:
        folder: The root; `paths` are relative to it.
        classes: Name of each label.
        paths: The file that each image is, or is part of.
        labels: Label or labels of each image.
        sizes: Length of each image, in bytes.
        empty: Classes of the list for which no image was found.
        names: What each image is called; None: like its file.
        offsets: Where each begins in its file; None: the file is the image.
        groups: Which images are read at once, by number, in rising order; None: each by itself.
        extras: Further members of each sample: extension, offset and length in the same file; None: there are none.
    """

    folder: str
    classes: tuple[str, ...]
    paths: list[str]
    labels: Labels
    sizes: list[int]
    empty: tuple[str, ...]
    names: list[str] | None = None
    offsets: list[int] | None = None
    extras: list[tuple[tuple[str, int, int], ...]] | None = None
    groups: list[int] | None = None

    @property
    def first_labels(self) -> list[int]:
        """The label of each image, the first one where it has several."""
        return [label if isinstance(label, int) else label[0] for label in self.labels]


def as_source(
    folder: str,
    classes: tuple[str, ...],
    paths: list[str],
    labels: Labels,
    sizes: list[int],
    *,
    names: list[str] | None = None,
    offsets: list[int] | None = None,
    extras: list[tuple[tuple[str, int, int], ...]] | None = None,
    groups: list[int] | None = None,
) -> Source:
    """A source with its empty classes found."""
    present = {one for label in labels for one in ((label,) if isinstance(label, int) else label)}
    empty = tuple(name for label, name in enumerate(classes) if label not in present)
    return Source(folder, classes, paths, labels, sizes, empty, names, offsets, extras, groups)


def image_type(content: bytes) -> str | None:
    """The extension that fits an image's first bytes, or None when they are not those of an image."""
    for magic, extension in _MAGIC:
        if content.startswith(magic):
            return extension
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    if content[4:8] == b"ftyp" and content[8:12] in (b"avif", b"avis"):
        return "avif"
    return None


def scan_folder(folder: str, classes: Sequence[str] | None = None) -> Source:
    """Every file below the class folders of `folder`.

    Args:
        folder: Holds one folder a class.
        classes: The class list; every class folder must be in it. None takes the sorted folder names, so that an empty
            folder keeps its label.

    Raises:
        UserError: Not such a folder, or a class that is not in the list.
    """
    names = _class_folders(folder)
    listed = tuple(classes) if classes is not None else tuple(names)
    label_of = {name: label for label, name in enumerate(listed)}
    paths: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    for name in names:
        if name not in label_of:
            raise UserError(
                f"class folder {os.path.join(folder, name)} is not in the list of {len(listed)} classes"
                f"{did_you_mean(name, listed)}"
            )
        for path, size in _files(os.path.join(folder, name), name, ()):
            paths.append(path)
            labels.append(label_of[name])
            sizes.append(size)
    if not paths:
        raise UserError(f"no images in {folder}: its {len(names)} class folders are empty")
    return as_source(folder, listed, paths, labels, sizes)


def read_classes(path: str) -> tuple[str, ...]:
    """A class list: from shards (a folder with `index.json`, or that file), or a text file with one name a line.

    Raises:
        UserError: No such file, no classes in it, or a name that stands there twice.
    """
    try:
        if os.path.isdir(path) or os.path.basename(path) == INDEX:
            entries = read_index(path if os.path.isdir(path) else os.path.dirname(path) or ".")
            classes = entries[0].classes if entries else ()
        else:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            classes = tuple(line.strip() for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the class list {path} cannot be read: {error}") from None
    if not classes:
        raise UserError(f"{path} names no classes; a class list has one name a line")
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise UserError(f"class {twice[0]!r} stands twice in {path}; each class has one label")
    return classes


def split_validation(source: Source, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Places of the training and of the validation images in `source`, both sorted.

    From each class the share that `fraction` asks for, up to rounding, drawn by `seed`; a class never loses its last
    training image.

    Raises:
        UserError: A fraction outside [0, 1), or one that takes no image.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"the validation fraction is {fraction}; it must be at least 0 and below 1")
    labels = np.array(source.first_labels)
    by_class = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[by_class], np.arange(len(source.classes) + 1))
    held: list[int] = []
    owed = 0.0
    for label, (first, last) in enumerate(itertools.pairwise(bounds)):
        owed += fraction * (last - first)
        count = max(0, min(round(owed), last - first - 1))
        owed = min(owed - count, 0.5)
        held += np.random.default_rng([seed, label]).permutation(by_class[first:last])[:count].tolist()
    if fraction and not held:
        raise UserError(
            f"a validation fraction of {fraction} takes none of the {len(labels)} images of {source.folder}"
        )
    taken = set(held)
    return [place for place in range(len(labels)) if place not in taken], sorted(held)


def _class_folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as found:
            entries = sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError as error:
        raise UserError(f"the source {folder} cannot be read: {error.strerror}") from None
    if not names:
        raise UserError(
            f"no class folders in {folder}: it holds {len(entries)} files; wanted is {folder}/<class>/<image>"
        )
    if {name.lower() for name in names} <= _SPLITS:
        first = os.path.join(folder, names[0])
        raise UserError(f"{folder} holds splits ({', '.join(names)}), not classes; pack each alone, as {first}")
    return names


def _files(folder: str, relative: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int]]:
    """Path and size of each file below `folder`, in order of the names; a folder inside itself is not entered again."""
    status = os.stat(folder)
    here = (*above, (status.st_dev, status.st_ino))
    with os.scandir(folder) as found:
        entries = sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
    for entry in entries:
        path = f"{relative}/{entry.name}"
        if entry.is_dir():
            inside = entry.stat()
            if (inside.st_dev, inside.st_ino) not in here:
                yield from _files(entry.path, path, here)
        else:
            yield path, _size(entry)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0
