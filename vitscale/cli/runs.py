"""Commands for runs: `checkpoint list`, `checkpoint verify`, `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vitscale.cli.arguments import Run, count
from vitscale.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from vitscale.train.checkpoint import Entry


def list_checkpoints(run: Run) -> None:
    """List a run's checkpoints, and whether each is whole.

    Example: `vitscale checkpoint list runs/demo/pretrain`
    """
    import time

    from rich.console import Console
    from rich.table import Table

    table = Table("step", "written", "size", "engine", "ranks", "state")
    for entry in _checkpoints(run):
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        size = f"{entry.bytes / 1e6:,.1f} MB"
        state = "whole" if not entry.problems else "; ".join(entry.problems)
        table.add_row(str(entry.step), written, size, entry.engine, str(entry.ranks), state)
    Console().print(table)


def verify_checkpoints(run: Run) -> None:
    """Read every checkpoint of a run and compare sizes and checksums. Exit code 1 if one is damaged.

    Example: `vitscale checkpoint verify runs/demo/pretrain`
    """
    entries = _checkpoints(run)
    damaged = [entry for entry in entries if entry.problems]
    for entry in damaged:
        typer.echo(f"{entry.path}: {'; '.join(entry.problems)}", err=True)
    typer.echo(f"{count(len(entries), 'checkpoint')}: {f'{len(damaged)} damaged' if damaged else 'all whole'}")
    if damaged:
        raise typer.Exit(EXIT_FAILED)


def _checkpoints(run: Path) -> list[Entry]:
    from vitscale.train.checkpoint import list_checkpoints

    entries = list_checkpoints(run)
    if not entries:
        raise UserError(f"{run} holds no checkpoints; name the folder of a run (its run_dir)")
    return entries


def report(run: Run) -> None:
    """Write `report.html` into the run: curves, evaluations, positions and patch kernels, in one file.

    Example: `vitscale report runs/demo/pretrain`
    """
    from vitscale.monitor.report import write_report

    typer.echo(write_report(run))
