"""The loss of a step: the mean over the valid samples of the whole global batch, however it is cut.

Each micro-batch gives a sum. Divided by the number of valid samples on all ranks, the sums of all micro-batches and
ranks add up to that mean, and their gradients to its gradient; neither ranks nor accumulation appear in the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitscale.data.batch import Batch
from vitscale.world import World


def valid_samples(batch: Batch, world: World) -> Tensor:
    """Number of valid samples in the global batch, a float32 scalar on the device; 0 makes the step's loss NaN."""
    count = batch.valid.sum(dtype=torch.float32)
    return count if world.world_size == 1 else world.all_reduce(count, "sum", what="counting the samples of a step")


def total(loss: Tensor, world: World) -> Tensor:
    """The sum over all ranks of what each has of the loss."""
    return loss if world.world_size == 1 else world.all_reduce(loss, "sum", what="adding up the loss of a step")


def telling(loss: Tensor) -> Tensor:
    """The same loss, whose gradient is NaN where the loss is not finite.

    An infinite loss may have a finite gradient (cross-entropy with a logit of -inf). This way the gradients alone,
    which all ranks share in the end, say whether the step is sound.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
