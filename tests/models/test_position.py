from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F
from helpers.timm_vit import TINY
from timm.layers import build_sincos2d_pos_embed, resample_abs_pos_embed
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from vitscale.models.position import (
    grid_height_width,
    num_prefix_positions,
    num_prefix_tokens,
    patch_grid,
    resize_grid,
    sincos,
)

GRIDS = [(2, 8), (4, 4), (8, 2), (1, 1), (3, 5), (7, 7), (14, 14), (24, 24), (14, 9), (39, 39)]


@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_grids_are_resized_as_timm_does(num_prefix: int, antialias: bool, kernel: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for old, new in product(GRIDS, GRIDS):
        positions = torch.randn(1, num_prefix + old[0] * old[1], 6, generator=generator)
        mode = f"{kernel}_antialias" if antialias else kernel
        ours = resize_grid(positions, old=old, new=new, num_prefix=num_prefix, mode=mode)
        theirs = resample_abs_pos_embed(
            positions, list(new), list(old), num_prefix_tokens=num_prefix, interpolation=kernel, antialias=antialias
        )
        assert ours.shape == (1, num_prefix + new[0] * new[1], 6)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours[:, :num_prefix], positions[:, :num_prefix])


def test_as_many_tokens_at_other_places_are_not_left_alone() -> None:
    positions = torch.randn(1, 16, 3)
    assert not torch.allclose(resize_grid(positions, old=(2, 8), new=(4, 4), num_prefix=0), positions)
    assert torch.equal(resize_grid(positions, old=(2, 8), new=(2, 8), num_prefix=0), positions)


def test_rows_and_columns_are_not_mixed_up() -> None:
    rows = torch.arange(4.0).repeat_interleave(2)  # a 4x2 grid that changes from row to row only
    resized = resize_grid(rows[None, :, None], old=(4, 2), new=(4, 6), num_prefix=0, mode="bilinear")
    torch.testing.assert_close(resized.reshape(4, 6), torch.arange(4.0)[:, None].expand(4, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_returned_as_it_came(dtype: torch.dtype) -> None:
    positions = torch.randn(1, 1 + 49, 4).to(dtype)
    resized = resize_grid(positions, old=(7, 7), new=(11, 5), num_prefix=1)
    exact = resize_grid(positions.float(), old=(7, 7), new=(11, 5), num_prefix=1)
    assert resized.dtype == dtype
    assert torch.equal(resized, exact.to(dtype))
    assert torch.equal(resized[:, :1], positions[:, :1])


def test_positions_of_another_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="50 positions are not 0 prefix tokens and a grid of 7x7"):
        resize_grid(torch.zeros(1, 50, 4), old=(7, 7), new=(8, 8), num_prefix=0)


def test_the_grid_of_a_config_is_rows_by_columns() -> None:
    assert grid_height_width(TINY) == (4, 4)


@pytest.mark.parametrize(("old", "new"), [(o, n) for o, n in product(GRIDS, GRIDS) if 1 not in (*o, *n)])
def test_corner_aligned_is_scipys_zoom_as_big_vision_calls_it(old: tuple[int, int], new: tuple[int, int]) -> None:
    positions = torch.randn(1, 1 + old[0] * old[1], 3, generator=torch.Generator().manual_seed(0))
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    expected = scipy.ndimage.zoom(positions[0, 1:].reshape(*old, 3).numpy(), zoom, order=1)
    ours = resize_grid(positions, old=old, new=new, num_prefix=1, mode="corner_aligned")
    np.testing.assert_allclose(ours[0, 1:].reshape(*new, 3).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [*range(1, 60), 111])
def test_the_offset_is_dinov2s_and_never_loses_a_patch(side: int) -> None:
    """What DINOv2's `interpolate_pos_encoding` does for its 37x37 grid, with the sides it computes from pixels."""
    positions = torch.randn(1, 1 + 37 * 37, 2, generator=torch.Generator().manual_seed(0))
    if side == 37:
        assert resize_grid(positions, old=(37, 37), new=(37, 37), num_prefix=1, mode="bicubic_offset") is positions
        return
    factors = (float(side + 0.1) / 37, float(40 + 0.1) / 37)
    grid = positions[:, 1:].reshape(1, 37, 37, 2).permute(0, 3, 1, 2)
    expected = F.interpolate(grid, scale_factor=factors, mode="bicubic")
    assert expected.shape[2:] == (side, 40)
    ours = resize_grid(positions, old=(37, 37), new=(side, 40), num_prefix=1, mode="bicubic_offset")
    torch.testing.assert_close(ours[:, 1:], expected.permute(0, 2, 3, 1).flatten(1, 2))
    plain = resize_grid(positions, old=(37, 37), new=(side, 40), num_prefix=1, mode="bicubic")
    assert not torch.allclose(ours, plain, atol=1e-3)


def test_the_conventions_differ_by_percents() -> None:
    noise = torch.randn(1, 14 * 14, 8, generator=torch.Generator().manual_seed(0))
    resized = {
        mode: resize_grid(noise, old=(14, 14), new=(24, 24), num_prefix=0, mode=mode)  # type: ignore[arg-type]
        for mode in ("bicubic", "bicubic_antialias", "bilinear", "corner_aligned")
    }
    assert (resized["bicubic"] - resized["bicubic_antialias"]).norm() > 0.02 * resized["bicubic"].norm()
    assert (resized["bilinear"] - resized["corner_aligned"]).norm() > 0.05 * resized["bilinear"].norm()


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (7, 3)])
def test_sincos_mae_is_that_of_maes_weights(grid: tuple[int, int]) -> None:
    table = build_2d_sinusoidal_position_embedding(*grid, embed_dim=24)
    expected = table.roll(12, dims=1)  # its own order is row, column; MAE's weights have the column first
    torch.testing.assert_close(sincos(grid, 24, style="sincos_mae")[0], expected, rtol=1e-6, atol=1e-6)


def test_sincos_mae_of_grids_that_are_not_square_is_timms_in_another_order() -> None:
    expected = build_sincos2d_pos_embed([3, 5], dim=16)  # sin y, sin x, cos y, cos x
    sin_y, sin_x, cos_y, cos_x = expected.chunk(4, dim=1)
    ours = sincos((3, 5), 16, style="sincos_mae")[0]
    torch.testing.assert_close(ours, torch.cat([sin_x, cos_x, sin_y, cos_y], dim=1), rtol=1e-6, atol=1e-6)


def test_sincos_is_the_formula_of_big_vision() -> None:
    rows, columns, bands = 3, 5, 4
    ours = sincos((rows, columns), 4 * bands, style="sincos")[0].reshape(rows, columns, 4, bands)
    for y, x, band in product(range(rows), range(columns), range(bands)):
        frequency = 1 / 10_000 ** (band / (bands - 1))
        expected = [np.sin(x * frequency), np.cos(x * frequency), np.sin(y * frequency), np.cos(y * frequency)]
        assert ours[y, x, :, band].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="4 does not divide a width of 6"):
        sincos((2, 2), 6, style="sincos")


@pytest.mark.parametrize(
    ("changes", "tokens", "positions"),
    [
        ({}, 1, 1),
        ({"pool": "gap"}, 0, 0),
        ({"pool": "gap", "class_token": True}, 1, 1),
        ({"num_registers": 4}, 5, 5),
        ({"num_registers": 4, "pos_embed_prefix": "class"}, 5, 1),
        ({"num_registers": 4, "pos_embed_prefix": "none"}, 5, 0),
        ({"num_registers": 4, "pos_embed_prefix": "class", "pool": "map"}, 4, 0),
    ],
)
def test_tokens_before_the_patches(changes: dict[str, Any], tokens: int, positions: int) -> None:
    config = replace(TINY, **changes)
    assert (num_prefix_tokens(config), num_prefix_positions(config)) == (tokens, positions)


@pytest.mark.parametrize(
    ("changes", "size", "grid"),
    [
        ({}, (8, 20), (2, 5)),
        ({"patch_padding": "corner"}, (9, 21), (3, 6)),
        ({"patch_padding": "same", "patch_stride": 3}, (9, 20), (3, 7)),
        ({"patch_stride": 3}, (16, 17), (5, 5)),
        ({"patch_size": 16, "patch_stride": 12}, (256, 128), (21, 10)),  # TransReID's overlapping patches
        ({"patch_size": 32, "patch_sizes": (8,), "image_size": 240}, None, (7, 7)),  # FlexiViT's grid of positions
    ],
)
def test_grids(changes: dict[str, Any], size: tuple[int, int] | None, grid: tuple[int, int]) -> None:
    config = replace(TINY, **changes)
    assert (patch_grid(config, size) if size else grid_height_width(config)) == grid


def test_images_smaller_than_a_patch_are_refused() -> None:
    with pytest.raises(ValueError, match="patches of 4 pixels do not divide images of 3x8"):
        patch_grid(replace(TINY, patch_stride=2), (3, 8))
