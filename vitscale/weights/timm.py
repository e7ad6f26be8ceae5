"""timm's Vision Transformers: the names of their tensors and what these tell about the model. No files here.

vitscale's names are timm's, so that only the model has to be found: timm's files say nothing about it but shapes. A
`config.json` of the hub beside the file says besides how images are prepared and what is pooled. Models with rotary
positions are another class in timm and have a module of their own here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.config.sizes import SIZES
from vitscale.errors import UserError
from vitscale.weights.adapt import expected_shapes, misfits
from vitscale.weights.content import Known, Preprocessing, Weights, describe, preprocessing_from, told_grid, told_heads
from vitscale.weights.table import to_ours, to_theirs
from vitscale.weights.timm_dinov3 import dinov3_config, dinov3_table, is_dinov3

_SIGNS = {"patch_embed.proj.weight": 4, "pos_embed": 3, "blocks.0.attn.qkv.weight": 2, "blocks.0.mlp.fc1.weight": 2}
"""Tensors that every one of timm's ViTs has, and how many dimensions they have."""

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_NOTHING = Known()
_ASSUMED = {"gelu": "exact GELU, ", "gelu_tanh": "tanh GELU, ", "swiglu": ""}
_TANH = re.compile(r"vit_(base_patch32|giantopt_patch16|so400m_patch16)_siglip|vit_large_patch16_siglip(_gap)?_512")
"""Architectures with GELU's tanh approximation, which no tensor tells."""
_OTHERS = {"quickgelu": "with QuickGELU", "_rpn_": "with norms after attention and MLP"}
"""Parts of architectures' names that mean a computation which no tensor tells and vitscale does not have."""
_UNSAYABLE = {
    "num_fcs": 2,
    "representation_size": None,
    "qk_scale": None,
    "v_shortcut": False,
    "patch_stride": None,
    "block": "sequential",
}
"""Fields that timm's models have one value of."""


def is_timm(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of one of timm's Vision Transformers, or of something built like one."""
    return is_dinov3(state) or all(name in state for name in _SIGNS)


def from_timm(
    state: Mapping[str, Tensor], description: Mapping[str, Any], kind: str, known: Known = _NOTHING
) -> Weights:
    """The model that timm tensors are of.

    Args:
        state: The tensors under their names in the file.
        description: `config.json` of the hub; empty where there is none.
        kind: How they were stored, in words.
        known: What the user says of the model.

    Raises:
        UserError: A part that vitscale's models do not have, tensors missing or of another shape, each named; or
            heads or a grid that cannot be told.
    """
    architecture = str(description.get("architecture", ""))
    for part, what in _OTHERS.items():
        if part in architecture:
            raise UserError(f"timm's {architecture}, a ViT {what}, which vitscale's models are not")
    if is_dinov3(state):
        config = replace(dinov3_config(state), **known.given())
        assumed = f"epsilon taken as {config.norm_eps:g}"
        tensors = to_ours(state, dinov3_table(config, gated="blocks.0.mlp.fc1_g.weight" in state), config)
    else:
        if _TANH.match(architecture) and known.activation is None:
            known = replace(known, activation="gelu_tanh")
        config, tensors = timm_config(state, description.get("global_pool"), known), dict(state)
        assumed = f"taken as {_ASSUMED[config.activation]}epsilon {config.norm_eps:g}, {config.num_heads} heads"
        assumed += "" if known.image_size else ", square"
    return Weights(
        state=tensors,
        config=config,
        preprocessing=_preprocessing(description.get("pretrained_cfg")),
        class_names=None,
        source=f"timm ViT ({kind}), {describe(config)}, {assumed}",
    )


def to_timm(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A vitscale model's tensors under the names of timm's `VisionTransformer`; of `Eva` with rotary positions.

    Raises:
        UserError: A part that timm's models do not have.
    """
    other = [
        f"{field.name}: {getattr(config, field.name)}"
        for field in fields(ModelConfig)
        if field.name in _UNSAYABLE and getattr(config, field.name) != _UNSAYABLE[field.name]
    ]
    if config.pos_embed not in ("learned", "rotary"):
        other.append(f"pos_embed: {config.pos_embed}")
    if config.patch_padding == "same":
        other.append("patch_padding: same")
    if config.pool == "cls_gap":
        other.append("pool: cls_gap")
    if config.pos_embed_prefix == "class" and config.num_registers and config.pos_embed == "learned":
        other.append("pos_embed_prefix: class")
    if other:
        raise UserError(f"timm has no such model, and would compute something else: {', '.join(other)}")
    if config.pos_embed != "rotary":
        return dict(state)
    return to_theirs(state, dinov3_table(config, gated=config.activation == "swiglu"))


def from_timm_names(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What `to_timm` gave for a model of `config`, under vitscale's names."""
    if config.pos_embed != "rotary":
        return dict(state)
    return to_ours(state, dinov3_table(config, gated=config.activation == "swiglu"), config)


def timm_config(state: Mapping[str, Tensor], global_pool: object = None, known: Known = _NOTHING) -> ModelConfig:
    """The model that timm tensors are of, from their shapes.

    The shapes do not tell the number of heads, the grid's sides, the activation or the norms' epsilon: heads are
    those of the known size with these dimensions, else 64 wide; the grid is square; GELU exact; epsilon 1e-6, with a
    norm before the blocks (CLIP) 1e-5.

    Args:
        state: The tensors.
        global_pool: What is pooled, in timm's words, where that is known.
        known: What the user says.

    Raises:
        UserError: See `from_timm`.
    """
    stubs = [f"{name} {list(state[name].shape)}" for name, ndim in _SIGNS.items() if state[name].ndim != ndim]
    if stubs:
        raise UserError(
            f"tensors of impossible shapes: {', '.join(stubs)}; were they saved from a sharded model without being "
            "gathered?"
        )
    embed_dim, in_channels, patch, patch_width = state["patch_embed.proj.weight"].shape
    if patch != patch_width:
        raise UserError(f"patches of {patch}x{patch_width} pixels; vitscale's are square")
    depth = 1 + max(int(found[1]) for name in state if (found := _BLOCK.match(name)))
    second = state.get("blocks.0.mlp.fc2.weight")
    mlp_dim = len(state["blocks.0.mlp.fc1.weight"]) if second is None else second.shape[1]
    swiglu = len(state["blocks.0.mlp.fc1.weight"]) == 2 * mlp_dim
    class_token = "cls_token" in state
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    size, prefix = told_grid(known, patch, _positions(state["pos_embed"].shape[1], class_token, registers))
    name, usual_heads = _usual_heads(state, embed_dim, depth, mlp_dim, patch)
    pre_norm = "norm_pre.weight" in state
    pool, final_norm = _pooling(state, class_token, global_pool)
    config = ModelConfig(
        name=name,
        image_size=size,
        in_channels=in_channels,
        patch_size=patch,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=told_heads(known, embed_dim, usual_heads),
        mlp_dim=mlp_dim,
        num_classes=len(state["head.weight"]) if "head.weight" in state else 0,
        pool=pool,  # type: ignore[arg-type]
        class_token=class_token if class_token != (pool == "cls") else None,
        num_registers=registers,
        pos_embed_prefix=prefix,
        pre_norm=pre_norm,
        final_norm=final_norm,  # type: ignore[arg-type]
        norm="layernorm" if "blocks.0.norm1.bias" in state else "rmsnorm",
        norm_eps=known.norm_eps or (1e-5 if pre_norm else 1e-6),
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        activation="swiglu" if swiglu else known.activation or "gelu",
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in state else None,
    )
    problems = misfits(state, expected_shapes(config))
    if problems:
        raise UserError(f"built like one of timm's ViTs, but not one that vitscale has: {'; '.join(problems)}")
    return config


def _pooling(state: Mapping[str, Tensor], class_token: bool, global_pool: object) -> tuple[str, str | None]:
    """What is pooled and where the last norm stands; the latter None where it is the usual place."""
    before, after = "norm.weight" in state, "fc_norm.weight" in state
    if "attn_pool.latent" in state:
        pool, usual = "map", "tokens"
    elif after or global_pool == "avg" or not class_token:
        pool, usual = "gap", "pooled"
    else:
        pool, usual = "cls", "tokens"
    where = {(True, True): "both", (True, False): "tokens", (False, True): "pooled", (False, False): "none"}
    final_norm = where[before, after]
    return pool, None if final_norm == usual else final_norm


def _positions(count: int, class_token: bool, registers: int) -> dict[Literal["all", "class", "none"], int]:
    """What is left for the grid where all of the tokens before the patches have positions, or some, or none."""
    left: dict[Literal["all", "class", "none"], int] = {"all": count - class_token - registers}
    if registers and class_token:
        left["class"] = count - 1
    if class_token or registers:
        left["none"] = count
    return left


def _usual_heads(
    state: Mapping[str, Tensor], embed_dim: int, depth: int, mlp_dim: int, patch: int
) -> tuple[str | None, int | None]:
    """Name, where the dimensions are those of a known size, and number of heads, where that can be told."""
    for letter, size in SIZES.items():
        if (size.embed_dim, size.depth, size.mlp_dim) == (embed_dim, depth, mlp_dim):
            return f"{letter}/{patch}", size.num_heads
    if "blocks.0.attn.q_norm.weight" in state:
        return None, embed_dim // len(state["blocks.0.attn.q_norm.weight"])
    return None, None


def _preprocessing(said: object) -> Preprocessing | None:
    """What timm's `pretrained_cfg` says; None where it says too little."""
    if not isinstance(said, Mapping):
        return None
    try:
        return preprocessing_from(said)
    except (KeyError, TypeError, ValueError):
        return None
