"""Jobs over processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from vitscale.data.pool import run_jobs
from vitscale.errors import UserError

pytestmark = pytest.mark.integration


def test_results_keep_the_order_and_jobs_are_not_drawn_far_ahead() -> None:
    drawn = [0]

    def jobs() -> Iterator[float]:
        for number in range(20):
            drawn[0] += 1
            yield -float(number)

    results = run_jobs(abs, jobs(), 2)
    assert next(results) == 0.0
    assert drawn[0] <= 5
    assert list(results) == [float(number) for number in range(1, 20)]


def test_the_fault_of_a_job_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(run_jobs(int, ["1", "x", "3"], 2))


def test_a_process_that_dies_is_said() -> None:
    with pytest.raises(UserError, match="a process died while it worked on a shard"):
        list(run_jobs(os._exit, [3], 2))
