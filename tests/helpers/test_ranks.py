from __future__ import annotations

import time

import pytest
import torch
from helpers.ranks import run_ranks

from vitscale.world import World

pytestmark = pytest.mark.integration


def add_up(world: World, number: int) -> tuple[int, float]:
    return world.rank, world.all_reduce(torch.tensor(float(number + world.rank)), "sum", what="a sum").item()


def one_fails(world: World) -> None:
    if world.rank == 1:
        raise KeyError("the reason")


def one_sleeps(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(2, add_up, 10) == [(0, 21.0), (1, 21.0)]


def test_failure_shows_rank_and_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 raised(?s:.*)in one_fails(?s:.*)the reason"):
        run_ranks(2, one_fails)


def test_timeout_names_the_missing_rank() -> None:
    with pytest.raises(AssertionError, match="no answer from rank 1 of 2 within 10 s"):
        run_ranks(2, one_sleeps, timeout=10)
