"""Batches: the same whoever makes them, complete, and masked where a sample is bad."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.loader_ranks import hashes_of_ranks
from helpers.ranks import run_ranks
from helpers.tars import labelled, make_tar
from PIL import Image

from vitscale.config.schema import DataConfig
from vitscale.data import reader as reader_module
from vitscale.data.batch import Batch
from vitscale.data.index import index_shards
from vitscale.data.loader import EvalLoader, TrainLoader
from vitscale.errors import UserError

SIZES = (40, 3, 25, 1, 32)
TOTAL = sum(SIZES)
CLASSES = 3


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """101 small images in five shards of very unequal size."""
    folder = tmp_path / "set"
    folder.mkdir()
    first = 0
    for number, count in enumerate(SIZES):
        make_tar(folder / f"train-{number:03d}.tar", labelled(range(first, first + count), classes=CLASSES))
        first += count
    index_shards(str(folder), progress=False)
    return folder


@pytest.fixture
def config(shards: Path) -> DataConfig:
    return DataConfig(train=str(shards), validation=str(shards), workers=0, shuffle_window=2)


def train_loader(config: DataConfig, run_dir: Path, **changed: object) -> TrainLoader:
    plain: dict[str, object] = {
        "image_size": (12, 16), "num_classes": CLASSES, "global_batch": 12, "seed": 5,
        "rank": 0, "world_size": 1, "start_step": 0, "run_dir": run_dir,
    }  # fmt: skip
    return TrainLoader(config, **{**plain, **changed})  # type: ignore[arg-type]


def take(loader: TrainLoader, steps: int) -> list[Batch]:
    try:
        return [next(loader) for _ in range(steps)]
    finally:
        loader.close()


def digest(batch: Batch) -> str:
    parts = (batch.images, batch.labels, batch.valid, batch.ids)
    return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()


def joined(batches: list[Batch]) -> Batch:
    columns = zip(*((b.images, b.labels, b.valid, b.ids) for b in batches), strict=True)
    return Batch(*(torch.cat(column) for column in columns))


def test_batches_depend_neither_on_workers_nor_on_ranks(config: DataConfig, tmp_path: Path) -> None:
    """Images, labels and ids of 26 steps, three epochs, by hash."""
    expected = [digest(batch) for batch in take(train_loader(config, tmp_path), 26)]
    assert len(set(expected)) == 26
    for workers in (1, 3):
        there = take(train_loader(replace(config, workers=workers), tmp_path), 26)
        assert [digest(batch) for batch in there] == expected
    for ranks in (2, 4):
        shares = [
            take(train_loader(replace(config, workers=rank % 3), tmp_path, rank=rank, world_size=ranks), 26)
            for rank in range(ranks)
        ]
        assert [digest(joined(list(step))) for step in zip(*shares, strict=True)] == expected


@pytest.mark.parametrize("start", [1, 8, 17, 1000])
def test_a_resumed_loader_goes_on_where_it_was(config: DataConfig, tmp_path: Path, start: int) -> None:
    there = take(train_loader(replace(config, workers=2), tmp_path, start_step=start - 1), 4)
    resumed = take(train_loader(config, tmp_path, start_step=start), 3)
    assert [digest(batch) for batch in resumed] == [digest(batch) for batch in there[1:]]
    assert [batch.step for batch in resumed] == [start, start + 1, start + 2]


def test_each_sample_once_an_epoch_with_its_own_label_and_pixels(config: DataConfig, tmp_path: Path) -> None:
    """An image of `labelled` is of one colour, (number, number // 256, 128): no crop or flip hides which it is."""
    loader = train_loader(config, tmp_path)
    assert loader.num_samples == TOTAL
    batch = joined(take(loader, 3 * TOTAL // 12 + 1))
    assert batch.images.dtype == torch.uint8
    assert batch.images.shape[1:] == (3, 12, 16)
    for epoch in range(3):
        assert sorted(batch.ids[epoch * TOTAL : (epoch + 1) * TOTAL].tolist()) == list(range(TOTAL))
    assert batch.valid.all()
    assert (batch.labels == batch.ids % CLASSES).all()
    assert (batch.images[:, 0] == batch.ids[:, None, None]).all()
    assert (batch.images[:, 2] == 128).all()


@pytest.mark.integration
def test_real_ranks_read_what_one_rank_reads(config: DataConfig, tmp_path: Path) -> None:
    """Two processes with workers, stopped after 7 steps and resumed as four: every id and pixel as on one rank."""
    expected = [digest(batch) for batch in take(train_loader(config, tmp_path), 14)]
    two = run_ranks(2, hashes_of_ranks, config, str(tmp_path), 0, 7)
    four = run_ranks(4, hashes_of_ranks, config, str(tmp_path), 7, 7)
    assert {tuple(hashes) for hashes in two} == {tuple(expected[:7])}
    assert {tuple(hashes) for hashes in four} == {tuple(expected[7:])}


def test_each_shard_is_fetched_once_an_epoch(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where shards are read."""
    fetched: Counter[int] = Counter()
    read = reader_module.read_samples

    def counting(index: object, shard: int, start: int, stop: int) -> object:
        fetched[shard] += stop - start
        return read(index, shard, start, stop)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "read_samples", counting)
    take(train_loader(config, tmp_path, global_batch=TOTAL), 1)
    assert [fetched[shard] for shard in range(len(SIZES))] == list(SIZES)


def test_evaluation_meets_each_sample_once(config: DataConfig) -> None:
    seen: list[Batch] = []
    lengths = set()
    for rank in range(4):
        loader = EvalLoader(
            replace(config, workers=rank % 3), image_size=16, num_classes=CLASSES, batch=8, rank=rank, world_size=4
        )
        batches = list(loader)
        again = list(loader)
        loader.close()
        assert [digest(batch) for batch in again] == [digest(batch) for batch in batches]
        assert {len(batch) for batch in batches} == {8}
        lengths.add(len(batches))
        seen += batches
    assert lengths == {4}
    batch = joined(seen)
    assert sorted(batch.ids[batch.valid].tolist()) == list(range(TOTAL))
    assert (batch.ids[~batch.valid] == -1).all()
    assert (batch.images[~batch.valid] == 0).all()
    assert (batch.labels[batch.valid] == batch.ids[batch.valid] % CLASSES).all()
    assert (batch.images[batch.valid][:, 0] == batch.ids[batch.valid][:, None, None]).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_may_be_asked_for_in_inference_mode(config: DataConfig, workers: int) -> None:
    loader = EvalLoader(
        replace(config, workers=workers), image_size=16, num_classes=CLASSES, batch=60, rank=0, world_size=1
    )
    with torch.inference_mode():
        assert sum(int(batch.valid.sum()) for batch in loader) == TOTAL
    loader.close()


def test_more_ranks_than_samples(tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tar", labelled(range(2)))
    index_shards(str(tmp_path), progress=False)
    config = DataConfig(train=str(tmp_path), validation=str(tmp_path), workers=1)
    ids = []
    for rank in range(4):
        loader = EvalLoader(config, image_size=8, num_classes=3, batch=3, rank=rank, world_size=4)
        ids += [batch.ids.tolist() for batch in loader]
        loader.close()
    assert ids == [[0, -1, -1], [1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    batches = take(train_loader(config, tmp_path, global_batch=4, rank=3, world_size=4), 4)
    assert all(len(batch) == 1 for batch in batches)
    assert all(batch.valid.all() for batch in batches)


BROKEN = {
    "s000": ([("cls", b"0")], "image", "no_image"),
    "s001": ([("cls", b"7"), ("png", None)], "label", "label"),
    "s002": ([("cls", b"-1"), ("png", None)], "label", "label"),
    "s003": ([("png", None)], "label", "label"),
    "s004": ([("json", b"{"), ("png", None)], "label", "label"),
    "s005": ([("cls", b"0"), ("png", b"")], "image", "empty"),
    "s006": ([("cls", b"0"), ("jpg", b"\xff\xd8\xff\xe0\0\x10JFIF")], "image", "truncated"),
    "s007": ([("cls", b"0"), ("jpg", b"no image at all")], "image", "not_an_image"),
}
FINE = {
    "s010": [("cls", b" 2\n"), ("jpg", None)],
    "s011": [("json", b'{"label": 2}'), ("PNG", None)],
    "s012": [("cls", b"2"), ("webp", None)],
}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Eight bad samples, each in its own way, among thirty good ones; `None` stands for a real image."""
    good = labelled(range(100, 130))
    image = dict(good)["s100.png"]
    odd = {key: fields for key, (fields, _, _) in BROKEN.items()} | FINE
    members = [(f"{key}.{name}", image if content is None else content) for key in odd for name, content in odd[key]]
    folder = tmp_path / "broken"
    folder.mkdir()
    make_tar(folder / "odd.tar", members)
    make_tar(folder / "rest.tar", good)
    index_shards(str(folder), progress=False)
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_masked_counted_and_written(broken: Path, tmp_path: Path, workers: int) -> None:
    loader = train_loader(DataConfig(train=str(broken), workers=workers), tmp_path, global_batch=41)
    (batch,) = take(loader, 1)
    odd = batch.ids < len(BROKEN)
    assert sorted(batch.ids.tolist()) == list(range(41))
    torch.testing.assert_close(batch.valid, ~odd)
    assert (batch.images[odd] == 0).all()
    assert (batch.labels[odd] == 0).all()
    fine = (batch.ids >= len(BROKEN)) & (batch.ids < 11)
    assert batch.labels[fine].tolist() == [2, 2, 2]
    assert (batch.images[fine] > 0).any(dim=1).all()

    assert loader.bad == Counter(reason for _, _, reason in BROKEN.values())
    assert loader.take_bad() == Counter(what for _, what, _ in BROKEN.values())
    assert loader.take_bad() == {}
    assert loader.samples_read == 41
    lines = [json.loads(line) for line in (tmp_path / "bad_samples.jsonl").read_text().splitlines()]
    assert {line["key"]: line["reason"] for line in lines} == {key: reason for key, (_, _, reason) in BROKEN.items()}
    assert {(line["shard"], line["step"]) for line in lines} == {("odd.tar", 0)}
    assert "out of range" in next(line["detail"] for line in lines if line["key"] == "s001")


def test_the_journal_grows_and_names_the_step(broken: Path, tmp_path: Path) -> None:
    take(train_loader(DataConfig(train=str(broken), workers=1), tmp_path, global_batch=41, start_step=3), 2)
    take(train_loader(DataConfig(train=str(broken), workers=1), tmp_path, global_batch=41, start_step=5), 1)
    lines = (tmp_path / "bad_samples.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["step"] for line in lines) == {3: 8, 4: 8, 5: 8}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_cannot_be_read(config: DataConfig, shards: Path, tmp_path: Path, workers: int) -> None:
    loader = train_loader(replace(config, workers=workers), tmp_path, global_batch=TOTAL)
    (shards / "train-002.tar").unlink()
    (batch,) = take(loader, 1)
    lost = (batch.ids >= 43) & (batch.ids < 68)
    torch.testing.assert_close(batch.valid, ~lost)
    assert loader.bad == {"unreadable_shard": 25}
    assert loader.take_bad() == {"shard": 25}
    line = json.loads((tmp_path / "bad_samples.jsonl").read_text().splitlines()[0])
    assert line["shard"] == "train-002.tar"
    assert "No such file" in line["detail"]


def test_a_damaged_stretch_of_a_tar_spoils_its_own_samples_only(
    config: DataConfig, shards: Path, tmp_path: Path
) -> None:
    loader = train_loader(config, tmp_path, global_batch=TOTAL)
    content = bytearray((shards / "train-000.tar").read_bytes())
    content[0:100] = b"\xaa" * 100
    (shards / "train-000.tar").write_bytes(content)
    (batch,) = take(loader, 1)
    assert batch.ids[~batch.valid].tolist() == [0]
    assert loader.bad == {"damaged_sample": 1}


def test_a_bad_validation_sample_is_not_valid_and_told(broken: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DataConfig(train=str(broken), validation=str(broken), workers=0)
    loader = EvalLoader(config, image_size=8, num_classes=CLASSES, batch=50, rank=0, world_size=1)
    (batch,) = list(loader)
    assert batch.ids.tolist() == list(range(41)) + [-1] * 9
    assert batch.valid.tolist() == [False] * 8 + [True] * 33 + [False] * 9
    assert loader.bad.total() == 8
    assert "8 validation samples could not be used, such as odd.tar: s000: no_image" in caplog.text


def test_a_run_folder_that_cannot_be_written_does_not_stop_the_run(
    broken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = train_loader(DataConfig(train=str(broken), workers=0), tmp_path / "missing", global_batch=41)
    assert take(loader, 1)[0].valid.sum() == 33
    assert "bad_samples.jsonl cannot be written (No such file or directory)" in caplog.text
    assert "s007" in caplog.text


def test_a_fault_of_the_program_comes_to_the_one_who_asks(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a fault in a thread")

    monkeypatch.setattr(reader_module, "read_samples", fails)
    for workers in (0, 2):
        loader = train_loader(replace(config, workers=workers), tmp_path)
        with pytest.raises(ZeroDivisionError, match="a fault in a thread"):
            next(loader)
        loader.close()


def test_signals_do_not_reach_the_workers_and_close_ends_them(config: DataConfig, tmp_path: Path) -> None:
    before = threading.active_count()
    caught: list[int] = []
    previous = {
        number: signal.signal(number, lambda n, _: caught.append(n)) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    loader = train_loader(replace(config, workers=3), tmp_path)
    try:
        next(loader)
        for number in previous:
            os.kill(os.getpid(), number)
        assert next(loader).valid.all()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        loader.close()
    assert caught == [signal.SIGTERM, signal.SIGUSR1]
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"world_size": 5}, "global_batch 12 cannot be shared by 5 ranks; make it a multiple of 5, such as 10"),
        ({"num_classes": 2}, "data.train has 3 classes, model.num_classes is 2; set it to 3 or more"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    shards: Path, tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    index_shards(str(shards), classes=("a", "b", "c"), progress=False)
    before = threading.active_count()
    with pytest.raises(UserError, match=message) as caught:
        train_loader(DataConfig(train=str(shards), workers=2), tmp_path, **changed)
    assert caught.value.exit_code == 2
    assert threading.active_count() == before


def test_streams_that_do_not_fit_and_no_validation(config: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.streams 5 does not divide global_batch 12"):
        train_loader(replace(config, streams=5), tmp_path)
    with pytest.raises(UserError, match=r"data\.validation is not set"):
        EvalLoader(replace(config, validation=None), image_size=8, num_classes=3, batch=2, rank=0, world_size=1)


def test_crop_and_flip_are_those_of_the_view(tmp_path: Path) -> None:
    """The whole image squeezed, and mirrored in half of the cases: pixels as Pillow's of the same file."""
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    content = (tmp_path / "x.png").read_bytes()
    make_tar(tmp_path / "a.tar", [m for i in range(40) for m in ((f"k{i:02d}.cls", b"1"), (f"k{i:02d}.png", content))])
    index_shards(str(tmp_path), progress=False)
    config = DataConfig(train=str(tmp_path), workers=0, crop="resize")
    (batch,) = take(train_loader(config, tmp_path, image_size=16, global_batch=40), 1)
    upright = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    same = (batch.images == upright).flatten(1).all(dim=1)
    mirrored = (batch.images == upright.flip(2)).flatten(1).all(dim=1)
    assert (same ^ mirrored).all()
    assert 8 <= mirrored.sum() <= 32
