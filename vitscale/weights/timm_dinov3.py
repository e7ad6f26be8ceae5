"""timm's DINOv3, an `Eva` with rotary positions: the names of its tensors, and the model from their shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.weights.table import Entry, Table, linear, no_key_bias, of_model, same, stacked

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_HEAD_DIM = 64
_HEADS_7B = (4096, 32)
"""Width and heads of the one DINOv3 whose heads are not 64 wide."""
_SIGNS = ("patch_embed.proj.weight", "cls_token", "reg_token", "blocks.0.gamma_1", "blocks.0.attn.qkv.weight")
_GATED = "blocks.0.mlp.fc1_g.weight"
_PLAIN = "blocks.0.mlp.fc1.weight"


def is_dinov3(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of a DINOv3: class token, registers and LayerScale, and no positions."""
    return all(name in state for name in _SIGNS) and "pos_embed" not in state


def dinov3_config(state: Mapping[str, Tensor]) -> ModelConfig:
    """The model. The image size is 224 or, where patches do not divide it, 14 patches; any other gives the same model.

    Raises:
        UserError: A part that DINOv3 does not have.
    """
    embed_dim, in_channels, patch, patch_width = state["patch_embed.proj.weight"].shape
    if patch != patch_width:
        raise UserError(f"patches of {patch}x{patch_width} pixels; vitscale's are square")
    if embed_dim % _HEAD_DIM:
        raise UserError(f"the number of heads cannot be told: {embed_dim} is no multiple of {_HEAD_DIM}, their width")
    if "blocks.0.mlp.fc2.weight" not in state:
        raise UserError("looks like timm's DINOv3, and has no blocks.0.mlp.fc2.weight")
    mlp_dim = state["blocks.0.mlp.fc2.weight"].shape[1]
    swiglu = _GATED in state or (_PLAIN in state and len(state[_PLAIN]) == 2 * mlp_dim)
    has_head = "head.weight" in state
    return ModelConfig(
        image_size=224 if 224 % patch == 0 else 14 * patch,
        in_channels=in_channels,
        patch_size=patch,
        embed_dim=embed_dim,
        depth=1 + max(int(found[1]) for name in state if (found := _BLOCK.match(name))),
        num_heads=_HEADS_7B[1] if embed_dim == _HEADS_7B[0] else embed_dim // _HEAD_DIM,
        mlp_dim=mlp_dim,
        num_classes=len(state["head.weight"]) if has_head else 0,
        pool="gap" if has_head else "cls",  # timm's DINOv3 pools the mean
        class_token=True if has_head else None,
        final_norm="tokens" if has_head else None,
        num_registers=state["reg_token"].shape[1],
        pos_embed="rotary",
        norm_eps=1e-5,
        qkv_bias="blocks.0.attn.q_bias" in state,
        activation="swiglu" if swiglu else "gelu",
        layer_scale=1e-5,
    )


def dinov3_table(config: ModelConfig, *, gated: bool) -> Table:
    """Names and layouts.

    Args:
        config: The model.
        gated: Whether the two halves of SwiGLU's first layer are tensors of their own (`fc1_g`, `fc1_x`).

    Raises:
        UserError: The model has a part that timm's does not.
    """
    table: dict[str, Entry] = {name: same(name) for name in ("cls_token", "reg_token")}
    table |= linear("patch_embed.proj", "patch_embed.proj") | linear("norm", "norm") | linear("fc_norm", "fc_norm")
    table |= linear("head", "head")
    for block in range(config.depth):
        path = f"blocks.{block}."
        for part in ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2"):
            table |= linear(path + part, path + part)
        table[f"{path}attn.qkv.weight"] = same(f"{path}attn.qkv.weight")
        table[f"{path}attn.qkv.bias"] = no_key_bias(f"{path}attn.q_bias", f"{path}attn.v_bias")
        table[f"{path}ls1.gamma"], table[f"{path}ls2.gamma"] = same(f"{path}gamma_1"), same(f"{path}gamma_2")
        if gated:
            for tensor in ("weight", "bias"):
                table[f"{path}mlp.fc1.{tensor}"] = stacked(*(f"{path}mlp.fc1_{half}.{tensor}" for half in "gx"))
    return of_model(table, config, whose="timm's model with rotary positions")
