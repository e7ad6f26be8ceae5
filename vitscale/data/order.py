"""Which sample is trained on at which step, on which rank: a pure function of the shards' sizes and a seed.

Training reads an endless sequence; step s of global batch B takes positions [s B, (s + 1) B). Epoch e is positions
[e N, (e + 1) N) of N samples, each exactly once.

    batch      columns 0 .. B-1; B / streams neighbouring columns belong to one stream, for ever
    line       all N samples laid out along the epoch's permutation of the shards
    stream     a piece of the line, as long as the epoch has positions in the stream's columns
    window     a piece of a stream, about `window` shards long, or a group if that is longer
    run        `run` neighbours on the line, which are read at once; the runs of a window are permuted
    group      some runs that follow each other after that; the samples of a group are permuted

A rank reads some columns of every batch, so it touches only the streams of those columns, and a run is fetched by one
rank where the ranks divide the streams. A group is what has to be in memory; the runs of all groups that are in use at
one time number about `runs_in_use`, on all ranks together, whatever the number of streams.

Nothing is stored but the line of the last epochs, O(shards); permutations are computed place by place (`permute`).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitscale.data.permute import derive, derive_each, permute

MOST_STREAMS = 512
SAMPLES_PER_STREAM = 4096
"""A set of fewer samples than this a stream has fewer streams, so that small sets are shuffled as a whole."""

_LINES_KEPT = 2

Ints = NDArray[np.int64]


class Plan(NamedTuple):
    """Samples to read, one element of each array a sample; all int64 `[count]`.

    Attributes:
        ids: Number of the sample: samples of the shards before its own, and its place; -1 for padding.
        epochs: How often the whole set was read before.
        shards: Its shard.
        places: Its place in the shard.
        starts: First place of the run that is read at once with it.
        stops: First place after that run.
    """

    ids: Ints
    epochs: Ints
    shards: Ints
    places: Ints
    starts: Ints
    stops: Ints


class _Line(NamedTuple):
    """One epoch: its shards in order and where each ends, `[shards]`; where the streams are cut, `[streams + 1]`.

    `read` is what was read of each stream before the epoch, `[streams]`.
    """

    key: int
    shards: Ints
    ends: Ints
    read: Ints
    cuts: Ints


class Order:
    """The endless sequence of samples.

    Args:
        shard_sizes: Samples in each shard, int64 `[shards]`; some may be 0.
        seed: The order's seed, 0 to 2**64 - 1.
        global_batch: Samples in a step, over all ranks.
        streams: Must divide `global_batch`; None chooses from `global_batch` and the number of samples.
        window: Shards that a window is long.
        run: Samples that are read at once.
        runs_in_use: Runs from which a batch is mixed, at least as many as a batch has samples; with runs of a
            mebibyte, 2048 of them are 2 GiB over all ranks.

    Attributes:
        num_samples: Samples in an epoch.
        streams: Number of streams.

    Raises:
        ValueError: No samples, a negative size, or streams that do not divide the batch.
    """

    def __init__(
        self,
        shard_sizes: Ints,
        *,
        seed: int,
        global_batch: int,
        streams: int | None = None,
        window: int = 4,
        run: int = 16,
        runs_in_use: int = 2048,
    ) -> None:
        sizes = np.asarray(shard_sizes, np.int64)
        if sizes.ndim != 1 or (sizes < 0).any() or not sizes.any():
            raise ValueError(f"shards of {sizes.tolist()[:10]} samples hold nothing to put in order")
        if min(global_batch, window, run, runs_in_use) < 1:
            raise ValueError("global_batch, window, run and runs_in_use must be 1 or more")
        self.num_samples = int(sizes.sum())
        self.streams = streams or choose_streams(global_batch, self.num_samples)
        if global_batch % self.streams:
            raise ValueError(f"{self.streams} streams do not divide a batch of {global_batch}")
        self._batch = global_batch
        self._seed = seed
        self._sizes = sizes
        self._ends = np.cumsum(sizes)
        self._columns = global_batch // self.streams
        self._run = run
        self._group = -(-max(runs_in_use, global_batch) // self.streams) * run
        self._window = max(self._group, -(-window * self.num_samples // int(np.count_nonzero(sizes))))
        self._lines: dict[int, _Line] = {}

    def at(self, start: int, count: int) -> Ints:
        """Sample ids at positions `[start, start + count)`, int64 `[count]`."""
        return self.plan(np.arange(start, start + count, dtype=np.int64)).ids

    def rank_positions(self, step: int, rank: int, world_size: int, *, steps: int = 1) -> Ints:
        """Positions that one rank reads from `step` on, int64 `[steps, global_batch / world_size]`.

        Raises:
            ValueError: The ranks do not divide the batch.
        """
        return rank_positions(self._batch, step, rank, world_size, steps=steps)

    def rank_ids(self, step: int, rank: int, world_size: int) -> Ints:
        """Sample ids that one rank reads at `step`, int64 `[global_batch / world_size]`."""
        return self.plan(self.rank_positions(step, rank, world_size)[0]).ids

    def plan(self, positions: Ints) -> Plan:
        """The samples at any positions, int64 `[count]`."""
        epochs = positions // self.num_samples
        found = np.empty((len(Plan._fields), len(positions)), np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            found[:, chosen] = self._plan_epoch(epoch, positions[chosen])
        return Plan(*found)

    def locate(self, ids: Ints) -> tuple[Ints, Ints]:
        """Shard of each sample and its place there."""
        return locate(self._ends, self._sizes, ids)

    def digest(self, step: int) -> str:
        """12 hex digits that two runs share exactly when they train on the same samples at `step`."""
        ids = self.at(step * self._batch, self._batch)
        return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:12]

    def samples_in_use(self, world_size: int) -> int:
        """Samples of all runs that one rank has in use at one time, about."""
        return min(self.num_samples, -(-self.streams // world_size) * self._group)

    def _plan_epoch(self, epoch: int, positions: Ints) -> Plan:
        """The samples at positions that all belong to one epoch."""
        line, run = self._line(epoch), self._run
        stream = positions % self._batch // self._columns
        place = self._read_before(positions, stream) - line.read[stream]
        begin, length = _part(place, line.cuts[stream + 1] - line.cuts[stream], self._window, run)
        window = line.cuts[stream] + begin
        group, group_length = _part(place - begin, length, self._group, run)
        # the samples of a group, permuted; then the runs of the window, but for a last one that is shorter
        moved = group + permute(place - begin - group, group_length, derive_each(line.key, 2 * (window + group) + 1))
        slot, offset = np.divmod(moved, run)
        full = length // run
        runs = np.maximum(full, 1)
        permuted = permute(np.minimum(slot, runs - 1), runs, derive_each(line.key, 2 * window))
        slot = np.where(slot < full, permuted, slot)

        low = window + slot * run
        high = np.minimum(low + run, window + length)
        piece = np.searchsorted(line.ends, low + offset, side="right")
        shard = line.shards[piece]
        size = self._sizes[shard]
        start = line.ends[piece] - size
        return Plan(
            ids=self._ends[shard] - size + low + offset - start,
            epochs=np.full_like(positions, epoch),
            shards=shard,
            places=low + offset - start,
            starts=np.maximum(low - start, 0),
            stops=np.minimum(high - start, size),
        )

    def _line(self, epoch: int) -> _Line:
        line = self._lines.get(epoch)
        if line is None:
            while len(self._lines) >= _LINES_KEPT:
                del self._lines[next(iter(self._lines))]
            line = self._lines[epoch] = self._lay_out(epoch)
        return line

    def _lay_out(self, epoch: int) -> _Line:
        key = derive(derive(0, self._seed), epoch)
        shards = np.argsort(derive_each(key, np.arange(len(self._sizes), dtype=np.int64)), kind="stable")
        streams = np.arange(self.streams, dtype=np.int64)
        read = self._read_before(np.full(self.streams, epoch * self.num_samples), streams)
        lengths = self._read_before(np.full(self.streams, (epoch + 1) * self.num_samples), streams) - read
        cuts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return _Line(key=key, shards=shards, ends=np.cumsum(self._sizes[shards]), read=read, cuts=cuts)

    def _read_before(self, positions: Ints, streams: Ints) -> Ints:
        """How many positions before each one belong to the columns of a stream."""
        steps, column = np.divmod(positions, self._batch)
        read: Ints = steps * self._columns + np.clip(column - streams * self._columns, 0, self._columns)
        return read


def rank_positions(batch: int, step: int, rank: int, world_size: int, *, steps: int = 1) -> Ints:
    """Positions that one rank reads from `step` on, int64 `[steps, batch / world_size]`.

    Raises:
        ValueError: The ranks do not divide the batch.
    """
    share, rest = divmod(batch, world_size)
    if rest or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} has no equal share of a batch of {batch}")
    begins = np.arange(step, step + steps, dtype=np.int64)[:, None] * batch + rank * share
    positions: Ints = begins + np.arange(share, dtype=np.int64)
    return positions


def choose_streams(global_batch: int, num_samples: int) -> int:
    """The most streams that divide the batch, up to `MOST_STREAMS` and with enough samples in each."""
    most = min(MOST_STREAMS, global_batch, max(1, num_samples // SAMPLES_PER_STREAM))
    return next(streams for streams in range(most, 0, -1) if global_batch % streams == 0)


def eval_batches(num_samples: int, batch: int, world_size: int) -> int:
    """Batches that every rank takes so that each sample is judged."""
    return -(-_block(num_samples, world_size) // batch)


def eval_ids(num_samples: int, batch: int, rank: int, world_size: int, index: int) -> Ints:
    """Sample ids of one batch of an evaluation, int64 `[batch]`, -1 for padding.

    Each rank reads a block of neighbours, so that every sample comes once, on one rank.
    """
    block = _block(num_samples, world_size)
    places = np.arange(index * batch, (index + 1) * batch, dtype=np.int64)
    ids = rank * block + places
    return np.where((places < block) & (ids < num_samples), ids, -1)


def eval_plan(shard_sizes: Ints, ids: Ints, *, run: int) -> Plan:
    """Where the samples `ids` lie; -1 stays -1, in shard 0."""
    sizes = np.asarray(shard_sizes, np.int64)
    shards, places = locate(np.cumsum(sizes), sizes, np.maximum(ids, 0))
    starts = places // run * run
    stops = np.minimum(starts + run, sizes[shards])
    return Plan(ids=ids, epochs=np.zeros_like(ids), shards=shards, places=places, starts=starts, stops=stops)


def locate(ends: Ints, sizes: Ints, ids: Ints) -> tuple[Ints, Ints]:
    """Shard of each sample and its place there, from the running sum of the shards' sizes."""
    shards = np.searchsorted(ends, ids, side="right")
    return shards, ids - (ends[shards] - sizes[shards])


def _block(num_samples: int, world_size: int) -> int:
    return -(-num_samples // world_size)


def _part(places: Ints, lengths: Ints, wanted: int, unit: int) -> tuple[Ints, Ints]:
    """Begin and length of the part that each place lies in, where a length is cut into equal parts of about `wanted`.

    Parts are multiples of `unit`, but for the last.
    """
    count = np.maximum(1, (2 * lengths + wanted) // (2 * wanted))
    size = -(-lengths // (count * unit)) * unit
    begin = places // size * size
    return begin, np.minimum(size, lengths - begin)
