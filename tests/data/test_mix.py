"""Mixup and CutMix, against timm for the same numbers, and across ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import SoftTargetCrossEntropy

from vitscale.config.schema import DataConfig, LossConfig
from vitscale.data.batch import Batch
from vitscale.data.mix import draw, mix
from vitscale.train.losses import classification_loss

CLASSES, SIZE = 5, 8
MIXUP = DataConfig(train="x", mixup=0.8)
CUTMIX = DataConfig(train="x", cutmix=1.0)
BOTH = DataConfig(train="x", mixup=0.8, cutmix=1.0, mix_mode="elem")


def batch(count: int = 8, step: int = 3) -> Batch:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=random)
    labels = torch.randint(0, CLASSES, (count,), generator=random)
    return Batch(images, labels, torch.ones(count, dtype=torch.bool), torch.arange(count), step)


def mixed(config: DataConfig, whole: Batch, *, ranks: int = 1) -> list[Batch]:
    share = len(whole) // ranks
    return [
        mix(part, config, seed=7, first=rank * share, global_batch=len(whole))
        for rank, part in enumerate(whole.split(share))
    ]


def test_mixup_is_the_formula_with_the_neighbour() -> None:
    whole = batch()
    (found,) = mixed(MIXUP, whole)
    shares, boxes = draw(MIXUP, seed=7, step=3, count=8, size=(SIZE, SIZE))
    assert len(set(shares.tolist())) == 1  # one for the whole batch
    assert not boxes.any()
    partner = [1, 0, 3, 2, 5, 4, 7, 6]
    expected = shares[0] * whole.images.double() + (1 - shares[0]) * whole.images[partner].double()
    assert (found.images.double() - expected).abs().max() <= 0.5 + 1e-4
    assert found.partners is not None
    assert found.partners.tolist() == whole.labels[partner].tolist()


def test_cutmix_exchanges_rectangles_and_counts_their_pixels() -> None:
    whole = batch()
    (found,) = mixed(replace(CUTMIX, mix_mode="elem"), whole)
    partner = [1, 0, 3, 2, 5, 4, 7, 6]
    assert found.shares is not None
    for number in range(8):
        own = (found.images[number] == whole.images[number]).all(dim=0)
        other = (found.images[number] == whole.images[partner[number]]).all(dim=0)
        assert (own | other).all()
        kept = float(own.float().mean())
        assert float(found.shares[number]) == pytest.approx(kept, abs=0.05)


@pytest.mark.parametrize("config", [MIXUP, CUTMIX, BOTH, replace(BOTH, mix_mode="batch")])
def test_neither_ranks_nor_micro_batches_change_what_is_mixed(config: DataConfig) -> None:
    whole = batch()
    (expected,) = mixed(config, whole)
    for ranks in (2, 4):
        parts = mixed(config, whole, ranks=ranks)
        assert torch.equal(torch.cat([part.images for part in parts]), expected.images)
        assert torch.equal(torch.cat([part.shares for part in parts]), expected.shares)  # type: ignore[misc]
        assert torch.equal(torch.cat([part.partners for part in parts]), expected.partners)  # type: ignore[misc]
    micro = [piece for part in mixed(config, whole) for piece in part.split(2)]
    assert torch.equal(torch.cat([part.shares for part in micro]), expected.shares)  # type: ignore[misc]
    (other,) = mixed(config, replace(whole, step=4))
    assert not torch.equal(other.images, expected.images)


@pytest.mark.parametrize("config", [MIXUP, CUTMIX, BOTH])
def test_what_cannot_be_used_leaks_into_no_other(config: DataConfig) -> None:
    whole = batch()
    valid = torch.tensor([True, False, True, True, False, False, True, True])
    (found,) = mixed(config, replace(whole, valid=valid))
    assert found.shares is not None
    assert found.shares[0] == 1
    assert torch.equal(found.images[0], whole.images[0])
    changed = replace(whole, valid=valid, images=whole.images.clone())
    changed.images[~valid] = 0
    (again,) = mixed(config, changed)
    assert torch.equal(again.images[valid], found.images[valid])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_timms_of_soft_targets(smoothing: float) -> None:
    (found,) = mixed(BOTH, batch())
    logits = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(2))
    assert found.shares is not None
    assert found.partners is not None
    targets = torch.cat([
        mixup_target(pair, CLASSES, lam=share.item(), smoothing=smoothing)[:1]
        for pair, share in zip(torch.stack([found.labels, found.partners], dim=1), found.shares, strict=True)
    ])  # fmt: skip
    loss = LossConfig(label_smoothing=smoothing)
    more = {"partners": found.partners, "shares": found.shares}
    total = classification_loss(logits, found.labels, found.valid, loss, **more)
    torch.testing.assert_close(total / 8, SoftTargetCrossEntropy()(logits, targets))
    sigmoid = classification_loss(logits, found.labels, found.valid, replace(loss, kind="sigmoid"), **more)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    torch.testing.assert_close(sigmoid, expected)


def test_shares_are_drawn_from_beta_and_as_often_as_asked() -> None:
    config = replace(BOTH, mix_probability=0.75, mix_switch=0.4)
    shares, boxes = draw(config, seed=1, step=0, count=20_000, size=(224, 224))
    cut = boxes[:, 2] > boxes[:, 0]
    blended = ~cut & (shares < 1)
    assert cut.mean() == pytest.approx(0.75 * 0.4, abs=0.02)
    assert blended.mean() == pytest.approx(0.75 * 0.6, abs=0.02)
    assert shares[blended].mean() == pytest.approx(0.5, abs=0.01)
    assert shares[blended].var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), rel=0.05)  # of Beta(0.8, 0.8)
    area = (boxes[cut, 2] - boxes[cut, 0]) * (boxes[cut, 3] - boxes[cut, 1]) / 224**2
    np.testing.assert_allclose(shares[cut], 1 - area, atol=1e-6)
    lonely, _ = draw(replace(MIXUP, mix_probability=0.0), seed=1, step=0, count=4, size=(8, 8))
    assert (lonely == 1).all()
