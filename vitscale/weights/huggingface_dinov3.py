"""Hugging Face's DINOv3 ViT, a backbone without a classifier: tensors and `config.json` <-> a vitscale model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.weights.table import Entry, Table, linear, no_key_bias, of_model, same, stacked

KIND = "dinov3_vit"
_THETA = 100.0
_ACTIVATIONS = {
    (False, "gelu"): "gelu",
    (False, "gelu_new"): "gelu_tanh",
    (False, "gelu_pytorch_tanh"): "gelu_tanh",
    (True, "silu"): "swiglu",
}
"""`use_gated_mlp` and `hidden_act` -> activation."""


def dinov3_config(tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> ModelConfig:
    """The model.

    Raises:
        UserError: A part that vitscale's models do not have.
        KeyError, TypeError, ValueError: Something is missing in the description.
    """
    gated, act = bool(description.get("use_gated_mlp")), str(description.get("hidden_act", "gelu"))
    if (gated, act) not in _ACTIVATIONS:
        raise UserError(f"a DINOv3 with hidden_act {act!r}{' in a gated MLP' if gated else ''}, which is not read")
    theta = description.get("rope_theta", _THETA)
    if theta != _THETA:
        raise UserError(f"rotary positions with rope_theta {theta}; vitscale's have {_THETA:g}")
    biases = {part: f"layer.0.attention.{part}_proj.bias" in tensors for part in "qkv"}
    if biases["q"] != biases["v"] or (biases["k"] and not biases["q"]):
        raise UserError("biases of queries without those of values, or of keys alone, which vitscale's models have not")
    size = description["image_size"]
    return ModelConfig(
        image_size=size if isinstance(size, int) else (int(size[0]), int(size[1])),
        in_channels=int(description.get("num_channels", 3)),
        patch_size=int(description["patch_size"]),
        embed_dim=int(description["hidden_size"]),
        depth=int(description["num_hidden_layers"]),
        num_heads=int(description["num_attention_heads"]),
        mlp_dim=int(description["intermediate_size"]),
        num_classes=0,
        pool="cls",
        num_registers=int(description.get("num_register_tokens", 0)),
        pos_embed="rotary",
        norm_eps=float(description.get("layer_norm_eps", 1e-5)),
        qkv_bias=biases["q"],
        activation=_ACTIVATIONS[gated, act],  # type: ignore[arg-type]
        layer_scale=float(description.get("layerscale_value", 1.0)),
    )


def dinov3_description(config: ModelConfig) -> dict[str, Any]:
    """`config.json` for a model.

    Raises:
        UserError: It has a classifier, for which transformers has no DINOv3.
    """
    if config.num_classes:
        raise UserError("Hugging Face has no DINOv3 with a classifier; export with --num-classes 0")
    gated, act = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}[config.activation]
    return {
        "model_type": KIND,
        "architectures": ["DINOv3ViTModel"],
        "image_size": config.image_size if isinstance(config.image_size, int) else list(config.image_size),
        "num_channels": config.in_channels,
        "patch_size": config.patch_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "num_register_tokens": config.num_registers,
        "hidden_act": act,
        "use_gated_mlp": gated,
        "query_bias": config.qkv_bias,
        "key_bias": config.qkv_bias,
        "value_bias": config.qkv_bias,
        "layer_norm_eps": config.norm_eps,
        "layerscale_value": config.layer_scale,
        "rope_theta": _THETA,
    }


def dinov3_table(config: ModelConfig, *, key_bias: bool) -> Table:
    """Names and layouts.

    Args:
        config: The model.
        key_bias: Whether keys have a bias where queries and values do; the published models' have none.

    Raises:
        UserError: The model has a part that Hugging Face's DINOv3 does not.
    """
    table: dict[str, Entry] = {
        "cls_token": same("embeddings.cls_token"),
        "reg_token": same("embeddings.register_tokens"),
        **linear("patch_embed.proj", "embeddings.patch_embeddings"),
        **linear("norm", "norm"),
    }
    for block in range(config.depth):
        ours, theirs = f"blocks.{block}.", f"layer.{block}."
        attention = f"{theirs}attention."
        table |= linear(f"{ours}norm1", f"{theirs}norm1") | linear(f"{ours}norm2", f"{theirs}norm2")
        table |= linear(f"{ours}attn.proj", f"{attention}o_proj") | linear(f"{ours}mlp.fc2", f"{theirs}mlp.down_proj")
        table[f"{ours}attn.qkv.weight"] = stacked(*(f"{attention}{part}_proj.weight" for part in "qkv"))
        table[f"{ours}attn.qkv.bias"] = (
            stacked(*(f"{attention}{part}_proj.bias" for part in "qkv"))
            if key_bias
            else no_key_bias(f"{attention}q_proj.bias", f"{attention}v_proj.bias")
        )
        for number in (1, 2):
            table[f"{ours}ls{number}.gamma"] = same(f"{theirs}layer_scale{number}.lambda1")
        parts = ("gate_proj", "up_proj") if config.activation == "swiglu" else ("up_proj",)
        for tensor in ("weight", "bias"):
            table[f"{ours}mlp.fc1.{tensor}"] = stacked(*(f"{theirs}mlp.{part}.{tensor}" for part in parts))
    return of_model(table, config, whose="Hugging Face's DINOv3")
