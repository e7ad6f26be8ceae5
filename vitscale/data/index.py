"""Writes `index.json` and its sidecars, for shards of our own and for those that another tool made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.data.find import FORMAT, INDEX, VERSION, find_tars, read_index, sidecar_path
from vitscale.data.pool import run_jobs
from vitscale.data.scan import Problem, Scan, scan_shard
from vitscale.data.storage import Access, GiveUp, is_remote
from vitscale.data.tar import TarFault
from vitscale.errors import UserError
from vitscale.progress import progress as show_progress

_READING = Access(allow_pipe=True)
"""Who names a command to index has allowed it."""


class IndexedShard(NamedTuple):
    """One line of an `index.json`; `name` is the path of the tar as seen from there."""

    name: str
    samples: int
    bytes: int
    sha256: str
    excluded: tuple[int, ...] = ()


@dataclass(frozen=True)
class IndexReport:
    """What indexing found.

    Attributes:
        folders: Where an `index.json` was written.
        shards: Tars read.
        samples: Samples in them.
        problems: Samples that are odd, and shards without samples; they are in the index nevertheless.
    """

    folders: tuple[str, ...]
    shards: int
    samples: int
    problems: tuple[Problem, ...]


def index_shards(
    spec: str | tuple[str, ...],
    out: str | None = None,
    *,
    classes: Sequence[str] = (),
    processes: int = 1,
    progress: bool = True,
) -> IndexReport:
    """Read every tar that `spec` names and write the index beside them.

    An index that is there already keeps its other shards, and its class list where `classes` is empty.

    Args:
        spec: A folder, tars, brace ranges or globs.
        out: Folder for `index.json` and the sidecars when that of the tars cannot be written; then the spec of these
            shards is `out`.
        classes: Name of each label, where known.
        processes: Shards read at once.
        progress: Show how far it is, on stderr.

    Raises:
        UserError: Nothing found, a tar that is cut or damaged (nothing is written then), or no place to write to.
    """
    tars = list(dict.fromkeys(find_tars(spec, _READING)))
    if out is None and (elsewhere := next(filter(is_remote, tars), None)):
        raise UserError(
            f"{elsewhere} is not on this machine: `--out` names the folder for its index, which you then give"
        )
    scans: list[Scan] = []
    damaged: list[str] = []
    with show_progress(len(tars), "indexing", unit="shards", shown=progress) as advancing:
        for path, scan in zip(tars, run_jobs(_scan, tars, processes), strict=True):
            advancing.advance()
            if isinstance(scan, str):
                damaged.append(f"{path}: {scan}")
            else:
                scans.append(scan)
    if damaged:
        more = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise UserError(f"{len(damaged)} of {len(tars)} shards cannot be indexed: {'; '.join(damaged[:3])}{more}")
    found = dict(zip(tars, scans, strict=True))
    folders = tuple(dict.fromkeys(_folder(path, out) for path in tars))
    for folder in folders:
        _write_beside({path: scan for path, scan in found.items() if _folder(path, out) == folder}, folder, classes)
    return IndexReport(folders, len(tars), sum(scan.samples for scan in scans), tuple(_problems(found)))


def write_index(folder: str, classes: Sequence[str], shards: Sequence[IndexedShard]) -> None:
    """Write `index.json`, whole or not at all."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "classes": list(classes),
        "shards": [_line(shard) for shard in shards],
    }
    path = os.path.join(folder, INDEX)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=0, ensure_ascii=False)
        file.write("\n")
    os.replace(f"{path}.tmp", path)


def _line(shard: IndexedShard) -> dict[str, Any]:
    """A shard as it stands in the index, which says nothing of excluded samples where there are none."""
    line = shard._asdict()
    if not shard.excluded:
        del line["excluded"]
    return line


def write_offsets(path: str, offsets: NDArray[np.int64]) -> None:
    """Write a sidecar, whole or not at all."""
    with open(f"{path}.tmp", "wb") as file:
        file.write(offsets.astype("<i8").tobytes())
    os.replace(f"{path}.tmp", path)


def _scan(path: str) -> Scan | str:
    """What `path` holds, or why it cannot be read."""
    try:
        return scan_shard(path, _READING)
    except (TarFault, OSError, GiveUp) as error:
        return str(error)


def _folder(path: str, out: str | None) -> str:
    return out if out is not None else os.path.dirname(path) or "."


def _write_beside(scans: dict[str, Scan], folder: str, classes: Sequence[str]) -> None:
    """Sidecars and index of `scans` in `folder`, kept together with what an index there says of other shards."""
    names: dict[str, str] = {}
    for path in scans:
        if (taken := names.setdefault(os.path.basename(path), path)) != path:
            raise UserError(
                f"{taken} and {path} have one name and cannot share the index in {folder}; index them apart"
            )
    kept = read_index(folder) if os.path.exists(os.path.join(folder, INDEX)) else []
    shards = {
        entry.name: IndexedShard(entry.name, entry.samples, entry.bytes, entry.sha256, entry.excluded)
        for entry in kept
        if os.path.basename(entry.name) not in names and (is_remote(entry.path) or os.path.exists(entry.path))
    }
    try:
        os.makedirs(folder, exist_ok=True)
        for path, scan in scans.items():
            sidecar = sidecar_path(folder, path)
            _refuse_foreign(sidecar)
            write_offsets(sidecar, scan.offsets)
            name = path if is_remote(path) else os.path.relpath(path, folder)
            excluded = next((entry.excluded for entry in kept if entry.sha256 == scan.sha256), ())
            shards[name] = IndexedShard(name, scan.samples, scan.bytes, scan.sha256, excluded)
        listed = tuple(classes) or _known_classes([folder, *map(os.path.dirname, scans)])
        write_index(folder, listed, [shards[name] for name in sorted(shards)])
    except OSError as error:
        raise UserError(
            f"the index cannot be written to {folder}: {error.strerror}; `--out` puts it into another folder"
        ) from None


def _known_classes(folders: Sequence[str]) -> tuple[str, ...]:
    """The class list of the first index that lies in one of `folders`."""
    for folder in dict.fromkeys(folders):
        if os.path.exists(os.path.join(folder, INDEX)) and (entries := read_index(folder)):
            return entries[0].classes
    return ()


def _refuse_foreign(sidecar: str) -> None:
    """DALI's wds2idx also calls its text files `.idx`."""
    if os.path.exists(sidecar):
        with open(sidecar, "rb") as file:
            if file.read(2) == b"v1":
                raise UserError(f"{sidecar} is an index of DALI's wds2idx; `--out` puts ours into another folder")


def _problems(scans: dict[str, Scan]) -> Iterator[Problem]:
    for path, scan in scans.items():
        if not scan.samples:
            yield Problem(path, "", "no samples")
        yield from (Problem(path, key, reason) for key, reason in scan.problems)
