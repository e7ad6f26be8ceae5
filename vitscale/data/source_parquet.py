"""Parquet files with images in them, as Hugging Face's datasets have: columns `image` and `label`.

`image` holds the encoded bytes, or a struct with `bytes`; `label` a whole number, or several. Row groups are what can
be read at once, so that rows are shuffled within windows of row groups, and the windows among each other.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from vitscale.data.source import Labels, Source, as_source
from vitscale.errors import UserError

_ENDING = ".parquet"


def is_parquet(source: str) -> bool:
    """Whether a source is a parquet file, or a folder of some."""
    if os.path.isdir(source):
        return any(name.endswith(_ENDING) for name in os.listdir(source))
    return source.endswith(_ENDING)


def scan_parquet(source: str, classes: Sequence[str] | None) -> Source:
    """Every row of a parquet file, or of those in a folder.

    Raises:
        UserError: pyarrow is missing, a file cannot be read, or has no such columns or labels.
    """
    names = sorted(name for name in os.listdir(source) if name.endswith(_ENDING)) if os.path.isdir(source) else [source]
    paths: list[str] = []
    labels: list[Any] = []
    sizes: list[int] = []
    rows: list[int] = []
    groups: list[int] = []
    known: list[str] = []
    group = 0
    for name in names:
        path = os.path.join(source, name) if os.path.isdir(source) else name
        file = _open(path)
        known = known or _class_names(file)
        for number in range(file.metadata.num_row_groups):
            found = file.read_row_group(number, columns=["label"]).column("label").to_pylist()
            size = file.metadata.row_group(number).total_byte_size // max(1, len(found))
            for label in found:
                labels.append(_label(path, len(rows), label))
            paths += [path] * len(found)
            sizes += [size] * len(found)
            rows += [(number << 32) + row for row in range(len(found))]
            groups += [group] * len(found)
            group += 1
    if not paths:
        raise UserError(f"{source} has no rows")
    several = any(isinstance(label, tuple) for label in labels)
    told: Labels = [label if isinstance(label, tuple) else (label,) for label in labels] if several else labels
    most = 1 + max(max(label) if isinstance(label, tuple) else label for label in labels)
    listed = tuple(classes) if classes is not None else tuple(known) or tuple(str(number) for number in range(most))
    if most > len(listed):
        raise UserError(f"{source}: label {most - 1} out of range, there are {len(listed)} classes")
    keys = [f"{os.path.basename(path).removesuffix(_ENDING)}_{number}" for number, path in enumerate(paths)]
    return as_source(source, listed, paths, told, sizes, names=keys, offsets=rows, groups=groups)


def read_image(path: str, row: int) -> bytes:
    """The encoded image in a row; `row` is the number of the row group times 2**32, and the place in it."""
    value = _images(path, row >> 32)[row & 0xFFFFFFFF].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    return content if isinstance(content, bytes) else b""


@functools.lru_cache(maxsize=4)
def _images(path: str, group: int) -> Any:
    """The images of a row group; those read last are kept, since a shard's rows come from few of them."""
    return _open(path).read_row_group(group, columns=["image"]).column("image")


def _open(path: str) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError("parquet needs a package that is not installed: pip install 'vitscale[parquet]'") from None
    try:
        file = ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    missing = {"image", "label"} - set(file.schema_arrow.names)
    if missing:
        raise UserError(
            f"{path} has no column {' and '.join(sorted(missing))}, but {', '.join(file.schema_arrow.names)}"
        )
    return file


def _label(path: str, row: int, label: Any) -> int | tuple[int, ...]:
    several = tuple(label) if isinstance(label, list) else (label,)
    if not several or not all(type(one) is int and one >= 0 for one in several):
        raise UserError(f"{path}: row {row} has the label {label!r}; wanted is the number of a class")
    return several if isinstance(label, list) else several[0]


def _class_names(file: Any) -> list[str]:
    """The names that Hugging Face's datasets keep of a ClassLabel, where there are any."""
    try:
        features = json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"]
        return [str(name) for name in features["label"]["names"]]
    except (KeyError, TypeError, ValueError):
        return []
