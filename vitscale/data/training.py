"""The set that is trained on: one set of shards, or several as a mixture with one list of classes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitscale.config.schema import DataConfig, MixtureSource
from vitscale.data.mixture import MixtureOrder, Part
from vitscale.data.names import find_classes
from vitscale.data.order import Order
from vitscale.data.reader import samples_per_run
from vitscale.data.sample import BadSample, label_of
from vitscale.data.shards import ShardIndex, load_index
from vitscale.data.storage import access_of
from vitscale.errors import EXIT_USAGE, UserError

AnyOrder: TypeAlias = Order | MixtureOrder


@dataclass(frozen=True, eq=False)
class TrainingSet:
    """Shards, and how their labels are read.

    Attributes:
        index: All shards, source after source.
        parts: The index of each source; one without a mixture.
        names: What each source is called; empty without a mixture.
        weights: Of each source.
        label_maps: For each source the class that each of its labels is; None where they are the same.
    """

    index: ShardIndex
    parts: tuple[ShardIndex, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    label_maps: tuple[NDArray[np.int64] | None, ...]

    def order(self, config: DataConfig, *, seed: int, global_batch: int) -> AnyOrder:
        """Which sample is trained on when."""
        if not self.names:
            return Order(
                self.index.samples,
                seed=seed,
                global_batch=global_batch,
                streams=config.streams,
                window=config.shuffle_window,
                run=samples_per_run(self.index),
            )
        parts = [
            Part(part.samples, weight, samples_per_run(part))
            for part, weight in zip(self.parts, self.weights, strict=True)
        ]
        return MixtureOrder(parts, seed=seed, global_batch=global_batch, window=config.shuffle_window)

    def label(self, shard: int, fields: Mapping[str, bytes], num_classes: int) -> int:
        """The class of a sample.

        Raises:
            BadSample: It has none, or one that its source does not have.
        """
        if not self.names:
            return label_of(fields, num_classes)
        first = np.cumsum([len(part.names) for part in self.parts])
        known = self.label_maps[int(np.searchsorted(first, shard, side="right"))]
        if known is None:
            return label_of(fields, num_classes)
        label = int(known[label_of(fields, len(known))])
        if label >= num_classes > 0:
            raise BadSample(f"label {label} out of range, there are {num_classes} classes")
        return label


def load_training(config: DataConfig) -> TrainingSet:
    """What a config trains on.

    Raises:
        UserError: Shards that cannot be found or hold nothing, or classes that cannot be brought together.
    """
    access = access_of(config)
    if not config.mixture:
        assert config.train is not None, "checked with the config"
        index = load_index(config.train, access)
        _not_empty(index, "data.train")
        return TrainingSet(index, (index,), (), (1.0,), (None,))
    parts = []
    for number, source in enumerate(config.mixture):
        try:
            parts.append(load_index(source.shards, access))
        except UserError as error:
            raise UserError(f"data.mixture[{number}] ({source.name}): {error.message}", exit_code=EXIT_USAGE) from None
        _not_empty(parts[-1], f"data.mixture[{number}] ({source.name})")
    maps = [_label_map(source, part, parts[0].classes) for source, part in zip(config.mixture, parts, strict=True)]
    return TrainingSet(
        _joined(config.mixture, parts, maps),
        tuple(parts),
        tuple(source.name for source in config.mixture),
        tuple(source.weight for source in config.mixture),
        tuple(maps),
    )


def _joined(
    sources: Sequence[MixtureSource], parts: Sequence[ShardIndex], maps: Sequence[NDArray[np.int64] | None]
) -> ShardIndex:
    digest = hashlib.sha256()
    for source, part, labels in zip(sources, parts, maps, strict=True):
        digest.update(f"{source.name}\0{source.weight!r}\0{part.digest}\0".encode())
        digest.update(b"" if labels is None else labels.tobytes())
    begins = zip(np.cumsum([0, *(len(part.names) for part in parts)]).tolist(), parts, strict=False)
    return replace(
        parts[0],
        names=tuple(
            f"{source.name}: {name}" for source, part in zip(sources, parts, strict=True) for name in part.names
        ),
        paths=tuple(path for part in parts for path in part.paths),
        sidecars=tuple(path for part in parts for path in part.sidecars),
        samples=np.concatenate([part.samples for part in parts]),
        bytes=np.concatenate([part.bytes for part in parts]),
        checksums=tuple(checksum for part in parts for checksum in part.checksums),
        digest=digest.hexdigest()[:16],
        excluded={first + shard: places for first, part in begins for shard, places in part.excluded.items()},
    )


def _label_map(source: MixtureSource, part: ShardIndex, classes: tuple[str, ...]) -> NDArray[np.int64] | None:
    """The class that each label of a source is; None where its list is that of the first."""
    if source.class_map is None and (part.classes == classes or not (part.classes and classes)):
        if part.classes != classes:
            raise UserError(
                f"the shards of {source.name} or those of the first source do not say what their classes are called; "
                "index them with `--classes`"
            )
        return None
    wanted = _class_map(source.class_map, part.classes) if source.class_map else list(part.classes)
    found = find_classes(classes, wanted, whose="the first source")
    unknown = [part.classes[label] for label, place in enumerate(found) if place is None]
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UserError(
            f"{source.name} has classes that the first source does not: {', '.join(unknown[:3])}{more}; say in a "
            "class_map which of its classes they are"
        )
    return np.array(found, np.int64)


def _class_map(path: str, classes: Sequence[str]) -> list[str]:
    """For each of `classes` the name that the file gives it; its own where the file does not name it.

    Raises:
        UserError: The file cannot be read, or names a class that is not there.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the class map {path} cannot be read: {error}") from None
    names = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        own, tab, other = line.partition("\t")
        if not tab or own.strip() not in classes:
            what = f"{own.strip()!r} is no class of this source" if tab else "there is no tab in it"
            raise UserError(f"{path}:{number}: {what}; a line is a class, a tab, and the class that it is of the first")
        names[own.strip()] = other.strip()
    return [names.get(name, name) for name in classes]


def _not_empty(index: ShardIndex, key: str) -> None:
    if not index.num_samples:
        raise UserError(f"{key}: {len(index.names)} shards hold no samples", exit_code=EXIT_USAGE)
