"""Samples left out, what a step is made of, and what a set holds; by the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import run_main
from helpers.tars import labelled, make_tar
from PIL import Image

from vitscale.config.schema import DataConfig
from vitscale.data.batch import Batch
from vitscale.data.index import index_shards
from vitscale.data.loader import EvalLoader, TrainLoader
from vitscale.data.shards import load_index


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    make_tar(folder / "a.tar", labelled(range(10), classes=3))
    make_tar(folder / "b.tar", labelled(range(10, 30), classes=3))
    index_shards(str(folder), classes=["x", "y", "z"], progress=False)
    return folder


def epoch(shards: Path, run_dir: Path) -> list[Batch]:
    config = DataConfig(train=str(shards), workers=2)
    loader = TrainLoader(
        config, image_size=8, num_classes=3, global_batch=6, seed=0, rank=0, world_size=1, start_step=0, run_dir=run_dir
    )
    batches = [next(loader) for _ in range(5)]
    assert not loader.bad
    loader.close()
    return batches


def test_excluded_samples_keep_their_place_and_no_other_moves(shards: Path, tmp_path: Path) -> None:
    before, digest = epoch(shards, tmp_path), load_index(str(shards)).digest
    keys = [content["key"] for content in ({"key": f"{number:06d}"} for number in (3, 12))]
    names = sorted(name.split(".")[0] for name, _ in labelled(range(30), classes=3))
    keys = [sorted(set(names))[3], sorted(set(names))[12]]
    (tmp_path / "list.txt").write_text(
        f"# two\na.tar {keys[0]}\n" + json.dumps({"shard": "b.tar", "key": keys[1]}) + "\n"
    )
    done = run_main("data", "exclude", shards, "--samples", tmp_path / "list.txt")
    assert (done.code, done.out) == (0, f"{shards}: 2 samples more left out\n")
    assert run_main("data", "exclude", shards, "--samples", tmp_path / "list.txt").out.endswith(
        "0 samples more left out\n"
    )
    after = epoch(shards, tmp_path)
    assert load_index(str(shards)).digest == digest
    left_out = []
    for old, new in zip(before, after, strict=True):
        assert (old.ids == new.ids).all()
        left_out += new.ids[~new.valid].tolist()
        assert (old.images[new.valid] == new.images[new.valid]).all()
        assert not new.images[~new.valid].any()
    assert sorted(left_out) == [3, 12]
    config = DataConfig(train=str(shards), validation=str(shards), workers=0)
    loader = EvalLoader(config, image_size=8, num_classes=3, batch=7, rank=0, world_size=1)
    assert sum(int(batch.valid.sum()) for batch in loader) == 28
    assert run_main("data", "verify", shards).code == 0
    index_shards(str(shards), progress=False)  # made again, it still knows
    assert sum(map(len, load_index(str(shards)).excluded.values())) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("c.tar 000001", "list.txt:1: {} has no shard c.tar"),
        ("a.tar nothing", "list.txt:1: a.tar has no sample nothing"),
        ("a.tar", "list.txt:1: 'a.tar' names no sample; write the shard's file name, a space, and the key"),
        ("{broken", "list.txt:1: '{{broken' names no sample"),
        ("# only this", "list.txt names no samples"),
    ],
)
def test_mistakes_in_the_list(shards: Path, tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "list.txt").write_text(f"{line}\n")
    before = (shards / "index.json").read_text()
    done = run_main("data", "exclude", shards, "--samples", tmp_path / "list.txt")
    assert done.code == 1
    assert said.format(shards) in done.err
    assert (shards / "index.json").read_text() == before


def test_a_step_is_printed_as_training_reads_it(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"name: a\nrun_dir: {tmp_path}/run\nduration: 1 epoch\nglobal_batch: 6\nseed: 0\ndata: {{train: {shards}}}\n"
        "model: {image_size: 8, patch_size: 4, num_classes: 3}\n"
    )
    done = run_main("data", "order", path, "--step", 3)
    assert done.code == 0
    head, *lines = done.out.splitlines()
    rows = [line.split("\t") for line in lines]
    batch = epoch(shards, tmp_path)[3]
    assert [int(row[0]) for row in rows] == batch.ids.tolist()
    assert head.startswith("# step 3, order ")
    for sample, _, shard, place in rows:
        assert (shard, int(place)) == (("a.tar", int(sample)) if int(sample) < 10 else ("b.tar", int(sample) - 10))
    second = run_main("data", "order", path, "--step", 3, "--rank", 1, "--ranks", 3)
    assert second.out.splitlines()[1:] == lines[2:4]
    wrong = run_main("data", "order", path, "--rank", 0, "--ranks", 4)
    assert "global_batch 6 cannot be shared by 4 ranks" in wrong.err


def test_what_a_set_holds(tmp_path: Path) -> None:
    source = tmp_path / "images"
    sizes = {"a": [(10, 20), (30, 40)], "b": [(50, 25)]}
    for name, of_class in sizes.items():
        (source / name).mkdir(parents=True)
        for number, (height, width) in enumerate(of_class):
            Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(source / name / f"{number}.png")
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    run_main("data", "pack", source, tmp_path / "shards", "--classes", tmp_path / "classes.txt")
    done = run_main("data", "stats", tmp_path / "shards", "--json", tmp_path / "stats.json")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "stats.json").read_text())
    assert (found["samples"], found["classes"], found["empty_classes"], found["unusable"]) == (3, 3, 1, 0)
    assert found["height"] == [10, 12, 20, 30, 40, 48, 50]
    assert found["width"][3] == 25
    assert found["aspect"][0] == 0.5
    assert found["images_per_class"][3] == 1
    assert "1 of 3 classes without an image" in done.out


def test_mixtures_leave_out_what_their_sources_do(shards: Path, tmp_path: Path) -> None:
    from vitscale.config.schema import MixtureSource
    from vitscale.data.training import load_training

    other = tmp_path / "other"
    other.mkdir()
    make_tar(other / "c.tar", labelled(range(5), classes=3))
    index_shards(str(other), classes=["x", "y", "z"], progress=False)
    keys = sorted({name.split(".")[0] for name, _ in labelled(range(30), classes=3)})
    (tmp_path / "list.txt").write_text(f"b.tar {keys[12]}\n")
    run_main("data", "exclude", shards, "--samples", tmp_path / "list.txt")
    sources = (MixtureSource(name="other", shards=str(other)), MixtureSource(name="set", shards=str(shards)))
    config = replace(DataConfig(), mixture=sources)
    assert load_training(config).index.excluded == {2: frozenset({2})}
