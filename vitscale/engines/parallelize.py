"""What is done to a plain model from outside before an engine takes it; it relies on `model.blocks` alone.

Everything works in place on the blocks' `forward`, so that no module is wrapped, no parameter changes its name, and
state dicts, parameter groups and fragments need no prefix stripped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def apply_checkpointing(model: nn.Module, mode: Literal["none", "full", "offload"]) -> None:
    """Let backward compute each block's activations again instead of keeping them; gradients stay the same.

    Args:
        model: Has `blocks`, an iterable of modules.
        mode: `full`: torch's non-reentrant checkpointing, dropout repeated from the saved random state; `offload`:
            fairscale's, which holds the blocks' inputs in host memory meanwhile; `none`: nothing.
    """
    if mode == "none":
        return
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        if mode == "full":
            _set_forward(block, functools.partial(_checkpointed, block.forward))
        else:
            _offload(block)


def _checkpointed(forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs)
    output = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=True)
    assert isinstance(output, Tensor)
    return output


def _offload(block: nn.Module) -> None:
    from fairscale.nn.checkpoint import checkpoint_wrapper

    # fairscale recomputes under float16 where forward ran under bfloat16 autocast, and on the CPU under none at all.
    # So autocast is taken off around it and put on again inside, in forward and in recomputation alike.
    wrapped = checkpoint_wrapper(block, offload_to_cpu=True).forward
    forward, *rest = wrapped.args
    run = functools.partial(wrapped.func, functools.partial(_under_autocast, forward), *rest)
    _set_forward(block, functools.partial(_outside_autocast, run))


def _outside_autocast(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    device = inputs[0].device.type
    autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    with torch.autocast(device, enabled=False):
        return run(*inputs, autocast=autocast)


def _under_autocast(
    forward: Callable[..., Tensor], block: nn.Module, *inputs: Tensor, autocast: tuple[str, torch.dtype, bool]
) -> Tensor:
    device, dtype, enabled = autocast
    with torch.autocast(device, dtype=dtype, enabled=enabled):
        return forward(block, *inputs)


def _set_forward(block: nn.Module, forward: Callable[..., Tensor]) -> None:
    block.forward = forward
