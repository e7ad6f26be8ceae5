"""Every sample id that real ranks train on: the same at each step, whatever there is of ranks, threads and stops."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.runs import write_config
from helpers.seen_ids import seen, train_and_note
from helpers.split_engine import world_of_one
from helpers.tars import labelled, make_tar

from vitscale.data.index import index_shards

SIZES = (29, 3, 1, 16)
"""49 samples in shards of very unequal size: one more than a multiple of the batch of 12, and fewer shards than ranks
have threads."""
BATCH = 12
STEPS = 3 * sum(SIZES) // BATCH + 1


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "train"
    folder.mkdir()
    first = 0
    for number, count in enumerate(SIZES):
        make_tar(folder / f"{number}.tar", labelled(range(first, first + count), classes=3))
        first += count
    index_shards(str(folder), progress=False)
    return folder


def overrides(shards: Path, *, workers: int, accumulation: int, ranks: int, mixed: bool = False) -> list[str]:
    more = ["data.mixup=0.5", "data.augment=randaugment"] if mixed else []
    return [
        f"data.train={shards}", "data.validation=null", f"data.workers={workers}", f"duration={STEPS} steps",
        f"global_batch={BATCH}", "checkpoint.every=1 steps", f"engine.micro_batch={BATCH // ranks // accumulation}",
        "data.shuffle_window=2", *more,
    ]  # fmt: skip


def run(folder: Path, shards: Path, ranks: int, last: int, **how: object) -> None:
    config = str(write_config(folder, shards.parent))
    words = overrides(shards, ranks=ranks, **how)  # type: ignore[arg-type]
    (folder / "notes").mkdir(exist_ok=True)
    if ranks == 1:
        with world_of_one() as world:
            train_and_note(world, config, words, str(folder / "notes"), last)
    else:
        run_ranks(ranks, train_and_note, config, words, str(folder / "notes"), last, timeout=240.0)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "augmented and mixed"])
def test_three_epochs_are_the_same_for_any_ranks_threads_and_stops(shards: Path, tmp_path: Path, mixed: bool) -> None:
    run(tmp_path / "one", shards, 1, STEPS, workers=0, accumulation=1, mixed=mixed)
    expected = seen(tmp_path / "one" / "notes")
    assert sorted(expected) == list(range(STEPS))
    # each sample once an epoch: epochs end inside a batch, so that they are counted along the sequence of steps
    counts = Counter(sample for step in range(STEPS) for sample, _, _ in expected[step])
    assert set(counts) == set(range(sum(SIZES)))
    assert max(counts.values()) - min(counts.values()) <= 1

    ways = [(2, 1, 1), (2, 3, 2), (4, 2, 1)] if not mixed else [(2, 2, 3)]
    for number, (ranks, workers, accumulation) in enumerate(ways):
        folder = tmp_path / f"way{number}"
        run(folder, shards, ranks, STEPS, workers=workers, accumulation=accumulation, mixed=mixed)
        assert seen(folder / "notes") == expected

    chance = random.Random(0)
    stops = sorted(chance.sample(range(1, STEPS - 1), 2))
    folder = tmp_path / "stopped"
    for ranks, last, workers in ((2, stops[0], 1), (1, stops[1], 2), (4 if not mixed else 2, STEPS, 0)):
        run(folder, shards, ranks, last, workers=workers, accumulation=1, mixed=mixed)
    assert seen(folder / "notes") == expected
