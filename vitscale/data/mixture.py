"""Several sets as one endless sequence: which source a position belongs to, and which of its samples.

A pattern of so many batches that every source has nearly its share of it is repeated for ever: source j has n_j places
in it, spread evenly, so that each rank's slice of a batch holds the sources by their shares too. The t-th place of
source j in the sequence is position t of that source's own order, which is one of a batch of n_j. Nothing is stored but
the pattern: any step begins at once, and ranks, workers and resumes change nothing, as in `order`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitscale.data.order import Ints, Order, Plan, rank_positions
from vitscale.data.permute import derive

_CLOSE = 0.01
"""Relative error of a source's share that is small enough not to look for a longer pattern."""
_MOST_BATCHES = 64


@dataclass(frozen=True)
class Part:
    """One source of a mixture.

    Attributes:
        shard_sizes: Samples in each of its shards, int64 `[shards]`.
        weight: Its share is this over the sum of all.
        run: Samples that are read at once.
    """

    shard_sizes: Ints
    weight: float
    run: int


class MixtureOrder:
    """The endless sequence of samples of several sources; ids and shards are numbered through, source after source.

    Args:
        parts: The sources.
        seed: Of the order.
        global_batch: Samples in a step, over all ranks.
        window: Shards that a window is long, see `Order`.

    Attributes:
        num_samples: Samples of all sources, which is what an epoch of the mixture counts.
        shares: Exact share of each source.
    """

    def __init__(self, parts: Sequence[Part], *, seed: int, global_batch: int, window: int) -> None:
        self._batch = global_batch
        counts, batches = _counts([part.weight for part in parts], global_batch)
        self._counts, self._period = counts, batches * global_batch
        self._source, self._place = _pattern(counts)
        self._orders = [
            Order(part.shard_sizes, seed=derive(seed, number + 1), global_batch=int(count), window=window, run=part.run)
            for number, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        sizes = np.array([order.num_samples for order in self._orders], np.int64)
        self._first_sample = np.cumsum(sizes) - sizes
        shards = np.array([len(part.shard_sizes) for part in parts], np.int64)
        self._first_shard = np.cumsum(shards) - shards
        self.num_samples = int(sizes.sum())
        self.shares = tuple(float(count) / self._period for count in counts)

    def at(self, start: int, count: int) -> Ints:
        """Sample ids at positions `[start, start + count)`, int64 `[count]`."""
        return self.plan(np.arange(start, start + count, dtype=np.int64)).ids

    def rank_positions(self, step: int, rank: int, world_size: int, *, steps: int = 1) -> Ints:
        """As of `Order`."""
        return rank_positions(self._batch, step, rank, world_size, steps=steps)

    def plan(self, positions: Ints) -> Plan:
        """The samples at any positions, int64 `[count]`."""
        block, slot = np.divmod(positions, self._period)
        source = self._source[slot]
        inner = block * self._counts[source] + self._place[slot]
        found = np.empty((len(Plan._fields), len(positions)), np.int64)
        for number, order in enumerate(self._orders):
            chosen = np.flatnonzero(source == number)
            plan = order.plan(inner[chosen])
            found[:, chosen] = plan._replace(
                ids=plan.ids + self._first_sample[number], shards=plan.shards + self._first_shard[number]
            )
        return Plan(*found)

    def digest(self, step: int) -> str:
        """As of `Order`."""
        ids = self.at(step * self._batch, self._batch)
        return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:12]

    def samples_in_use(self, world_size: int) -> int:
        """As of `Order`."""
        return sum(order.samples_in_use(world_size) for order in self._orders)

    def epochs(self, step: int) -> list[float]:
        """How often each source was read before `step`."""
        blocks, slots = divmod(step * self._batch, self._period)
        read = blocks * self._counts + np.bincount(self._source[:slots], minlength=len(self._counts))
        return [float(count) / order.num_samples for count, order in zip(read, self._orders, strict=True)]

    def source_of(self, ids: Ints) -> Ints:
        """The number of the source that each sample is of."""
        found: Ints = np.searchsorted(self._first_sample, ids, side="right") - 1
        return found


def _counts(weights: Sequence[float], batch: int) -> tuple[Ints, int]:
    """Places of each source in the pattern, and how many batches the pattern is long."""
    shares = np.array(weights) / np.sum(weights)
    best: tuple[float, Ints, int] | None = None
    for batches in range(1, _MOST_BATCHES + 1):
        counts = _largest_remainders(shares * batch * batches, batch * batches)
        error = float(np.max(np.abs(counts / (shares * batch * batches) - 1)))
        if best is None or error < best[0]:
            best = (error, counts, batches)
        if error <= _CLOSE:
            break
    assert best is not None
    return best[1], best[2]


def _largest_remainders(wanted: NDArray[np.float64], total: int) -> Ints:
    """Whole numbers near `wanted`, each at least 1, that add up to `total`."""
    counts: Ints = np.maximum(np.floor(wanted).astype(np.int64), 1)
    while counts.sum() < total:
        counts[np.argmax(wanted - counts)] += 1
    while counts.sum() > total:
        counts[np.argmin(np.where(counts > 1, wanted - counts, np.inf))] -= 1
    return counts


def _pattern(counts: Ints) -> tuple[Ints, Ints]:
    """Source of each place, and how many places of that source lie before it."""
    source = np.repeat(np.arange(len(counts)), counts)
    place = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    order = np.argsort((place + 0.5) / counts[source], kind="stable")
    return source[order], place[order]
