from __future__ import annotations

import math

import psutil
import pytest
import torch

from vitscale.errors import UserError
from vitscale.monitor.health import SkipLimit, Throughput, memory


def observe(limit: SkipLimit, step: int, loss: float) -> None:
    limit.observe(step, rate=0.003, loss=torch.tensor(loss), skipped=torch.tensor(not math.isfinite(loss)))


def test_so_many_skipped_steps_in_a_row_stop_the_run() -> None:
    limit = SkipLimit(3)
    for step, loss in enumerate((2.5, 2.25, math.nan, math.inf), start=41):
        observe(limit, step, loss)
    assert limit.check() == 2
    observe(limit, 45, math.nan)  # the row goes on over the check
    with pytest.raises(UserError) as caught:
        limit.check()
    for part in ("step 45", "3 steps in a row", "rate 0.003", "loss nan", "step was 42 with loss 2.25"):
        assert part in caught.value.message
    assert caught.value.exit_code == 1


def test_a_good_step_begins_the_count_anew() -> None:
    limit = SkipLimit(3)
    for step, loss in enumerate((math.nan, math.nan, 1.0, math.nan, math.nan, 1.0)):
        observe(limit, step, loss)
    assert limit.check() == 4
    assert limit.check() == 0


def test_a_row_that_ended_before_the_check_is_seen() -> None:
    limit = SkipLimit(2)
    for step, loss in enumerate((math.nan, math.nan, 1.0), start=1):
        observe(limit, step, loss)
    with pytest.raises(UserError, match=r"at step 2: .*no step before was good"):
        limit.check()


def test_observe_does_not_read_the_device() -> None:
    there = torch.zeros((), device="meta")
    SkipLimit(1).observe(1, rate=0.1, loss=there, skipped=there)


def test_throughput_leaves_pauses_out() -> None:
    seconds = iter([100.0, 104.0, 154.0, 160.0, 161.0])  # begin; pause from 4 to 54; read at 60; read at 61
    meter = Throughput(lambda: next(seconds))
    meter.add(300)
    with meter.paused():
        pass
    meter.add(200)
    assert meter.read() == pytest.approx(500 / (60 - 50))
    meter.add(7)
    assert meter.read() == pytest.approx(7.0)


def test_host_memory_is_the_nodes() -> None:
    used = memory(torch.device("cpu"))
    assert set(used) == {"host_memory_bytes"}
    assert used["host_memory_bytes"] == pytest.approx(psutil.virtual_memory().used, rel=0.2)
