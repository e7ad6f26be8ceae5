"""Is the run well: steps that are not finite, images a second, memory in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from vitscale.errors import UserError

_FEWEST_BAD = 10  # a few bad samples at the very start say nothing about the set


@dataclass(frozen=True)
class _Step:
    step: int
    rate: float
    loss: Tensor
    skipped: Tensor


class SkipLimit:
    """Stops a run whose loss or gradients are not finite for several steps in a row.

    `observe` waits for nothing; `check` reads what the device has said since, and is called before anything is saved.
    What an engine says of a step is the same on every rank, so every rank stops at the same step.

    Args:
        limit: So many skipped steps in a row are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: list[_Step] = []
        self._in_a_row = 0
        self._last_good: tuple[int, float] | None = None

    def observe(self, step: int, *, rate: float, loss: Tensor, skipped: Tensor) -> None:
        """Note a step: its learning rate, its loss and whether it was skipped, scalars that stay on the device."""
        self._pending.append(_Step(step, rate, loss.detach().clone(), skipped.detach().clone()))

    def check(self) -> int:
        """The number of skipped steps since the last check.

        Raises:
            UserError: As many in a row as the limit.
        """
        if not self._pending:
            return 0
        both = torch.stack([torch.stack((s.loss.double(), s.skipped.double())) for s in self._pending]).tolist()
        skipped = 0
        for noted, (loss, was_skipped) in zip(self._pending, both, strict=True):
            if not was_skipped:
                self._in_a_row, self._last_good = 0, (noted.step, loss)
                continue
            skipped += 1
            self._in_a_row += 1
            if self._in_a_row >= self._limit:
                raise UserError(self._explain(noted, loss))
        self._pending.clear()
        return skipped

    def _explain(self, last: _Step, loss: float) -> str:
        good = "no step before was good"
        if self._last_good is not None:
            good = f"the last good step was {self._last_good[0]} with loss {self._last_good[1]:.4g}"
        return (
            f"stopped at step {last.step}: loss or gradients were not finite in {self._in_a_row} "
            f"step{'s' * (self._in_a_row != 1)} in a row (monitor.max_skipped), at learning rate {last.rate:.3g} "
            f"with loss {loss:.4g}; {good}. No checkpoint was written since. A lower optim.lr, a longer "
            "schedule.warmup or a lower optim.clip_norm may help."
        )


class BadLimit:
    """Stops a run of whose samples too many cannot be used.

    Args:
        fraction: The largest share of the samples read so far.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def check(self, totals: Mapping[str, float], *, run_dir: Path) -> None:
        """Judge the counters of all ranks, the same on each.

        Raises:
            UserError: The share is above the limit, with at least ten of them.
        """
        bad = {key: count for key, count in totals.items() if key.startswith("bad_samples_total") and count}
        count, read = sum(bad.values()), totals.get("images_total", 0.0)
        if count < _FEWEST_BAD or count <= self._fraction * read:
            return
        reasons = ", ".join(f"{key.split(chr(34))[1]} {number:.0f}" for key, number in bad.items())
        raise UserError(
            f"{count:.0f} of {read:.0f} samples could not be used ({reasons}), more than data.max_bad_fraction = "
            f"{self._fraction:g} allows; {run_dir}/bad_samples.jsonl names each, `vitscale data verify` finds all"
        )


class Throughput:
    """Images a second since the last reading, without pauses.

    Args:
        clock: Seconds that only rise.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._images = 0

    def add(self, images: int) -> None:
        """Count images that were trained on."""
        self._images += images

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside: an evaluation, a checkpoint."""
        begin = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - begin

    def read(self) -> float:
        """Images a second since the last reading, or since this meter began."""
        now = self._clock()
        images, elapsed = self._images, now - self._since
        self._images, self._since = 0, now
        return images / elapsed if elapsed > 0 else 0.0


def memory(device: torch.device) -> dict[str, float]:
    """Bytes in use by metric: of this node's memory, and at most of this rank's GPU since the last call."""
    used = {"host_memory_bytes": float(psutil.virtual_memory().used)}
    if device.type == "cuda":
        used["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return used
