from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from helpers.timm_vit import TINY, randomise
from timm.layers import RotaryEmbeddingDinoV3
from timm.models.eva import Eva
from torch import Tensor, nn

from vitscale.config.schema import ModelConfig
from vitscale.engines.parallelize import apply_checkpointing
from vitscale.models.position import image_height_width
from vitscale.models.rotary import rotary_table, rotate
from vitscale.models.vit import VisionTransformer

DINOV3 = replace(
    TINY, pos_embed="rotary", num_registers=4, layer_scale=1e-5, norm_eps=1e-5, qkv_bias=False, num_classes=5
)


def timm_dinov3(config: ModelConfig) -> Eva:
    return Eva(
        img_size=image_height_width(config), patch_size=config.patch_size, embed_dim=config.embed_dim,
        depth=config.depth, num_heads=config.num_heads, mlp_ratio=config.mlp_dim / config.embed_dim, qkv_bias=False,
        init_values=config.layer_scale, rope_type="dinov3", rope_temperature=100, rope_rotate_half=True,
        use_rot_pos_emb=True, use_abs_pos_emb=False, num_reg_tokens=config.num_registers, use_fc_norm=False,
        swiglu_mlp=config.activation == "swiglu", norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
        global_pool="token", num_classes=config.num_classes, dynamic_img_size=config.dynamic_image_size,
    )  # fmt: skip


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value for name, value in state.items()
    }


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("image_size", [16, (8, 20)])
def test_outputs_are_those_of_timms_dinov3(image_size: int | tuple[int, int], activation: str) -> None:
    config = replace(DINOV3, image_size=image_size, activation=activation)  # type: ignore[arg-type]
    ours, theirs = VisionTransformer(config).eval(), timm_dinov3(config).eval()
    randomise(ours)
    theirs.load_state_dict(to_timm(ours.state_dict()), strict=True)
    images = torch.randn(2, 3, *image_height_width(config), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_positions_are_recomputed_for_another_size() -> None:
    config = replace(DINOV3, dynamic_image_size=True)
    ours, theirs = VisionTransformer(config).eval(), timm_dinov3(config).eval()
    randomise(ours)
    theirs.load_state_dict(to_timm(ours.state_dict()), strict=True)
    images = torch.randn(2, 3, 24, 12)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)
    other = VisionTransformer(replace(DINOV3, image_size=(24, 12))).eval()
    other.load_state_dict(ours.state_dict())  # nothing in it depends on the size
    assert torch.equal(other(images), ours(images))


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (2, 7)])
def test_angles_are_timms_and_prefix_tokens_are_not_turned(grid: tuple[int, int]) -> None:
    expected = RotaryEmbeddingDinoV3(dim=16, temperature=100).get_embed(list(grid))
    table = rotary_table(grid, 16, num_prefix=3)
    torch.testing.assert_close(torch.cat([table[0, 3:], table[1, 3:]], dim=1), expected, rtol=1e-5, atol=1e-6)
    heads = torch.randn(2, 3, 3 + grid[0] * grid[1], 16)
    turned = rotate(heads, table)
    assert torch.equal(turned[:, :, :3], heads[:, :, :3])
    # The centre of a single patch is the origin.
    assert grid == (1, 1) or not torch.allclose(turned[:, :, 3:], heads[:, :, 3:])


def test_products_depend_on_the_distance_alone() -> None:
    """What rotary positions are for: moved together on the grid, a query and a key have the same product."""
    table = rotary_table((8, 8), 16, num_prefix=0).double()
    query, key = torch.randn(1, 1, 1, 16, dtype=torch.double), torch.randn(1, 1, 1, 16, dtype=torch.double)

    def product(first: int, second: int) -> float:
        angles = [table[:, [8 * place[0] + place[1]]] for place in ((first, second), (first + 2, second + 3))]
        return float((rotate(query, angles[0]).double() * rotate(key, angles[1]).double()).sum())

    assert product(0, 0) == pytest.approx(product(4, 2), rel=1e-4)
    assert product(0, 0) == pytest.approx(product(5, 4), rel=1e-4)


@pytest.mark.parametrize("mode", ["full", "offload"])
def test_recomputed_blocks_are_given_the_angles_too(mode: Literal["full", "offload"]) -> None:
    images = torch.randn(4, 3, 16, 16)
    gradients = []
    for recompute in ("none", mode):
        model = VisionTransformer(replace(DINOV3, drop_path=0.5, patch_dropout=0.5)).train()
        randomise(model)
        apply_checkpointing(model, recompute)  # type: ignore[arg-type]
        torch.manual_seed(0)
        model(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=1e-6, atol=1e-6)


def test_half_precision_is_turned_in_float32() -> None:
    heads = torch.randn(1, 2, 9, 16).bfloat16()
    table = rotary_table((3, 3), 16, num_prefix=0)
    assert torch.equal(rotate(heads, table), rotate(heads.float(), table).bfloat16())


def test_dropped_patches_take_their_angles_with_them() -> None:
    """With one block, and read by no other token, a kept patch's output depends on what was kept, not on the order."""
    config = replace(DINOV3, patch_dropout=0.5, depth=1)
    model = VisionTransformer(config)
    randomise(model)
    images = torch.randn(2, 3, 16, 16)
    embedded = model.patch_embed(images).tokens
    torch.manual_seed(5)
    kept = model.patch_drop.train()(embedded)
    assert kept is not None
    whole = torch.cat([model.cls_token.expand(2, -1, -1), model.reg_token.expand(2, -1, -1), embedded], dim=1)
    table = rotary_table((4, 4), 8, num_prefix=5)
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[:, 5:] = torch.zeros(2, 16, dtype=torch.bool).scatter(1, kept, True)
    block = model.blocks[0]
    expected = []
    for sample in range(2):  # without its dropped patches, by hand
        chosen = mask[sample].nonzero()[:, 0]
        expected.append(block(whole[sample : sample + 1, chosen], table[:, chosen])[0, :5])
    torch.manual_seed(5)
    features = model.train().forward_features(images)
    torch.testing.assert_close(features[:, :5], model.norm(torch.stack(expected)), rtol=1e-4, atol=1e-5)
