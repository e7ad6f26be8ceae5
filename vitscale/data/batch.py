"""One batch as it comes from the loader: images still uint8, on the host or on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One rank's share of a step.

    Attributes:
        images: uint8 RGB `[batch, 3, height, width]`, not normalised.
        labels: int64 class index `[batch]`; 0 where `valid` is false.
        valid: bool `[batch]`; false for a slot whose sample could not be used, or that pads the last batch of an
            evaluation. Such a slot counts neither in the loss nor in a metric.
        ids: int64 sample id `[batch]`; -1 for padding.
        partners: int64 class of the sample that each was mixed with `[batch]`; None where nothing was mixed.
        shares: float32 `[batch]`, how much of each sample is itself; the rest is its partner's.
        step: Optimizer step that the batch belongs to, from 0, for what all ranks draw alike in it.
    """

    images: Tensor
    labels: Tensor
    valid: Tensor
    ids: Tensor
    step: int = 0
    partners: Tensor | None = None
    shares: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; does not wait for the copy when the source is pinned memory."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of `size` samples; the last may be smaller."""
        return [self._each(lambda tensor: tensor[i : i + size]) for i in range(0, len(self), size)]  # noqa: B023

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            images=change(self.images),
            labels=change(self.labels),
            valid=change(self.valid),
            ids=change(self.ids),
            partners=None if self.partners is None else change(self.partners),
            shares=None if self.shares is None else change(self.shares),
        )
