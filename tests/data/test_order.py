"""The contract of the order, for sets, batches and ranks of any shape."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.data.order import Order, choose_streams, eval_batches, eval_ids, eval_plan


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, np.ndarray, int]:
    """An order, the shard sizes it was made of and its batch."""
    size = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(200, 400))
    sizes = np.array(draw(st.lists(size, min_size=1, max_size=12).filter(any)))
    batch = draw(st.sampled_from([1, 2, 6, 7, 16, 24, 48, 60]))
    order = Order(
        sizes,
        seed=draw(st.integers(0, 2**63 - 1)),
        global_batch=batch,
        streams=draw(st.sampled_from([None, *divisors(batch)])),
        window=draw(st.integers(1, 5)),
        run=draw(st.integers(1, 20)),
        runs_in_use=draw(st.sampled_from([1, 4, 30, 2048])),
    )
    return order, sizes, batch


@given(orders(), st.sampled_from([0, 1, 2, 7, 1_000_003]))
def test_each_epoch_is_a_permutation(made: tuple[Order, np.ndarray, int], epoch: int) -> None:
    order, sizes, _ = made
    ids = order.at(epoch * order.num_samples, order.num_samples)
    np.testing.assert_array_equal(np.sort(ids), np.arange(sizes.sum()))


@given(orders(), st.integers(0, 10**7), st.data())
def test_ranks_tile_the_batch(made: tuple[Order, np.ndarray, int], step: int, data: st.DataObject) -> None:
    order, _, batch = made
    ranks = data.draw(st.sampled_from(divisors(batch)))
    shares = [order.rank_ids(step, rank, ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {batch // ranks}
    np.testing.assert_array_equal(np.concatenate(shares), order.at(step * batch, batch))


@given(orders(), st.floats(0, 3), st.integers(0, 60))
def test_starting_anywhere_is_the_same_as_coming_from_the_start(
    made: tuple[Order, np.ndarray, int], epochs: float, count: int
) -> None:
    order, _, _ = made
    start = int(epochs * order.num_samples)
    np.testing.assert_array_equal(order.at(start, count), order.at(0, start + count)[start:])


@given(orders(), st.integers(0, 10**9))
def test_a_plan_names_the_sample_s_shard_place_and_run(made: tuple[Order, np.ndarray, int], start: int) -> None:
    order, sizes, _ = made
    positions = np.arange(start, start + min(300, 5 * order.num_samples))
    plan = order.plan(positions)
    before = np.concatenate([[0], np.cumsum(sizes)])
    np.testing.assert_array_equal(plan.ids, before[plan.shards] + plan.places)
    np.testing.assert_array_equal(plan.epochs, positions // order.num_samples)
    assert ((plan.starts <= plan.places) & (plan.places < plan.stops) & (plan.stops <= sizes[plan.shards])).all()
    shards, places = order.locate(plan.ids)
    np.testing.assert_array_equal(shards, plan.shards)
    np.testing.assert_array_equal(places, plan.places)


@given(orders())
def test_runs_do_not_overlap_within_an_epoch(made: tuple[Order, np.ndarray, int]) -> None:
    order, sizes, _ = made
    plan = order.plan(np.arange(order.num_samples))
    runs = np.unique(np.stack([plan.shards, plan.starts, plan.stops]), axis=1)
    assert (runs[2] - runs[1]).sum() == sizes.sum()


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 16]))
def test_evaluation_meets_each_sample_once(samples: int, batch: int, ranks: int, run: int) -> None:
    batches = eval_batches(samples, batch, ranks)
    ids = np.stack([[eval_ids(samples, batch, rank, ranks, i) for i in range(batches)] for rank in range(ranks)])
    assert ids.shape == (ranks, batches, batch)
    np.testing.assert_array_equal(np.sort(ids[ids >= 0]), np.arange(samples))
    assert batches * batch * ranks < samples + batch * ranks + ranks
    sizes = np.array([0, samples // 3, 0, samples - samples // 3])
    plan = eval_plan(sizes, np.arange(samples), run=run)
    np.testing.assert_array_equal(np.cumsum(sizes)[plan.shards] - sizes[plan.shards] + plan.places, np.arange(samples))
    assert ((plan.starts <= plan.places) & (plan.places < plan.stops) & (plan.stops <= sizes[plan.shards])).all()


def test_epochs_and_seeds_differ() -> None:
    order = Order(np.array([50, 50]), seed=3, global_batch=10)
    first, second = order.at(0, 100), order.at(100, 100)
    other = Order(np.array([50, 50]), seed=4, global_batch=10).at(0, 100)
    again = Order(np.array([50, 50]), seed=3, global_batch=10).at(0, 100)
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9
    np.testing.assert_array_equal(first, again)


def test_the_order_is_what_it_was() -> None:
    """A changed number here means that no run can be resumed with the same data by a new version."""
    order = Order(np.array([7, 0, 30, 5, 90]), seed=2024, global_batch=12, streams=4, window=2, run=4, runs_in_use=16)
    assert order.digest(0) == "7c5df5287a15"
    assert order.digest(1000) == "e4cce5a30567"


def test_a_small_set_is_shuffled_as_a_whole() -> None:
    """Sample 0 comes at any place of an epoch, and any other sample may follow it."""
    order = Order(np.array([20, 20, 20]), seed=0, global_batch=4, run=5)
    epochs = np.stack([order.at(epoch * 60, 60) for epoch in range(3000)])
    place = (epochs == 0).argmax(axis=1)
    counts = np.bincount(place, minlength=60)
    assert ((counts - 50) ** 2 / 50).sum() < 59 + 5 * (2 * 59) ** 0.5
    follower = epochs[np.arange(3000)[place < 59], place[place < 59] + 1]
    counts = np.bincount(follower, minlength=60)[1:]
    expected = counts.sum() / 59
    assert ((counts - expected) ** 2 / expected).sum() < 58 + 5 * (2 * 58) ** 0.5


@pytest.mark.parametrize(("window", "share"), [(4, 0.7), (50, 0.95)])
def test_a_batch_mixes_classes_although_a_shard_holds_one(window: int, share: float) -> None:
    """200 shards of one class each, 32 streams: shard after shard, a batch would hold 32 of the 144 classes it should.

    A window of 4 shards allows for 128 at the very most.
    """
    order = Order(np.full(200, 1000), seed=1, global_batch=256, run=10, window=window)
    classes = order.locate(order.at(0, 256 * 700))[0].reshape(700, 256)
    distinct = np.mean([len(np.unique(batch)) for batch in classes])
    at_random = 200 * (1 - (1 - 1 / 200) ** 256)
    assert order.streams == 32
    assert distinct > share * at_random


@pytest.mark.parametrize("ranks", [1, 4, 16, 64])
def test_each_run_is_read_by_about_one_rank(ranks: int) -> None:
    order = Order(np.full(300, 1000), seed=1, global_batch=512, streams=64, run=10)
    steps = order.num_samples // 512
    fetched = 0
    for rank in range(ranks):
        positions = order.rank_positions(0, rank, ranks, steps=steps).reshape(-1)
        plan = order.plan(positions)
        runs = np.unique(np.stack([plan.shards, plan.starts, plan.stops]), axis=1)
        fetched += (runs[2] - runs[1]).sum()
    assert fetched / (steps * 512) < 1.01


def test_streams_follow_from_batch_and_samples() -> None:
    assert choose_streams(4096, 14_000_000) == 512
    assert choose_streams(1000, 14_000_000) == 500
    assert choose_streams(1024, 1_281_167) == 256
    assert choose_streams(128, 1500) == 1
    assert choose_streams(7, 10**9) == 7


@settings(max_examples=20)
@given(st.integers(1, 64).filter(lambda ranks: 48 % ranks != 0))
def test_ranks_that_do_not_divide_the_batch_are_refused(ranks: int) -> None:
    order = Order(np.array([100]), seed=0, global_batch=48)
    with pytest.raises(ValueError, match=f"of {ranks} has no equal share of a batch of 48"):
        order.rank_ids(0, 0, ranks)


@pytest.mark.parametrize(
    ("sizes", "streams", "message"),
    [([0, 0], None, "hold nothing"), ([3, -1], None, "hold nothing"), ([5], 3, "3 streams do not divide a batch of 8")],
)
def test_what_cannot_be_ordered_is_refused(sizes: list[int], streams: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order(np.array(sizes), seed=0, global_batch=8, streams=streams)


def test_no_torch_is_imported() -> None:
    code = "import sys, vitscale.data.order; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
