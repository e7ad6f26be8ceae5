"""Where tokens stand: the grid of patches, and learned or fixed positions at any grid. Pure functions."""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitscale.config.schema import ModelConfig

Resize: TypeAlias = Literal[
    "bicubic_antialias", "bicubic", "bicubic_offset", "bilinear_antialias", "bilinear", "corner_aligned"
]
"""Ways to another grid, as `ModelConfig.pos_embed_resize` explains them. They differ by some percent, those with and
without antialias also when the grid grows: torch's bicubic kernel has a = -0.5 with and a = -0.75 without."""

_OFFSET = 0.1
"""What DINOv2 adds to the sides of the grid wanted before it divides by the old ones (`interpolate_offset`)."""


def image_height_width(config: ModelConfig) -> tuple[int, int]:
    """Height and width in pixels of the images that a model takes."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def grid_height_width(config: ModelConfig) -> tuple[int, int]:
    """Rows and columns of patches in images of the model's own size; learned positions are kept for this grid.

    Raises:
        ValueError: The patch size does not divide the image's height or width.
    """
    height, width = image_height_width(config)
    patch = config.patch_size
    if config.patch_sizes:
        return height // patch, width // patch
    return patch_grid(config, (height, width))


def patch_grid(config: ModelConfig, size: tuple[int, int], *, patch_size: int | None = None) -> tuple[int, int]:
    """Rows and columns of patches in images of any size.

    Args:
        config: How patches lie.
        size: Height and width of the images in pixels.
        patch_size: Side of a patch where it is not the model's own.

    Raises:
        ValueError: Patches lie side by side, unpadded, and do not fill the images; or no patch fits.
    """
    height, width = size
    patch = patch_size or config.patch_size
    stride = config.patch_stride or patch
    if config.patch_padding != "none":
        return -(-height // stride), -(-width // stride)
    if min(height, width) < patch or (stride == patch and (height % patch or width % patch)):
        below = f"{max(height // patch, 1) * patch}x{max(width // patch, 1) * patch}"
        raise ValueError(
            f"patches of {patch} pixels do not divide images of {height}x{width}; the next smaller size is {below}"
        )
    return (height - patch) // stride + 1, (width - patch) // stride + 1


def has_class_token(config: ModelConfig) -> bool:
    """Whether there is a class token: said by the config, else where the pooling reads it."""
    return config.pool in ("cls", "cls_gap") if config.class_token is None else config.class_token


def num_prefix_tokens(config: ModelConfig) -> int:
    """Tokens before the patch tokens: the class token, where there is one, and the registers."""
    return has_class_token(config) + config.num_registers


def num_prefix_positions(config: ModelConfig) -> int:
    """Rows of the learned positions before the grid's: those of the class token and the registers that have one."""
    covered = {"all": num_prefix_tokens(config), "class": int(has_class_token(config)), "none": 0}
    return covered[config.pos_embed_prefix]


def resize_grid(
    positions: Float[Tensor, "1 tokens dim"],
    *,
    old: tuple[int, int],
    new: tuple[int, int],
    num_prefix: int,
    mode: Resize = "bicubic_antialias",
) -> Float[Tensor, "1 new_tokens dim"]:
    """Learned positions of a grid `old`, interpolated to a grid `new`.

    The prefix tokens are handed through bit by bit. The grid is computed in float32 and returned in the type it came
    in. Only equal grids are left alone: 2x8 and 4x4 have as many tokens, but at other places.

    Args:
        positions: `[1, num_prefix + rows * columns, dim]`.
        old: Rows and columns of the grid in `positions`.
        new: Rows and columns wanted.
        num_prefix: Positions before the grid, see `num_prefix_positions`.
        mode: Kind of interpolation; antialias widens the kernel when the grid shrinks.

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
    image = interpolate(grid.float().reshape(1, *old, -1).permute(0, 3, 1, 2), new, mode=mode)
    return torch.cat([prefix, image.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], dim=1)


def interpolate(
    image: Float[Tensor, "batch channels rows columns"], size: tuple[int, int], *, mode: Resize
) -> Float[Tensor, "batch channels new_rows new_columns"]:
    """`image` at another size, by the convention named."""
    if mode == "corner_aligned":
        return F.interpolate(image, size=size, mode="bilinear", align_corners=True)
    if mode == "bicubic_offset":
        factors = [(new + _OFFSET) / old for new, old in zip(size, image.shape[2:], strict=True)]
        return F.interpolate(image, scale_factor=factors, mode="bicubic", align_corners=False)
    kernel, _, antialias = mode.partition("_")
    return F.interpolate(image, size=size, mode=kernel, align_corners=False, antialias=bool(antialias))


def sincos(
    grid: tuple[int, int], dim: int, *, style: Literal["sincos", "sincos_mae"], device: torch.device | None = None
) -> Float[Tensor, "1 patches dim"]:
    """Fixed 2-D positions: sin(x w), cos(x w), sin(y w), cos(y w), a quarter of the width each; x column, y row.

    The frequencies w fall from 1 to 1/10000: `sincos` reaches that end (big_vision's `posemb_sincos_2d`), `sincos_mae`
    stops one short of it (MAE).

    Args:
        grid: Rows and columns.
        dim: Width of a token, a multiple of 4.
        style: Which frequencies.
        device: Where to make them.

    Raises:
        ValueError: 4 does not divide `dim`.
    """
    if dim % 4:
        raise ValueError(f"4 does not divide a width of {dim}: sine and cosine of row and column have a quarter each")
    bands = dim // 4
    steps = torch.arange(bands, dtype=torch.float64, device=device) / (bands - 1 if style == "sincos" else bands)
    frequencies = 10_000.0**-steps
    rows, columns = (torch.arange(side, dtype=torch.float64, device=device) for side in grid)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    angles = [axis.flatten()[:, None] * frequencies for axis in (x, y)]
    return torch.cat([turned for angle in angles for turned in (angle.sin(), angle.cos())], dim=1)[None].float()
