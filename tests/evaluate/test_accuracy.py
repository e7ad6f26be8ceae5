"""Accuracy against a plain count in numpy, at any batch size and rank count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.split_engine import world_of_one
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from vitscale.data.batch import Batch
from vitscale.evaluate.accuracy import Accuracy, evaluate
from vitscale.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of_one() as world:
        yield world


class Table(nn.Module):
    """Gives the logits of the image whose first pixel is the row."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.from_numpy(logits))

    def forward(self, images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return self.logits[images[:, 0, 0, 0].long()]


def first_pixel(images: Tensor) -> Tensor:
    assert images.dtype == torch.uint8
    return images


def batches(labels: NDArray[np.int64], kinds: NDArray[np.str_], size: int) -> list[Batch]:
    """One image a row; `kinds`: "good", "bad" (unreadable) or "padding"."""
    rows = torch.arange(len(labels))
    images = rows.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    valid = torch.from_numpy(kinds == "good")
    ids = torch.where(torch.from_numpy(kinds == "padding"), -1, rows)
    return Batch(images, torch.where(valid, torch.from_numpy(labels), 0), valid, ids).split(size)


def counted(logits: NDArray[np.float32], labels: NDArray[np.int64], kinds: NDArray[np.str_]) -> Accuracy:
    """Image by image: sort the classes by falling logit, then by number, and look where the label stands."""
    first = among_five = count = 0
    losses: list[float] = []
    for row, label, kind in zip(logits.astype(np.float64), labels, kinds, strict=True):
        if kind != "good":
            continue
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        first += order[0] == label
        among_five += int(label) in order[:5]
        losses.append(row.max() + math.log(np.exp(row - row.max()).sum()) - row[label])
        count += 1
    unreadable = int((kinds == "bad").sum())
    if not count:
        return Accuracy(math.nan, math.nan, math.nan, 0, unreadable)
    return Accuracy(first / count, among_five / count, math.fsum(losses) / count, count, unreadable)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    images=st.integers(0, 40),
    classes=st.integers(1, 9),
    size=st.integers(1, 41),
)
def test_equals_a_plain_count(world: World, seed: int, images: int, classes: int, size: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(-2, 3, (images, classes)).astype(np.float32)  # few values: many ties
    labels = random.integers(0, classes, images)
    kinds = random.choice(["good", "bad", "padding"], images, p=[0.7, 0.15, 0.15])
    found = evaluate(Table(logits), batches(labels, kinds, size), prepare=first_pixel, world=world)
    expected = counted(logits, labels, kinds)
    assert astuple(found)[:2] == pytest.approx(astuple(expected)[:2], abs=0, rel=0, nan_ok=True)
    assert (found.count, found.unreadable) == (expected.count, expected.unreadable)
    # the losses themselves are float32
    assert found.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-7, nan_ok=True)


@pytest.mark.parametrize("count", [3, 49, 107])
def test_all_right_is_exactly_one(world: World, count: int) -> None:
    labels = np.arange(count) % 7
    logits = np.eye(7, dtype=np.float32)[labels]
    found = evaluate(Table(logits), batches(labels, np.full(count, "good"), 10), prepare=first_pixel, world=world)
    assert (found.top1, found.top5, found.count) == (1.0, 1.0, count)


def test_a_constant_model_is_right_for_the_first_classes_only(world: World) -> None:
    labels = np.arange(8)
    logits = np.zeros((8, 8), dtype=np.float32)
    found = evaluate(Table(logits), batches(labels, np.full(8, "good"), 3), prepare=first_pixel, world=world)
    assert (found.top1, found.top5) == (1 / 8, 5 / 8)
    assert found.loss == pytest.approx(math.log(8))


def test_logits_that_are_no_numbers_are_wrong_and_those_of_padding_are_nothing(world: World) -> None:
    logits = np.full((4, 3), np.nan, dtype=np.float32)
    logits[0] = [0, 1, 0]
    kinds = np.array(["good", "padding", "bad", "padding"])
    found = evaluate(Table(logits), batches(np.array([1, 0, 0, 0]), kinds, 2), prepare=first_pixel, world=world)
    assert (found.top1, found.top5, found.count, found.unreadable) == (1.0, 1.0, 1, 1)
    assert math.isfinite(found.loss)
    kinds[:] = "good"
    found = evaluate(Table(logits), batches(np.array([1, 0, 1, 2]), kinds, 2), prepare=first_pixel, world=world)
    assert (found.top1, found.top5, found.count) == (0.25, 0.25, 4)
    assert math.isnan(found.loss)


def test_classes_that_are_ruled_out_do_not_make_an_image_wrong(world: World) -> None:
    logits = np.array([[0, 3, -np.inf]], dtype=np.float32)
    found = evaluate(Table(logits), batches(np.array([1]), np.array(["good"]), 1), prepare=first_pixel, world=world)
    assert (found.top1, found.top5) == (1.0, 1.0)
    assert found.loss == pytest.approx(math.log(1 + math.exp(-3)))


def test_nothing_to_judge_is_not_a_number(world: World) -> None:
    found = evaluate(Table(np.zeros((1, 2), np.float32)), [], prepare=first_pixel, world=world)
    assert (found.count, found.unreadable) == (0, 0)
    assert all(math.isnan(value) for value in (found.top1, found.top5, found.loss))


class Parts(nn.Module):
    """Says in which mode it was called; may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.frozen, self.learning = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.frozen.eval()
        self.fails = fails
        self.modes: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.modes += [module.training for module in self.modules()]
        if self.fails:
            raise KeyError("a fault in the model")
        out: Tensor = self.learning(self.frozen(images.float())).mean(dim=(2, 3))
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_every_part_is_put_into_evaluation_mode_and_back(world: World, fails: bool) -> None:
    model = Parts(fails=fails)
    one = batches(np.array([1, 2]), np.array(["good", "good"]), 2)
    try:
        evaluate(model, one, prepare=first_pixel, world=world)
    except KeyError:
        assert fails
    assert not any(model.modes)
    assert (model.training, model.learning.training, model.frozen.training) == (True, True, False)
    assert torch.is_grad_enabled()


def test_low_precision_is_for_forward_only(world: World) -> None:
    types = []

    class Linear(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            out = super().forward(images.float().mean(dim=(2, 3)))
            types.append(out.dtype)
            return out

    one = batches(np.array([1, 2]), np.array(["good", "good"]), 2)
    for precision in (torch.float32, torch.bfloat16):
        assert evaluate(Linear(3, 4), one, prepare=first_pixel, world=world, precision=precision).count == 2
    assert types == [torch.float32, torch.bfloat16]


# ------------------------------------------------------------------------------------------------ several ranks
Case = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.str_], int]


def judge_shares(world: World, cases: list[Case]) -> list[Accuracy]:
    """Each rank takes every n-th batch of each case."""
    found = []
    for logits, labels, kinds, size in cases:
        mine = batches(labels, kinds, size)[world.rank :: world.world_size]
        found.append(evaluate(Table(logits), mine, prepare=first_pixel, world=world))
    return found


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_also_where_one_has_no_data(ranks: int) -> None:
    random = np.random.default_rng(0)
    cases = []
    for images, size in ((37, 4), (5, 5), (20, 20), (0, 1)):  # the second and third: all on rank 0
        kinds = random.choice(["good", "bad", "padding"], images, p=[0.7, 0.15, 0.15])
        logits = random.normal(size=(images, 7)).astype(np.float32)
        cases.append((logits, random.integers(0, 7, images), kinds, size))
    told = run_ranks(ranks, judge_shares, cases, timeout=60)
    for place, (logits, labels, kinds, _) in enumerate(cases):
        expected = astuple(counted(logits, labels, kinds))
        for rank in range(ranks):
            found = astuple(told[rank][place])
            assert found[:2] == pytest.approx(expected[:2], abs=0, rel=0, nan_ok=True)
            assert found[3:] == expected[3:]
            assert found[2] == pytest.approx(expected[2], rel=1e-6, nan_ok=True)
