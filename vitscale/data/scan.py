"""One pass over a whole shard: where its samples begin, its checksum, and what is odd about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.data.shards import map_shard
from vitscale.data.storage import LOCAL, Access
from vitscale.data.tar import Buffer, archive_members, split_name


class Problem(NamedTuple):
    """Something wrong with a shard, or with one sample in it (`key` is empty where it is the shard as a whole)."""

    shard: str
    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.key}: {self.reason}" if self.key else f"{self.shard}: {self.reason}"


@dataclass
class Span:
    """One sample's stretch of a tar: bytes `[start, end)` hold its members and nothing of another sample.

    Attributes:
        key: Path of the members up to the dot.
        start: First byte, headers included.
        end: First byte that is not the sample's.
        fields: Extension -> first byte and length of the content.
        faults: What is wrong with the members, in words.
    """

    key: str
    start: int
    end: int
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scan:
    """A shard as one pass found it.

    Attributes:
        offsets: int64 `[samples + 1]`, as in the sidecar.
        bytes: Length of the tar.
        sha256: Its checksum, in hex.
        problems: Faults of samples, as (key, reason).
    """

    offsets: NDArray[np.int64]
    bytes: int
    sha256: str
    problems: tuple[tuple[str, str], ...]

    @property
    def samples(self) -> int:
        """Samples in the shard."""
        return len(self.offsets) - 1


def scan_shard(path: str, access: Access = LOCAL) -> Scan:
    """Read the tar at `path` once.

    Raises:
        TarFault: It is not a whole plain tar.
        OSError: It cannot be opened.
    """
    with map_shard(path, access) as buffer:
        spans = list(spans_of(buffer))
        return Scan(offsets_of(spans), len(buffer), hashlib.sha256(buffer).hexdigest(), tuple(faults_of(spans)))


def spans_of(buffer: Buffer) -> Iterator[Span]:
    """Each sample of a whole tar, in order; members that belong to none go with the sample before them.

    Raises:
        TarFault: The buffer is not a whole plain tar.
    """
    span: Span | None = None
    for member in archive_members(buffer):
        parts = split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if not member.regular:
            if span is not None and span.key == key:
                span.faults.append(f".{extension} is a link or a folder, without content")
            continue
        if span is None or span.key != key:
            if span is not None:
                span.end = member.start
                yield span
            span = Span(key, member.start, member.end)
        if extension in span.fields:
            span.faults.append(f"two members .{extension}; the first one counts")
        else:
            span.fields[extension] = (member.data, member.size)
        span.end = member.end
    if span is not None:
        yield span


def offsets_of(spans: list[Span]) -> NDArray[np.int64]:
    """int64 `[samples + 1]`: where each sample begins, and where the last one ends."""
    return np.array([span.start for span in spans] + [spans[-1].end if spans else 0], np.int64)


def faults_of(spans: list[Span]) -> Iterator[tuple[str, str]]:
    """(key, reason) of everything odd; keys that come again in the shard are one entry, under the first of them."""
    seen: set[str] = set()
    again: list[str] = []
    for span in spans:
        yield from ((span.key, fault) for fault in span.faults)
        if span.key in seen:
            again.append(span.key)
        seen.add(span.key)
    if again:
        more = f", and so do {len(again) - 1} more keys" if len(again) > 1 else ""
        yield again[0], f"comes again later in the shard{more}; members of a sample must follow each other"
