"""timm's Vision Transformers: the names of their tensors and what these tell about the model. No files here.

vitscale's names are timm's, so that only the model has to be found: timm's files say nothing about it but shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.config.sizes import SIZES
from vitscale.errors import UserError
from vitscale.weights.adapt import expected_shapes, misfits

_SIGNS = {"patch_embed.proj.weight": 4, "pos_embed": 3, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
"""Tensors that every one of timm's ViTs has, and how many dimensions they have."""

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_HEAD_DIM = 64


def is_timm(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of one of timm's Vision Transformers, or of something built like one."""
    return all(name in state for name in _SIGNS)


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A vitscale model's tensors under timm's names."""
    return dict(state)


def from_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm model's tensors under vitscale's names."""
    return dict(state)


def timm_config(state: Mapping[str, Tensor]) -> ModelConfig:
    """The model that timm tensors are of, from their shapes.

    The shapes do not tell the number of heads, the grid's sides, the activation or the norms' epsilon: heads are
    those of the known size with these dimensions, else 64 wide; the grid is square; GELU exact; epsilon 1e-6.

    Raises:
        UserError: A part that vitscale's models do not have, a tensor missing or of another shape, each named; heads
            or grid that cannot be told.
    """
    stubs = [f"{name} {list(state[name].shape)}" for name, ndim in _SIGNS.items() if state[name].ndim != ndim]
    if stubs:
        raise UserError(
            f"tensors of impossible shapes: {', '.join(stubs)}; were they saved from a sharded model without being "
            "gathered?"
        )
    embed_dim, in_channels, patch, patch_width = state["patch_embed.proj.weight"].shape
    if patch != patch_width:
        raise UserError(f"patches of {patch}x{patch_width} pixels; vitscale's are square")
    depth = 1 + max(int(found[1]) for name in state if (found := _BLOCK.match(name)))
    mlp_dim = len(state["blocks.0.mlp.fc1.weight"])
    has_class_token = "cls_token" in state
    name, num_heads = _heads(embed_dim, depth, mlp_dim, patch)
    config = ModelConfig(
        name=name,
        image_size=patch * _square_side(state["pos_embed"].shape[1] - has_class_token),
        in_channels=in_channels,
        patch_size=patch,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_dim=mlp_dim,
        num_classes=len(state["head.weight"]) if "head.weight" in state else 0,
        pool="cls" if has_class_token else "gap",
        qkv_bias="blocks.0.attn.qkv.bias" in state,
    )
    problems = misfits(state, expected_shapes(config))
    if problems:
        raise UserError(f"built like one of timm's ViTs, but not one that vitscale has: {'; '.join(problems)}")
    return config


def _heads(embed_dim: int, depth: int, mlp_dim: int, patch: int) -> tuple[str | None, int]:
    """Name, where the dimensions are those of a known size, and number of heads."""
    for letter, size in SIZES.items():
        if (size.embed_dim, size.depth, size.mlp_dim) == (embed_dim, depth, mlp_dim):
            return f"{letter}/{patch}", size.num_heads
    if embed_dim % _HEAD_DIM:
        raise UserError(
            f"the number of heads cannot be told: a width of {embed_dim} is no known size and not a multiple of "
            f"{_HEAD_DIM}, the usual width of a head"
        )
    return None, embed_dim // _HEAD_DIM


def _square_side(positions: int) -> int:
    side = math.isqrt(max(positions, 0))
    if side * side != positions or not side:
        raise UserError(
            f"positions for {positions} patches, which is no square grid; a file that vitscale did not write does "
            "not say what grid it is"
        )
    return side
