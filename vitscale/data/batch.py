"""One batch as it comes from the loader: images still uint8, on the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    images: Tensor
    labels: Tensor
    valid: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`; does not wait for the copy when the source is pinned memory."""
        return Batch(*(t.to(device, non_blocking=True) for t in (self.images, self.labels, self.valid, self.ids)))

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of `size` samples; the last may be smaller."""
        starts = range(0, len(self), size)
        return [Batch(*(t[i : i + size] for t in (self.images, self.labels, self.valid, self.ids))) for i in starts]
