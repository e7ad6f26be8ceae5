from __future__ import annotations

import math
import subprocess
import sys

import pytest

from vitscale.optim.schedules import is_time, rate


def test_warmup_rises_linearly_and_its_first_step_is_not_zero() -> None:
    factors = [rate(step, total=100, warmup=4, kind="cosine", final=0.0) for step in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_decays_at_hand_computed_points(final: float) -> None:
    def at(step: int, kind: str) -> float:
        return rate(step, total=110, warmup=10, kind=kind, final=final)  # type: ignore[arg-type]

    assert at(10, "cosine") == at(10, "linear") == 1.0
    assert at(60, "cosine") == pytest.approx((1 + final) / 2)
    assert at(35, "cosine") == pytest.approx(final + (1 - final) * (1 + math.sqrt(0.5)) / 2)
    assert at(35, "linear") == pytest.approx(1 - 0.25 * (1 - final))
    assert at(110, "cosine") == pytest.approx(final)
    assert at(110, "linear") == pytest.approx(final)
    assert at(500, "linear") == pytest.approx(final)
    assert at(109, "cosine") > final
    assert at(109, "constant") == 1.0


def test_edges() -> None:
    assert rate(0, total=1, warmup=0, kind="cosine", final=0.0) == 1.0
    assert rate(9, total=10, warmup=10, kind="linear", final=0.0) == 1.0
    assert 0.0 <= rate(10, total=10, warmup=10, kind="linear", final=0.0) <= 1.0


def turns(every: int, total: int) -> list[int]:
    return [step for step in range(1, total + 1) if is_time(step, every=every, total=total)]


def test_is_time() -> None:
    assert turns(10, 35) == [10, 20, 30, 35]
    assert turns(10, 32) == [10, 20, 32], "not shortly before the end"
    assert turns(10, 40) == [10, 20, 30, 40]
    assert turns(1, 4) == [1, 2, 3, 4]
    assert turns(100, 7) == [7]


def test_imports_no_torch() -> None:
    code = "import sys, vitscale.optim.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
