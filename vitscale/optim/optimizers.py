"""The optimizers, torch's own: AdamW and SGD with momentum, fused, their state there from the beginning.

The fused kernels take a flag on the device that turns a step into nothing, so that a gradient that is not finite can
be left out without the host waiting for the answer.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from vitscale.config.schema import OptimConfig

Slot: TypeAlias = Literal["exp_avg", "exp_avg_sq", "momentum_buffer"]


def build_optimizer(groups: list[dict[str, Any]], config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that `config.kind` names, at the peak rate.

    Args:
        groups: As from `param_groups`.
        config: Kind and constants.
        device: Where the parameters are.
    """
    fused = device.type in ("cpu", "cuda")
    if config.kind == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)


def slots(config: OptimConfig) -> tuple[Slot, ...]:
    """Names of the tensors that the optimizer keeps for each parameter, each of the parameter's shape."""
    if config.kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def init_state(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Give every parameter its slots at zero and step count 0: what torch would do at the first step.

    SGD begins with momentum * 0 + gradient, which equals torch's beginning (a copy of the first gradient).
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for slot in slots(config):
                state[slot] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if config.kind == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def set_step_count(optimizer: torch.optim.Optimizer, count: float) -> None:
    """How many steps were applied, so that AdamW's bias correction goes on from there."""
    for state in optimizer.state.values():
        step: Tensor | None = state.get("step")
        if step is not None:
            step.fill_(count)
