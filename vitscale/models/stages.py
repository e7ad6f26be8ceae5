"""How deep in the model a parameter is: what layer-wise learning rates and the freezing of first blocks go by."""

from __future__ import annotations

import re

from torch import nn

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_BEFORE_BLOCKS = ("cls_token", "reg_token", "pos_embed", "patch_embed.", "norm_pre.")
_AFTER_BLOCKS = ("norm.", "fc_norm.", "attn_pool.", "pre_logits.", "head.")


def layer_depth(name: str, *, depth: int) -> int:
    """0 for what makes the tokens, 1 to `depth` for the blocks, `depth` + 1 for what comes after them.

    A layer decay d gives a parameter the rate d ** (depth + 1 - layer_depth).

    Args:
        name: Of a parameter in the bare model.
        depth: Number of blocks.

    Raises:
        ValueError: No parameter of a Vision Transformer has this name.
    """
    block = _BLOCK.match(name)
    if block and int(block[1]) < depth:
        return int(block[1]) + 1
    if name.startswith(_BEFORE_BLOCKS):
        return 0
    if name.startswith(_AFTER_BLOCKS):
        return depth + 1
    raise ValueError(
        f"{name!r} is no parameter of a Vision Transformer of {depth} blocks: how deep it is cannot be told"
    )


def is_frozen(name: str, *, depth: int, frozen_stages: int) -> bool:
    """Whether a parameter belongs to the first `frozen_stages` blocks or to what comes before them.

    Where every block is frozen the last norm is too; 0 freezes nothing.
    """
    if not frozen_stages:
        return False
    last_norm = frozen_stages == depth and name.startswith(("norm.", "fc_norm."))
    return last_norm or layer_depth(name, depth=depth) <= frozen_stages


def freeze(model: nn.Module, *, depth: int, frozen_stages: int) -> None:
    """Let no gradient be computed for the frozen parameters."""
    for name, parameter in model.named_parameters():
        if is_frozen(name, depth=depth, frozen_stages=frozen_stages):
            parameter.requires_grad_(False)


def evaluate_frozen(model: nn.Module, *, depth: int, frozen_stages: int) -> None:
    """Set the frozen parts to evaluation mode, without dropout; `model.train()` alone sets all parts to training."""
    if not frozen_stages:
        return
    for name, part in model.named_modules():
        before = name in ("patch_embed", "pos_drop", "patch_drop", "norm_pre")
        if before or any(name == f"blocks.{index}" for index in range(frozen_stages)):
            part.eval()
