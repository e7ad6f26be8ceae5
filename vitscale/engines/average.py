"""The exponential moving average of the weights, beside whatever tensors an optimizer steps.

    average = decay * average + (1 - decay) * weights        after each step that was applied

The first value is the weights themselves; the decay does not warm up. Sharded weights have a sharded average.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MovingAverage:
    """The average of some float32 tensors.

    Args:
        weights: Tensors that an optimizer changes in place.
        decay: See the formula.

    Attributes:
        values: The averages, one for each of the weights.
        swapped: Whether averages and weights have changed places.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._decay = decay
        self.values = [weight.clone() for weight in self._weights]
        self.swapped = False

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Move towards the weights where `applied`, a bool scalar on their device, is true; else stay."""
        share = applied * (1 - self._decay)
        for value, weight in zip(self.values, self._weights, strict=True):
            value.lerp_(weight, share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights by value; a second time undoes it exactly."""
        for value, weight in zip(self.values, self._weights, strict=True):
            before = weight.clone()
            weight.copy_(value)
            value.copy_(before)
        self.swapped = not self.swapped
