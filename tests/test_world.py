"""Ranks agree, stop together, and say who is missing."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from helpers.ranks import run_ranks

from vitscale.errors import EXIT_CRASHED, EXIT_USAGE, UserError
from vitscale.world import World


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_world_of_one_reduces_to_itself_and_stops_on_a_signal() -> None:
    world = World.start(timeout=10, device=torch.device("cpu"))
    try:
        assert world.is_first
        value = torch.tensor([3.0])
        assert world.all_reduce(value, "sum", what="test").item() == 3.0
        assert world.gather_text("ä", what="test") == ["ä"]
        assert not world.stop_requested(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not world.stop_requested(2)  # this call starts the agreement
        assert world.stop_requested(3)
    finally:
        world.end()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_an_environment_that_is_half_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK is set but LOCAL_RANK, LOCAL_WORLD_SIZE is not") as caught:
        World.start(timeout=1)
    assert caught.value.exit_code == EXIT_USAGE


def _meet(world: World) -> dict[str, object]:
    mine = torch.tensor([float(world.rank + 1)])
    reduced = [world.all_reduce(mine, how, what="test").item() for how in ("sum", "max", "min")]
    assert mine.item() == world.rank + 1, "the given tensor is left alone"
    stops = []
    for step in range(6):
        if step == 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stops.append(world.stop_requested(step))
    world.barrier("the end")
    return {
        "reduced": reduced,
        "agree": [world.agree(True, what="a"), world.agree(world.rank == 0, what="b")],
        "texts": world.gather_text("é" * world.rank, what="names"),
        "stops": stops,
    }


@pytest.mark.integration
def test_ranks_agree_on_sums_texts_and_the_step_to_stop_at() -> None:
    results = run_ranks(3, _meet)
    assert results[0] == results[1] == results[2]
    assert results[0]["reduced"] == [6.0, 3.0, 1.0]
    assert results[0]["agree"] == [True, False]
    assert results[0]["texts"] == ["", "é", "éé"]
    assert results[0]["stops"] == [False, False, False, True, True, True]


def _lose(world: World) -> tuple[str, int, float]:
    world.timeout = 2
    if world.rank == 1:
        time.sleep(8)  # longer than the others wait for it and for its excuse
        return "", 0, 0.0
    before = time.monotonic()
    with pytest.raises(UserError) as caught:
        world.barrier("the save of step 7")
    return caught.value.message, caught.value.exit_code, time.monotonic() - before


@pytest.mark.integration
def test_who_does_not_come_in_time_is_named() -> None:
    message, code, seconds = run_ranks(3, _lose)[0]
    assert "rank 1 did not answer for 2 s" in message
    assert "during the save of step 7" in message
    assert code == EXIT_CRASHED
    assert seconds < 8
