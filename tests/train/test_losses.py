from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from vitscale.config.schema import LossConfig
from vitscale.train.losses import classification_loss

VALID = torch.tensor([True, False, True, True, False])
LABELS = torch.tensor([0, 0, 3, 1, 0])


def logits() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def by_hand(logits: Tensor, labels: Tensor, kind: str, smoothing: float) -> float:
    """The docstring's formula in float64, number by number."""
    total = 0.0
    for row, label in zip(logits.double(), labels, strict=True):
        for k, logit in enumerate(row):
            target = (1 - smoothing) * (k == label) + smoothing / len(row)
            if kind == "softmax":
                total -= float(target * (logit - row.exp().sum().log()))
            else:
                p = 1 / (1 + (-logit).exp())
                total -= float(target * p.log() + (1 - target) * (1 - p).log())
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_equals_the_formula_over_valid_samples(kind: Literal["softmax", "sigmoid"], smoothing: float) -> None:
    loss = classification_loss(logits(), LABELS, VALID, LossConfig(kind=kind, label_smoothing=smoothing))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand(logits()[VALID], LABELS[VALID], kind, smoothing), rel=1e-5)


def test_equals_torch() -> None:
    softmax = classification_loss(logits(), LABELS, VALID, LossConfig(label_smoothing=0.2))
    expected = torch.nn.functional.cross_entropy(logits()[VALID], LABELS[VALID], label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(softmax, expected)
    sigmoid = classification_loss(logits(), LABELS, VALID, LossConfig(kind="sigmoid"))
    one_hot = torch.nn.functional.one_hot(LABELS[VALID], 4).float()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits()[VALID], one_hot, reduction="sum")
    torch.testing.assert_close(sigmoid, expected)


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_slots_that_are_not_valid_have_no_influence(kind: Literal["softmax", "sigmoid"], poison: float) -> None:
    config = LossConfig(kind=kind, label_smoothing=0.1)
    clean, dirty = logits().requires_grad_(), logits()
    dirty[~VALID] = poison
    dirty.requires_grad_()
    expected = classification_loss(clean, LABELS, VALID, config)
    found = classification_loss(dirty, LABELS, VALID, config)
    assert torch.equal(found, expected)
    expected.backward()
    found.backward()
    assert dirty.grad is not None
    assert clean.grad is not None
    assert torch.equal(dirty.grad, clean.grad)
    assert not dirty.grad[~VALID].any()


def test_low_precision_logits_are_computed_in_float32() -> None:
    half = (logits() * 20).bfloat16()
    loss = classification_loss(half, LABELS, VALID, LossConfig())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, classification_loss(half.float(), LABELS, VALID, LossConfig()))


def test_nothing_valid_is_zero() -> None:
    assert classification_loss(logits(), LABELS, torch.zeros(5, dtype=torch.bool), LossConfig()) == 0
