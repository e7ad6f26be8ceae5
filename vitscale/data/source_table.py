"""A table of paths and labels as a source: CSV (or TSV) with a header, or JSON lines.

    path,label               path,label                        {"path": "a/1.jpg", "label": 3}
    a/1.jpg,3                a/1.jpg,tench;goldfish            {"path": "a/1.jpg", "label": ["tench", "goldfish"]}

Labels are numbers of classes, or their names. Paths are relative to the table. Several labels make a multi-label set.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vitscale.data.source import Labels, Source, as_source
from vitscale.errors import UserError, did_you_mean

_KINDS = (".csv", ".tsv", ".jsonl")


class _Row(NamedTuple):
    place: str
    path: str
    labels: list[str | int]


def is_table(path: str) -> bool:
    """Whether a source is named like a table."""
    return path.endswith(_KINDS)


def scan_table(path: str, classes: Sequence[str] | None) -> Source:
    """Every row of a table.

    Args:
        path: The table.
        classes: The class list; None takes the names that are there, sorted, or numbers as they are.

    Raises:
        UserError: The table cannot be read, or a row names no file or no label that can be; with file and line.
    """
    rows = list(_json_rows(path) if path.endswith(".jsonl") else _csv_rows(path))
    if not rows:
        raise UserError(f"{path} has no rows")
    named = any(isinstance(label, str) for row in rows for label in row.labels)
    if classes is None:
        if named:
            classes = sorted({str(label) for row in rows for label in row.labels})
        else:
            classes = [str(label) for label in range(1 + max(int(label) for row in rows for label in row.labels))]
    numbers = {name: number for number, name in enumerate(classes)}
    multi = any(len(row.labels) > 1 for row in rows)
    labels: Labels = []
    sizes = []
    folder = os.path.dirname(path) or "."
    for row in rows:
        found = tuple(_number(row, label, numbers) for label in row.labels)
        labels.append(found if multi else found[0])  # type: ignore[arg-type]
        try:
            sizes.append(os.stat(os.path.join(folder, row.path)).st_size)
        except OSError as error:
            raise UserError(f"{row.place}: {row.path} cannot be read: {error.strerror}") from None
    return as_source(folder, tuple(classes), [row.path for row in rows], labels, sizes)


def _number(row: _Row, label: str | int, numbers: dict[str, int]) -> int:
    if isinstance(label, str):
        if label not in numbers:
            raise UserError(
                f"{row.place}: {label!r} is not in the list of {len(numbers)} classes{did_you_mean(label, numbers)}"
            )
        return numbers[label]
    if not 0 <= label < len(numbers):
        raise UserError(f"{row.place}: label {label} out of range, there are {len(numbers)} classes")
    return label


def _csv_rows(path: str) -> Iterator[_Row]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.endswith(".tsv") else ",")
            missing = {"path", "label"} - set(reader.fieldnames or ())
            if missing:
                raise UserError(f"{path}:1 has no column {' and '.join(sorted(missing))}; wanted are path and label")
            for record in reader:
                place = f"{path}:{reader.line_num}"
                labels = [_whole(part.strip()) for part in (record["label"] or "").split(";") if part.strip()]
                yield _checked(place, record["path"], labels)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a table: {error}") from None


def _json_rows(path: str) -> Iterator[_Row]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record: Any = json.loads(line)
                    labels = record["label"] if isinstance(record["label"], list) else [record["label"]]
                    yield _checked(f"{path}:{number}", record["path"], labels)
                except (ValueError, KeyError, TypeError):
                    raise UserError(f'{path}:{number} is not {{"path": ..., "label": ...}}') from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _checked(place: str, path: object, labels: list[Any]) -> _Row:
    if not isinstance(path, str) or not path:
        raise UserError(f"{place} names no file")
    if not labels or not all(isinstance(label, str) or type(label) is int for label in labels):
        raise UserError(f"{place}: {path} has no label; a label is a class's number or name, several with `;` between")
    return _Row(place, path, labels)


def _whole(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdigit() else text
