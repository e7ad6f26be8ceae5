"""mmpretrain's (and mmcls's) Vision Transformers: `backbone.` and `head.` of a checkpoint -> a vitscale model.

A checkpoint does not say what it is but by shapes: heads are those of mmpretrain's own sizes, GELU is exact, epsilon is
1e-6, the grid is square, and positions are resized as mmpretrain does, bicubic without antialias. No files here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.config.sizes import SIZES
from vitscale.errors import UserError
from vitscale.weights.content import Weights, describe
from vitscale.weights.table import Entry, Table, same, to_ours, to_theirs

_PATCHES = "patch_embed.projection.weight"
_BLOCK = re.compile(r"layers\.(\d+)\.")
_BACKBONE = "backbone."
_SMALL = (768, 8, 2304)
"""Width, depth and MLP width of mmpretrain's `small`, which has 8 heads and is no S/16."""
_PREPROCESSOR = "data_preprocessor."

_PARTS = {
    "norm1": "ln1",
    "attn.qkv": "attn.qkv",
    "attn.proj": "attn.proj",
    "norm2": "ln2",
    "mlp.fc1": "ffn.layers.0.0",
    "mlp.fc2": "ffn.layers.1",
}


def is_mmpretrain(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of one of its ViTs, with its head or the backbone alone."""
    return any(name.removeprefix(_BACKBONE) == _PATCHES for name in state)


def from_mmpretrain(state: Mapping[str, Tensor]) -> Weights:
    """The model.

    Args:
        state: The tensors under their names in the file.

    Raises:
        UserError: A part that vitscale's models do not have, or tensors missing or too much, each named.
    """
    tensors = {}
    for name, tensor in state.items():
        if not name.startswith(_PREPROCESSOR):
            # names in the table: those of the backbone bare, those of the head with their prefix
            tensors[name.removeprefix(_BACKBONE)] = tensor
    config = _config(tensors)
    return Weights(
        state=to_ours(tensors, _table(config), config),
        config=config,
        preprocessing=None,
        class_names=None,
        source=f"mmpretrain ViT, {describe(config)}, its grid of positions taken as square",
    )


def to_mmpretrain(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of its `ImageClassifier` with `VisionTransformer` and `VisionTransformerClsHead`."""
    tensors = to_theirs(state, _table(config))
    return {name if name.startswith("head.") else _BACKBONE + name: tensor for name, tensor in tensors.items()}


def _config(tensors: Mapping[str, Tensor]) -> ModelConfig:
    needed = ("pos_embed", "layers.0.ffn.layers.0.0.weight", "ln1.weight")
    absent = [name for name in needed if name not in tensors]
    if absent:
        raise UserError(f"an mmpretrain ViT without {', '.join(absent)}, which is not read")
    embed_dim, in_channels, patch, patch_width = tensors[_PATCHES].shape
    if patch != patch_width:
        raise UserError(f"patches of {patch}x{patch_width} pixels; vitscale's are square")
    depth = 1 + max(int(found[1]) for name in tensors if (found := _BLOCK.match(name)))
    mlp_dim = len(tensors["layers.0.ffn.layers.0.0.weight"])
    class_token = "cls_token" in tensors
    head, pre_logits = tensors.get("head.layers.head.weight"), tensors.get("head.layers.pre_logits.weight")
    side = math.isqrt(tensors["pos_embed"].shape[1] - class_token)
    if side * side + class_token != tensors["pos_embed"].shape[1]:
        raise UserError(f"{tensors['pos_embed'].shape[1]} positions, which is no square grid")
    return ModelConfig(
        image_size=patch * side,
        in_channels=in_channels,
        patch_size=patch,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=_heads(embed_dim, depth, mlp_dim),
        mlp_dim=mlp_dim,
        num_classes=0 if head is None else len(head),
        representation_size=None if pre_logits is None else len(pre_logits),
        pool="cls" if class_token else "gap",
        final_norm="tokens",
        pos_embed_resize="bicubic",
        qkv_bias="layers.0.attn.qkv.bias" in tensors,
        layer_scale=1.0 if "layers.0.attn.gamma1.weight" in tensors else None,
    )


def _heads(embed_dim: int, depth: int, mlp_dim: int) -> int:
    if (embed_dim, depth, mlp_dim) == _SMALL:
        return 8
    for size in SIZES.values():
        if (size.embed_dim, size.depth, size.mlp_dim) == (embed_dim, depth, mlp_dim):
            return size.num_heads
    if embed_dim % 64:
        raise UserError(
            f"the number of heads cannot be told: {embed_dim} wide, {depth} blocks is no size of mmpretrain, and not a "
            "multiple of 64, the usual width of a head"
        )
    return embed_dim // 64


def _table(config: ModelConfig) -> Table:
    table: dict[str, Entry] = {
        "pos_embed": same("pos_embed"),
        **_linear("patch_embed.proj", "patch_embed.projection"),
        **_linear("norm", "ln1"),
    }
    if config.pool == "cls":
        table["cls_token"] = same("cls_token")
    if config.num_classes:
        table |= _linear("head", "head.layers.head")
    if config.representation_size:
        table |= _linear("pre_logits.fc", "head.layers.pre_logits")
    for block in range(config.depth):
        ours, theirs = f"blocks.{block}.", f"layers.{block}."
        for mine, other in _PARTS.items():
            table |= _linear(ours + mine, theirs + other)
        if not config.qkv_bias:
            del table[f"{ours}attn.qkv.bias"]
        if config.layer_scale:
            table[f"{ours}ls1.gamma"] = same(f"{theirs}attn.gamma1.weight")
            table[f"{ours}ls2.gamma"] = same(f"{theirs}ffn.gamma2.weight")
    return table


def _linear(ours: str, theirs: str) -> dict[str, Entry]:
    return {f"{ours}.{tensor}": same(f"{theirs}.{tensor}") for tensor in ("weight", "bias")}
