"""Plans -> batches: samples read, decoded and put into their slots by threads, batches given in the order of the plans.

Reading, decoding and resizing let other threads run, so that threads of one process share what was read and write
straight into the batch; a batch does not depend on how many there are, or on which did what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vitscale.data.augment import View
from vitscale.data.batch import Batch
from vitscale.data.decode import BadImage, Interpolation, open_picture
from vitscale.data.order import Plan
from vitscale.data.reader import Run, RunReader
from vitscale.data.sample import BadSample, image_field
from vitscale.data.shards import RawSample, ShardError, ShardIndex
from vitscale.data.storage import is_remote

_PIECE = 8  # samples that one thread takes at a time
_READERS = 4
_REMOTE_READERS = 16  # of a store that answers after tens of milliseconds

AugmentOf = Callable[[int, int, NDArray[np.uint8]], NDArray[np.uint8]]
"""(epoch, sample id, uint8 RGB `[height, width, 3]`) -> the same, changed."""
ViewOf = Callable[[int, int, int, int], View]
"""(epoch, sample id, height, width) of an image -> what is shown of it."""
LabelOf = Callable[[int, Mapping[str, bytes]], int]
"""(shard, fields of a sample) -> its class; BadSample where it has none."""
What = Literal["shard", "image", "label"]


class Bad(NamedTuple):
    """A sample that could not be used.

    Attributes:
        sample: Its id.
        shard: Name of its shard.
        key: Its key, where that could be read.
        what: Which part of it is wrong.
        reason: A word that never changes.
        detail: What was found.
    """

    sample: int
    shard: str
    key: str
    what: What
    reason: str
    detail: str


@dataclass(frozen=True)
class Assembled:
    """A batch, and those of its samples that are masked out."""

    batch: Batch
    bad: list[Bad]


class Assembler:
    """Turns plans into batches.

    Args:
        index: The shards.
        view: What is shown of an image.
        augment: What is done to it after that, if anything.
        size: Height and width of the images.
        interpolation: Kind of resizing.
        label: The class of a sample.
        workers: Threads that decode; with 0 all is done by the thread that asks for a batch.
        ahead: Batches that are worked on before they are asked for; none with 0 workers.
        capacity: Samples of unfinished runs that are kept in memory.
    """

    def __init__(
        self,
        index: ShardIndex,
        *,
        view: ViewOf,
        augment: AugmentOf | None,
        size: tuple[int, int],
        interpolation: Interpolation,
        label: LabelOf,
        workers: int,
        ahead: int,
        capacity: int,
    ) -> None:
        self._index = index
        self._view = view
        self._augment = augment
        self._size = size
        self._interpolation = interpolation
        self._label = label
        self._ahead = ahead if workers else 0
        readers = _REMOTE_READERS if any(map(is_remote, index.paths)) else _READERS
        self._decoders = ThreadPoolExecutor(workers, "decode") if workers else _Here()
        self._readers = ThreadPoolExecutor(readers, "read") if workers else _Here()
        self._capacity = capacity

    def batches(self, plans: Iterable[Plan]) -> Iterator[Assembled]:
        """A batch for each plan."""
        reader = RunReader(self._index, self._readers.submit, capacity=self._capacity)
        begun: deque[tuple[Batch, list[Future[list[Bad]]]]] = deque()
        source = iter(plans)
        while True:
            wanted = 1 + self._ahead - len(begun)
            begun.extend(self._begin(reader, plan) for plan in islice(source, wanted))
            if not begun:
                return
            batch, pieces = begun.popleft()
            yield Assembled(batch, [bad for piece in pieces for bad in piece.result()])

    def close(self) -> None:
        """End the threads; what they have not begun is left undone."""
        for executor in (self._decoders, self._readers):
            executor.shutdown(wait=True, cancel_futures=True)

    def _begin(self, reader: RunReader, plan: Plan) -> tuple[Batch, list[Future[list[Bad]]]]:
        with torch.inference_mode(mode=False):  # whatever mode the caller is in, threads must be able to write
            batch = _empty(plan, self._size, self._excluded(plan))
        wanted = batch.valid.numpy().nonzero()[0]
        plan = Plan(*(column[wanted] for column in plan))
        columns = (wanted, plan.ids, plan.epochs, plan.shards, plan.places - plan.starts)
        runs = reader.runs_of(plan)
        rows = zip(*(column.tolist() for column in columns), runs, strict=True)
        slots = [_Slot(*row) for row in rows]
        pieces = [slots[i : i + _PIECE] for i in range(0, len(slots), _PIECE)]
        return batch, [self._decoders.submit(self._fill, batch, piece) for piece in pieces]

    def _excluded(self, plan: Plan) -> NDArray[np.bool_]:
        """Which samples the index leaves out."""
        if not self._index.excluded:
            return np.zeros(len(plan.ids), np.bool_)
        none: frozenset[int] = frozenset()
        pairs = zip(plan.shards.tolist(), plan.places.tolist(), strict=True)
        return np.array([place in self._index.excluded.get(shard, none) for shard, place in pairs], np.bool_)

    def _fill(self, batch: Batch, slots: list[_Slot]) -> list[Bad]:
        """Put samples into their slots; a slot whose sample is bad stays black and not valid."""
        bad: list[Bad] = []
        for slot in slots:
            key = ""
            try:
                sample = _take(slot)
                key = sample.key
                self._prepare(batch, slot, sample)
            except _Unusable as error:
                batch.images[slot.slot] = 0
                batch.labels[slot.slot] = 0
                batch.valid[slot.slot] = False
                name = self._index.names[slot.shard]
                bad.append(Bad(slot.sample, name, key, error.what, error.reason, error.detail))
        return bad

    def _prepare(self, batch: Batch, slot: _Slot, sample: RawSample) -> None:
        if sample.fault is not None:
            raise _Unusable("shard", "damaged_sample", sample.fault)
        try:
            label = self._label(slot.shard, sample.fields)
        except BadSample as error:
            raise _Unusable("label", "label", str(error)) from None
        try:
            picture = open_picture(sample.fields[image_field(sample.fields)])
            box, flip = self._view(slot.epoch, slot.sample, picture.height, picture.width)
            pixels = picture.crop(box, self._size, interpolation=self._interpolation).numpy()
        except BadSample as error:
            raise _Unusable("image", "no_image", str(error)) from None
        except BadImage as error:
            raise _Unusable("image", error.reason, error.detail) from None
        # numpy, since torch would start a team of threads for each of ours
        pixels = pixels[:, :, ::-1] if flip else pixels
        if self._augment is not None:
            upright = np.ascontiguousarray(pixels.transpose(1, 2, 0))
            pixels = self._augment(slot.epoch, slot.sample, upright).transpose(2, 0, 1)
        batch.images[slot.slot].numpy()[:] = pixels
        batch.labels[slot.slot] = label


class _Slot(NamedTuple):
    """A place in a batch, and what belongs there: the sample `offset` of a run."""

    slot: int
    sample: int
    epoch: int
    shard: int
    offset: int
    run: Future[Run]


class _Unusable(Exception):
    """Why a sample is bad; fields as in `Bad`."""

    def __init__(self, what: What, reason: str, detail: str) -> None:
        super().__init__(what, reason, detail)
        self.what: What = what
        self.reason = reason
        self.detail = detail


class _Here(Executor):
    """Runs what is submitted at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **named))
        return future


def _take(slot: _Slot) -> RawSample:
    """The slot's sample out of its run; each is asked for once, so its bytes need not be kept any longer."""
    run = slot.run.result()
    if isinstance(run, ShardError):
        raise _Unusable("shard", "unreadable_shard", run.reason)
    sample = run[slot.offset]
    run[slot.offset] = _TAKEN
    return sample


_TAKEN = RawSample("", {}, "taken before")


def _empty(plan: Plan, size: tuple[int, int], excluded: NDArray[np.bool_]) -> Batch:
    """A batch whose images are yet to come, black where none will; page-locked where there is a GPU."""
    count, pinned = len(plan.ids), torch.cuda.is_available()
    ids = torch.from_numpy(plan.ids.copy())
    images = torch.empty((count, 3, *size), dtype=torch.uint8, pin_memory=pinned)
    usable = (plan.ids >= 0) & ~excluded
    for slot in (~usable).nonzero()[0].tolist():  # a mask would cost a pass over all pixels
        images[slot] = 0
    labels = torch.zeros(count, dtype=torch.int64, pin_memory=pinned)
    valid = torch.from_numpy(usable)
    return Batch(images, labels, valid.pin_memory(), ids.pin_memory()) if pinned else Batch(images, labels, valid, ids)
