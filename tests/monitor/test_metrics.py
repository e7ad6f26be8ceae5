from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import pytest
import torch
from helpers.ranks import run_ranks

from vitscale.monitor.metrics import METRICS, Recorder
from vitscale.world import Reduction, World


class Kept:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        self.records.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


class Full:
    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


def test_names_follow_prometheus_conventions() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not metric.name.endswith(("_count", "_sum", "_bucket")), metric.name
        assert not re.search(r"milli|_ms\b|_mb\b|_gb\b|percent|minutes|hours", metric.name), metric.name
        if metric.unit in ("seconds", "bytes", "ratio"):
            assert re.search(rf"_{metric.unit}(_total)?$", metric.name), metric.name
        assert metric.help.endswith("."), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(metric.buckets), metric.name
        assert metric.kind == "info" or len(metric.labels or ()) <= 1, metric.name
        assert not metric.of or METRICS[metric.of].of == "", metric.name


def test_window_is_combined_by_the_rows_reduction(world: World) -> None:
    recorder = Recorder(world, [])
    for loss, rate in ((3.0, 0.1), (2.0, 0.2), (1.0, 0.3)):
        recorder.record("loss", loss)
        recorder.record("learning_rate", rate)
        recorder.record("images_total", 32)
        recorder.record("host_memory_bytes", 100 - loss)
    values = recorder.flush(3)
    assert values["loss"] == pytest.approx(2.0)
    assert values["learning_rate"] == 0.3
    assert values["images_total"] == 96
    assert values["host_memory_bytes"] == 99
    assert values["current_step"] == 3


def test_a_window_begins_empty(world: World) -> None:
    recorder = Recorder(world, [])
    recorder.record("loss", 9.0)
    recorder.record("images_total", 32)
    recorder.flush(1)
    values = recorder.flush(2)
    assert "loss" not in values
    assert values["images_total"] == 32  # a counter stays


def test_mean_is_weighted(world: World) -> None:
    recorder = Recorder(world, [])
    recorder.record("loss", 1.0, weight=30)
    recorder.record("loss", 4.0, weight=10)
    assert recorder.flush(1)["loss"] == pytest.approx((30 * 1.0 + 10 * 4.0) / 40)


def test_one_step_that_is_not_finite_leaves_the_mean_of_the_others(world: World) -> None:
    recorder = Recorder(world, [])
    for loss in (1.0, math.nan, 3.0, math.inf):
        recorder.record("loss", torch.tensor(loss))
    assert recorder.flush(1)["loss"] == pytest.approx(2.0)
    recorder.record("loss", torch.tensor(math.nan))
    assert math.isnan(recorder.flush(2)["loss"])


def test_totals_go_on_from_a_checkpoint(world: World) -> None:
    first = Recorder(world, [])
    first.record("images_total", 32)
    first.record("bad_samples_total", 2, label="image")
    first.flush(1)
    second = Recorder(world, [], totals=first.totals)
    second.record("images_total", 8)
    values = second.flush(2)
    assert values["images_total"] == 40
    assert values['bad_samples_total{reason="image"}'] == 2


def test_histogram_counts_at_or_below_each_bound(world: World) -> None:
    recorder = Recorder(world, [])
    durations = [0.01, 0.011, 0.3, 0.31, 500.0]
    for duration in durations[:2]:
        recorder.record("step_duration_seconds", duration)
    recorder.flush(2)
    for duration in durations[2:]:
        recorder.record("step_duration_seconds", duration)
    values = recorder.flush(5)
    for bound in METRICS["step_duration_seconds"].buckets:
        expected = sum(duration <= bound for duration in durations)
        assert values[f'step_duration_seconds_bucket{{le="{bound}"}}'] == expected
    assert values["step_duration_seconds_count"] == 5
    assert values["step_duration_seconds_sum"] == pytest.approx(sum(durations))
    assert values["step_duration_seconds"] == pytest.approx(sum(durations[2:]) / 3)


def test_a_tensor_is_neither_altered_nor_followed(world: World) -> None:
    recorder = Recorder(world, [])
    loss = torch.tensor(2.0, requires_grad=True)
    recorder.record("loss", loss)
    with torch.no_grad():
        loss += 5
    assert recorder.flush(1)["loss"] == 2.0
    assert loss.item() == 7.0


def test_record_does_not_read_the_device(world: World) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros((), device="meta").item()  # a meta tensor cannot be read: it stands for a device that is busy
    Recorder(world, []).record("loss", torch.zeros((), device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_record_does_not_synchronize(world: World) -> None:
    recorder = Recorder(world, [])
    loss = torch.tensor(2.0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorder.record("loss", loss)
        loss += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.record("loss", 4.0)
    assert recorder.flush(1)["loss"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("name", "label", "message"),
    [
        ("los", None, "there is no metric 'los'; did you mean 'loss'?"),
        ("images", None, "did you mean 'images_total'?"),
        ("bad_samples_total", None, "needs its label 'reason' to be one of shard, image, label, other"),
        ("bad_samples_total", "imag", "did you mean 'image'?"),
        ("loss", "train", "metric 'loss' has no label, but was given 'train'"),
        ("slowest_rank", None, "it tells of step_duration_seconds"),
        ("build_info", None, "is not recorded"),
    ],
)
def test_a_wrong_name_is_refused(world: World, name: str, label: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Recorder(world, []).record(name, 1.0, label=label)


def test_a_tensor_of_several_elements_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"one number, not a tensor of shape \(2, 3\)"):
        Recorder(world, []).record("loss", torch.zeros(2, 3))


def test_a_full_disk_stops_neither_training_nor_the_other_writers(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    recorder = Recorder(world, [Full(), kept])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            recorder.record("loss", 1.0)
            recorder.flush(step)
    assert [step for step, _ in kept.records] == [1, 2]
    assert caplog.text.count("No space left on device") == 1
    recorder.close()
    assert kept.closed


class Counting(World):
    """Counts how often ranks wait for each other."""

    collectives = 0

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, *, what: str) -> torch.Tensor:
        self.collectives += 1
        return super().all_reduce(tensor, reduction, what=what)


def unequal_ranks(world: World) -> tuple[list[tuple[int, dict[str, float]]], dict[str, float], int]:
    rank = world.rank
    kept = Kept()
    counting = Counting(**vars(world))
    recorder = Recorder(counting, [kept] if rank == 0 else [])
    recorder.record("loss", torch.tensor(1.0 + rank), weight=1 + 2 * rank)
    if rank == 1:
        recorder.record("loss", torch.tensor(6.0), weight=4)
        recorder.record("bad_samples_total", 3, label="shard")  # rank 0 has none
    for _ in range(2):
        recorder.record("step_duration_seconds", 0.1 * (rank + 1))
    recorder.record("data_wait_seconds_total", 0.5 - 0.4 * rank)
    recorder.record("images_total", 10 + rank)
    recorder.record("skipped_steps_total", 1)  # the same step, seen by both
    recorder.record("learning_rate", 0.25)
    recorder.record("checkpoint_size_bytes", 100)
    recorder.record("checkpoint_duration_seconds", 3 - rank)
    recorder.flush(7)
    return kept.records, recorder.totals, counting.collectives


@pytest.mark.integration
def test_ranks_come_together_in_one_collective() -> None:
    (records, totals, collectives), (none, others_totals, _) = run_ranks(2, unequal_ranks)
    assert none == []
    assert collectives == 1
    assert totals == others_totals  # so that any rank may save them
    ((step, values),) = records
    assert step == 7
    expected = {
        "current_step": 7,
        "loss": (1 * 1.0 + 3 * 2.0 + 4 * 6.0) / 8,  # not the mean of the ranks' means
        "step_duration_seconds": 0.15,
        "step_duration_min_seconds": 0.1,
        "step_duration_max_seconds": 0.2,
        "slowest_rank": 1,
        "step_duration_seconds_count": 4,
        "step_duration_seconds_sum": 0.6,
        "data_wait_seconds_total": 0.6,
        "data_wait_max_seconds": 0.5,
        "data_wait_max_rank": 0,
        "images_total": 21,
        "skipped_steps_total": 1,
        'bad_samples_total{reason="shard"}': 3,
        "learning_rate": 0.25,
        "checkpoint_size_bytes": 200,
        "checkpoint_duration_seconds": 3,
    }
    assert {key: value for key, value in values.items() if "_bucket" not in key} == pytest.approx(expected)
