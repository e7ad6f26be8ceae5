"""Reads whole shards and says everything that is wrong with them; mends nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitscale.data.decode import BadImage, open_picture
from vitscale.data.find import ShardEntry, find_shards, merge_classes
from vitscale.data.pool import run_jobs
from vitscale.data.sample import LABEL_FIELDS, BadSample, image_field, label_of
from vitscale.data.scan import Problem, Span, faults_of, offsets_of, spans_of
from vitscale.data.shards import ShardError, load_offsets, map_shard
from vitscale.data.storage import LOCAL, GiveUp
from vitscale.data.tar import Buffer, TarFault
from vitscale.progress import progress as show_progress


@dataclass(frozen=True)
class VerifyReport:
    """What was read, and what is wrong with it.

    Attributes:
        shards: Shards read.
        samples: Samples that the index promises in them.
        problems: In the order of the shards; none means that all is well.
    """

    shards: int
    samples: int
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.problems


def verify_shards(spec: str | tuple[str, ...], *, processes: int = 1, progress: bool = True) -> VerifyReport:
    """Check every shard that `spec` names: length, checksum, sidecar, and in each sample the image and its label.

    Keys must differ within a shard; the same key in two shards is no fault, since many tools count anew in each.

    Args:
        spec: As of `load_index`.
        processes: Shards read at once.
        progress: Show how far it is, on stderr.

    Raises:
        UserError: No shards, no index, or class lists that differ.
    """
    entries = find_shards(spec, LOCAL)
    num_classes = len(merge_classes(entries))
    problems: list[Problem] = []
    jobs = ((entry._replace(classes=()), num_classes) for entry in entries)
    samples = sum(entry.samples for entry in entries)
    with show_progress(samples, "verifying", shown=progress) as advancing:
        for entry, found in zip(entries, run_jobs(_verify_shard, jobs, processes), strict=True):
            problems += found
            advancing.advance(entry.samples)
    return VerifyReport(len(entries), samples, tuple(problems))


def _verify_shard(job: tuple[ShardEntry, int]) -> list[Problem]:
    entry, num_classes = job
    try:
        with map_shard(entry.path, LOCAL) as buffer:
            return [Problem(entry.name, key, reason) for key, reason in _problems(buffer, entry, num_classes)]
    except (OSError, GiveUp) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return [Problem(entry.name, "", f"{entry.path} cannot be read: {reason}")]


def _problems(buffer: Buffer, entry: ShardEntry, num_classes: int) -> Iterator[tuple[str, str]]:
    """(key, reason) of everything wrong; the key is empty for the shard as a whole."""
    if len(buffer) != entry.bytes:
        yield "", f"{len(buffer):,} bytes, the index says {entry.bytes:,}"
    elif (checksum := hashlib.sha256(buffer).hexdigest()) != entry.sha256:
        yield "", f"its sha256 begins with {checksum[:12]}, that in the index with {entry.sha256[:12]}"
    spans: list[Span] = []
    whole = True
    try:
        for span in spans_of(buffer):
            spans.append(span)
            yield from ((span.key, reason) for reason in _sample_faults(buffer, span, num_classes))
    except TarFault as fault:
        whole = False
        yield "", f"{fault}; {len(spans):,} samples before it can be read"
    yield from faults_of(spans)
    if whole and len(spans) != entry.samples:
        yield "", f"{len(spans):,} samples, the index says {entry.samples:,}"
    yield from (("", reason) for reason in _sidecar_faults(entry, spans, whole))


def _sidecar_faults(entry: ShardEntry, spans: list[Span], whole: bool) -> Iterator[str]:
    try:
        offsets = load_offsets(entry.name, entry.sidecar, entry.samples, entry.sha256, LOCAL)
    except ShardError as error:
        yield error.reason
        return
    if whole and not np.array_equal(offsets, offsets_of(spans)):
        yield f"{entry.sidecar} does not fit the tar; run `vitscale data index` again"


def _sample_faults(buffer: Buffer, span: Span, num_classes: int) -> Iterator[str]:
    def content(field: str) -> bytes:
        start, size = span.fields[field]
        return buffer[start : start + size]

    try:
        label_of({field: content(field) if field in LABEL_FIELDS else b"" for field in span.fields}, num_classes)
    except BadSample as bad:
        yield str(bad)
    try:
        field = image_field(span.fields)
    except BadSample as bad:
        yield str(bad)
        return
    if reason := _undecodable(content(field)):
        yield f".{field} cannot be decoded: {reason}"


def _undecodable(content: bytes) -> str | None:
    """Why training could not use these bytes, or None."""
    try:
        open_picture(content).pixels()
    except BadImage as error:
        return str(error)
    return None
