"""One run at a time in a run folder: two that write the same checkpoints would each undo the other's work."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitscale.errors import UserError
from vitscale.world import World

log = logging.getLogger(__name__)

CLAIM = ".running"


@contextmanager
def claimed(run_dir: str | Path, world: World) -> Iterator[None]:
    """Hold the run folder while the run is on; the system takes the claim back when rank 0 ends, however it does.

    Raises:
        UserError: Another run holds it; on every rank.
    """
    file, problem = _claim(Path(run_dir) / CLAIM) if world.is_first else (None, "")
    try:
        problem = world.gather_text(problem, what="the claim of the run folder")[0]
        if problem:
            raise UserError(f"{run_dir} is in use by {problem}; wait for it, end it, or give this run another run_dir")
        yield
    finally:
        if file is not None:
            os.close(file)


def _claim(path: Path) -> tuple[int | None, str]:
    """The open file that holds the claim, or who has it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        return None, holder or "another run"
    except OSError as error:
        log.warning("two runs in one folder would not be noticed: %s takes no locks (%s)", path, error.strerror)
        return file, ""
    with suppress(OSError):  # on a full disk the claim holds all the same, without a name
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file, ""
