"""Files of timm, against timm itself: every part that its ViTs have, its registered models, and DINOv3."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.command_line import run_main
from helpers.timm_vit import TINY, randomise, timm_vit
from safetensors.torch import load_file, save_file
from timm.models.eva import Eva
from torch import Tensor, nn

from vitscale import load_model
from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.weights.content import Known
from vitscale.weights.export import export_model
from vitscale.weights.io import load_weights
from vitscale.weights.timm import from_timm, timm_config

WIDE = replace(TINY, embed_dim=128, num_heads=2, mlp_dim=32)
"""Heads 64 wide, so that timm's shapes alone tell how many."""

PARTS: dict[str, dict[str, Any]] = {
    "cls": {},
    "gap": {"pool": "gap"},
    "gap, normalised tokens": {"pool": "gap", "final_norm": "tokens"},
    "map": {"pool": "map"},
    "layer scale": {"layer_scale": 0.1},
    "registers": {"num_registers": 3},
    "registers without positions": {"num_registers": 4, "pos_embed_prefix": "none"},
    "registers, no class token": {"num_registers": 4, "pool": "gap"},
    "DeiT III": {"pos_embed_prefix": "none", "layer_scale": 0.1},
    "swiglu": {"activation": "swiglu"},
    "qk norm": {"qk_norm": True, "num_heads": 4},
    "rms norm": {"norm": "rmsnorm"},
    "CLIP": {"pre_norm": True, "norm_eps": 1e-5},
    "no last norm": {"final_norm": "none"},
    "one channel, no bias": {"in_channels": 1, "qkv_bias": False},
}


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_a_file_of_timm_computes_what_timm_does(part: str, tmp_path: Path) -> None:
    config = replace(WIDE, **PARTS[part])
    theirs = timm_vit(config).eval()
    randomise(theirs)
    save_file(theirs.state_dict(), tmp_path / "m.safetensors")
    ours = load_model(tmp_path / "m.safetensors")
    expected = theirs(images(config.in_channels))
    torch.testing.assert_close(ours(images(config.in_channels)), expected, rtol=1e-5, atol=1e-5)
    told = {name: getattr(ours.config, name) for name in ("num_heads", "num_registers", "pool", "qk_norm", "norm")}
    assert told == {name: getattr(config, name) for name in told}


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_timm_loads_strictly_what_is_written_for_it(part: str, tmp_path: Path) -> None:
    config = replace(WIDE, **PARTS[part])
    ours = VisionTransformer(config).eval()
    randomise(ours)
    file = tmp_path / "m.safetensors"
    export_model(file, ours.state_dict(), config, format="timm", preprocessing=None, class_names=None)
    theirs = timm_vit(config).eval()
    theirs.load_state_dict(load_file(file), strict=True)
    expected = theirs(images(config.in_channels))
    torch.testing.assert_close(ours(images(config.in_channels)), expected, rtol=1e-5, atol=1e-5)
    assert load_weights(file).config == config


# ------------------------------------------------------------------------------------------------ registered models
GELU = {"GELU": "gelu", "SiLU": "swiglu"}


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224", "vit_base_patch32_224", "vit_large_patch16_384", "vit_huge_patch14_224",
        "vit_giant_patch14_224", "vit_gigantic_patch14_224", "deit3_small_patch16_224", "deit3_huge_patch14_224",
        "vit_small_patch14_dinov2", "vit_giant_patch14_dinov2", "vit_base_patch14_reg4_dinov2",
        "vit_base_patch16_clip_224", "vit_base_patch16_siglip_256", "vit_base_patch16_siglip_gap_256",
        "vit_so400m_patch14_siglip_224", "vit_base_patch16_reg4_gap_256", "vit_medium_patch16_reg4_gap_256",
        "vit_medium_patch16_gap_240", "flexivit_base", "eva_large_patch14_196", "vit_so150m_patch16_reg4_map_256",
        "vit_intern300m_patch14_448",
    ],
)  # fmt: skip
def test_timms_own_models_are_told_by_their_shapes(name: str) -> None:
    with torch.device("meta"):
        theirs: Any = timm.create_model(name)
    config = timm_config(theirs.state_dict(), theirs.global_pool)
    block = theirs.blocks[0]
    assert config.num_heads == block.attn.num_heads
    assert config.norm_eps == block.norm1.eps
    assert config.image_size == theirs.patch_embed.img_size[0]
    assert config.activation == GELU[type(block.mlp.act).__name__]
    assert {"token": "cls", "avg": "gap", "map": "map", "": config.pool}[theirs.global_pool] == config.pool
    with torch.device("meta"):
        ours = VisionTransformer(config)
    assert {n: t.shape for n, t in ours.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit_dwee_patch16_reg1_gap_256", r"not in the model: .*attn.lambda"),
        ("vit_base_patch32_clip_quickgelu_224", "a ViT with QuickGELU, which vitscale's models are not"),
        ("vit_base_patch16_rpn_224", "a ViT with norms after attention and MLP"),
    ],
)
def test_what_vitscale_does_not_have_is_named(name: str, said: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(name)
    with pytest.raises(UserError, match=said):
        from_timm(theirs.state_dict(), {"architecture": name}, "safetensors")


def test_the_gelu_of_every_siglip_of_timm() -> None:
    found, expected = {}, {}
    for name in timm.list_models("*siglip*", module="vision_transformer"):
        with torch.device("meta"):
            theirs: Any = timm.create_model(name)
        found[name] = from_timm(theirs.state_dict(), {"architecture": name}, "safetensors").config.activation
        expected[name] = {"GELU": "gelu", "GELUTanh": "gelu_tanh"}[type(theirs.blocks[0].mlp.act).__name__]
    assert len(found) > 30
    assert found == expected


def test_the_hubs_description_says_how_images_are_prepared_and_what_is_pooled(tmp_path: Path) -> None:
    theirs = timm_vit(WIDE)
    randomise(theirs)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    told = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bicubic", "crop_pct": 0.95}
    (tmp_path / "config.json").write_text(json.dumps({"global_pool": "avg", "pretrained_cfg": told}))
    weights = load_weights(tmp_path)
    assert weights.preprocessing is not None
    assert (weights.preprocessing.mean, weights.preprocessing.crop_pct) == ((0.1, 0.2, 0.3), 0.95)
    assert (weights.config.pool, weights.config.class_token, weights.config.final_norm) == ("gap", True, "tokens")
    theirs.global_pool = "avg"
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(images()), theirs.eval()(images()), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ DINOv3
def eva(**changes: Any) -> Eva:
    fields: dict[str, Any] = dict(
        img_size=224, patch_size=32, embed_dim=128, depth=2, num_heads=2, mlp_ratio=3, qkv_bias=False, init_values=1e-5,
        rope_type="dinov3", rope_temperature=100, rope_rotate_half=True, use_rot_pos_emb=True, use_abs_pos_emb=False,
        num_reg_tokens=4, use_fc_norm=False, norm_layer=partial(nn.LayerNorm, eps=1e-5), num_classes=5,
        global_pool="avg",
    )  # fmt: skip
    model = Eva(**fields | changes).eval()
    randomise(model)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu_mlp": True, "swiglu_align_to": 8},
        {"swiglu_mlp": True},
        {"qkv_bias": True, "qkv_fused": False},
        {"num_classes": 0},
    ],
    ids=["plain", "swiglu", "swiglu in one", "biases of query and value", "no head"],
)
@torch.no_grad()
def test_a_dinov3_of_timm(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("qkv_fused") is False:  # timm's own `_qkvb` models: one matrix, biases of queries and values
        changes = {"qkv_bias": True}
    theirs = eva(**changes)
    save_file(theirs.state_dict(), tmp_path / "m.safetensors")
    ours = load_model(tmp_path / "m.safetensors")
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    features = ours.forward_features(pixels)
    torch.testing.assert_close(features, theirs.forward_features(pixels), rtol=1e-4, atol=2e-5)
    if ours.config.num_classes:
        torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_dinov3_for_timm(activation: str, tmp_path: Path) -> None:
    config = replace(
        WIDE, pos_embed="rotary", num_registers=4, layer_scale=0.1, norm_eps=1e-5, qkv_bias=False, image_size=224,
        patch_size=32, depth=2, mlp_dim=384, num_classes=5, activation=activation,
    )  # fmt: skip
    ours = VisionTransformer(config).eval()
    randomise(ours)
    file = tmp_path / "m.safetensors"
    export_model(file, ours.state_dict(), config, format="timm", preprocessing=None, class_names=None)
    gated = {"swiglu_mlp": True, "swiglu_align_to": 8} if activation == "swiglu" else {}
    theirs = eva(global_pool="token", **gated)
    theirs.load_state_dict(load_file(file), strict=True)
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-4, atol=2e-5)
        again = load_model(file)
        assert again.config == config
        assert torch.equal(again(pixels), ours(pixels))


@pytest.mark.parametrize(
    "change",
    [
        {"num_fcs": 3},
        {"representation_size": 8},
        {"qk_scale": 0.2},
        {"v_shortcut": True},
        {"block": "parallel"},
        {"pos_embed": "sincos"},
        {"pool": "cls_gap"},
        {"patch_padding": "same"},
        {"num_registers": 2, "pos_embed_prefix": "class"},
        {"pos_embed": "rotary", "pre_norm": True},
    ],
    ids=str,
)
def test_what_timm_does_not_have_is_not_written(change: dict[str, Any], tmp_path: Path) -> None:
    config: ModelConfig = replace(WIDE, **change)
    with pytest.raises(UserError, match=r"timm.*(no such model|no place)"):
        export_model(
            tmp_path / "m", VisionTransformer(config).state_dict(), config, format="timm", preprocessing=None,
            class_names=None,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_grid_that_is_not_square_needs_its_image_size() -> None:
    with torch.device("meta"):
        state = timm.create_model("vit_tiny_patch16_224").state_dict()
    state["pos_embed"] = torch.empty(1, 190, 192, device="meta")
    with pytest.raises(UserError, match="189 or 190 patches, which is no square grid"):
        from_timm(state, {}, "safetensors")
    known = Known(image_size=(160, 304))  # 10 x 19 patches, and none for the class token
    assert from_timm(state, {}, "safetensors", known).config.image_size == (160, 304)
    with pytest.raises(UserError, match="which images of 160x320 in 16s do not have"):
        from_timm(state, {}, "safetensors", Known(image_size=(160, 320)))


@torch.no_grad()
def test_what_a_file_does_not_say_a_user_may(tmp_path: Path) -> None:
    config = replace(WIDE, num_heads=4, activation="gelu_tanh", norm_eps=1e-3)
    theirs = timm_vit(config).eval()
    randomise(theirs)
    save_file(theirs.state_dict(), tmp_path / "m.safetensors")
    options = ["--heads", 4, "--activation", "gelu_tanh", "--norm-eps", 1e-3]
    done = run_main("import", tmp_path / "m.safetensors", tmp_path / "out.safetensors", *options)
    assert "taken as tanh GELU, epsilon 0.001, 4 heads, square" in done.out
    torch.testing.assert_close(
        load_model(tmp_path / "out.safetensors")(images()), theirs(images()), rtol=1e-5, atol=1e-5
    )
    again = run_main("import", tmp_path / "out.safetensors", tmp_path / "more.safetensors", *options)
    assert "the file says itself what num_heads, activation, norm_eps of its model are; leave them out" in again.err
    wrong = run_main("import", tmp_path / "m.safetensors", tmp_path / "more.safetensors", "--heads", 3)
    assert "3 heads do not divide a width of 128" in wrong.err
