"""Where tokens stand: the grid of patches, and learned positions at another grid. Pure functions."""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitscale.config.schema import ModelConfig


def image_height_width(config: ModelConfig) -> tuple[int, int]:
    """Height and width in pixels of the images that a model takes."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def grid_height_width(config: ModelConfig) -> tuple[int, int]:
    """Rows and columns of patches.

    Raises:
        ValueError: The patch size does not divide the image's height or width.
    """
    height, width = image_height_width(config)
    patch = config.patch_size
    if height % patch or width % patch:
        below = f"{max(height // patch, 1) * patch}x{max(width // patch, 1) * patch}"
        raise ValueError(
            f"patches of {patch} pixels do not divide images of {height}x{width}; the next smaller size is {below}"
        )
    return height // patch, width // patch


def num_prefix_tokens(config: ModelConfig) -> int:
    """Tokens before the patch tokens: the class token, where there is one."""
    return 1 if config.pool == "cls" else 0


def resize_grid(
    positions: Float[Tensor, "1 tokens dim"],
    *,
    old: tuple[int, int],
    new: tuple[int, int],
    num_prefix: int,
    mode: Literal["bicubic", "bilinear"] = "bicubic",
    antialias: bool = True,
) -> Float[Tensor, "1 new_tokens dim"]:
    """Learned positions of a grid `old`, interpolated to a grid `new`.

    The prefix tokens are handed through bit by bit. The grid is computed in float32 and returned in the type it came
    in. Only equal grids are left alone: 2x8 and 4x4 have as many tokens, but at other places. The defaults are timm's.

    Args:
        positions: `[1, num_prefix + rows * columns, dim]`.
        old: Rows and columns of the grid in `positions`.
        new: Rows and columns wanted.
        num_prefix: Tokens before the grid.
        mode: Kind of interpolation.
        antialias: Widen the kernel when the grid shrinks. It also picks the kernel: torch's bicubic has a = -0.5 with
            and a = -0.75 without, so that the two differ when enlarging too.

    Raises:
        ValueError: `positions` does not have `num_prefix` tokens and a grid `old`.
    """
    if positions.shape[1] != num_prefix + old[0] * old[1]:
        raise ValueError(
            f"{positions.shape[1]} positions are not {num_prefix} prefix tokens and a grid of {old[0]}x{old[1]}"
        )
    if old == new:
        return positions
    prefix, grid = positions[:, :num_prefix], positions[:, num_prefix:]
    image = grid.float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=new, mode=mode, align_corners=False, antialias=antialias)
    return torch.cat([prefix, image.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)
