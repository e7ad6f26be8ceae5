from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.timm_vit import TINY, randomise
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.weights.adapt import adapt


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    model = VisionTransformer(config)
    randomise(model)
    return model.state_dict()


def test_the_same_model_takes_every_tensor_as_it_is() -> None:
    state = weights_of(TINY)
    adapted, report = adapt(state, TINY, TINY, head="keep")
    assert all(adapted[name] is state[name] for name in state)
    assert report.matched == tuple(state)
    assert report.resized == report.reinitialised == report.missing == report.unexpected == ()
    assert str(report) == f"{len(state)} tensors as they were"


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_positions_follow_the_image_size(pool: str, dtype: torch.dtype) -> None:
    source = replace(TINY, image_size=(8, 32), pool=pool)
    target = replace(source, image_size=(16, 16))  # as many patches, at other places
    state = {name: tensor.to(dtype) for name, tensor in weights_of(source).items()}
    adapted, report = adapt(state, source, target, head="keep")
    prefix = 1 if pool == "cls" else 0
    expected = resample_abs_pos_embed(state["pos_embed"], [4, 4], [2, 8], num_prefix_tokens=prefix)
    torch.testing.assert_close(adapted["pos_embed"], expected)
    assert adapted["pos_embed"].dtype == dtype
    assert report.resized == ("pos_embed",)
    assert set(report.matched) == set(state) - {"pos_embed"}
    VisionTransformer(target).load_state_dict(adapted, strict=True)


def test_the_head_is_begun_anew_at_zero_for_other_classes() -> None:
    target = replace(TINY, num_classes=3)
    adapted, report = adapt(weights_of(TINY), TINY, target, head="zero")
    assert adapted["head.weight"].shape == (3, 24)
    assert not adapted["head.weight"].any()
    assert not adapted["head.bias"].any()
    assert report.reinitialised == ("head.weight", "head.bias")
    assert report.missing == ()
    assert "head.weight, head.bias anew at zero" in str(report)


def test_zero_means_zero_for_the_same_classes_too_in_the_type_of_the_rest() -> None:
    state = {name: tensor.half() for name, tensor in weights_of(TINY).items()}
    adapted, _ = adapt(state, TINY, TINY, head="zero")
    assert not adapted["head.weight"].any()
    assert {tensor.dtype for tensor in adapted.values()} == {torch.float16}


def test_a_model_without_a_head_gets_one_or_loses_it() -> None:
    headless = replace(TINY, num_classes=0)
    adapted, report = adapt(weights_of(headless), headless, TINY, head="zero")
    assert adapted["head.weight"].shape == (7, 24)
    assert report.missing == ("head.weight", "head.bias")
    for head in ("keep", "zero"):
        adapted, report = adapt(weights_of(TINY), TINY, headless, head=head)
        assert "head.weight" not in adapted
        assert report.unexpected == ("head.weight", "head.bias")


def test_keeping_a_head_needs_the_same_classes() -> None:
    with pytest.raises(UserError, match="the weights have 7, the model 3; use head: zero"):
        adapt(weights_of(TINY), TINY, replace(TINY, num_classes=3), head="keep")
    headless = replace(TINY, num_classes=0)
    with pytest.raises(UserError, match="these have none; use head: zero"):
        adapt(weights_of(headless), headless, TINY, head="keep")


def test_every_misshapen_tensor_is_named() -> None:
    with pytest.raises(UserError) as caught:
        adapt(weights_of(TINY), TINY, replace(TINY, mlp_dim=40), head="keep")
    message = caught.value.message
    assert "blocks.{0..2}.mlp.fc1.weight: [48, 24] in place of [40, 24]" in message
    assert "blocks.{0..2}.mlp.fc1.bias: [48] in place of [40]" in message
    assert "blocks.{0..2}.mlp.fc2.weight: [24, 48] in place of [24, 40]" in message
    assert "attn" not in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 5}, r"missing: blocks.{3..4}.norm1.weight"),
        ({"depth": 2}, r"not in the model: blocks.2.norm1.weight"),
        ({"pool": "gap"}, r"the weights need pool: cls \(asked for: gap\)"),
        ({"qkv_bias": False}, r"the weights need qkv_bias: True \(asked for: False\)"),
        ({"num_heads": 6}, r"the weights need num_heads: 3 \(asked for: 6\)"),
        ({"activation": "gelu_tanh"}, r"the weights need activation: gelu \(asked for: gelu_tanh\)"),
        ({"norm_eps": 1e-5}, r"the weights need norm_eps: 1e-06 \(asked for: 1e-05\)"),
        ({"image_size": 18}, r"patches of 4 pixels do not divide images of 18x18"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        adapt(weights_of(TINY), TINY, replace(TINY, **changes), head="keep")


def test_a_state_that_is_not_of_its_config_is_refused() -> None:
    state = weights_of(TINY)
    del state["blocks.1.norm1.bias"]
    with pytest.raises(UserError, match=r"missing: blocks.1.norm1.bias"):
        adapt(state, TINY, TINY, head="keep")


@pytest.mark.parametrize("patch_size", [2, 8])
def test_patch_kernels_follow_the_patch_size(patch_size: int) -> None:
    source = replace(TINY, image_size=16)
    target = replace(source, image_size=24, patch_size=patch_size)
    state = weights_of(source)
    adapted, report = adapt(state, source, target, head="keep")
    kernel = state["patch_embed.proj.weight"]
    expected = resample_patch_embed(kernel, [patch_size, patch_size])
    torch.testing.assert_close(adapted["patch_embed.proj.weight"], expected, rtol=1e-5, atol=1e-5)
    side = 24 // patch_size
    positions = resample_abs_pos_embed(state["pos_embed"], [side, side], [4, 4])
    torch.testing.assert_close(adapted["pos_embed"], positions)
    assert report.resized == ("patch_embed.proj.weight", "pos_embed")
    VisionTransformer(target).load_state_dict(adapted, strict=True)
    plain, _ = adapt(state, source, target, head="keep", patch_resize="bilinear")
    expected = torch.nn.functional.interpolate(kernel, size=(patch_size,) * 2, mode="bilinear")
    torch.testing.assert_close(plain["patch_embed.proj.weight"], expected)


@torch.no_grad()
def test_a_model_for_larger_patches_sees_enlarged_images_as_before() -> None:
    """FlexiViT's claim, through a whole model: where patches grow, nothing is lost."""
    source = replace(TINY, image_size=16)
    target = replace(source, image_size=32, patch_size=8)
    state = weights_of(source)
    small, large = VisionTransformer(source).eval(), VisionTransformer(target).eval()
    small.load_state_dict(state)
    large.load_state_dict(adapt(state, source, target, head="keep").state)
    images = torch.randn(2, 3, 16, 16)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # each patch is enlarged by itself
    shape = patches.shape
    enlarged = torch.nn.functional.interpolate(
        patches.reshape(-1, 1, 4, 4).expand(-1, 2, -1, -1), size=(8, 8), mode="bicubic", antialias=True
    )[:, 0]
    enlarged = enlarged.reshape(*shape[:4], 8, 8).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(large(enlarged), small(images), rtol=1e-4, atol=1e-4)


def test_the_head_is_picked_class_by_class() -> None:
    state = weights_of(TINY)
    target = replace(TINY, num_classes=4)
    adapted, report = adapt(state, TINY, target, head="map", classes=(6, None, 0, 6))
    for name in ("head.weight", "head.bias"):
        expected = torch.stack([state[name][6], torch.zeros_like(state[name][0]), state[name][0], state[name][6]])
        assert torch.equal(adapted[name], expected)
    assert report.mapped == ("head.weight", "head.bias")
    assert report.reinitialised == ()
    assert "head.weight, head.bias by class, 1 of them unknown and zero" in str(report)
    with pytest.raises(UserError, match="head: map needs weights with a classifier"):
        adapt(weights_of(replace(TINY, num_classes=0)), replace(TINY, num_classes=0), target, head="map", classes=(0,))


@pytest.mark.parametrize("covered", ["all", "class", "none"])
def test_only_the_prefix_that_has_positions_is_kept_aside(covered: str) -> None:
    source = replace(TINY, image_size=16, num_registers=2, pos_embed_prefix=covered)
    target = replace(source, image_size=24)
    state = weights_of(source)
    prefix = {"all": 3, "class": 1, "none": 0}[covered]
    adapted, _ = adapt(state, source, target, head="keep")
    expected = resample_abs_pos_embed(state["pos_embed"], [6, 6], [4, 4], num_prefix_tokens=prefix)
    torch.testing.assert_close(adapted["pos_embed"], expected)
    VisionTransformer(target).load_state_dict(adapted, strict=True)


def test_positions_are_resized_in_the_way_of_the_target() -> None:
    source = replace(TINY, image_size=16)
    state = weights_of(source)
    grid = state["pos_embed"][:, 1:].reshape(1, 4, 4, 24).permute(0, 3, 1, 2)
    ways = {
        "bicubic": dict(mode="bicubic"),
        "bilinear": dict(mode="bilinear"),
        "bilinear_antialias": dict(mode="bilinear", antialias=True),
        "corner_aligned": dict(mode="bilinear", align_corners=True),
    }
    for way, how in ways.items():
        target = replace(source, image_size=8, pos_embed_resize=way)
        adapted, _ = adapt(state, source, target, head="keep")
        expected = torch.nn.functional.interpolate(grid, size=(2, 2), **how)  # type: ignore[arg-type]
        torch.testing.assert_close(adapted["pos_embed"][:, 1:], expected.permute(0, 2, 3, 1).flatten(1, 2))


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 6},
        {"activation": "gelu_tanh"},
        {"norm_eps": 1e-12},
        {"qk_scale": 0.1},
        {"v_shortcut": True},
        {"pool": "none", "class_token": True},
        {"pool": "gap", "class_token": True, "final_norm": "tokens"},
        {"patch_padding": "corner"},
    ],
    ids=str,
)
def test_what_computes_something_else_with_equal_tensors_is_refused(change: dict[str, Any]) -> None:
    target = replace(TINY, **change)
    state = weights_of(TINY)
    assert {n: t.shape for n, t in weights_of(target).items()} == {n: t.shape for n, t in state.items()}
    with pytest.raises(UserError, match=f"the weights need .*{next(iter(change))}: "):
        adapt(state, TINY, target, head="keep")


def test_what_training_alone_knows_of_may_differ() -> None:
    target = replace(TINY, drop_path=0.2, dropout=0.1, frozen_stages=1, class_token=True, name="any")
    state = weights_of(TINY)
    adapted, report = adapt(state, TINY, target, head="keep")
    assert report.matched == tuple(state)
    assert all(adapted[name] is state[name] for name in state)
