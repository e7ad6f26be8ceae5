from __future__ import annotations

from typing import Literal

import pytest
import torch
from helpers.tiny import Tiny, global_batch, objective, tiny
from torch import Tensor

from vitscale.engines.parallelize import apply_checkpointing

Mode = Literal["none", "full", "offload"]


def gradients(mode: Mode, *, bfloat16: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = tiny(dropout=0.3)
    apply_checkpointing(model, mode)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        loss = objective(model, global_batch(0, 8))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("mode", ["full", "offload"])
def test_gradients_are_those_without_checkpointing(mode: Mode, bfloat16: bool) -> None:
    """Bit-equal with dropout and drop path on: random state and autocast are the forward's in recomputation."""
    loss, expected = gradients("none", bfloat16=bfloat16)
    found_loss, found = gradients(mode, bfloat16=bfloat16)
    assert torch.equal(loss, found_loss)
    assert len(found) == len(expected) == len(list(tiny().named_parameters()))
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def calls(model: Tiny, *, grad: bool) -> int:
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    # a child's hook: the block's own forward is what is replaced
    model.blocks[0].norm.register_forward_hook(counted)
    with torch.set_grad_enabled(grad):
        loss = objective(model, global_batch(0, 8))
    if grad:
        loss.backward()
    return count


@pytest.mark.parametrize(("mode", "expected"), [("none", 1), ("full", 2), ("offload", 2)])
def test_blocks_run_again_in_backward(mode: Mode, expected: int) -> None:
    model = tiny()
    apply_checkpointing(model, mode)
    assert calls(model, grad=True) == expected


@pytest.mark.parametrize("mode", ["full", "offload"])
def test_nothing_is_kept_without_gradients(mode: Mode) -> None:
    model = tiny()
    apply_checkpointing(model, mode)
    assert calls(model, grad=False) == 1


@pytest.mark.parametrize("mode", ["full", "offload"])
def test_names_do_not_change(mode: Mode) -> None:
    model = tiny()
    apply_checkpointing(model, mode)
    assert list(model.state_dict()) == list(tiny().state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in tiny().named_modules()]
