"""What is in a set: images a class, sizes, aspects, bytes. Headers are read, nothing is decoded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.data.decode import BadImage, open_picture
from vitscale.data.find import ShardEntry, find_shards, merge_classes
from vitscale.data.pool import run_jobs
from vitscale.data.sample import LABEL_FIELDS, BadSample, image_field, label_of
from vitscale.data.scan import spans_of
from vitscale.data.shards import map_shard
from vitscale.data.storage import GiveUp
from vitscale.data.tar import Buffer, TarFault
from vitscale.errors import UserError
from vitscale.progress import progress as show_progress

_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class Quantiles(NamedTuple):
    """The least, 5 %, 25 %, the median, 75 %, 95 %, the most."""

    least: float
    p5: float
    p25: float
    median: float
    p75: float
    p95: float
    most: float


@dataclass(frozen=True)
class Statistics:
    """What a set holds.

    Attributes:
        shards: Number of shards.
        samples: Samples in them.
        bytes: Length of the shards.
        classes: Number of classes in the list; 0 without one.
        images_per_class: Images of each class, least to most; those without any count.
        empty_classes: Classes without an image.
        height: In pixels, upright.
        width: In pixels, upright.
        aspect: Width over height.
        image_bytes: Length of the encoded images.
        unusable: Samples without a label or an image whose header can be read.
    """

    shards: int
    samples: int
    bytes: int
    classes: int
    images_per_class: Quantiles
    empty_classes: int
    height: Quantiles
    width: Quantiles
    aspect: Quantiles
    image_bytes: Quantiles
    unusable: int

    def json(self) -> str:
        """As text, for a file."""
        return json.dumps(asdict(self), indent=1) + "\n"


class _Found(NamedTuple):
    """Of one shard: labels and how often they come; height, width and bytes of each image."""

    labels: Counter[int]
    images: list[tuple[int, int, int]]
    unusable: int


def statistics(spec: str | tuple[str, ...], *, processes: int = 1, progress: bool = True) -> Statistics:
    """Read the headers of all images.

    Args:
        spec: As of `load_index`.
        processes: Shards read at once.
        progress: Show how far it is, on stderr.

    Raises:
        UserError: No shards, no index, or a shard that cannot be read.
    """
    entries = find_shards(spec)
    classes = merge_classes(entries)
    labels: Counter[int] = Counter()
    images: list[tuple[int, int, int]] = []
    unusable = 0
    samples = sum(entry.samples for entry in entries)
    jobs = [entry._replace(classes=()) for entry in entries]
    with show_progress(samples, "reading headers", shown=progress) as advancing:
        for entry, found in zip(entries, run_jobs(_read, jobs, processes), strict=True):
            if isinstance(found, str):
                raise UserError(f"{entry.path}: {found}; run `vitscale data verify`")
            labels.update(found.labels)
            images += found.images
            unusable += found.unusable
            advancing.advance(entry.samples)
    counts = [labels[label] for label in range(len(classes))] or list(labels.values())
    sizes = np.array(images or [(0, 0, 0)], np.float64)
    return Statistics(
        shards=len(entries),
        samples=samples,
        bytes=sum(entry.bytes for entry in entries),
        classes=len(classes),
        images_per_class=_quantiles(np.array(counts or [0])),
        empty_classes=sum(1 for count in counts if not count),
        height=_quantiles(sizes[:, 0]),
        width=_quantiles(sizes[:, 1]),
        aspect=_quantiles(sizes[:, 1] / np.maximum(sizes[:, 0], 1)),
        image_bytes=_quantiles(sizes[:, 2]),
        unusable=unusable,
    )


def _quantiles(values: NDArray[Any]) -> Quantiles:
    return Quantiles(*(round(float(value), 4) for value in np.quantile(values, _QUANTILES)))


def _read(entry: ShardEntry) -> _Found | str:
    """What one shard holds, or why it cannot be read."""
    labels: Counter[int] = Counter()
    images: list[tuple[int, int, int]] = []
    unusable = 0
    try:
        with map_shard(entry.path) as buffer:
            for label, size in _samples(buffer):
                if label is None or size is None:
                    unusable += 1
                    continue
                labels[label] += 1
                images.append(size)
    except (TarFault, OSError, GiveUp) as error:
        return str(error)
    return _Found(labels, images, unusable)


def _samples(buffer: Buffer) -> Iterator[tuple[int | None, tuple[int, int, int] | None]]:
    """Label, and (height, width, bytes) of the image, of each sample; None where it has none."""
    for span in spans_of(buffer):
        fields = {
            name: buffer[at : at + size] if name in LABEL_FIELDS else b"" for name, (at, size) in span.fields.items()
        }
        try:
            at, size = span.fields[image_field(fields)]
            picture = open_picture(buffer[at : at + size])
            yield label_of(fields, 0), (picture.height, picture.width, size)
        except (BadSample, BadImage):
            yield None, None
