"""Runs of neighbouring samples, each read once from its shard and kept until its samples were handed out.

    train-00012.tar  [........|-- a run --|.........]     one read, about a mebibyte, parsed at once

A plan says for each sample which run it lies in. All that is remembered is kept by the thread that asks (`runs_of`);
reading itself happens wherever `submit` runs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from vitscale.data.order import Plan
from vitscale.data.shards import RawSample, ShardError, ShardIndex, read_samples

RUN_BYTES = 2**20

Run = list[RawSample] | ShardError
"""The samples of a run, or why none of them can be read."""
Submit = Callable[..., "Future[Run]"]


class _Entry:
    """A run and how many of its samples nobody asked for yet."""

    def __init__(self, future: Future[Run], left: int) -> None:
        self.future = future
        self.left = left


class RunReader:
    """Reads runs ahead of those who decode.

    Args:
        index: The shards.
        submit: Runs a function with its arguments, now or later, here or in a thread.
        capacity: Samples of unfinished runs to remember; beyond that the run that was idle longest is forgotten, and
            read again if it is asked for.
    """

    def __init__(self, index: ShardIndex, submit: Submit, *, capacity: int) -> None:
        self._index = index
        self._submit = submit
        self._capacity = capacity
        self._held = 0
        self._entries: OrderedDict[tuple[int, int, int, int], _Entry] = OrderedDict()

    def runs_of(self, plan: Plan) -> list[Future[Run]]:
        """The run of each sample of `plan`; reading begins with this call."""
        keys = zip(*(column.tolist() for column in (plan.epochs, plan.shards, plan.starts, plan.stops)), strict=True)
        return [self._run(key) for key in keys]

    def _run(self, key: tuple[int, int, int, int]) -> Future[Run]:
        entry = self._entries.get(key)
        if entry is None:
            _, shard, start, stop = key
            entry = _Entry(self._submit(read_run, self._index, shard, start, stop), stop - start)
            self._entries[key] = entry
            self._held += stop - start
            while self._held > self._capacity and len(self._entries) > 1:
                oldest = next(iter(self._entries))
                self._forget(oldest)
        self._entries.move_to_end(key)
        entry.left -= 1
        if entry.left == 0:
            self._forget(key)
        return entry.future

    def _forget(self, key: tuple[int, int, int, int]) -> None:
        del self._entries[key]
        self._held -= key[3] - key[2]


def read_run(index: ShardIndex, shard: int, start: int, stop: int) -> Run:
    """`read_samples`, with its error as a value: a shard that cannot be read makes bad samples, not a failed run."""
    try:
        return read_samples(index, shard, start, stop)
    except ShardError as error:
        return error


def samples_per_run(index: ShardIndex) -> int:
    """How many samples of an average size make `RUN_BYTES`."""
    return max(1, -(-RUN_BYTES * index.num_samples // max(1, int(index.bytes.sum()))))
