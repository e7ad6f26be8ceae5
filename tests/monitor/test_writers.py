from __future__ import annotations

import json
import logging
import math
import socket
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from vitscale.config.schema import MonitorConfig
from vitscale.errors import UserError
from vitscale.monitor.metrics import METRICS, Recorder
from vitscale.monitor.writers import JsonlWriter, PrometheusWriter, TensorBoardWriter, open_writers, read_history
from vitscale.world import World

RUN = {"name": "try", "model": "B/16", "engine": "ddp", "ranks": "2"}


def serve(run_dir: Path, port: int = 0, **keys: object) -> PrometheusWriter:
    return PrometheusWriter(run_dir, host="127.0.0.1", port=port, run=RUN, **keys)  # type: ignore[arg-type]


def scrape(writer: PrometheusWriter) -> dict[str, Metric]:
    assert writer.url is not None
    with urllib.request.urlopen(writer.url, timeout=5) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    found = [s.value for f in families.values() for s in f.samples if s.name == sample and s.labels == labels]
    assert len(found) == 1, (sample, labels, found)
    return float(found[0])


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[PrometheusWriter]:
    writer = serve(tmp_path)
    yield writer
    writer.close()


# --- metrics.jsonl


def test_jsonl_holds_a_record_a_line(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path, step=0, run=RUN)
    writer.write(10, {"loss": 2.5, "grad_norm": math.nan, 'step_duration_seconds_bucket{le="0.1"}': 3}, 100.0)
    writer.close()
    start, record = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert start["event"] == "start"
    assert record == {"step": 10, "time": 100.0, "loss": 2.5, "grad_norm": None}
    (read,) = read_history(tmp_path).records
    assert read.values["loss"] == 2.5
    assert math.isnan(read.values["grad_norm"])


def test_a_restart_makes_later_records_void_and_keeps_their_lines(tmp_path: Path) -> None:
    first = JsonlWriter(tmp_path, step=0, run=RUN)
    for step in (10, 20, 25):
        first.write(step, {"loss": 1.0}, step)
    first.close()
    second = JsonlWriter(tmp_path, step=20, run={**RUN, "ranks": "4"})
    second.write(30, {"loss": 2.0}, 40.0)
    second.close()
    history = read_history(tmp_path)
    assert history.series("loss") == ([10, 20, 30], [1.0, 1.0, 2.0])
    assert [(attempt.step, attempt.end) for attempt in history.attempts] == [(0, 25.0), (20, 40.0)]
    assert [attempt.run["ranks"] for attempt in history.attempts] == ["2", "4"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    first = JsonlWriter(tmp_path, step=0, run=RUN)
    first.write(10, {"loss": 1.0}, 10.0)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "time": 20.0, "lo')
    assert len(read_history(tmp_path).records) == 1
    second = JsonlWriter(tmp_path, step=10, run=RUN)
    second.write(20, {"loss": 2.0}, 30.0)
    second.close()
    assert read_history(tmp_path).series("loss") == ([10, 20], [1.0, 2.0])


def test_a_run_without_metrics_has_no_history(tmp_path: Path) -> None:
    history = read_history(tmp_path)
    assert history.records == ()
    assert history.attempts == ()


# --- TensorBoard


def test_tensorboard_reads_back_what_was_written_and_forgets_lost_steps(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path, step=0)
    for step in (10, 20, 30):
        first.write(step, {"loss": float(step), 'bad_samples_total{reason="image"}': 1.0}, 1000.0 + step)
    first.close()
    second = TensorBoardWriter(tmp_path, step=20)
    second.write(40, {"loss": -40.0}, 2000.0)
    second.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("optimization/loss")
    assert [(event.step, event.value) for event in scalars] == [(10, 10.0), (20, 20.0), (40, -40.0)]
    assert scalars[0].wall_time == 1010.0
    assert events.Scalars("data/bad_samples_total/image")[0].value == 1.0


# --- Prometheus


def test_every_recorded_metric_is_scraped(world: World, endpoint: PrometheusWriter) -> None:
    recorder = Recorder(world, [endpoint])
    for metric in METRICS.values():
        if metric.kind != "info" and not metric.of:
            for label in next(iter((metric.labels or {}).values()), (None,)):
                recorder.record(metric.name, 0.3, label=label)
    recorder.flush(12)
    families = scrape(endpoint)
    ours = {name for name in families if name.startswith("vitscale_")}
    assert ours == {f"vitscale_{name.removesuffix('_total')}" for name in METRICS}
    assert all(families[name].documentation for name in ours)
    assert value(families, "vitscale_current_step") == 12
    assert value(families, "vitscale_loss") == pytest.approx(0.3)
    assert value(families, "vitscale_bad_samples_total", reason="image") == pytest.approx(0.3)
    assert value(families, "vitscale_evaluation_top1_ratio", weights="ema") == pytest.approx(0.3)
    assert value(families, "vitscale_step_duration_seconds_bucket", le="0.2") == 0
    assert value(families, "vitscale_step_duration_seconds_bucket", le="0.3") == 1
    assert value(families, "vitscale_step_duration_seconds_bucket", le="+Inf") == 1
    assert value(families, "vitscale_step_duration_seconds_count") == 1
    assert value(families, "vitscale_run_info", **RUN) == 1


def test_types_and_suffixes_agree(endpoint: PrometheusWriter) -> None:
    endpoint.write(1, {"loss": 1.0}, 0.0)
    for name, family in scrape(endpoint).items():
        if name.startswith("vitscale_"):
            counted = [sample.name for sample in family.samples if sample.name.endswith("_total")]
            assert bool(counted) == (family.type == "counter"), name


def test_counters_are_there_from_the_start_and_count_from_zero(tmp_path: Path) -> None:
    writer = serve(tmp_path, totals={"images_total": 1000.0, 'bad_samples_total{reason="image"}': 7.0})
    try:
        assert value(scrape(writer), "vitscale_images_total") == 0
        writer.write(11, {"images_total": 1064.0, 'bad_samples_total{reason="image"}': 8.0}, 0.0)
        families = scrape(writer)
        assert value(families, "vitscale_images_total") == 64
        assert value(families, "vitscale_bad_samples_total", reason="image") == 1
        assert value(families, "vitscale_bad_samples_total", reason="shard") == 0
    finally:
        writer.close()


def test_a_value_stays_until_the_next(endpoint: PrometheusWriter) -> None:
    endpoint.write(1, {"loss": 1.0, 'evaluation_top1_ratio{weights="ema"}': 0.5}, 0.0)
    endpoint.write(2, {"loss": 2.0}, 0.0)
    families = scrape(endpoint)
    assert value(families, "vitscale_loss") == 2.0
    assert value(families, "vitscale_evaluation_top1_ratio", weights="ema") == 0.5


def test_port_in_use_gives_the_next_free_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING):
            writer = serve(tmp_path, port=port)
        try:
            address = json.loads((tmp_path / "prometheus.json").read_text())
            assert address["port"] > port
            assert address["host"] == "127.0.0.1"
            assert f"port {port} is in use; Prometheus metrics are at {writer.url}" in caplog.text
            assert str(address["port"]) in str(writer.url)
            scrape(writer)
        finally:
            writer.close()


def test_a_port_that_others_share_counts_as_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        writer = serve(tmp_path, port=taken.getsockname()[1])
        writer.close()
        assert f":{taken.getsockname()[1]}/" not in str(writer.url)


def test_close_gives_the_port_back(tmp_path: Path) -> None:
    writer = serve(tmp_path)
    url = str(writer.url)
    port = json.loads((tmp_path / "prometheus.json").read_text())["port"]
    scrape(writer)
    writer.close()
    assert not (tmp_path / "prometheus.json").exists()
    again = serve(tmp_path, port=port)
    assert again.url == url
    again.close()


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    writers = [serve(folder) for folder in folders]
    try:
        for loss, writer in zip((1.0, 2.0), writers, strict=True):
            writer.write(1, {"loss": loss}, 0.0)
        assert [value(scrape(writer), "vitscale_loss") for writer in writers] == [1.0, 2.0]
    finally:
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 9400), ("no.such.host.invalid", 9400), ("127.0.0.1", -1)])
def test_no_endpoint_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, port: int
) -> None:
    writer = PrometheusWriter(tmp_path, host=host, port=port, run=RUN)
    writer.write(1, {"loss": 1.0}, 0.0)
    writer.close()
    assert writer.url is None
    assert f"no Prometheus endpoint at {host}:{port}, training goes on without" in caplog.text
    assert not (tmp_path / "prometheus.json").exists()


def test_only_loopback_hears_unless_told(tmp_path: Path) -> None:
    config = MonitorConfig(prometheus_port=0)
    writer = PrometheusWriter(tmp_path, host=config.prometheus_host, port=0, run=RUN)
    writer.close()
    assert str(writer.url).startswith("http://127.0.0.1:")


# --- all


def test_all_of_them(world: World, tmp_path: Path) -> None:
    writers = open_writers(MonitorConfig(prometheus_port=0), run_dir=tmp_path, world=world, step=0, run=RUN)
    for writer in writers:
        writer.write(1, {"loss": 1.0}, 0.0)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard", "prometheus.json"}
    for writer in writers:
        writer.close()


def test_only_what_the_config_asks_for(world: World, tmp_path: Path) -> None:
    config = MonitorConfig(tensorboard=False, prometheus_port=None)
    (writer,) = open_writers(config, run_dir=tmp_path / "new", world=world, step=0, run=RUN)
    writer.close()
    assert isinstance(writer, JsonlWriter)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["metrics.jsonl"]


def test_only_rank_0_writes(world: World, tmp_path: Path) -> None:
    world.rank = 1
    assert open_writers(MonitorConfig(), run_dir=tmp_path / "run", world=world, step=0, run=RUN) == []
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_said(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metrics cannot be written: .*file"):
        open_writers(MonitorConfig(), run_dir=tmp_path / "file" / "run", world=world, step=0, run=RUN)
