"""Jobs over processes, results in the order of the jobs, never more than a few jobs ahead."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from vitscale.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(function: Callable[[Job], Result], jobs: Iterable[Job], processes: int) -> Iterator[Result]:
    """`function(job)` of each job, in their order; in this process when `processes` is 1.

    Raises:
        UserError: A process was ended from outside (out of memory, a signal) or `processes` is not positive.
    """
    if processes < 1:
        raise UserError(f"processes is {processes}; it must be 1 or more")
    if processes == 1:
        yield from map(function, jobs)
        return
    source = iter(jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_leave_interrupts_to_the_parent) as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(function, job) for job in islice(source, 2 * processes))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, job) for job in islice(source, 1))
                yield result
        except BrokenProcessPool:
            raise UserError(
                "a process died while it worked on a shard, perhaps for want of memory; fewer processes need less"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
