"""Run a function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from vitscale.world import World

_GRACE = 8.0  # seconds for the other ranks to say why they failed too


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """What `function(world, *args)` returns on each rank, in rank order.

    Processes are spawned, so a call costs seconds of imports: do much in one. Warnings are errors there as here.

    Args:
        ranks: How many.
        function: A function at the top level of a file; arguments and result must be picklable.
        args: Passed on.
        timeout: Seconds for all of it.

    Raises:
        AssertionError: A rank raised (with its traceback), died, or did not come back in time.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            source = (inspect.getfile(function), function.__module__, function.__qualname__)
            process = context.Process(
                target=_child, args=(theirs, rank, ranks, store.port, source, pickle.dumps(args), timeout), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        return _collect(processes, pipes, time.monotonic() + timeout, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(processes: list[BaseProcess], pipes: list[Connection], end: float, timeout: float) -> list[Any]:
    waiting = dict(enumerate(pipes))
    results: dict[int, Any] = {}
    failures: list[str] = []
    while waiting and not (failures and time.monotonic() > end):
        if time.monotonic() > end:
            missing = ", ".join(map(str, sorted(waiting)))
            raise AssertionError(f"no answer from rank {missing} of {len(pipes)} within {timeout:g} s")
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=0.2)
        for rank, pipe in [(rank, pipe) for rank, pipe in waiting.items() if pipe in ready]:
            del waiting[rank]
            try:
                ok, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, results[rank] = False, _end(processes[rank])
            if not ok:
                failures.append(f"rank {rank} of {len(pipes)} {results[rank]}")
                end = min(end, time.monotonic() + _GRACE)
    assert not failures, "\n".join(failures)
    return [results[rank] for rank in range(len(pipes))]


def _end(process: BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _child(
    pipe: Connection, rank: int, ranks: int, port: int, source: tuple[str, str, str], args: bytes, timeout: float
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store, at a port of the system's choice
    }
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        function = _find(*source)
        world = World.start(timeout=timeout, device=torch.device("cpu"))
        result = function(world, *pickle.loads(args))
        world.end()
        answer = pickle.dumps((True, result))
    except BaseException:
        answer = pickle.dumps((False, "raised\n" + traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(answer)
    sys.stdout.flush()
    os._exit(0)


def _find(path: str, module_name: str, name: str) -> Callable[..., Any]:
    """The function: by its module if a process can import that, else by its file, as for those in a test file."""
    if module_name.startswith("helpers."):
        module = importlib.import_module(module_name)
    else:
        spec = importlib.util.spec_from_file_location("ranks_target", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["ranks_target"] = module
        spec.loader.exec_module(module)
    found = getattr(module, name)
    assert callable(found)
    return found
