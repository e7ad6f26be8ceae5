"""Rotary positions on two axes, as in DINOv3 (https://arxiv.org/abs/2508.10104): pure functions.

A patch's centre has coordinates from -1 to 1 on each axis, whatever the grid, so that nothing is learned or stored and
any resolution is met by computing the angles again. The first quarter of a head's width and the third turn with the
row, the second and fourth with the column: channel i and channel i + width / 2 are one plane (`rotate_half`).
"""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

_BASE = 100.0
"""The periods grow from 1 to just below this, in units of coordinates; the same for every size of DINOv3."""


def rotary_table(
    grid: tuple[int, int], head_dim: int, *, num_prefix: int, device: torch.device | None = None
) -> Float[Tensor, "2 tokens head_dim"]:
    """Sines and cosines of every token's angles; the tokens before the patches are not turned.

    Args:
        grid: Rows and columns of patches.
        head_dim: Width of a head, a multiple of 4.
        num_prefix: Tokens before the patches.
        device: Where to make it.
    """
    bands = head_dim // 4
    periods = _BASE ** (torch.arange(bands, dtype=torch.float32, device=device) / bands)
    centres = [(torch.arange(side, dtype=torch.float32, device=device) + 0.5) / side * 2 - 1 for side in grid]
    coordinates = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).reshape(-1, 2)
    angles = 2 * math.pi * coordinates[:, :, None] / periods
    angles = torch.cat([angles.new_zeros(num_prefix, head_dim // 2), angles.flatten(1)]).tile(2)
    return torch.stack([angles.sin(), angles.cos()])


def rotate(
    heads: Float[Tensor, "batch heads tokens head_dim"], table: Float[Tensor, "2 *batch tokens head_dim"]
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Turn queries or keys by the angles of their tokens, in float32; returned in the type they came in.

    Args:
        heads: Queries or keys.
        table: Of `rotary_table`; with a batch dimension where samples kept other patches.
    """
    sine, cosine = table.unsqueeze(-3) if table.ndim == 4 else table
    first, second = heads.float().chunk(2, dim=-1)
    turned: Tensor = heads * cosine + torch.cat([-second, first], dim=-1) * sine
    return turned.to(heads.dtype)
