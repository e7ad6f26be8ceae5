"""Start the ranks of a run on this machine, end them together, and start again from the last checkpoint.

torchrun's agent starts one `vitscale train` a rank and ends the others when one dies. This module adds what a person
needs: which rank died of what, the last lines of its log, and whether a restart can help. Each attempt is an agent of
its own, since the agent's own restarts do not tell why they happened.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from vitscale.errors import EXIT_FAILED, EXIT_REQUEUE, EXIT_USAGE
from vitscale.logs import last_lines, log_path

_LINES = 15  # of a dead rank's log that are shown
_SIGNALS: dict[str, Any] = (  # before 2.9, torch's agent passes SIGINT and SIGHUP on by itself
    {"signals_to_handle": "SIGTERM"} if "signals_to_handle" in LaunchConfig.__dataclass_fields__ else {}
)


def launch_local(
    arguments: Sequence[str], *, run_dir: str | Path, processes: int, max_restarts: int, timeout: float
) -> int:
    """Run `vitscale ARGUMENTS` as `processes` ranks on this machine.

    Args:
        arguments: The command line of each rank, `["train", "config.yaml", ...]`.
        run_dir: The run's folder, where the ranks keep their logs.
        processes: Number of ranks.
        max_restarts: How often the ranks are started again after one died.
        timeout: Seconds that a rank has to save after a signal.

    Returns:
        0 when the run ended well, 75 when it saved and wants to go on later, else 1 or 2.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed."):  # each of these loggers has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # this module says it better
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(timeout))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _save_and_end)
    try:
        return _attempts(arguments, run_dir=run_dir, processes=processes, max_restarts=max_restarts)
    except SignalException:  # the agent passed the signal on and waited for the ranks to save
        return EXIT_REQUEUE


def _attempts(arguments: Sequence[str], *, run_dir: str | Path, processes: int, max_restarts: int) -> int:
    """Start the ranks, and start them again while that may help; the exit code."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    for attempt in range(max_restarts + 1):
        failures = _attempt(arguments, processes)
        if not failures:
            return 0
        rank, failure = _cause(failures)
        if failure.exitcode == EXIT_REQUEUE:
            return EXIT_REQUEUE
        if failure.exitcode in (EXIT_FAILED, EXIT_USAGE):  # the rank itself said what is wrong, on every rank alike
            console.print(f"vitscale launch: {_describe(rank, failure)}; a restart would end the same way")
            return failure.exitcode
        console.print(f"vitscale launch: {_describe(rank, failure)}; the other ranks were ended")
        path = log_path(run_dir, rank)
        console.print(f"  last lines of {path}:{'' if path.exists() else ' there is no such file'}")
        for line in last_lines(path, _LINES):
            console.print(f"  | {line}")
        if attempt < max_restarts:
            console.print(f"vitscale launch: restart {attempt + 1} of {max_restarts}, from the last checkpoint")
    console.print(f"vitscale launch: gave up after {max_restarts} restart{'s' * (max_restarts != 1)}")
    return EXIT_FAILED


def _save_and_end(number: int, frame: FrameType | None) -> NoReturn:
    """What torch's agent does on SIGTERM, which is then what its ranks get; Ctrl-C ends them at once after that."""
    signal.signal(signal.SIGINT, _end_at_once)
    raise SignalException(f"process {os.getpid()} got signal {number}", signal.SIGTERM)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    raise KeyboardInterrupt


def _attempt(arguments: Sequence[str], processes: int) -> Mapping[int, ProcessFailure]:
    """Run the ranks once; what failed, by rank."""
    with tempfile.TemporaryDirectory(prefix="vitscale-agent-") as scratch:
        agent = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            **_SIGNALS,
        )
        try:
            elastic_launch(agent, sys.executable)("-m", "vitscale", *arguments)
        except ChildFailedError as error:
            return error.failures
    return {}


def _cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure that brought the others about.

    That is the first one seen: a rank that hung is killed long after the others gave up on it. Of those seen at once, a
    signal comes before an exit, and an exit that says why before a lost peer. SIGTERM comes last, since it is what the
    agent ends the others with.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, int, bool, bool, int]:
        rank, failure = item
        code = failure.exitcode
        return code == -signal.SIGTERM, failure.timestamp, code >= 0, code not in (EXIT_FAILED, EXIT_USAGE), rank

    return min(failures.items(), key=order)


def _describe(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"rank {rank} (pid {failure.pid}) was killed by {failure.signal_name()}"
    return f"rank {rank} (pid {failure.pid}) ended with exit code {failure.exitcode}"
