"""Which parameters decay: two groups, every parameter in exactly one.

Decay pulls matrices towards zero. It is left off whatever is not a matrix of a linear map: biases and norms (every
tensor of one dimension) and what is added to the tokens or stands among them (positions, class and register tokens),
whatever its shape. Build the groups from the bare model, before anything wraps it: a wrapper's prefix must not decide.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitscale.config.schema import OptimConfig


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to this parameter.

    Args:
        name: Its name in the bare model, e.g. `blocks.0.attn.qkv.weight`.
        parameter: The parameter.
    """
    last = name.rsplit(".", 1)[-1]
    return parameter.ndim > 1 and not last.endswith(("pos_embed", "token", "tokens"))


def param_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The groups for a torch optimizer, in the model's order; a group without parameters is left out.

    Args:
        model: The bare model.
        config: Where `weight_decay` stands.

    Returns:
        Dicts with `params` and `weight_decay`.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if decays(name, parameter) else undecayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
