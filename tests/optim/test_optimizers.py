from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from vitscale.config.schema import OptimConfig
from vitscale.optim.optimizers import build_optimizer, init_state, set_rate, set_step_count, slots

CPU = torch.device("cpu")


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: range) -> None:
    for step in steps:
        set_rate(optimizer, 0.1 / (step + 1))
        weight.grad = torch.tensor([0.3, -2.0, 1e-3]) * (step + 1)
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_made_beforehand_changes_nothing(kind: Literal["adamw", "sgd"]) -> None:
    config = OptimConfig(kind=kind, lr=0.1, betas=(0.8, 0.9), eps=1e-6, momentum=0.7)
    found, expected = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([{"params": [found], "weight_decay": 0.2}], config, CPU)
    init_state(optimizer, config)
    plain: torch.optim.Optimizer = (
        torch.optim.AdamW([expected], betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, foreach=False)
        if kind == "adamw"
        else torch.optim.SGD([expected], momentum=0.7, weight_decay=0.2, foreach=False)
    )
    train(optimizer, found, range(4))
    train(plain, expected, range(4))
    torch.testing.assert_close(found, expected)
    for slot in slots(config):
        torch.testing.assert_close(optimizer.state[found][slot], plain.state[expected][slot])
    assert set(optimizer.state[found]) == set(slots(config)) | ({"step"} if kind == "adamw" else set())


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_flagged_step_changes_nothing(kind: Literal["adamw", "sgd"]) -> None:
    config = OptimConfig(kind=kind)
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([{"params": [weight]}], config, CPU)
    init_state(optimizer, config)
    train(optimizer, weight, range(2))
    before = [weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())]
    weight.grad = torch.full((3,), torch.nan)
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    after = [weight.detach(), *optimizer.state[weight].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_step_count_carries_bias_correction() -> None:
    config = OptimConfig(lr=0.1, weight_decay=0.0)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer([{"params": [weight]}], config, CPU)
    init_state(optimizer, config)
    set_step_count(optimizer, 9)
    weight.grad = torch.ones(1)
    optimizer.step()
    # step 10 of Adam with moments at zero: m = 0.1, v = 0.001
    update = 0.1 / (1 - 0.9**10) / (0.001 / (1 - 0.999**10)) ** 0.5
    assert weight.item() == pytest.approx(-0.1 * update, rel=1e-4)


def test_sgd_without_momentum_keeps_nothing() -> None:
    assert slots(OptimConfig(kind="sgd", momentum=0.0)) == ()
