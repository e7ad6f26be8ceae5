"""Every metric of vitscale in one table, and the recorder that brings the ranks' values together.

Names follow Prometheus: base units, `_total` for what only grows, a bounded set of labels. Writers put `vitscale_` in
front where names are shared with other programs. A value passes two reductions: first over the window (all that one
rank recorded since the last flush), then over the ranks.

    window  mean   weighted mean of the finite values; NaN when none is finite
            sum    what is added to a counter
            max, min, last
    ranks   mean   by weight, so that unequal shares give the true mean
            sum, max, min
            same   every rank has the same value, or rank 0 alone records one: rank 0's is taken

A row with `of` is not recorded: it tells of another row's window value, which rank had the least or most of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from vitscale.errors import did_you_mean
from vitscale.world import World

PREFIX = "vitscale_"

Kind: TypeAlias = Literal["gauge", "counter", "histogram", "info"]
Group: TypeAlias = Literal["progress", "optimization", "speed", "data", "checkpoint", "evaluation", "system"]
Window: TypeAlias = Literal["mean", "sum", "max", "min", "last"]
Ranks: TypeAlias = Literal["same", "mean", "sum", "max", "min", "argmax"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One row of the table.

    Attributes:
        name: Without `vitscale_`.
        kind: Prometheus's type.
        unit: Base unit; `ratio` runs from 0 to 1, empty for a plain number.
        group: Heading it stands under in tables and in TensorBoard.
        help: One sentence.
        window: How the values of one rank since the last flush become one.
        ranks: How the ranks' values become one.
        labels: Allowed values of each label; no values for an `info`, whose text is given once. At most one otherwise.
        buckets: Upper bounds of a histogram, in `unit`.
        of: The row that this one tells of.
    """

    name: str
    kind: Kind
    group: Group
    help: str
    unit: str = ""
    window: Window = "mean"
    ranks: Ranks = "same"
    labels: Mapping[str, tuple[str, ...]] | None = None
    buckets: tuple[float, ...] = ()
    of: str = ""

    def series(self) -> list[str]:
        """The keys of its series among the values that writers are given: `name`, or `name{label="value"}`."""
        if self.kind == "info" or not self.labels:
            return [self.name]
        return [self.key(value) for values in self.labels.values() for value in values]

    def key(self, label: str) -> str:
        """The key of the series whose label has this value."""
        return f'{self.name}{{{next(iter(self.labels or ()))}="{label}"}}'


_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 120.0)
_SOURCES = {"source": tuple(str(number) for number in range(16))}
_WEIGHTS = {"weights": ("trained", "ema")}

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(name="current_step", kind="gauge", group="progress", window="last",
               help="The step that the run stands at."),
        Metric(name="step_total", kind="counter", group="progress", window="sum",
               help="Steps taken, those skipped among them."),
        Metric(name="images_total", kind="counter", group="progress", unit="images", window="sum", ranks="sum",
               help="Training images used, over all ranks."),
        Metric(name="epoch", kind="gauge", group="progress", unit="epochs", window="last",
               help="Passes over the training set, with fraction."),
        Metric(name="restarts", kind="gauge", group="progress", window="last",
               help="How often the run was started again."),
        Metric(name="loss", kind="gauge", group="optimization", ranks="mean",
               help="Training loss, mean over the steps since the last record."),
        Metric(name="grad_norm", kind="gauge", group="optimization", ranks="mean",
               help="L2 norm of all gradients before clipping, mean over the steps since the last record."),
        Metric(name="learning_rate", kind="gauge", group="optimization", window="last",
               help="Learning rate of the last step."),
        Metric(name="skipped_steps_total", kind="counter", group="optimization", window="sum",
               help="Steps left out because loss or gradients were not finite."),
        Metric(name="step_duration_seconds", kind="histogram", group="speed", unit="seconds", ranks="mean",
               buckets=_STEP_BUCKETS, help="Time from step to step, every rank's steps."),
        Metric(name="step_duration_min_seconds", kind="gauge", group="speed", unit="seconds", ranks="min",
               of="step_duration_seconds", help="Mean step of the fastest rank since the last record."),
        Metric(name="step_duration_max_seconds", kind="gauge", group="speed", unit="seconds", ranks="max",
               of="step_duration_seconds", help="Mean step of the slowest rank since the last record."),
        Metric(name="slowest_rank", kind="gauge", group="speed", ranks="argmax", of="step_duration_seconds",
               help="Rank with the longest mean step since the last record."),
        Metric(name="images_per_second", kind="gauge", group="speed", unit="images per second", window="last",
               help="Training images a second over all ranks since the last record, without pauses."),
        Metric(name="data_wait_seconds_total", kind="counter", group="speed", unit="seconds", window="sum",
               ranks="sum", help="Time that ranks waited for a batch, summed over the ranks."),
        Metric(name="data_wait_max_seconds", kind="gauge", group="speed", unit="seconds", ranks="max",
               of="data_wait_seconds_total", help="Waiting of the rank that waited longest since the last record."),
        Metric(name="data_wait_max_rank", kind="gauge", group="speed", ranks="argmax", of="data_wait_seconds_total",
               help="Rank that waited longest for data since the last record."),
        Metric(name="bad_samples_total", kind="counter", group="data", unit="samples", window="sum", ranks="sum",
               labels={"reason": ("shard", "image", "label", "other")},
               help="Samples that could not be used, by what was wrong."),
        Metric(name="source_images_total", kind="counter", group="data", unit="images", window="sum", ranks="sum",
               labels=_SOURCES, help="Training images of each source of a mixture, in the order of data.mixture."),
        Metric(name="source_epochs", kind="gauge", group="data", unit="epochs", window="last", labels=_SOURCES,
               help="Passes over each source of a mixture, with fraction."),
        Metric(name="checkpoint_duration_seconds", kind="gauge", group="checkpoint", unit="seconds", window="last",
               ranks="max", help="Time that the last checkpoint took, on the slowest rank."),
        Metric(name="checkpoint_size_bytes", kind="gauge", group="checkpoint", unit="bytes", window="last",
               ranks="sum", help="Size of the last checkpoint, over all ranks."),
        Metric(name="checkpoint_failures_total", kind="counter", group="checkpoint", window="sum",
               help="Checkpoints that could not be written."),
        Metric(name="checkpoint_step", kind="gauge", group="checkpoint", window="last",
               help="Step of the newest checkpoint."),
        Metric(name="checkpoint_timestamp_seconds", kind="gauge", group="checkpoint", unit="seconds", window="last",
               help="When the newest checkpoint was complete, seconds since 1970."),
        Metric(name="evaluation_top1_ratio", kind="gauge", group="evaluation", unit="ratio", window="last",
               labels=_WEIGHTS, help="Validation images whose first guess is right."),
        Metric(name="evaluation_top5_ratio", kind="gauge", group="evaluation", unit="ratio", window="last",
               labels=_WEIGHTS, help="Validation images whose class is among the first five guesses."),
        Metric(name="evaluation_loss", kind="gauge", group="evaluation", window="last", labels=_WEIGHTS,
               help="Mean loss over the validation images."),
        Metric(name="evaluation_duration_seconds", kind="gauge", group="evaluation", unit="seconds", window="last",
               ranks="max", help="Time that the last evaluation took, on the slowest rank."),
        Metric(name="host_memory_bytes", kind="gauge", group="system", unit="bytes", window="max", ranks="max",
               help="Host memory in use on the fullest node, by all of its processes."),
        Metric(name="gpu_memory_bytes", kind="gauge", group="system", unit="bytes", window="max", ranks="max",
               help="Peak of the GPU memory that torch has allocated, on the fullest rank."),
        Metric(name="build_info", kind="info", group="system", help="Versions that this run is made with.",
               labels={"version": (), "torch": (), "python": ()}),
        Metric(name="run_info", kind="info", group="system", help="What this run is.",
               labels={"name": (), "model": (), "engine": (), "ranks": ()}),
    )
}  # fmt: skip
"""The table; the reference of all names."""


class Writer(Protocol):
    """Takes what all ranks together recorded, and puts it somewhere."""

    def write(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Take one record.

        Args:
            step: The step that the run stands at.
            values: Value by key (`Metric.series`). Counters hold the run's total. A histogram gives its mean since the
                last record under its name, and its state since the process began as `name_sum`, `name_count` and
                cumulative `name_bucket{le="0.1"}`.
            time: When, seconds since 1970.

        Raises:
            OSError: There is no place for it; the run goes on.
        """
        ...

    def close(self) -> None:
        """Give back files and sockets."""
        ...


@dataclass(frozen=True)
class _Series:
    metric: Metric
    key: str
    by_rank: bool  # one cell a rank, beside those that are summed

    def width(self, world_size: int) -> int:
        return 3 + len(self.metric.buckets) + (world_size if self.by_rank else 0)


class Recorder:
    """Collects values on each rank and brings them together in one collective.

    Args:
        world: This rank among all.
        writers: Who is told on this rank; rank 0's are enough.
        totals: What counters stood at (`totals` of the recorder that wrote the checkpoint), to go on from.
    """

    def __init__(self, world: World, writers: Sequence[Writer], *, totals: Mapping[str, float] | None = None) -> None:
        self.totals: dict[str, float] = dict(totals or {})
        self._world = world
        self._writers = list(writers)
        self._complained: set[int] = set()
        told = {metric.of for metric in METRICS.values() if metric.of}
        self._series = [
            _Series(metric, key, by_rank=metric.ranks in ("max", "min") or metric.name in told)
            for metric in METRICS.values()
            if metric.kind != "info" and not metric.of
            for key in metric.series()
        ]
        self._window: dict[str, list[tuple[float | Tensor, float]]] = {series.key: [] for series in self._series}
        self._histograms: dict[str, list[float]] = {}

    def record(self, name: str, value: float | Tensor, *, label: str | None = None, weight: float = 1.0) -> None:
        """Note one value; a tensor on a device is kept as it is now, and nobody waits for it.

        Args:
            name: A row of `METRICS`.
            value: A number or a tensor of one element, in the row's unit; for a counter what is added.
            label: Value of the row's label, where it has one.
            weight: How much the value counts in a mean, e.g. the samples that it is the mean of.

        Raises:
            ValueError: No such row or label, a row that is not recorded, or a tensor of several elements.
        """
        key = _key(name, label)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"metric {name!r} takes one number, not a tensor of shape {tuple(value.shape)}")
            # a copy, since its owner may write into it before the flush
            value = value.detach()
            value = float(value) if value.device.type == "cpu" else value.to(torch.float64, copy=True)
        self._window[key].append((value, weight))

    def flush(self, step: int) -> dict[str, float]:
        """Bring all ranks' values since the last flush together and hand them to the writers.

        One collective, the same on every rank whatever each recorded; every rank has to call it.

        Args:
            step: The step that the run stands at.

        Returns:
            What the writers were given.
        """
        self.record("current_step", step)
        rank, world_size = self._world.rank, self._world.world_size
        window = _fetch(self._window)
        mine = [cell for series in self._series for cell in _pack(series, window[series.key], rank, world_size)]
        packed = torch.tensor(mine, dtype=torch.float64)
        cells = self._world.all_reduce(packed, "sum", what=f"metrics of step {step}").tolist()
        values: dict[str, float] = {}
        for series in self._series:
            width = series.width(world_size)
            self._unpack(series, cells[:width], values)
            del cells[:width]
        for entries in self._window.values():
            entries.clear()
        self._tell(step, values)
        return values

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            writer.close()

    def _unpack(self, series: _Series, cells: list[float], values: dict[str, float]) -> None:
        """Add to `values` what the ranks' sum of `_pack` says of one series."""
        metric, key = series.metric, series.key
        numerator, weight, seen = cells[:3]
        if metric.kind == "counter":
            if seen:
                self.totals[key] = self.totals.get(key, 0.0) + numerator
            if key in self.totals:
                values[key] = self.totals[key]
        if metric.kind == "histogram":
            state = self._histograms.setdefault(key, [0.0] * (2 + len(metric.buckets)))
            mine = [numerator, weight, *cells[3 : 3 + len(metric.buckets)]]
            state[:] = [old + new for old, new in zip(state, mine, strict=True)]
            values[f"{key}_sum"], values[f"{key}_count"] = state[:2]
            values |= {f'{key}_bucket{{le="{le}"}}': n for le, n in zip(metric.buckets, state[2:], strict=True)}
        if not seen:
            return
        by_rank = {rank: v for rank, v in enumerate(cells[3 + len(metric.buckets) :]) if not math.isnan(v)}
        if metric.ranks in ("max", "min"):
            values[key] = _over_ranks(metric.ranks, by_rank)
        elif metric.kind != "counter":
            divisor = 1.0 if metric.ranks == "sum" else weight
            values[key] = numerator / divisor if divisor else math.nan
        for row in METRICS.values():
            if row.of == metric.name:
                values[row.name] = _over_ranks(row.ranks, by_rank)

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        for index, writer in enumerate(self._writers):
            try:
                writer.write(step, values, now)
            except OSError as error:
                if index not in self._complained:
                    _log.warning("metrics are lost, training goes on: %s: %s", type(writer).__name__, error)
                self._complained.add(index)


def _key(name: str, label: str | None) -> str:
    metric = METRICS.get(name)
    if metric is None:
        raise ValueError(f"there is no metric {name!r}{did_you_mean(name, METRICS)}")
    if metric.of or metric.kind == "info":
        raise ValueError(f"metric {name!r} is not recorded; it tells of {metric.of or 'the process'}")
    if not metric.labels:
        if label is not None:
            raise ValueError(f"metric {name!r} has no label, but was given {label!r}")
        return name
    ((label_name, allowed),) = metric.labels.items()
    if label not in allowed:
        raise ValueError(
            f"metric {name!r} needs its label {label_name!r} to be one of {', '.join(allowed)}, not {label!r}"
            f"{did_you_mean(label or '', allowed)}"
        )
    return metric.key(label)


def _fetch(window: Mapping[str, Sequence[tuple[float | Tensor, float]]]) -> dict[str, list[tuple[float, float]]]:
    """The same window with every tensor's number, brought to the host in one copy."""
    tensors = [value.reshape(()) for entries in window.values() for value, _ in entries if isinstance(value, Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return {
        key: [(next(numbers) if isinstance(value, Tensor) else value, weight) for value, weight in entries]
        for key, entries in window.items()
    }


def _pack(series: _Series, entries: list[tuple[float, float]], rank: int, world_size: int) -> list[float]:
    """One rank's cells of one series, such that the ranks' sum of them holds all there is to know.

    The cells: numerator, weight, number of values, how many values lie below each bound of a histogram, and, where the
    single ranks matter, a cell for every rank of which this rank fills its own (NaN: nothing there).
    """
    metric = series.metric
    values = [value for value, _ in entries]
    value, weight = _over_window(metric.window, entries)
    spread: list[float] = []
    if series.by_rank:
        spread = [0.0] * world_size
        spread[rank] = value if entries else math.nan
    counts = [float(sum(v <= bound for v in values)) for bound in metric.buckets]
    if not entries or (metric.ranks == "same" and rank != 0):
        return [0.0, 0.0, 0.0, *counts, *spread]
    if metric.ranks in ("mean", "same"):
        value = value * weight if weight else 0.0
    return [value, weight, float(len(entries)), *counts, *spread]


def _over_window(window: Window, entries: list[tuple[float, float]]) -> tuple[float, float]:
    """(value, weight) of one rank's window; NaN where a mean or an extreme has no finite value."""
    if not entries:
        return math.nan, 0.0
    if window == "sum":
        return sum(value for value, _ in entries), 1.0
    if window == "last":
        return entries[-1][0], 1.0
    finite = [(value, weight) for value, weight in entries if math.isfinite(value)]
    if window == "mean":
        total = sum(weight for _, weight in finite)
        return (sum(value * weight for value, weight in finite) / total if total else math.nan), total
    extreme = max if window == "max" else min
    return extreme((value for value, _ in finite), default=math.nan), 1.0


def _over_ranks(ranks: Ranks, by_rank: Mapping[int, float]) -> float:
    """The least or most of the ranks' values, or which rank has the most; NaN when no rank has one."""
    if not by_rank:
        return math.nan
    if ranks == "argmax":
        return float(max(by_rank, key=lambda rank: by_rank[rank]))
    return max(by_rank.values()) if ranks == "max" else min(by_rank.values())
