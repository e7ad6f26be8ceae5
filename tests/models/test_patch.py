from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from helpers.timm_vit import TINY, randomise
from timm.layers import resample_patch_embed
from torch import Tensor

from vitscale.models.patch import PatchEmbed, draw_patch_size, pad_to_patches, resize_patch_kernel
from vitscale.models.position import resize_grid
from vitscale.models.vit import VisionTransformer


def padded_as_mmcv_documents(images: Tensor, kernel: int, stride: int, padding: str) -> Tensor:
    """Of mmcv's `AdaptivePadding`: output is ceil(input / stride); what is missing is padded, in `corner` at the right
    and bottom, in `same` half before and the rest after.
    """
    height, width = images.shape[2:]
    rows, columns = math.ceil(height / stride), math.ceil(width / stride)
    missing_rows = max((rows - 1) * stride + kernel - height, 0)
    missing_columns = max((columns - 1) * stride + kernel - width, 0)
    top, left = (missing_rows // 2, missing_columns // 2) if padding == "same" else (0, 0)
    padded = torch.zeros(*images.shape[:2], height + missing_rows, width + missing_columns)
    padded[:, :, top : top + height, left : left + width] = images
    return padded


@pytest.mark.parametrize("padding", ["same", "corner"])
@pytest.mark.parametrize(("kernel", "stride"), [(4, 4), (4, 3), (4, 2), (3, 5)])
def test_adaptive_padding_is_mmcvs(kernel: int, stride: int, padding: str) -> None:
    for height, width in product(range(4, 13), (5, 8, 11)):
        images = torch.randn(2, 3, height, width)
        ours = pad_to_patches(images, patch_size=kernel, stride=stride, padding=padding)  # type: ignore[arg-type]
        assert torch.equal(ours, padded_as_mmcv_documents(images, kernel, stride, padding)), (height, width)


def test_indivisible_images_are_embedded_patch_by_patch() -> None:
    embed = PatchEmbed(in_channels=3, patch_size=4, embed_dim=5, stride=3, padding="same", bias=False)
    randomise(embed)
    images = torch.randn(2, 3, 10, 7)
    tokens, grid = embed(images)
    padded = padded_as_mmcv_documents(images, 4, 3, "same")
    assert grid == (4, 3)
    for row, column in product(range(4), range(3)):
        patch = padded[:, :, 3 * row : 3 * row + 4, 3 * column : 3 * column + 4]
        expected = torch.einsum("bchw,dchw->bd", patch, embed.proj.weight)
        torch.testing.assert_close(tokens[:, 3 * row + column], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(("old", "new"), [(16, 8), (16, 14), (16, 24), (8, 16), (32, 10), (14, 16), (7, 7), (1, 3)])
def test_kernels_are_resized_as_timm_does(old: int, new: int, antialias: bool, kernel: str) -> None:
    weight = torch.randn(3, 2, old, old, generator=torch.Generator().manual_seed(0))
    mode = f"{kernel}_antialias" if antialias else kernel
    ours = resize_patch_kernel(weight, new, mode=mode)  # type: ignore[arg-type]
    # timm inverts the whole matrix in float32, of condition up to 1e2; each side is inverted here in float64
    torch.testing.assert_close(
        ours,
        resample_patch_embed(weight, [new, new], kernel, antialias),
        rtol=1e-4,
        atol=1e-4 * ours.abs().max().item(),
    )


@pytest.mark.parametrize("mode", ["bicubic_antialias", "bilinear"])
@pytest.mark.parametrize(("old", "new"), [(8, 16), (8, 11), (14, 16), (4, 5)])
def test_tokens_of_enlarged_patches_are_those_of_the_old(old: int, new: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, patches = torch.randn(3, 2, old, old, generator=generator), torch.randn(5, 2, old, old, generator=generator)
    kernel, _, antialias = mode.partition("_")
    enlarged = F.interpolate(patches, size=new, mode=kernel, antialias=bool(antialias))
    tokens = torch.einsum("bchw,dchw->bd", enlarged, resize_patch_kernel(weight, new, mode=mode))  # type: ignore[arg-type]
    torch.testing.assert_close(tokens, torch.einsum("bchw,dchw->bd", patches, weight), rtol=1e-4, atol=1e-4)


def test_plain_interpolation_of_a_kernel() -> None:
    weight = torch.randn(3, 2, 8, 8)
    ours = resize_patch_kernel(weight, 12, mode="bilinear", method="interpolate")
    assert torch.equal(ours, F.interpolate(weight, size=12, mode="bilinear"))
    assert not torch.allclose(ours, resize_patch_kernel(weight, 12, mode="bilinear"), atol=0.1)


def test_kernels_keep_their_type_and_are_left_alone_at_their_own_size() -> None:
    weight = torch.randn(3, 2, 8, 8).bfloat16()
    assert resize_patch_kernel(weight, 8) is weight
    for method in ("pseudo_inverse", "interpolate"):
        resized = resize_patch_kernel(weight, 5, method=method)  # type: ignore[arg-type]
        assert torch.equal(resized, resize_patch_kernel(weight.float(), 5, method=method).bfloat16())  # type: ignore[arg-type]


def test_kernels_are_resized_in_float32_under_autocast() -> None:
    weight = torch.randn(3, 2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resize_patch_kernel(weight, 12), resize_patch_kernel(weight, 12))
        resized = resize_patch_kernel(weight, 12)
    torch.testing.assert_close(resized, resize_patch_kernel(weight, 12), rtol=0, atol=0)


FLEXI = replace(TINY, image_size=24, patch_size=10, patch_sizes=(3, 4, 6, 8, 12), pool="gap")


@pytest.mark.parametrize("patch_size", FLEXI.patch_sizes)
def test_a_flexible_model_is_a_plain_one_with_kernel_and_positions_resized(patch_size: int) -> None:
    flexible = VisionTransformer(replace(FLEXI, pos_embed_resize="bilinear_antialias")).eval()
    randomise(flexible)
    state = flexible.state_dict()
    state["patch_embed.proj.weight"] = resample_patch_embed(
        state["patch_embed.proj.weight"], [patch_size, patch_size], "bilinear", antialias=False
    )
    side = 24 // patch_size
    state["pos_embed"] = resize_grid(
        state["pos_embed"], old=(2, 2), new=(side, side), num_prefix=0, mode="bilinear_antialias"
    )
    plain = VisionTransformer(replace(FLEXI, patch_size=patch_size, patch_sizes=())).eval()
    plain.load_state_dict(state)
    images = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    # The kernel's pseudo-inverse amplifies rounding when patches shrink: values of some tens here.
    torch.testing.assert_close(flexible(images, patch_size=patch_size), plain(images), rtol=1e-3, atol=1e-3)


def test_every_patch_size_trains_the_one_kernel() -> None:
    model = VisionTransformer(FLEXI).train()
    randomise(model)
    for patch_size in FLEXI.patch_sizes:
        model.zero_grad()
        model(torch.randn(2, 3, 24, 24), patch_size=patch_size).square().sum().backward()
        gradient = model.patch_embed.proj.weight.grad
        assert gradient is not None
        assert gradient.shape[2:] == (10, 10)
        assert gradient.abs().sum() > 0


def test_other_patch_sizes_are_refused() -> None:
    model = VisionTransformer(FLEXI)
    with pytest.raises(ValueError, match="patches of 5 pixels: this model takes 3, 4, 6, 8, 10, 12"):
        model(torch.zeros(1, 3, 24, 24), patch_size=5)
    with pytest.raises(ValueError, match="patches of 10 pixels do not divide images of 24x24"):
        model(torch.zeros(1, 3, 24, 24))


def test_patch_sizes_are_drawn_evenly_and_the_same_again() -> None:
    sizes = (8, 10, 12, 15, 16)
    drawn = [draw_patch_size(7, step, sizes) for step in range(5000)]
    assert drawn == [draw_patch_size(7, step, sizes) for step in range(5000)]
    assert drawn != [draw_patch_size(8, step, sizes) for step in range(5000)]
    # Each count is binomial: mean 1000, standard deviation sqrt(5000 * 0.2 * 0.8) = 28; five times that.
    assert all(abs(Counter(drawn)[size] - 1000) < 5 * 28 for size in sizes)
    followed = Counter(pairwise(drawn))
    assert len(followed) == 25  # any size may follow any
    assert draw_patch_size(0, 0, sizes) == draw_patch_size(0, 0, list(sizes))
