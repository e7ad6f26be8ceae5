"""What the loop does when numbers, disks, samples or checkpoints are bad."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.runs import assert_same_tensors, losses, newest, records, tensors, vitscale, write_config, write_shards
from helpers.split_engine import world_of_one
from helpers.tars import labelled, make_tar

from vitscale.config.load import load_config
from vitscale.data.index import index_shards
from vitscale.errors import EXIT_FAILED, UserError
from vitscale.train import checkpoint
from vitscale.train.loop import TrainResult, train


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


def run(config: Path, *overrides: str) -> TrainResult:
    with world_of_one() as world:
        return train(load_config(config, overrides), world)


def steps_of(run_dir: Path) -> list[int]:
    return [entry.step for entry in checkpoint.list_checkpoints(run_dir)]


# ------------------------------------------------------------------------------------------------ a run that goes well
def test_a_run_leaves_what_the_design_says(shards: Path, tmp_path: Path) -> None:
    result = run(write_config(tmp_path, shards, evaluate={"every": "10 steps"}, monitor={"tensorboard": True}))
    assert (result.step, result.finished) == (20, True)
    assert result.accuracy is not None
    assert result.accuracy.count == 30
    assert steps_of(tmp_path / "run") == [5, 10, 15, 20]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.jsonl", "tensorboard"} <= names
    assert load_config(tmp_path / "run/config.yaml", []) == load_config(tmp_path / "run.yaml", [])
    found = records(tmp_path / "run")
    assert list(losses(tmp_path / "run")) == list(range(1, 21))
    evaluated = [record["step"] for record in found if 'evaluation_top1_ratio{weights="ema"}' in record]
    assert evaluated == [10, 20]
    values = [newest(tmp_path / "run", key) for key in ("step_total", "images_total", "checkpoint_step", "epoch")]
    assert values == pytest.approx([20, 160, 20, 160 / 90])
    assert newest(tmp_path / "run", 'evaluation_top1_ratio{weights="ema"}') == result.accuracy.top1


def test_the_learning_rate_is_that_of_the_paper(shards: Path, tmp_path: Path) -> None:
    """Linear from 0 to the peak in two steps, then half a cosine to 0."""
    run(write_config(tmp_path, shards, duration="10 steps", schedule={"warmup": "2 steps"}))
    rates = [record["learning_rate"] for record in records(tmp_path / "run") if "learning_rate" in record]
    warm = [1e-2 * (step + 1) / 2 for step in range(2)]
    cosine = [1e-2 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 8)) for step in range(2, 10)]
    assert rates[:10] == pytest.approx(warm[: len(rates)] + cosine, rel=1e-6)


# ------------------------------------------------------------------------------------------------ numbers
def test_a_loss_that_stays_infinite_stops_the_run_without_a_new_checkpoint(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, checkpoint={"every": "1 steps"}, monitor={"max_skipped": 4})
    assert run(config, "duration=5 steps").step == 5
    before = tensors(tmp_path / "run")
    with pytest.raises(UserError) as caught:
        run(config, "optim.lr=1e38", "optim.clip_norm=null", "loss.kind=sigmoid", "loss.label_smoothing=0")
    message = caught.value.message
    assert "not finite in 4 steps in a row (monitor.max_skipped)" in message
    assert "No checkpoint was written since" in message
    assert caught.value.exit_code == EXIT_FAILED
    good = int(message.split("the last good step was ")[1].split(" ")[0])
    assert max(steps_of(tmp_path / "run")) <= good + 3
    # what was good before is still there, whole
    for entry in checkpoint.list_checkpoints(tmp_path / "run"):
        assert entry.problems == ()
        if entry.step > 5:
            shutil.rmtree(entry.path)
    assert_same_tensors(tensors(tmp_path / "run"), before)


# ------------------------------------------------------------------------------------------------ disks
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.integration
def test_a_disk_that_fills_up_is_said_and_training_goes_on(shards: Path, small_disk: Path) -> None:
    config = write_config(small_disk, shards, duration="40 steps", checkpoint={"every": "2 steps"})
    done = vitscale("train", config)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "training goes on and tries again at the next checkpoint" in done.stderr
    assert "No space left on device" in done.stderr
    assert "step 40/40" in done.stderr
    assert newest(small_disk / "run", "checkpoint_failures_total") >= 1
    entries = checkpoint.list_checkpoints(small_disk / "run")
    assert entries
    assert [entry.problems for entry in entries] == [()] * len(entries)
    # with room again, the run goes on from the last whole checkpoint
    for entry in entries[:-1]:
        shutil.rmtree(entry.path)
    again = vitscale("train", config, "checkpoint.keep_last=1")
    assert again.returncode == 0, again.stderr
    assert f"from step {entries[-1].step} of this run" in again.stderr


# ------------------------------------------------------------------------------------------------ samples
def spoiled(folder: Path, *, good: int, bad: int) -> Path:
    """Shards of which the last `bad` samples cannot be decoded."""
    folder.mkdir()
    members = labelled(range(good + bad))
    make_tar(
        folder / "a.tar",
        [
            (name, b"no image" if name.endswith(".png") and int(name[1:4]) >= good else content)
            for name, content in members
        ],
    )
    index_shards(str(folder / "a.tar"), classes=("a", "b", "c"))
    return folder


def test_few_bad_samples_are_counted_and_named(tmp_path: Path) -> None:
    source = spoiled(tmp_path / "shards", good=96, bad=4)
    data = {"train": str(source), "validation": None, "max_bad_fraction": 0.1}
    assert run(write_config(tmp_path, tmp_path, data=data, duration="25 steps")).finished
    assert newest(tmp_path / "run", 'bad_samples_total{reason="image"}') == 8, "each of four in each of two epochs"
    told = [json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()]
    assert sorted(line["key"] for line in told) == [f"s{number:03d}" for number in (96, 97, 98, 99) for _ in range(2)]
    assert {line["reason"] for line in told} == {"not_an_image"}


def test_too_many_bad_samples_end_the_run(tmp_path: Path) -> None:
    source = spoiled(tmp_path / "shards", good=60, bad=40)
    data = {"train": str(source), "validation": None, "max_bad_fraction": 0.1}
    with pytest.raises(
        UserError, match=r"samples could not be used \(image \d+\), more than data.max_bad_fraction = 0.1"
    ):
        run(write_config(tmp_path, tmp_path, data=data, duration="25 steps"))
    assert (tmp_path / "run/bad_samples.jsonl").exists()
