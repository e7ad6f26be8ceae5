"""Class folders into shards: shuffled over the whole set, the same bytes for any number of processes.

    out/shard-00000.tar, .idx, ..., index.json               without a validation split
    out/train/train-00000.tar, ...; out/validation/...       with one
    out/skipped.jsonl                                        files that are no images, where there were any

Image bytes are kept as they are. A sample is `<number>-<name>.<type>` and `<number>-<name>.cls`, the label in digits;
the number is the image's place in the sorted source. Until everything is written, `out/.vitscale-pack` says what is
being packed and which shards are whole, no `index.json` is there, and the same call goes on where it was stopped.

The members are written by `tarfile`, since webdataset's own writer brings torch into each process and says no more.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.data.find import UNFINISHED, sidecar_path
from vitscale.data.index import IndexedShard, write_index, write_offsets
from vitscale.data.pool import run_jobs
from vitscale.data.scan import scan_shard
from vitscale.data.source import Source, image_type, scan_folder, split_validation
from vitscale.data.tar import BLOCK
from vitscale.errors import UserError
from vitscale.progress import progress as show_progress

SKIPPED = "skipped.jsonl"
_PLAN = "plan.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_NAME = 48

log = logging.getLogger("vitscale")


class Skipped(NamedTuple):
    """A file of the source that is not in the shards."""

    path: str
    reason: str


@dataclass(frozen=True)
class PackedSplit:
    """One set of shards: its folder, and how much lies there."""

    folder: str
    shards: int
    samples: int
    bytes: int


@dataclass(frozen=True)
class PackReport:
    """What packing made.

    Attributes:
        splits: The set, or training and validation set.
        classes: Name of each label.
        empty: Classes without a file in the source; they keep their labels.
        skipped: Files that are no images, also written to `skipped.jsonl`.
        resumed: Shards that an earlier, interrupted call had made.
    """

    splits: tuple[PackedSplit, ...]
    classes: tuple[str, ...]
    empty: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    resumed: int


@dataclass(frozen=True)
class _Job:
    """One shard to write: images as (path, label, key), and where the record of the finished shard goes."""

    tar: str
    record: str
    root: str
    images: list[tuple[str, int, str]]


@dataclass(frozen=True)
class _Record:
    """What is kept of a finished shard until the index is written."""

    samples: int
    bytes: int
    sha256: str
    skipped: list[tuple[str, str]]


@dataclass(frozen=True)
class _Split:
    """Places of one split in the source, shuffled, and where each shard begins in them."""

    folder: str
    prefix: str
    places: NDArray[np.int64]
    cuts: NDArray[np.int64]

    @property
    def num_shards(self) -> int:
        return len(self.cuts) - 1

    def name(self, shard: int) -> str:
        return f"{self.prefix}-{shard:0{max(5, len(str(self.num_shards - 1)))}d}.tar"


def pack_folder(
    source: str,
    out: str,
    *,
    shard_samples: int = 10_000,
    shard_bytes: int = 256 << 20,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    validation: float = 0.0,
    processes: int = 1,
    progress: bool = True,
) -> PackReport:
    """Pack `source/<class>/<image>` into shards and their index in `out`.

    Args:
        source: Folder of class folders.
        out: New or empty folder, or that of a pack of the same things that was interrupted.
        shard_samples: Most samples of a shard. Shards are filled evenly, so that each has about this many or fewer.
        shard_bytes: About the largest length of a shard.
        seed: Of the shuffle and of the split.
        classes: The class list, so that several sets share their labels; None takes the sorted folder names.
        validation: Share of each class that goes to `out/validation`, the rest to `out/train`.
        processes: Shards written at once; the result does not depend on it.
        progress: Show how far it is, on stderr.

    Raises:
        UserError: A source without images, a class that is not in the list, or an output that cannot be written or
            holds something else.
    """
    if shard_samples < 1 or shard_bytes < 1:
        raise UserError(f"shards of {shard_samples} samples and {shard_bytes} bytes; both must be 1 or more")
    if os.path.realpath(out).startswith(os.path.join(os.path.realpath(source), "")):
        raise UserError(f"{out} lies inside the source {source}, where it would be a class; pack to another place")
    images = scan_folder(source, classes)
    splits = _plan(images, out, shard_samples, shard_bytes, seed, validation)
    try:
        _prepare(out, splits, _digest(images, splits))
        jobs = [(split, shard) for split in splits for shard in range(split.num_shards)]
        left = [(split, shard) for split, shard in jobs if not os.path.exists(_record(out, split, shard))]
        if len(left) < len(jobs):
            log.info("going on with an interrupted pack: %d of %d shards are there", len(jobs) - len(left), len(jobs))
        total = sum(len(split.places) for split in splits)
        todo = sum(int(split.cuts[shard + 1] - split.cuts[shard]) for split, shard in left)
        with show_progress(total, "packing", done=total - todo, shown=progress) as advancing:
            for count in run_jobs(_write_shard, (_job(images, out, *which) for which in left), processes):
                advancing.advance(count)
        return _finish(out, images, splits, len(jobs) - len(left))
    except OSError as error:
        raise _unwritable(out, error) from None


def _plan(
    source: Source, out: str, shard_samples: int, shard_bytes: int, seed: int, validation: float
) -> tuple[_Split, ...]:
    """Which image lies where, before any is read."""
    if validation:
        kept, held = split_validation(source, validation, seed)
        sets = [("train", kept), ("validation", held)]
    else:
        sets = [("", list(range(len(source.paths))))]
    sizes = np.array(source.sizes, np.int64)
    splits = []
    for number, (name, members) in enumerate(sets):
        places = np.random.default_rng([seed, number]).permutation(np.array(members, np.int64))
        length = int((-(-sizes[places] // BLOCK) * BLOCK + 3 * BLOCK).sum())
        shards = min(len(places), max(-(-len(places) // shard_samples), -(-length // shard_bytes)))
        cuts = np.arange(shards + 1, dtype=np.int64) * len(places) // shards
        splits.append(_Split(os.path.join(out, name) if name else out, name or "shard", places, cuts))
    return tuple(splits)


def _digest(source: Source, splits: tuple[_Split, ...]) -> str:
    """Of all that decides what the shards will hold."""
    digest = hashlib.sha256("\0".join(source.classes).encode("utf-8", "surrogateescape"))
    for path, label, size in zip(source.paths, source.labels, source.sizes, strict=True):
        digest.update(f"{path}\0{label}\0{size}\n".encode("utf-8", "surrogateescape"))
    for split in splits:
        digest.update(split.prefix.encode() + split.places.tobytes() + split.cuts.tobytes())
    return digest.hexdigest()


def _prepare(out: str, splits: tuple[_Split, ...], digest: str) -> None:
    """Make the folders, or see that what is in `out` is the same pack, interrupted."""
    plan = os.path.join(out, UNFINISHED, _PLAN)
    if os.path.exists(plan):
        with open(plan, encoding="utf-8") as file:
            if json.load(file) != digest:
                raise UserError(
                    f"{out} holds an interrupted pack of another source or with other settings; finish that one with "
                    "its own settings, or remove the folder"
                )
    elif os.path.isdir(out) and (held := sorted(os.listdir(out))):
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise UserError(f"{out} is not empty: it holds {shown}; pack into a new folder")
    for folder in [os.path.join(out, UNFINISHED), *(split.folder for split in splits)]:
        os.makedirs(folder, exist_ok=True)
    _write_json(plan, digest)


def _record(out: str, split: _Split, shard: int) -> str:
    return os.path.join(out, UNFINISHED, f"{split.name(shard)}.json")


def _job(source: Source, out: str, split: _Split, shard: int) -> _Job:
    places = split.places[split.cuts[shard] : split.cuts[shard + 1]].tolist()
    images = [(source.paths[place], source.labels[place], _key(place, source.paths[place])) for place in places]
    return _Job(os.path.join(split.folder, split.name(shard)), _record(out, split, shard), source.folder, images)


def _key(place: int, path: str) -> str:
    """Unique through the number, readable through the name, and without a dot, which would end the key."""
    name = os.path.splitext(os.path.basename(path))[0]
    return f"{place:09d}-{_UNSAFE.sub('_', name)[:_LONGEST_NAME]}"


def _write_shard(job: _Job) -> int:
    """Write one shard, its sidecar and, last, its record; how many images that were."""
    skipped: list[tuple[str, str]] = []
    part = f"{job.tar}.tmp"
    with open(part, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, label, key in job.images:
                content, kind, reason = _read_image(os.path.join(job.root, path))
                if kind is None:
                    skipped.append((path, reason))
                    continue
                _add(tar, f"{key}.cls", str(label).encode())
                _add(tar, f"{key}.{kind}", content)
        file.flush()
        os.fsync(file.fileno())
    scan = scan_shard(part)
    if scan.samples:
        write_offsets(sidecar_path(os.path.dirname(job.tar), job.tar), scan.offsets)
        os.replace(part, job.tar)
    else:
        os.remove(part)
    _write_json(job.record, asdict(_Record(scan.samples, scan.bytes, scan.sha256, skipped)))
    return len(job.images)


def _read_image(path: str) -> tuple[bytes, str | None, str]:
    """Content and type of a file, or no type and why it is not taken."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        return b"", None, f"cannot be read: {error.strerror}"
    if not content:
        return b"", None, "empty file"
    return content, image_type(content), "not an image: its first bytes are those of no known format"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """A member whose header depends on nothing but name and length."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o444
    tar.addfile(info, io.BytesIO(content))


def _finish(out: str, source: Source, splits: tuple[_Split, ...], resumed: int) -> PackReport:
    """Index all shards, say what was left out, and take the notes of the pack away."""
    made: list[PackedSplit] = []
    skipped: list[Skipped] = []
    indexes: list[tuple[str, list[IndexedShard]]] = []
    for split in splits:
        shards: list[IndexedShard] = []
        for shard in range(split.num_shards):
            with open(_record(out, split, shard), encoding="utf-8") as file:
                record = _Record(**json.load(file))
            skipped += [Skipped(path, reason) for path, reason in record.skipped]
            if record.samples:
                shards.append(IndexedShard(split.name(shard), record.samples, record.bytes, record.sha256))
        if not shards:
            what = f"{skipped[0].path}: {skipped[0].reason}"
            shutil.rmtree(os.path.join(out, UNFINISHED))
            raise UserError(f"no images in {source.folder}: none of its {len(split.places)} files is one ({what})")
        indexes.append((split.folder, shards))
        made.append(
            PackedSplit(split.folder, len(shards), sum(s.samples for s in shards), sum(s.bytes for s in shards))
        )
    skipped.sort()
    if skipped:
        with open(os.path.join(out, SKIPPED), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(skip._asdict()) + "\n" for skip in skipped)
    for folder, shards in indexes:
        write_index(folder, source.classes, shards)
    shutil.rmtree(os.path.join(out, UNFINISHED))
    return PackReport(tuple(made), source.classes, source.empty, tuple(skipped), resumed)


def _write_json(path: str, content: object) -> None:
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(f"{path}.tmp", path)


def _unwritable(out: str, error: OSError) -> UserError:
    where = error.filename or out
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space left for {where}; make room and run the same command again, it goes on from there")
    return UserError(f"the shards cannot be written: {where}: {error.strerror}")
