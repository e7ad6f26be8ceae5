"""DINOv2 as Hugging Face computes it: SwiGLU, LayerScale, registers, a classifier of class token and mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.timm_vit import TINY, randomise
from torch import Tensor
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    PreTrainedModel,
)

from vitscale.config.schema import ModelConfig
from vitscale.models.vit import VisionTransformer

DINOV2 = replace(
    TINY, pool="cls_gap", layer_scale=1e-5, pos_embed_resize="bicubic", mlp_dim=96, dynamic_image_size=True
)
_PARTS = {
    "norm1": "norm1", "norm2": "norm2", "attn.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip


def theirs(config: ModelConfig) -> PreTrainedModel:
    fields = {
        "hidden_size": config.embed_dim, "num_hidden_layers": config.depth, "num_attention_heads": config.num_heads,
        "mlp_ratio": 4, "image_size": 16, "patch_size": 4, "num_labels": 7, "layer_norm_eps": 1e-6,
        "use_swiglu_ffn": config.activation == "swiglu",
    }  # fmt: skip
    if config.num_registers:
        fields["num_register_tokens"] = config.num_registers
        return Dinov2WithRegistersForImageClassification(Dinov2WithRegistersConfig(**fields)).eval()
    return Dinov2ForImageClassification(Dinov2Config(**fields)).eval()


def to_theirs(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Names below the model's prefix."""
    embed = "embeddings."
    named = {
        f"{embed}cls_token": state["cls_token"], f"{embed}position_embeddings": state["pos_embed"],
        f"{embed}patch_embeddings.projection.weight": state["patch_embed.proj.weight"],
        f"{embed}patch_embeddings.projection.bias": state["patch_embed.proj.bias"],
        "layernorm.weight": state["norm.weight"], "layernorm.bias": state["norm.bias"],
    }  # fmt: skip
    if config.num_registers:
        named[f"{embed}register_tokens"] = state["reg_token"]
    parts = dict(_PARTS)
    if config.activation == "swiglu":
        parts.pop("mlp.fc1")
        parts["mlp.fc2"] = "mlp.down_proj"
    for index in range(config.depth):
        ours, layer = f"blocks.{index}.", f"encoder.layer.{index}."
        for kind in ("weight", "bias"):
            named |= {f"{layer}{part}.{kind}": state[f"{ours}{mine}.{kind}"] for mine, part in parts.items()}
            for name, tensor in zip("qkv", state[f"{ours}attn.qkv.{kind}"].chunk(3), strict=True):
                named[f"{layer}attention.{name}_proj.{kind}"] = tensor
            if config.activation == "swiglu":
                gate, value = state[f"{ours}mlp.fc1.{kind}"].chunk(2)
                named |= {f"{layer}mlp.gate_proj.{kind}": gate, f"{layer}mlp.up_proj.{kind}": value}
        named[f"{layer}layer_scale1.lambda1"] = state[f"{ours}ls1.gamma"]
        named[f"{layer}layer_scale2.lambda1"] = state[f"{ours}ls2.gamma"]
    return named


@pytest.mark.parametrize("size", [(16, 16), (24, 12)])
@pytest.mark.parametrize(
    "config",
    [
        DINOV2,
        replace(DINOV2, activation="swiglu", mlp_dim=64),  # (2 / 3 of 4 * 24, rounded up to a multiple of 8)
        replace(DINOV2, num_registers=4, pos_embed_prefix="class", pos_embed_resize="bicubic_antialias"),
    ],
    ids=["gelu", "swiglu", "registers"],
)
def test_logits_are_those_of_hugging_face(config: ModelConfig, size: tuple[int, int]) -> None:
    ours, other = VisionTransformer(config).eval(), theirs(config)
    randomise(ours)
    base = other.base_model
    missing, unexpected = base.load_state_dict(to_theirs(ours.state_dict(), config), strict=False)
    assert set(missing) <= {"embeddings.mask_token"}
    assert not unexpected
    other.classifier.load_state_dict({"weight": ours.head.weight, "bias": ours.head.bias})
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = other(images).logits
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)
