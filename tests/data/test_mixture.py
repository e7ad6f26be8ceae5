"""Several sets as one order: shares, epochs of each source, ranks, labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tars import labelled, make_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.config.schema import DataConfig, MixtureSource
from vitscale.data.index import index_shards
from vitscale.data.loader import TrainLoader
from vitscale.data.mixture import MixtureOrder, Part
from vitscale.errors import UserError

SIZES = (np.array([40, 3, 0, 77]), np.array([5, 6]), np.array([500]))


def order(weights: tuple[float, ...], *, batch: int = 24, seed: int = 3) -> MixtureOrder:
    parts = [Part(sizes, weight, 4) for sizes, weight in zip(SIZES, weights, strict=False)]
    return MixtureOrder(parts, seed=seed, global_batch=batch, window=2)


@settings(max_examples=40)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=3).map(tuple),
    batch=st.sampled_from([3, 8, 24, 60]),
    seed=st.integers(0, 2**40),
)
def test_every_source_is_read_by_its_share_and_each_of_its_samples_once_an_epoch(
    weights: tuple[float, ...], batch: int, seed: int
) -> None:
    mixture = order(weights, batch=batch, seed=seed)
    sizes = [int(part.sum()) for part in SIZES[: len(weights)]]
    first = np.cumsum([0, *sizes])
    count = batch * (3000 // batch)
    ids = mixture.at(0, count)
    sources = mixture.source_of(ids)
    read = np.bincount(sources, minlength=len(weights))
    for number, size in enumerate(sizes):
        wanted = count * weights[number] / sum(weights)
        assert abs(read[number] - wanted) <= 0.011 * wanted + batch + 1
        own = ids[sources == number] - first[number]
        assert own.min() >= 0
        assert own.max() < size
        for epoch in range(len(own) // size):
            assert len(np.unique(own[epoch * size : (epoch + 1) * size])) == size
    assert mixture.epochs(count // batch) == pytest.approx([r / s for r, s in zip(read, sizes, strict=True)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 24])
def test_ranks_share_every_batch_and_any_step_begins_at_once(ranks: int) -> None:
    mixture = order((0.6, 0.1, 0.3))
    for step in (0, 7, 100_003):
        shares = [mixture.plan(mixture.rank_positions(step, rank, ranks)[0]) for rank in range(ranks)]
        joined = np.concatenate([share.ids for share in shares])
        np.testing.assert_array_equal(joined, mixture.at(step * 24, 24))
        assert mixture.digest(step) == order((0.6, 0.1, 0.3)).digest(step)
    assert mixture.digest(5) != order((0.6, 0.1, 0.3), seed=4).digest(5)


def test_every_slice_of_a_batch_holds_the_sources_by_their_shares() -> None:
    mixture = order((0.5, 0.25, 0.25))
    for rank in range(6):
        ids = mixture.plan(mixture.rank_positions(11, rank, 6)[0]).ids
        assert np.bincount(mixture.source_of(ids), minlength=3).tolist() == [2, 1, 1]


def test_ids_and_shards_are_numbered_through() -> None:
    mixture = order((0.4, 0.3, 0.3))
    plan = mixture.plan(np.arange(5000))
    sizes = np.concatenate(SIZES)
    ends = np.cumsum(sizes)
    np.testing.assert_array_equal(plan.shards, np.searchsorted(ends, plan.ids, side="right"))
    np.testing.assert_array_equal(plan.places, plan.ids - (ends - sizes)[plan.shards])
    assert ((plan.starts <= plan.places) & (plan.places < plan.stops)).all()


# ------------------------------------------------------------------------------------------------ with shards
def make_set(folder: Path, first: int, count: int, classes: list[str]) -> Path:
    folder.mkdir()
    make_tar(folder / "train-000.tar", labelled(range(first, first + count), classes=len(classes)))
    index_shards(str(folder), classes=classes, progress=False)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    base = make_set(tmp_path / "base", 0, 40, ["n01440764 tench", "n01443537 goldfish", "cat", "dog"])
    own = make_set(tmp_path / "own", 1000, 10, ["Dog", "n01440764"])
    return DataConfig(
        mixture=(
            MixtureSource(name="base", shards=str(base), weight=3),
            MixtureSource(name="own", shards=str(own), weight=1),
        ),
        workers=0,
        flip=False,
    )


def loader(config: DataConfig, run_dir: Path, **changed: int) -> TrainLoader:
    numbers = {"global_batch": 8, "rank": 0, "world_size": 1, "start_step": 0} | changed
    return TrainLoader(config, image_size=8, num_classes=4, seed=1, run_dir=run_dir, **numbers)


def test_labels_are_those_of_the_first_source_and_counts_are_kept(config: DataConfig, tmp_path: Path) -> None:
    batches = loader(config, tmp_path)
    assert batches.num_samples == 50
    seen = {}
    for _ in range(10):
        batch = next(batches)
        assert batch.valid.all()
        assert int((batch.ids >= 40).sum()) == 2
        seen |= dict(zip(batch.ids.tolist(), batch.labels.tolist(), strict=True))
    for sample, label in seen.items():
        # `labelled` gives number % classes; the second set's labels 0 and 1 are classes 3 and 0 of the first
        assert label == (sample % 4 if sample < 40 else (3, 0)[(sample - 40) % 2])
    counts = batches.take_sources()
    assert {number: count for number, (count, _) in counts.items()} == {0: 60, 1: 20}
    assert [epochs for _, epochs in counts.values()] == [1.5, 2.0]
    assert batches.take_sources()[0][0] == 0


def test_a_class_map_says_what_names_do_not(config: DataConfig, tmp_path: Path) -> None:
    other = make_set(tmp_path / "other", 2000, 6, ["hound", "carp"])
    sources = (config.mixture[0], MixtureSource(name="other", shards=str(other)))
    with pytest.raises(UserError, match="classes that the first source does not: hound, carp; say in a class_map"):
        loader(replace(config, mixture=sources), tmp_path)
    (tmp_path / "map.txt").write_text("hound\tdog\ncarp\tn01443537\n")
    mapped = (config.mixture[0], replace(sources[1], class_map=str(tmp_path / "map.txt")))
    batch = next(loader(replace(config, mixture=mapped), tmp_path))
    there = batch.ids >= 40
    assert set(batch.labels[there].tolist()) <= {3, 1}
    (tmp_path / "map.txt").write_text("hound\tdog\nfox\tcat\n")
    with pytest.raises(UserError, match=r"map\.txt:2: 'fox' is no class of this source"):
        loader(replace(config, mixture=mapped), tmp_path)


def test_a_source_that_is_not_there_is_named(config: DataConfig, tmp_path: Path) -> None:
    sources = (config.mixture[0], MixtureSource(name="lost", shards=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"data\.mixture\[1\] \(lost\): no shards found"):
        loader(replace(config, mixture=sources), tmp_path)
