"""Shards and their index: which tars there are, what each holds, and one contiguous read of samples.

    shards/index.json       {"format": "vitscale-index", "version": 1, "classes": [...],
                             "shards": [{"name", "samples", "bytes", "sha256"}, ...]}
    shards/train-00000.tar  a plain WebDataset tar: the members of one sample follow each other
    shards/train-00000.idx  little-endian int64 [samples + 1]: sample i is bytes [offset[i], offset[i + 1])

`storage` knows how their bytes are reached, here or elsewhere. An index holds no open file, so it may cross a fork or
be pickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitscale.data.cache import cached
from vitscale.data.find import ShardEntry, find_shards, merge_classes
from vitscale.data.storage import (
    LOCAL,
    Access,
    GiveUp,
    TooShort,
    download,
    file_size,
    is_remote,
    read_range,
    read_whole,
    with_retries,
)
from vitscale.data.tar import TarFault, members, split_name
from vitscale.errors import UserError


class ShardError(Exception):
    """A shard that cannot be read, after all tries.

    Attributes:
        shard: Its name in the index.
        reason: What is wrong, in words.
    """

    def __init__(self, shard: str, reason: str) -> None:
        super().__init__(shard, reason)
        self.shard = shard
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.shard}: {self.reason}"


@dataclass(frozen=True)
class RawSample:
    """One sample as it lies in a shard.

    Attributes:
        key: Path of its members up to the dot; empty when `fault` is set.
        fields: Lower-case extension -> content.
        fault: Why the sample's stretch of the tar cannot be parsed, else None.
    """

    key: str
    fields: dict[str, bytes]
    fault: str | None = None


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """What is known of a set of shards before any is opened.

    Attributes:
        names: Of each shard, as in its `index.json`.
        paths: Of each tar.
        sidecars: Path of each `.idx`.
        samples: Samples in each shard, int64 `[shards]`.
        bytes: Length of each tar, int64 `[shards]`.
        checksums: sha256 of each tar, in hex.
        classes: Name of each label; empty when unknown.
        access: How they are reached.
        excluded: Places of samples that are left out, by number of the shard; they keep their place in the order.
        digest: Of names, samples and checksums in order: two sets with one digest hold the same samples in one order.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    sidecars: tuple[str, ...]
    samples: NDArray[np.int64]
    bytes: NDArray[np.int64]
    checksums: tuple[str, ...]
    classes: tuple[str, ...]
    digest: str
    access: Access = LOCAL
    excluded: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.samples.sum())


def load_index(spec: str | tuple[str, ...], access: Access = LOCAL) -> ShardIndex:
    """The index of all shards that `spec` names, in that order, their sizes compared with the files.

    Args:
        spec: A folder with its `index.json`, or tars by path, brace range (`{000..127}.tar`) or glob; several are
            appended to each other. URLs of http, https, s3 and gs are taken likewise, and `@FILE`, a list of specs.
        access: How remote shards are reached.

    Raises:
        UserError: No shards, no index, or an index that does not fit the shards.
    """
    entries = find_shards(spec, access)
    _compare_sizes(entries)
    return ShardIndex(
        names=tuple(entry.name for entry in entries),
        paths=tuple(entry.path for entry in entries),
        sidecars=tuple(entry.sidecar for entry in entries),
        samples=np.array([entry.samples for entry in entries], np.int64),
        bytes=np.array([entry.bytes for entry in entries], np.int64),
        checksums=tuple(entry.sha256 for entry in entries),
        classes=merge_classes(entries),
        digest=_digest(entries),
        access=access,
        excluded={number: frozenset(entry.excluded) for number, entry in enumerate(entries) if entry.excluded},
    )


def read_samples(index: ShardIndex, shard: int, start: int, stop: int) -> list[RawSample]:
    """Samples `[start, stop)` of one shard in one contiguous read.

    A sample whose own stretch is damaged comes back with its `fault`; the others are not touched by it.

    Raises:
        ShardError: The shard or its sidecar cannot be read, or is not the one that was indexed.
    """
    name, path = index.names[shard], index.paths[shard]
    if not 0 <= start <= stop <= index.samples[shard]:
        raise IndexError(f"samples [{start}, {stop}) of {name}, which holds {index.samples[shard]}")
    if start == stop:
        return []
    samples, access = int(index.samples[shard]), index.access
    offsets = load_offsets(name, index.sidecars[shard], samples, index.checksums[shard], access)
    first, last = int(offsets[start]), int(offsets[stop])
    try:
        content = _read_shard(index, shard, path, first, last - first)
    except (OSError, UserError, GiveUp) as error:
        raise ShardError(name, str(error)) from error
    bounds = (offsets[start : stop + 1] - first).tolist()
    return [_parse(content, *bounds[i : i + 2]) for i in range(stop - start)]


def _read_shard(index: ShardIndex, shard: int, path: str, first: int, length: int) -> bytes:
    """`length` bytes of a shard, from its local copy where it has one; its size is compared with the index's."""
    size, access = int(index.bytes[shard]), index.access
    if is_remote(path) and access.cache_dir is not None:
        path = cached(path, size=size, sha256=index.checksums[shard], access=access) or path
    if is_remote(path):
        found = _remote_size(path, index.checksums[shard], access)
        if found != size:
            raise ShardError(index.names[shard], f"{found:,} bytes there, but the index says {size:,}")
        return with_retries(path, lambda: read_range(path, first, length, access))

    def read() -> bytes:
        with open_shard(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise ShardError(index.names[shard], f"{found:,} bytes, but {size:,} when the index was loaded")
            file.seek(first)
            content = file.read(length)
        if len(content) != length:
            raise TooShort(f"{len(content):,} bytes at {first:,} instead of {length:,}")
        return content

    return with_retries(path, read)


def open_shard(path: str) -> BinaryIO:
    """The tar at a local `path`, from its beginning."""
    return open(path, "rb")


@functools.lru_cache(maxsize=4096)
def _remote_size(path: str, checksum: str, access: Access) -> int:
    """Asked for once a process, since each question is a request."""
    return with_retries(path, lambda: file_size(path, access))


@contextlib.contextmanager
def map_shard(path: str, access: Access = LOCAL) -> Iterator[mmap.mmap | bytes]:
    """The whole tar at `path` as a buffer that is read as it is touched; of a remote one a copy for the time being.

    Raises:
        OSError: The file cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        file: IO[bytes]
        if is_remote(path):
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="vitscale-"))
            with_retries(path, lambda: download(path, file.name, access))
        else:
            file = stack.enter_context(open_shard(path))
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            yield buffer


@functools.lru_cache(maxsize=256)
def load_offsets(name: str, sidecar: str, samples: int, checksum: str, access: Access = LOCAL) -> NDArray[np.int64]:
    """Where each sample of a shard begins, int64 `[samples + 1]`; the last one is the end of the last sample.

    `checksum` of the shard keeps a remembered sidecar apart from that of another version of the shard.

    Raises:
        ShardError: No sidecar, or one that does not fit.
    """
    try:
        content = read_whole(sidecar, access, length=8 * (samples + 1))
    except (OSError, UserError) as error:
        raise ShardError(name, str(error)) from error
    if len(content) != 8 * (samples + 1):
        raise ShardError(name, f"{sidecar} has {len(content):,} bytes instead of {8 * (samples + 1):,}")
    offsets = np.frombuffer(content, "<i8").astype(np.int64)
    if offsets[0] < 0 or (np.diff(offsets) <= 0).any():
        raise ShardError(name, f"{sidecar} does not list rising offsets")
    offsets.flags.writeable = False
    return offsets


def _parse(content: bytes, start: int, stop: int) -> RawSample:
    key = ""
    fields: dict[str, bytes] = {}
    try:
        for member in members(content, start, stop):
            parts = split_name(member.name) if member.regular else None
            if parts is None:
                continue
            key = key or parts[0]
            if parts[0] != key:
                return RawSample("", {}, f"members of two samples, {key} and {parts[0]}, where the sidecar has one")
            fields.setdefault(parts[1], content[member.data : member.data + member.size])
    except TarFault as fault:
        return RawSample("", {}, f"damaged tar: {fault.reason.rstrip(',')}")
    return RawSample(key, fields) if fields else RawSample("", {}, "no member where the sidecar has a sample")


def _compare_sizes(entries: list[ShardEntry]) -> None:
    """Refuse shards that are missing or of another length than the index says, all in one message."""
    wrong: list[str] = []
    for entry in entries:
        if is_remote(entry.path):
            continue  # a request for each; compared when it is read
        try:
            size = os.stat(entry.path).st_size
        except OSError as error:
            wrong.append(f"{entry.path} should have {entry.bytes:,} bytes and cannot be read ({error.strerror})")
            continue
        if size != entry.bytes:
            wrong.append(f"{entry.path} has {size:,} bytes, the index says {entry.bytes:,}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        folder = os.path.dirname(entries[0].sidecar)
        raise UserError(
            f"the index does not fit its shards: {'; '.join(wrong[:3])}{more}. Copy the shards again and run "
            f"`vitscale data verify {folder}`, or, where they changed on purpose, `vitscale data index {folder}`"
        )


def _digest(entries: list[ShardEntry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        line = f"{os.path.basename(entry.name)}\0{entry.samples}\0{entry.sha256}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]
