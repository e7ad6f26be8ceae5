"""What is minimised: cross-entropy over classes, softmax or sigmoid, summed over the samples that count."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitscale.config.schema import LossConfig


def classification_loss(
    logits: Tensor,
    labels: Tensor,
    valid: Tensor,
    config: LossConfig,
    *,
    partners: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """The sum of the losses of the valid samples.

    With K classes and smoothing e, the target of a sample of class c is t_k = (1 - e) * [k = c] + e / K, and its loss

        softmax:  -sum_k t_k * log softmax(logits)_k
        sigmoid:  -sum_k t_k * log sigmoid(logits_k) + (1 - t_k) * log(1 - sigmoid(logits_k))

    Both are linear in the targets, so that a sample mixed of two (mixup, CutMix), whose target is the mixture of
    theirs, has the mixture of the losses with each.

    What stands in a slot that is not valid has no influence on value or gradient, be it infinite or not a number.

    Args:
        logits: `[batch, classes]`, of any floating type; computed in float32.
        labels: int64 class index `[batch]`.
        valid: bool `[batch]`.
        config: Kind and smoothing.
        partners: int64 class of what each sample was mixed with `[batch]`; None where nothing was mixed.
        shares: float32 `[batch]`, the part of each that is itself.

    Returns:
        A float32 scalar.
    """
    # replaced before, not masked after: the derivative of log softmax at infinity is NaN, and 0 * NaN is NaN
    logits = logits.float().masked_fill(~valid[:, None], 0.0)
    losses = _losses(logits, labels, config)
    if partners is not None and shares is not None:
        losses = shares * losses + (1 - shares) * _losses(logits, partners, config)
    return losses.masked_fill(~valid, 0.0).sum()


def _losses(logits: Tensor, labels: Tensor, config: LossConfig) -> Tensor:
    """The loss of each sample, float32 `[batch]`."""
    if config.kind == "softmax":
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)
    smoothing, num_classes = config.label_smoothing, logits.shape[1]
    targets = F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
