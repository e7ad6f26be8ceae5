"""Top-1, top-5 and loss over a labelled set: the same numbers at any number of ranks and any batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitscale.data.batch import Batch
from vitscale.world import World


@dataclass(frozen=True)
class Accuracy:
    """How good a model is on a labelled set; the shares are not a number when no image could be judged.

    Attributes:
        top1: Share of the images whose class has the largest logit.
        top5: Share of the images whose class is among the five largest (all, with five classes or fewer).
        loss: Mean softmax cross-entropy without smoothing.
        count: Images judged.
        unreadable: Images that could not be read; they count neither as right nor as wrong.
    """

    top1: float
    top5: float
    loss: float
    count: int
    unreadable: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    *,
    prepare: Callable[[Tensor], Tensor],
    world: World,
    precision: torch.dtype = torch.float32,
) -> Accuracy:
    """Judge `model` on every sample that the ranks' loaders give.

    A rank without a sample takes part all the same. Of equal logits the lower class counts as larger. An image with a
    logit that is not a number is judged, and wrong.

    Args:
        model: Put into evaluation mode meanwhile; the same call on every rank, no communication inside.
        loader: This rank's batches; padding is not `valid` and has id -1.
        prepare: uint8 images on the device -> what the model takes.
        world: The ranks.
        precision: Type of forward; logits are compared in float32.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=world.device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for host_batch in loader:
            batch = host_batch.to(world.device)
            with _autocast(world.device, precision):
                logits = model(prepare(batch.images)).float()
            sums += _judge(logits, batch)
    finally:
        for module in training:  # not `model.train()`: a part that is frozen in evaluation mode stays so
            module.training = True
    total = world.all_reduce(sums, "sum", what="evaluation").tolist()
    right, among_five, loss, count, unreadable = total
    top1, top5, mean_loss = (value / count if count else math.nan for value in (right, among_five, loss))
    return Accuracy(top1, top5, mean_loss, int(count), int(unreadable))


def _judge(logits: Tensor, batch: Batch) -> Tensor:
    """float64 `[5]`: right, right within five, sum of losses, images, unreadable images."""
    target = logits.gather(1, batch.labels[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    above = (logits > target) | ((logits == target) & (classes < batch.labels[:, None]))
    # a logit that is no number compares as false everywhere: such a sample would look right
    place = torch.where(logits.isnan().any(dim=1), logits.shape[1], above.sum(dim=1))
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    valid = batch.valid
    columns = (
        (place < 1) & valid,
        (place < min(5, logits.shape[1])) & valid,
        torch.where(valid, losses, 0.0),
        valid,
        ~valid & (batch.ids >= 0),
    )
    return torch.stack([column.double().sum() for column in columns])


def _autocast(device: torch.device, precision: torch.dtype) -> torch.autocast | nullcontext[None]:
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, precision)
