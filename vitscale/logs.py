"""Where a rank's words go: rank 0 to the terminal and its log file, every other rank to its log file alone.

`logs/rank-000.log`, `logs/rank-001.log`, ... are appended to, so that a restart keeps what led to it. Everything that
another rank than 0 prints, a crash of native code included, lands in its file.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

from vitscale.errors import UserError

STEPS = "vitscale.steps"
"""Name of the logger whose lines a progress bar shows already."""


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now, so that a progress bar can move its lines above itself."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if record.name != STEPS or not sys.stderr.isatty():
            super().emit(record)


def log_path(run_dir: str | Path, rank: int) -> Path:
    """The log file of `rank`."""
    return Path(run_dir) / "logs" / f"rank-{rank:03d}.log"


def start_logging(run_dir: str | Path, rank: int) -> None:
    """Send this process's log lines, and for ranks above 0 all its output, to the rank's file.

    Other packages are heard from warnings on.

    Raises:
        UserError: The run folder cannot be written.
    """
    path = log_path(run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; run_dir must be a folder that this user may write"
        ) from error
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    if rank == 0:
        handlers.append(_Terminal())
    else:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(stream.fileno(), descriptor)
    faulthandler.enable(stream)
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s rank {rank} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        handlers=handlers,
        force=True,
    )
    logging.getLogger("vitscale").setLevel(logging.INFO)


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a log file; none when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * count))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []
