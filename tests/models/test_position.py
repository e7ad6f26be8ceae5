from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.timm_vit import TINY
from timm.layers import resample_abs_pos_embed

from vitscale.models.position import grid_height_width, resize_grid

GRIDS = [(2, 8), (4, 4), (8, 2), (1, 1), (3, 5), (7, 7), (14, 14), (24, 24), (14, 9), (39, 39)]


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_grids_are_resized_as_timm_does(num_prefix: int, antialias: bool, mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for old, new in product(GRIDS, GRIDS):
        positions = torch.randn(1, num_prefix + old[0] * old[1], 6, generator=generator)
        ours = resize_grid(positions, old=old, new=new, num_prefix=num_prefix, mode=mode, antialias=antialias)
        theirs = resample_abs_pos_embed(
            positions, list(new), list(old), num_prefix_tokens=num_prefix, interpolation=mode, antialias=antialias
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
