"""A source into shards: shuffled over the whole set, the same bytes for any number of processes or of array parts.

    out/shard-00000.tar, .idx, ..., index.json               without a validation split
    out/train/train-00000.tar, ...; out/validation/...       with one
    out/skipped.jsonl                                        files that are no images, where there were any

Image bytes are kept as they are, unless they are to be made smaller. A sample is `<number>-<name>.<type>` and
`<number>-<name>.cls`, the label in digits, or `.json` with several labels; the number is the image's place in the
source. Until everything is written, `out/.vitscale-pack` says what is being packed and which shards are whole, no
`index.json` is there, and the same call goes on where it was stopped.

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
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.data.decode import BadImage
from vitscale.data.find import UNFINISHED, sidecar_path
from vitscale.data.index import IndexedShard, write_index, write_offsets
from vitscale.data.pool import run_jobs
from vitscale.data.scan import scan_shard
from vitscale.data.shrink import shrink
from vitscale.data.source import Source, image_type, split_validation
from vitscale.data.source_parquet import read_image
from vitscale.data.tar import BLOCK
from vitscale.errors import UserError
from vitscale.progress import progress as show_progress

SKIPPED = "skipped.jsonl"
_PLAN = "plan.json"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_NAME = 48
_GROUPS_MIXED = 4  # as many as a process remembers

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


class _Image(NamedTuple):
    """One image of a job; fields as in `Source`, the offset None where the whole file is the image."""

    path: str
    label: int | tuple[int, ...]
    key: str
    offset: int | None
    size: int
    extras: tuple[tuple[str, int, int], ...]


class _Fit(NamedTuple):
    """How large images may be, and how well those that are made smaller are encoded."""

    max_side: int
    quality: int


@dataclass(frozen=True)
class _Job:
    """One shard to write: its images, and where the record of the finished shard goes."""

    tar: str
    record: str
    root: str
    images: list[_Image]
    fit: _Fit | None


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


def pack_source(
    source: Source,
    out: str,
    *,
    shard_samples: int = 10_000,
    shard_bytes: int = 256 << 20,
    seed: int = 0,
    validation: float = 0.0,
    max_side: int | None = None,
    quality: int = 92,
    part: tuple[int, int] | None = None,
    processes: int = 1,
    progress: bool = True,
) -> PackReport | None:
    """Pack a source into shards and their index in `out`.

    Args:
        source: What to pack.
        out: New or empty folder, or that of a pack of the same things that was interrupted.
        shard_samples: Most samples of a shard. Shards are filled evenly, so that each has about this many or fewer.
        shard_bytes: About the largest length of a shard.
        seed: Of the shuffle and of the split.
        validation: Share of each class that goes to `out/validation`, the rest to `out/train`.
        max_side: Images whose longer side is more pixels are made that small; None keeps all as they are.
        quality: Of the JPEGs that those become.
        part: (i, n): write only the shards of part i of n, in a folder that all parts share. The part that finds all
            shards written makes the index.
        processes: Shards written at once; the result does not depend on it.
        progress: Show how far it is, on stderr.

    Returns:
        What was made; None where other parts are still to come.

    Raises:
        UserError: A source without images, or an output that cannot be written or holds something else.
    """
    if shard_samples < 1 or shard_bytes < 1:
        raise UserError(f"shards of {shard_samples} samples and {shard_bytes} bytes; both must be 1 or more")
    if part is not None and not 0 <= part[0] < part[1]:
        raise UserError(f"part {part[0]} of {part[1]}; parts are counted from 0")
    fit = None if max_side is None else _Fit(max_side, quality)
    splits = _plan(source, out, shard_samples, shard_bytes, seed, validation)
    try:
        _prepare(out, splits, _digest(source, splits, fit))
        jobs = [(split, shard) for split in splits for shard in range(split.num_shards)]
        if part is not None:
            jobs = jobs[part[0] :: part[1]]
        left = [(split, shard) for split, shard in jobs if not os.path.exists(_record(out, split, shard))]
        if len(left) < len(jobs):
            log.info("going on with an interrupted pack: %d of %d shards are there", len(jobs) - len(left), len(jobs))
        total = sum(int(split.cuts[shard + 1] - split.cuts[shard]) for split, shard in jobs)
        todo = sum(int(split.cuts[shard + 1] - split.cuts[shard]) for split, shard in left)
        with show_progress(total, "packing", done=total - todo, shown=progress) as advancing:
            for count in run_jobs(_write_shard, (_job(source, out, fit, *which) for which in left), processes):
                advancing.advance(count)
        if part is not None and not _is_last(out, splits):
            return None
        return _finish(out, source, splits, len(jobs) - len(left))
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
        places = _shuffled(np.array(members, np.int64), source.groups, np.random.default_rng([seed, number]))
        length = int((-(-sizes[places] // BLOCK) * BLOCK + 3 * BLOCK).sum())
        shards = min(len(places), max(-(-len(places) // shard_samples), -(-length // shard_bytes)))
        cuts = np.arange(shards + 1, dtype=np.int64) * len(places) // shards
        splits.append(_Split(os.path.join(out, name) if name else out, name or "shard", places, cuts))
    return tuple(splits)


def _shuffled(places: NDArray[np.int64], groups: list[int] | None, random: np.random.Generator) -> NDArray[np.int64]:
    """Places in random order; where images are read in groups, those of a few random groups after each other."""
    if groups is None:
        return random.permutation(places)
    group = np.array(groups, np.int64)[places]
    window = random.permutation(group.max() + 1)[group] // _GROUPS_MIXED
    mixed: NDArray[np.int64] = places[np.lexsort((random.random(len(places)), window))]
    return mixed


def _is_last(out: str, splits: tuple[_Split, ...]) -> bool:
    """Whether all shards of all parts are written, and no other part is making the index."""
    if not all(os.path.exists(_record(out, split, shard)) for split in splits for shard in range(split.num_shards)):
        return False
    try:
        os.mkdir(os.path.join(out, UNFINISHED, "finishing"))
    except (FileExistsError, FileNotFoundError):  # another is at it, or was
        return False
    return True


def _digest(source: Source, splits: tuple[_Split, ...], fit: _Fit | None) -> str:
    """Of all that decides what the shards will hold."""
    digest = hashlib.sha256("\0".join((*source.classes, repr(fit))).encode("utf-8", "surrogateescape"))
    offsets = source.offsets or [0] * len(source.paths)
    for path, label, size, offset in zip(source.paths, source.labels, source.sizes, offsets, strict=True):
        digest.update(f"{path}\0{label}\0{size}\0{offset}\n".encode("utf-8", "surrogateescape"))
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
    elif os.path.isdir(out) and (held := sorted(set(os.listdir(out)) - {UNFINISHED})) and not os.path.exists(plan):
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise UserError(f"{out} is not empty: it holds {shown}; pack into a new folder")
    for folder in [os.path.join(out, UNFINISHED), *(split.folder for split in splits)]:
        os.makedirs(folder, exist_ok=True)
    _write_json(plan, digest)


def _record(out: str, split: _Split, shard: int) -> str:
    return os.path.join(out, UNFINISHED, f"{split.name(shard)}.json")


def _job(source: Source, out: str, fit: _Fit | None, split: _Split, shard: int) -> _Job:
    images = [
        _Image(
            source.paths[place],
            source.labels[place],
            _key(place, source.names[place] if source.names else source.paths[place]),
            source.offsets[place] if source.offsets else None,
            source.sizes[place],
            source.extras[place] if source.extras else (),
        )
        for place in split.places[split.cuts[shard] : split.cuts[shard + 1]].tolist()
    ]
    return _Job(os.path.join(split.folder, split.name(shard)), _record(out, split, shard), source.folder, images, fit)


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
            for image in job.images:
                content, kind, reason = _read_image(job, image)
                if kind is None:
                    skipped.append((image.path if image.offset is None else f"{image.path}: {image.key}", reason))
                    continue
                _add_label(tar, image)
                _add(tar, f"{image.key}.{kind}", content)
                for field, at, size in image.extras:
                    _add(tar, f"{image.key}.{field}", _read(os.path.join(job.root, image.path), at, size))
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


def _read(path: str, offset: int | None, size: int) -> bytes:
    if path.endswith(".parquet") and offset is not None:
        return read_image(path, offset)
    with open(path, "rb") as file:
        if offset is None:
            return file.read()
        file.seek(offset)
        return file.read(size)


def _read_image(job: _Job, image: _Image) -> tuple[bytes, str | None, str]:
    """Content and type of an image, or no type and why it is not taken."""
    try:
        content = _read(os.path.join(job.root, image.path), image.offset, image.size)
    except OSError as error:
        return b"", None, f"cannot be read: {error.strerror}"
    if not content:
        return b"", None, "empty file"
    kind = image_type(content)
    if kind is None or job.fit is None:
        return content, kind, "not an image: its first bytes are those of no known format"
    try:
        smaller = shrink(content, max_side=job.fit.max_side, quality=job.fit.quality)
    except BadImage as error:
        return b"", None, f"cannot be decoded: {error}"
    return (content, kind, "") if smaller is None else (smaller, "jpg", "")


def _add_label(tar: tarfile.TarFile, image: _Image) -> None:
    if isinstance(image.label, int):
        _add(tar, f"{image.key}.cls", str(image.label).encode())
    else:
        _add(tar, f"{image.key}.json", json.dumps({"labels": list(image.label)}).encode())


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
    aside = f"{path}.{os.getpid()}.tmp"  # parts of an array may write the same file at one time
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(aside, path)


def _unwritable(out: str, error: OSError) -> UserError:
    where = error.filename or out
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space left for {where}; make room and run the same command again, it goes on from there")
    return UserError(f"the shards cannot be written: {where}: {error.strerror}")
