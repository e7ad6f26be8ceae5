"""Which field of a sample is its image and which its label, and what is wrong when there is none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

IMAGE_FIELDS = frozenset(
    ("jpg", "jpeg", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jxl", "ppm", "pgm", "img", "image")
)
LABEL_FIELDS = ("cls", "cls.txt", "index", "label", "json")


class BadSample(Exception):
    """A sample that cannot be used; the message is the reason that goes into reports."""


def image_field(fields: Iterable[str]) -> str:
    """The field that holds the image: the first, in order of names, whose last extension is one of an image.

    Raises:
        BadSample: None is.
    """
    names = sorted(fields)
    for name in names:
        if name.rpartition(".")[2] in IMAGE_FIELDS:
            return name
    raise BadSample(f"no image among its fields {', '.join(names) or '(none)'}")


def label_of(fields: Mapping[str, bytes], num_classes: int) -> int:
    """The label: an integer as text (`.cls`), or `label` in a `.json` record.

    Args:
        fields: Extension -> content; only the label's field is looked at.
        num_classes: The label must be below it; 0 accepts any that is not negative.

    Raises:
        BadSample: No label, no integer, or out of range.
    """
    name = next((field for field in LABEL_FIELDS if field in fields), None)
    if name is None:
        raise BadSample(f"no label among its fields {', '.join(sorted(fields)) or '(none)'}")
    label = _json_label(fields[name]) if name == "json" else _text_label(name, fields[name])
    if label < 0 or (num_classes and label >= num_classes):
        raise BadSample(f"label {label} out of range" + (f", there are {num_classes} classes" if num_classes else ""))
    return label


def _text_label(name: str, content: bytes) -> int:
    try:
        return int(content.decode("ascii"))
    except ValueError:
        raise BadSample(f".{name} is not an integer: {content[:20]!r}") from None


def _json_label(content: bytes) -> int:
    try:
        record = json.loads(content)
    except ValueError:
        raise BadSample(".json is not valid JSON") from None
    label = record.get("label") if isinstance(record, dict) else None
    if type(label) is not int:
        raise BadSample('.json has no integer "label"')
    return label
