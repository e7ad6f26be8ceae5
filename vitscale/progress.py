"""How far a long piece of work is: a bar on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

PLAIN_SECONDS = 10.0
"""Time between two lines where the output is not a terminal."""


class Progress(Protocol):
    """What the work tells of itself."""

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""


@contextmanager
def progress(
    total: int,
    label: str,
    *,
    unit: str = "images",
    done: int = 0,
    every: float = PLAIN_SECONDS,
    shown: bool = True,
) -> Iterator[Progress]:
    """Show on stderr how much of `total` is done, the rate and the time left.

    Args:
        total: Units in all.
        label: What is being done.
        unit: What is counted, in the plural.
        done: Units done before; they count for the share, not for the rate.
        every: Seconds between two lines where stderr is not a terminal; there no carriage return is written.
        shown: False writes nothing, for a caller that was asked to be quiet.
    """
    if not shown:
        yield _Silent()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(sys.stderr, total, label, unit, done, every)
        yield lines
        lines.close()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(unit), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        yield _OnBar(bar, total, label, done)


class _Silent:
    def advance(self, count: int = 1) -> None:
        pass


class _OnBar:
    def __init__(self, bar: Bar, total: int, label: str, done: int) -> None:
        self._bar = bar
        self._task = bar.add_task(label, total=total, completed=done)

    def advance(self, count: int = 1) -> None:
        self._bar.advance(self._task, count)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self._unit}/s" if speed else f"- {self._unit}/s")


class _Lines:
    def __init__(self, stream: TextIO, total: int, label: str, unit: str, done: int, every: float) -> None:
        self._stream = stream
        self._total = total
        self._label = label
        self._unit = unit
        self._before = self._done = done
        self._every = every
        self._began = self._said = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said >= self._every and self._done < self._total:
            self._said = now
            rate = (self._done - self._before) / (now - self._began)
            left = f", {duration((self._total - self._done) / rate)} left" if rate else ""
            self._print(f"{self._done:,} of {self._total:,} {self._unit}, {rate:,.0f}/s{left}")

    def close(self) -> None:
        seconds = time.monotonic() - self._began
        rate = (self._done - self._before) / max(seconds, 1e-9)
        self._print(f"{self._done:,} of {self._total:,} {self._unit} in {duration(seconds)}, {rate:,.0f}/s")

    def _print(self, text: str) -> None:
        print(f"{self._label}: {text}", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds as `45 s`, `12 min 30 s` or `3 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
