from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from helpers.timm_vit import TINY, randomise, timm_vit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitscale.config.schema import ModelConfig
from vitscale.models.create import ModelOverrides, create_model
from vitscale.models.position import grid_height_width
from vitscale.models.vit import VisionTransformer

# Equal formulas in float32: what is left is the order of summation, some 1e-7 relative, through a few blocks.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

VARIANTS: dict[str, dict[str, Any]] = {
    "cls": {},
    "gap": {"pool": "gap"},
    "no qkv bias": {"qkv_bias": False},
    "tanh": {"activation": "gelu_tanh"},
    "epsilon": {"norm_eps": 1e-2},
    "not square": {"image_size": (8, 20)},
    "gray, no head": {"in_channels": 1, "num_classes": 0},
    "gap, not square, no head": {"pool": "gap", "image_size": (20, 8), "num_classes": 0},
    "one block": {"depth": 1},
    "map": {"pool": "map"},
    "map with a class token": {"pool": "map", "class_token": True, "activation": "gelu_tanh"},
    "class token, but gap": {"pool": "gap", "class_token": True},
    "no pooling": {"pool": "none", "class_token": True},
    "norm before the mean": {"pool": "gap", "final_norm": "tokens"},
    "norm after the class token": {"final_norm": "pooled"},
    "no last norm": {"final_norm": "none"},
    "registers": {"num_registers": 4},
    "registers without class token": {"num_registers": 2, "pool": "gap"},
    "no positions before the patches": {"num_registers": 2, "pos_embed_prefix": "none"},
    "norm before the blocks": {"pre_norm": True},
    "layer scale": {"layer_scale": 1e-2},
    "qk norm": {"qk_norm": True},
    "rmsnorm": {"norm": "rmsnorm", "norm_eps": 1e-3, "qk_norm": True, "pre_norm": True},
    "swiglu": {"activation": "swiglu"},
    "any size": {"dynamic_image_size": True},
    "indivisible images, padded": {"patch_padding": "corner", "image_size": (15, 18), "dynamic_image_size": True},
}


def images_for(config: ModelConfig, batch: int = 3) -> Tensor:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, config.in_channels, height, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_outputs_and_gradients_are_timms(changes: dict[str, Any]) -> None:
    config = replace(TINY, **changes)
    ours, theirs = VisionTransformer(config).eval(), timm_vit(config).eval()
    randomise(ours)
    if config.patch_padding != "none":  # timm's table of positions does not know of the padding
        theirs.pos_embed = nn.Parameter(torch.empty_like(ours.pos_embed))
        theirs.patch_embed.grid_size = grid_height_width(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = images_for(config)

    torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images), **TOLERANCE)
    logits, expected = ours(images), theirs(images)
    torch.testing.assert_close(logits, expected, **TOLERANCE)

    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_parameters_have_timms_names_in_timms_order(changes: dict[str, Any]) -> None:
    config = replace(TINY, **changes)
    assert list(VisionTransformer(config).state_dict()) == list(timm_vit(config).state_dict())


def test_dropout_and_drop_path_draw_like_timm_in_training() -> None:
    config = replace(TINY, dropout=0.3, attention_dropout=0.2, drop_path=0.4, num_registers=1)
    ours, theirs = VisionTransformer(config).train(), timm_vit(config).train()
    randomise(ours)
    theirs.load_state_dict(ours.state_dict())
    images = images_for(config)
    torch.manual_seed(3)
    drawn = ours(images)
    torch.manual_seed(3)
    torch.testing.assert_close(drawn, theirs(images), **TOLERANCE)
    assert not torch.allclose(drawn, ours.eval()(images))
    torch.testing.assert_close(ours(images), theirs.eval()(images), **TOLERANCE)


def test_checkpointed_blocks_give_the_same_gradients_with_dropout_on() -> None:
    config = replace(TINY, dropout=0.3, attention_dropout=0.2, drop_path=0.5)
    model = VisionTransformer(config).train()
    randomise(model)
    images = images_for(config, batch=8)

    def gradients(recompute: bool) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(4)
        tokens = model.pos_drop(model.patch_embed(images).tokens + model.pos_embed[:, 1:])
        for block in model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if recompute else block(tokens)
        tokens.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for kept, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pool": "gap"},
        {"pool": "map", "num_registers": 2, "representation_size": 5, "layer_scale": 0.1, "qk_norm": True},
        {"pool": "cls_gap", "pre_norm": True, "final_norm": "both", "norm": "rmsnorm", "activation": "swiglu"},
        {"block": "parallel", "layer_scale": 0.1, "qk_norm": True, "pos_embed": "rotary", "num_fcs": 3},
    ],
)
def test_initialisation_sets_everything_after_meta_and_poison(changes: dict[str, Any]) -> None:
    config = replace(TINY, **changes)
    with torch.device("meta"):
        model = VisionTransformer(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(5)
    model.init_weights()
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name

    torch.manual_seed(5)
    direct = VisionTransformer(config)
    for (name, tensor), other in zip(direct.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), f"{name} depends on where the model was built"


def test_initialisation_follows_the_formulas() -> None:
    config = replace(TINY, embed_dim=192, mlp_dim=384, image_size=64, patch_size=8, depth=2)
    torch.manual_seed(6)
    state = VisionTransformer(config).state_dict()
    fan_in = 3 * 8 * 8
    expected_std = {
        "patch_embed.proj.weight": fan_in**-0.5,
        "pos_embed": 192**-0.5,
        "blocks.0.attn.qkv.weight": (2 / (192 + 192)) ** 0.5,  # of each [dim, dim] matrix, not of the fused one
        "blocks.1.attn.proj.weight": (2 / (192 + 192)) ** 0.5,
        "blocks.0.mlp.fc1.weight": (2 / (192 + 384)) ** 0.5,
        "blocks.1.mlp.fc2.weight": (2 / (384 + 192)) ** 0.5,
        "blocks.0.mlp.fc1.bias": 1e-6,
        "blocks.0.mlp.fc2.bias": 1e-6,
    }
    for name, std in expected_std.items():
        count = state[name].numel()
        # A sample's standard deviation strays by std / sqrt(2 n); its mean by std / sqrt(n). Five times that.
        assert state[name].std().item() == pytest.approx(std, rel=5 / (2 * count) ** 0.5), name
        assert abs(state[name].mean().item()) < 5 * std / count**0.5, name
    # Uniform ends at sqrt(3) standard deviations; jax's lecun_normal at 2 of the uncut normal.
    for name in ("blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"):
        assert state[name].abs().max().item() == pytest.approx(expected_std[name] * 3**0.5, rel=1e-3)
    cut = 2 * expected_std["patch_embed.proj.weight"] / 0.87962566103423978
    assert state["patch_embed.proj.weight"].abs().max().item() == pytest.approx(cut, rel=1e-2)
    for name in ("cls_token", "head.weight", "head.bias", "patch_embed.proj.bias", "blocks.0.attn.qkv.bias"):
        assert not state[name].any(), name
    for name in ("norm.weight", "blocks.1.norm2.weight"):
        assert (state[name] == 1).all(), name
    for name in ("norm.bias", "blocks.1.norm2.bias", "blocks.0.attn.proj.bias"):
        assert not state[name].any(), name


def test_drop_path_grows_linearly_over_the_blocks() -> None:
    config = replace(TINY, depth=5, drop_path=0.2)
    rates = [block.drop_path.rate for block in VisionTransformer(config).blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    rates = [block.drop_path.rate for block in VisionTransformer(replace(config, drop_path_schedule="constant")).blocks]
    assert rates == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("shape", [(2, 3, 16, 20), (2, 1, 16, 16), (2, 3, 32, 32)])
def test_other_images_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"this model takes \[batch, 3, 16, 16\]") as caught:
        VisionTransformer(TINY)(torch.zeros(shape))
    assert str(list(shape)) in str(caught.value)


def test_impossible_models_are_refused() -> None:
    with pytest.raises(ValueError, match="5 heads do not divide a width of 24"):
        VisionTransformer(replace(TINY, num_heads=5))
    with pytest.raises(
        ValueError, match="patches of 4 pixels do not divide images of 18x16; the next smaller size is 16x16"
    ):
        VisionTransformer(replace(TINY, image_size=(18, 16)))
    with pytest.raises(ValueError, match="images of 16x19"):
        VisionTransformer(replace(TINY, image_size=(16, 19)))
    with pytest.raises(ValueError, match=r"drop path rate 1.0 is not in \[0, 1\)"):
        VisionTransformer(replace(TINY, drop_path=1.0))


def test_create_model_takes_the_fields_of_the_config() -> None:
    model = create_model("Ti/16", image_size=(32, 64), num_classes=3, pool="gap", depth=1)
    assert model(torch.zeros(1, 3, 32, 64)).shape == (1, 3)
    assert (model.config.embed_dim, model.config.depth, model.config.name) == (192, 1, "Ti/16")
    assert isinstance(model, nn.Module)
    with pytest.raises(ValueError, match=r"image_sise.*did you mean 'image_size'"):
        create_model("Ti/16", image_sise=32)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'B/16'"):
        create_model("vit_base_patch16_224")


def test_the_overrides_of_create_model_are_those_of_the_config() -> None:
    own = {"name", "activation_checkpointing"}  # the first is the argument; the other is nothing that a model computes
    assert set(ModelOverrides.__annotations__) == {field.name for field in fields(ModelConfig)} - own
