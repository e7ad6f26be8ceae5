"""Leaves samples out of training and evaluation, without moving any other: their places are noted in the index."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vitscale.data.find import find_shards, read_index
from vitscale.data.index import IndexedShard, write_index
from vitscale.data.scan import spans_of
from vitscale.data.shards import map_shard
from vitscale.errors import UserError


class Named(NamedTuple):
    """A sample as a list names it: where it stands in the list, its shard's file name, its key."""

    place: str
    shard: str
    key: str


def read_names(path: str) -> list[Named]:
    """Samples in a list: a line `SHARD KEY` each, or JSON with "shard" and "key", as in `bad_samples.jsonl`.

    Raises:
        UserError: The file cannot be read, or a line says something else.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the list {path} cannot be read: {error}") from None
    names = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        place = f"{path}:{number}"
        try:
            record = (
                json.loads(line) if line.startswith("{") else dict(zip(("shard", "key"), line.split(), strict=True))
            )
            shard, key = record["shard"], record["key"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{place}: {line!r} names no sample; write the shard's file name, a space, and the key"
            ) from None
        if key:  # of a shard that could not be read at all no sample is known
            names.append(Named(place, os.path.basename(str(shard).rpartition(": ")[2]), str(key)))
    if not names:
        raise UserError(f"{path} names no samples")
    return names


def exclude(folder: str, names: Iterable[Named]) -> int:
    """Note in the index of a folder of shards that these samples are left out; how many were not before.

    Raises:
        UserError: A sample is not there, or the index cannot be written; nothing is changed then.
    """
    entries = {os.path.basename(entry.path): entry for entry in find_shards(folder)}
    wanted: dict[str, list[Named]] = defaultdict(list)
    for name in names:
        if name.shard not in entries:
            raise UserError(f"{name.place}: {folder} has no shard {name.shard}")
        wanted[name.shard].append(name)
    places = {}
    for shard, of_shard in wanted.items():
        with map_shard(entries[shard].path) as buffer:
            there = {span.key: place for place, span in reversed(list(enumerate(spans_of(buffer))))}
        if missing := next((name for name in of_shard if name.key not in there), None):
            raise UserError(f"{missing.place}: {shard} has no sample {missing.key}")
        places[shard] = {there[name.key] for name in of_shard}
    listed = read_index(folder)
    before = sum(len(entry.excluded) for entry in listed)
    shards = [
        IndexedShard(
            entry.name,
            entry.samples,
            entry.bytes,
            entry.sha256,
            tuple(sorted({*entry.excluded, *places.get(os.path.basename(entry.path), ())})),
        )
        for entry in listed
    ]
    try:
        write_index(folder, listed[0].classes, shards)
    except OSError as error:
        raise UserError(f"the index in {folder} cannot be written: {error.strerror}") from None
    return sum(len(shard.excluded) for shard in shards) - before
