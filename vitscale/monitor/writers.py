"""Where metrics go: `metrics.jsonl`, TensorBoard, and the endpoint that Prometheus scrapes.

Each writer is told the same records (`monitor.metrics.Writer`), on rank 0. `metrics.jsonl` is the run's own memory and
is only ever appended to: one JSON object a line, either a record

    {"step": 120, "time": 1764567890.1, "loss": 2.31, "images_total": 30720, ...}

or, each time a process begins to write,

    {"event": "start", "step": 100, "time": 1764567880.0, "run": {"name": "vit-b16", "ranks": "8", ...}}

after which earlier records of later steps are void: they tell of work that a restart lost. `read_history` applies that
rule. A value that is not finite is null.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import platform
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from time import time as now
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import torch
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vitscale.config.schema import MonitorConfig
from vitscale.errors import UserError
from vitscale.monitor.metrics import METRICS, PREFIX, Metric, Writer
from vitscale.world import World

_PORTS_TRIED = 100

_log = logging.getLogger(__name__)


def open_writers(
    config: MonitorConfig,
    *,
    run_dir: str | Path,
    world: World,
    step: int,
    run: Mapping[str, str],
    totals: Mapping[str, float] | None = None,
) -> list[Writer]:
    """The writers that `config` asks for; none on other ranks than 0.

    Args:
        config: Which of them, and where.
        run_dir: The run's folder.
        world: This rank among all.
        step: The step that this process goes on from; 0 for a new run.
        run: What the run is: the labels of `run_info`.
        totals: What counters stand at, as given to the recorder.

    Raises:
        UserError: The folder cannot be written.
    """
    if not world.is_first:
        return []
    run_dir = Path(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        writers: list[Writer] = [JsonlWriter(run_dir, step=step, run=run)]
        if config.tensorboard:
            writers.append(TensorBoardWriter(run_dir, step=step))
    except OSError as error:
        raise UserError(f"metrics cannot be written: {error.filename}: {error.strerror}") from error
    if config.prometheus_port is not None:
        writers.append(
            PrometheusWriter(run_dir, host=config.prometheus_host, port=config.prometheus_port, run=run, totals=totals)
        )
    return writers


@dataclass(frozen=True)
class Record:
    """What the run said of itself at one step; a value is NaN where it was not finite."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Attempt:
    """One process that wrote.

    Attributes:
        step: The step that it went on from.
        start: When it began, seconds since 1970.
        end: When it wrote its last line.
        run: What the run was then: name, model, engine, ranks.
    """

    step: int
    start: float
    end: float
    run: Mapping[str, str]


@dataclass(frozen=True)
class History:
    """All of a run's `metrics.jsonl` that counts.

    Attributes:
        records: Rising steps, each once; those that a restart made void are left out.
        attempts: The processes that wrote, the first one included.
    """

    records: tuple[Record, ...]
    attempts: tuple[Attempt, ...]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one key, where it was recorded."""
        points = [(record.step, record.values[key]) for record in self.records if key in record.values]
        return [step for step, _ in points], [value for _, value in points]


def read_history(run_dir: str | Path) -> History:
    """Read `metrics.jsonl`; empty when there is none. Lines that a crash tore are passed over."""
    records: list[Record] = []
    attempts: list[Attempt] = []
    for line in _lines(Path(run_dir) / "metrics.jsonl"):
        step, time = int(line.pop("step")), float(line.pop("time"))
        if line.pop("event", None) == "start":
            attempts.append(Attempt(step, time, time, line.get("run", {})))
            while records and records[-1].step > step:
                records.pop()
            continue
        if attempts:
            attempts[-1] = replace(attempts[-1], end=time)
        if records and records[-1].step == step:  # the step at which a process ended or the next began
            line = {**records.pop().values, **line}
        records.append(Record(step, time, {k: math.nan if v is None else float(v) for k, v in line.items()}))
    return History(tuple(records), tuple(attempts))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and "step" in line and "time" in line:
                yield line


class JsonlWriter:
    """Appends to `metrics.jsonl`.

    Args:
        run_dir: The run's folder.
        step: The step that this process goes on from; records of later steps are void from now on.
        run: What the run is, noted with the start.
    """

    def __init__(self, run_dir: Path, *, step: int, run: Mapping[str, str]) -> None:
        path = run_dir / "metrics.jsonl"
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
        self._append({"event": "start", "step": step, "time": now(), "run": dict(run)})

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        numbers = {key: value if math.isfinite(value) else None for key, value in _scalars(values)}
        self._append({"step": step, "time": time, **numbers})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _scalars(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The values without the state of histograms."""
    return ((key, value) for key, value in values.items() if key.partition("{")[0] in METRICS)


class TensorBoardWriter:
    """Writes scalars into `tensorboard/`, each under its group's heading.

    Args:
        run_dir: The run's folder.
        step: The step that this process goes on from; TensorBoard forgets what was written of later ones.
    """

    def __init__(self, run_dir: Path, *, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # a second to import, for those who asked for it

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        for key, value in _scalars(values):
            name, _, label = key.partition("{")
            tag = f"{METRICS[name].group}/{name}" + (f"/{label.split(chr(34))[1]}" if label else "")
            self._writer.add_scalar(tag, value, step, walltime=time)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class PrometheusWriter:
    """Serves the newest values at `http://host:port/metrics`, from a registry of its own.

    Binds here and now, so that a port in use is seen: the next free one is taken. Where the endpoint can be scraped
    stands in `prometheus.json` of the run's folder while it lives. When no port can be had at all, the log says so and
    `url` is None; training goes on. Counters count from the start of this process, as Prometheus expects of them.

    Args:
        run_dir: The run's folder.
        host: Address to listen on.
        port: First port to try; 0 for any.
        run: Labels of `run_info`.
        totals: What counters stand at before this process adds to them.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        host: str,
        port: int,
        run: Mapping[str, str],
        totals: Mapping[str, float] | None = None,
    ) -> None:
        self._address_file = run_dir / "prometheus.json"
        self._latest = _Latest(run, totals or {})
        registry = CollectorRegistry()
        registry.register(self._latest)
        ProcessCollector(registry=registry)
        self._server: _Server | None = None
        self.url: str | None = None
        try:
            self._server = _bind(host, port)
        except (OSError, OverflowError) as error:
            _log.warning("no Prometheus endpoint at %s:%d, training goes on without: %s", host, port, error)
            return
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()
        self._announce(host, port, self._server.server_port)

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._latest.update(values)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None
            self._address_file.unlink(missing_ok=True)

    def _announce(self, host: str, asked: int, port: int) -> None:
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{port}/metrics"
        if port != asked and asked != 0:
            _log.warning("port %d is in use; Prometheus metrics are at %s", asked, self.url)
        else:
            _log.info("Prometheus metrics are at %s", self.url)
        address = {"host": host, "port": port, "pid": os.getpid(), "node": socket.gethostname(), "url": self.url}
        try:
            self._address_file.write_text(json.dumps(address) + "\n", encoding="utf-8")
        except OSError as error:
            _log.warning("%s: %s; the endpoint works all the same", self._address_file, error.strerror)


class _Latest(Collector):
    """The newest value of each series, as Prometheus's metric families."""

    def __init__(self, run: Mapping[str, str], totals: Mapping[str, float]) -> None:
        self._info = {"build_info": _build(), "run_info": dict(run)}
        self._base = dict(totals)
        self._values: dict[str, float] = {}

    def update(self, values: Mapping[str, float]) -> None:
        self._values = {**self._values, **values}  # a scrape in another thread sees all of a record or nothing

    def collect(self) -> Iterable[Family]:
        values = self._values
        for metric in METRICS.values():
            family = self._family(metric, values)
            if family.samples:
                yield family

    def _family(self, metric: Metric, values: Mapping[str, float]) -> Family:
        name = PREFIX + metric.name
        if metric.kind == "info":
            return InfoMetricFamily(name.removesuffix("_info"), metric.help, self._info[metric.name])
        if metric.kind == "histogram":
            return _histogram(name, metric, values)
        labels = list(metric.labels or ())
        family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
            name, metric.help, labels=labels
        )
        for label, key in zip(*_labels_and_keys(metric), strict=True):
            if metric.kind == "counter":  # from the first scrape on, so that no increase is missed
                family.add_metric(label, values.get(key, self._base.get(key, 0.0)) - self._base.get(key, 0.0))
            elif key in values:
                family.add_metric(label, values[key])
        return family


def _labels_and_keys(metric: Metric) -> tuple[list[list[str]], list[str]]:
    allowed = [value for values in (metric.labels or {}).values() for value in values]
    return [[value] for value in allowed] or [[]], metric.series()


def _histogram(name: str, metric: Metric, values: Mapping[str, float]) -> Family:
    count = values.get(f"{metric.name}_count", 0.0)
    below = [(str(le), values.get(f'{metric.name}_bucket{{le="{le}"}}', 0.0)) for le in metric.buckets]
    total = values.get(f"{metric.name}_sum", 0.0)
    return HistogramMetricFamily(name, metric.help, buckets=[*below, ("+Inf", count)], sum_value=total)


def _build() -> dict[str, str]:
    try:
        version = metadata.version("vitscale")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {"version": version, "torch": str(torch.__version__), "python": platform.python_version()}


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds for a client that connects and says nothing

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_port = False  # else two processes share one port, and scrapes land on either

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks the name service who this is, and may hang
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _bind(host: str, port: int) -> _Server:
    """A server on `port`, else on the next free one, else on any.

    Raises:
        OSError: The host is not an address of this machine, or no port is free.
        OverflowError: The port is below 0.
    """
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    server = _ServerV6 if family == socket.AF_INET6 else _Server
    for candidate in range(port, min(port + _PORTS_TRIED, 65536)):
        try:
            return server((host, candidate), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return server((host, 0), _Handler)
