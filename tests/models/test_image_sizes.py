from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.timm_vit import TINY, randomise, timm_vit
from torch import Tensor

from vitscale.models.position import resize_grid, sincos
from vitscale.models.vit import VisionTransformer

SIZES = [(16, 16), (8, 20), (20, 8), (32, 32), (4, 4), (24, 36)]


def images_of(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", [{}, {"pool": "gap"}, {"num_registers": 3, "image_size": (8, 20)}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_positions_are_resized_on_the_fly_as_timm_does(size: tuple[int, int], changes: dict[str, Any]) -> None:
    config = replace(TINY, dynamic_image_size=True, **changes)
    ours, theirs = VisionTransformer(config).eval(), timm_vit(config).eval()
    randomise(ours)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(images_of(size)), theirs(images_of(size)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_positions_are_resized_on_the_fly_as_mmpretrain_documents(size: tuple[int, int]) -> None:
    """`resize_pos_embed`: the extra tokens aside, bicubic, `align_corners=False`, no antialias."""
    config = replace(TINY, dynamic_image_size=True, pos_embed_resize="bicubic")
    model = VisionTransformer(config).eval()
    randomise(model)
    rows, columns = size[0] // 4, size[1] // 4
    grid = model.pos_embed[:, 1:].reshape(1, 4, 4, 24).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    fixed = VisionTransformer(replace(config, image_size=size)).eval()
    fixed.load_state_dict({**model.state_dict(), "pos_embed": torch.cat([model.pos_embed[:, :1], resized], dim=1)})
    torch.testing.assert_close(model(images_of(size)), fixed(images_of(size)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", ["sincos", "sincos_mae"])
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_fixed_positions_are_added_to_the_patches_alone(style: str, pool: str) -> None:
    """Equal to learned positions that hold the table, and zeros for the class token, as MAE's weights do."""
    config = replace(TINY, pos_embed=style, pool=pool, dynamic_image_size=True)  # type: ignore[arg-type]
    model = VisionTransformer(config).eval()
    randomise(model)
    assert "pos_embed" not in model.state_dict()
    for size in SIZES:
        table = sincos((size[0] // 4, size[1] // 4), 24, style=style)  # type: ignore[arg-type]
        zeros = torch.zeros(1, int(pool == "cls"), 24)
        learned = VisionTransformer(replace(config, pos_embed="learned", image_size=size)).eval()
        learned.load_state_dict({**model.state_dict(), "pos_embed": torch.cat([zeros, table], dim=1)})
        torch.testing.assert_close(model(images_of(size)), learned(images_of(size)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["same", "corner"])
def test_indivisible_images_of_any_size(padding: str) -> None:
    config = replace(TINY, dynamic_image_size=True, patch_padding=padding, patch_stride=3)  # type: ignore[arg-type]
    model = VisionTransformer(config).eval()
    randomise(model)
    (features,) = model.forward_features(images_of((10, 17)), -1, out_type="featmap")
    assert features.shape == (2, 24, 4, 6)
    assert model(images_of((10, 17))).shape == (2, 7)


def test_indivisible_images_are_refused_without_padding() -> None:
    model = VisionTransformer(replace(TINY, dynamic_image_size=True))
    with pytest.raises(
        ValueError, match="patches of 4 pixels do not divide images of 18x16; the next smaller size is 16x16"
    ):
        model(images_of((18, 16)))
    with pytest.raises(ValueError, match=r"this model takes \[batch, 3, height, width\]"):
        model(torch.zeros(2, 1, 16, 16))


def test_positions_are_resized_in_float32_under_autocast() -> None:
    positions = torch.randn(1, 17, 24)
    plain = resize_grid(positions, old=(4, 4), new=(6, 6), num_prefix=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resize_grid(positions, old=(4, 4), new=(6, 6), num_prefix=1), plain)


def test_gradients_reach_the_positions_of_another_size() -> None:
    model = VisionTransformer(replace(TINY, dynamic_image_size=True))
    randomise(model)
    model(images_of((24, 12))).square().sum().backward()
    assert model.pos_embed.grad is not None
    assert model.pos_embed.grad.abs().amax(dim=2).gt(0).all()
