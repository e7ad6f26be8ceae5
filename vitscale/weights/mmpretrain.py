"""mmpretrain's (and mmcls's) Vision Transformers: `backbone.` and `head.` of a checkpoint -> a vitscale model.

A checkpoint does not say what it is but by shapes: heads are those of mmpretrain's own sizes, GELU is exact, epsilon is
1e-6, the grid is square, and positions are resized as mmpretrain does, bicubic without antialias. No files here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.config.sizes import SIZES
from vitscale.errors import UserError
from vitscale.weights.content import Known, Weights, describe, told_grid, told_heads
from vitscale.weights.table import Entry, Table, linear, of_model, same, to_ours, to_theirs

_PATCHES = "patch_embed.projection.weight"
_BLOCK = re.compile(r"layers\.(\d+)\.")
_BACKBONE = "backbone."
_SMALL = (768, 8, 2304)
"""Width, depth and MLP width of mmpretrain's `small`, which has 8 heads and is no S/16."""
_NOTHING = Known()
_PREPROCESSOR = "data_preprocessor."

_PARTS = {
    "norm1": "ln1",
    "attn.qkv": "attn.qkv",
    "attn.proj": "attn.proj",
    "norm2": "ln2",
}
_SWIGLU = {"mlp.fc1": "ffn.w12", "mlp.fc2": "ffn.w3"}
_LAYER = re.compile(r"layers\.0\.ffn\.layers\.(\d+)\.")


def is_mmpretrain(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of one of its ViTs, with its head or the backbone alone."""
    return any(name.removeprefix(_BACKBONE) == _PATCHES for name in state)


def from_mmpretrain(state: Mapping[str, Tensor], known: Known = _NOTHING) -> Weights:
    """The model.

    Args:
        state: The tensors under their names in the file.
        known: What the user says of the model.

    Raises:
        UserError: A part that vitscale's models do not have, or tensors missing or too much, each named.
    """
    tensors = {}
    for name, tensor in state.items():
        if not name.startswith(_PREPROCESSOR):
            # names in the table: those of the backbone bare, those of the head with their prefix
            tensors[name.removeprefix(_BACKBONE)] = tensor
    config = _config(tensors, known)
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


def _config(tensors: Mapping[str, Tensor], known: Known) -> ModelConfig:
    swiglu = "layers.0.ffn.w12.weight" in tensors
    second = "layers.0.ffn.w3.weight" if swiglu else "layers.0.ffn.layers.0.0.weight"
    needed = ("pos_embed", second)
    absent = [name for name in needed if name not in tensors]
    if absent:
        raise UserError(f"an mmpretrain ViT without {', '.join(absent)}, which is not read")
    embed_dim, in_channels, patch, patch_width = tensors[_PATCHES].shape
    if patch != patch_width:
        raise UserError(f"patches of {patch}x{patch_width} pixels; vitscale's are square")
    depth = 1 + max(int(found[1]) for name in tensors if (found := _BLOCK.match(name)))
    mlp_dim = tensors[second].shape[1] if swiglu else len(tensors[second])
    class_token = "cls_token" in tensors
    head = tensors.get("head.layers.head.weight", tensors.get("head.fc.weight"))
    pre_logits = tensors.get("head.layers.pre_logits.weight")
    pool = "cls" if class_token and "ln2.weight" not in tensors else "gap"
    norms = {(True, True): "both", (True, False): "tokens", (False, True): "pooled", (False, False): "none"}
    final_norm = norms["ln1.weight" in tensors, "ln2.weight" in tensors]
    usual = final_norm == ("tokens" if pool == "cls" else "pooled")
    size, _ = told_grid(known, patch, {"all": tensors["pos_embed"].shape[1] - class_token})
    return ModelConfig(
        image_size=size,
        in_channels=in_channels,
        patch_size=patch,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=told_heads(known, embed_dim, _usual_heads(embed_dim, depth, mlp_dim)),
        mlp_dim=mlp_dim,
        num_classes=0 if head is None else len(head),
        representation_size=None if pre_logits is None else len(pre_logits),
        pool=pool,  # type: ignore[arg-type]
        class_token=True if class_token and pool == "gap" else None,
        final_norm=None if usual else final_norm,  # type: ignore[arg-type]
        num_fcs=2 if swiglu else 1 + max(int(found[1]) for name in tensors if (found := _LAYER.match(name))),
        activation="swiglu" if swiglu else known.activation or "gelu",
        norm_eps=known.norm_eps or 1e-6,
        pre_norm="pre_norm.weight" in tensors,
        pos_embed_resize="bicubic",
        qkv_bias="layers.0.attn.qkv.bias" in tensors,
        layer_scale=1.0 if "layers.0.attn.gamma1.weight" in tensors else None,
    )


def _usual_heads(embed_dim: int, depth: int, mlp_dim: int) -> int | None:
    """Those of mmpretrain's own sizes."""
    if (embed_dim, depth, mlp_dim) == _SMALL:
        return 8
    for size in SIZES.values():
        if (size.embed_dim, size.depth, size.mlp_dim) == (embed_dim, depth, mlp_dim):
            return size.num_heads
    return None


def _table(config: ModelConfig) -> Table:
    table: dict[str, Entry] = {
        "pos_embed": same("pos_embed"),
        **linear("patch_embed.proj", "patch_embed.projection"),
        "cls_token": same("cls_token"),
        **linear("norm_pre", "pre_norm"),
        **linear("norm", "ln1"),
        **linear("fc_norm", "ln2"),
        **linear("pre_logits.fc", "head.layers.pre_logits"),
        **linear("head", "head.layers.head" if config.pool == "cls" else "head.fc"),
    }
    for block in range(config.depth):
        ours, theirs = f"blocks.{block}.", f"layers.{block}."
        for mine, other in (_PARTS | (_SWIGLU if config.activation == "swiglu" else _mlp(config.num_fcs))).items():
            table |= linear(ours + mine, theirs + other)
        table[f"{ours}ls1.gamma"] = same(f"{theirs}attn.gamma1.weight")
        table[f"{ours}ls2.gamma"] = same(f"{theirs}ffn.gamma2.weight")
    return of_model(table, config, whose="mmpretrain's ViT")


def _mlp(num_fcs: int) -> dict[str, str]:
    """The layers of an MLP; the last one stands without its activation."""
    layers = {f"mlp.fc{number}": f"ffn.layers.{number - 1}.0" for number in range(1, num_fcs)}
    return layers | {f"mlp.fc{num_fcs}": f"ffn.layers.{num_fcs - 1}"}
