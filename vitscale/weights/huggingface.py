"""Hugging Face's ViT, DeiT, DINOv2 and DINOv3: tensors and JSON descriptions -> a vitscale model, and back.

The names are those that `save_pretrained` writes and the hub holds. No files here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.weights.content import Interpolation, Preprocessing, Weights, describe
from vitscale.weights.huggingface_dinov3 import KIND, dinov3_config, dinov3_description, dinov3_table
from vitscale.weights.table import Entry, Table, linear, of_model, same, stacked, to_ours, to_theirs

_PATCHES = ("embeddings.patch_embeddings.projection.weight", "embeddings.patch_embeddings.weight")
_PREFIX = re.compile(r"(vit|deit|dinov2|dinov2_with_registers)\.")
_MODELS = {
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "DINOv2",
    "dinov2_with_registers": "DINOv2 with registers",
    KIND: "DINOv3",
}
_CLASSES = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_RESAMPLE: dict[int, Interpolation] = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, as processors store them."""
_UNUSED = ("pooler.", "embeddings.mask_token")
"""Tensors that a classifier of these weights has no use for; besides those without values."""


def is_huggingface(state: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of one of these models, with or without its prefix."""
    return any(_PREFIX.sub("", name, count=1) in _PATCHES for name in state)


def from_huggingface(
    state: Mapping[str, Tensor], description: Mapping[str, Any], preprocessor: Mapping[str, Any]
) -> Weights:
    """The model.

    Args:
        state: The tensors under their names in the file.
        description: `config.json`.
        preprocessor: `preprocessor_config.json`; empty where there is none.

    Raises:
        UserError: No `config.json`, a model that is none of these, or tensors that are not its own, each named.
    """
    kind = description.get("model_type")
    if not description:
        raise UserError("looks like a Hugging Face model, and needs its config.json beside it (heads, epsilon)")
    if kind not in _MODELS:
        raise UserError(f"a Hugging Face model of type {kind!r}; {', '.join(_MODELS)} are read")
    tensors = {_PREFIX.sub("", name, count=1): tensor for name, tensor in state.items()}
    if "cls_classifier.weight" in tensors:
        raise UserError("a DeiT that averages two classifiers (WithTeacher), which vitscale's models do not have")
    left_out = tuple(name for name, tensor in tensors.items() if name.startswith(_UNUSED) or not tensor.numel())
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    config = _config(kind, tensors, description)
    if kind == KIND:
        table = dinov3_table(config, key_bias="layer.0.attention.k_proj.bias" in tensors)
    else:
        table = _table(kind, config)
    return Weights(
        state=to_ours(tensors, table, config),
        config=config,
        preprocessing=_preprocessing(preprocessor) if preprocessor else None,
        class_names=_class_names(description, config.num_classes),
        source=f"Hugging Face {_MODELS[kind]}, {describe(config)}",
        left_out=left_out,
    )


def to_huggingface(
    state: Mapping[str, Tensor], config: ModelConfig, class_names: Sequence[str] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and `config.json` that transformers loads.

    That is a DINOv3 with rotary positions, else a DINOv2 with LayerScale, a DeiT with one register, else a ViT.

    Raises:
        UserError: A part that none of these has.
    """
    if config.pos_embed == "rotary":
        description = dinov3_description(config)
        tensors = to_theirs(state, dinov3_table(config, key_bias=config.qkv_bias))
        return tensors | _mask_token(1, 1, config.embed_dim), description
    kind = "deit" if config.num_registers == 1 and not config.layer_scale else "vit"
    if config.layer_scale:
        kind = "dinov2_with_registers" if config.num_registers else "dinov2"
    names = class_names or [f"LABEL_{number}" for number in range(config.num_classes)]
    activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}.get(config.activation, "gelu")
    description = {
        "model_type": kind,
        "architectures": [f"{_CLASSES[kind]}{'ForImageClassification' if config.num_classes else 'Model'}"],
        "image_size": config.image_size if isinstance(config.image_size, int) else list(config.image_size),
        "num_channels": config.in_channels,
        "patch_size": config.patch_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.num_heads,
        "hidden_act": activation,
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    if config.layer_scale:
        description |= {
            "mlp_ratio": _mlp_ratio(config),
            "use_swiglu_ffn": config.activation == "swiglu",
            "layerscale_value": config.layer_scale,
            "use_mask_token": False,
        }
        if config.num_registers:
            description["num_register_tokens"] = config.num_registers
    else:
        description["intermediate_size"] = config.mlp_dim
    tensors = to_theirs(state, _table(kind, config))
    if kind == "dinov2_with_registers":
        tensors |= _mask_token(1, config.embed_dim)
    prefix = f"{kind}." if config.num_classes else ""
    return {name if name.startswith("classifier.") else prefix + name: t for name, t in tensors.items()}, description


def _mask_token(*shape: int) -> dict[str, Tensor]:
    """What DINO's pretraining puts in place of masked patches: every such model has one, and it begins at zero."""
    return {"embeddings.mask_token": torch.zeros(shape)}


def _mlp_ratio(config: ModelConfig) -> int:
    """The whole number from which DINOv2 finds the width of its MLP; with SwiGLU two thirds of that, by eights."""
    for ratio in range(1, 17):
        wide = config.embed_dim * ratio
        if config.mlp_dim == ((int(wide * 2 / 3) + 7) // 8 * 8 if config.activation == "swiglu" else wide):
            return ratio
    raise UserError(f"Hugging Face's DINOv2 has no MLP {config.mlp_dim} wide in a model {config.embed_dim} wide")


def _config(kind: str, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> ModelConfig:
    try:
        return dinov3_config(tensors, description) if kind == KIND else _vit_config(kind, tensors, description)
    except KeyError as error:
        raise UserError(f"{error} is missing, in config.json or among the tensors; copy both again") from None
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"config.json does not describe a ViT: {error}") from None


def _vit_config(kind: str, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> ModelConfig:
    dinov2 = kind.startswith("dinov2")
    swiglu = bool(description.get("use_swiglu_ffn"))
    activation = "swiglu" if swiglu else _ACTIVATIONS.get(str(description.get("hidden_act", "gelu")))
    if activation is None:
        raise UserError(f"hidden_act {description['hidden_act']!r}; vitscale's ViTs have {', '.join(_ACTIVATIONS)}")
    first = "encoder.layer.0." + {True: "mlp.weights_out" if swiglu else "mlp.fc2", False: "output.dense"}[dinov2]
    mlp_dim = tensors[f"{first}.weight"].shape[1]
    size = description["image_size"]
    return ModelConfig(
        image_size=size if isinstance(size, int) else (int(size[0]), int(size[1])),
        in_channels=int(description.get("num_channels", 3)),
        patch_size=int(description["patch_size"]),
        embed_dim=int(description["hidden_size"]),
        depth=int(description["num_hidden_layers"]),
        num_heads=int(description["num_attention_heads"]),
        mlp_dim=mlp_dim,
        num_classes=len(tensors["classifier.weight"]) if "classifier.weight" in tensors else 0,
        pool="cls_gap" if dinov2 and "classifier.weight" in tensors else "cls",
        num_registers=1 if kind == "deit" else int(description.get("num_register_tokens", 0)),
        pos_embed_prefix="class" if kind == "dinov2_with_registers" else "all",
        pos_embed_resize="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        qkv_bias=bool(description.get("qkv_bias", True)),
        activation=activation,  # type: ignore[arg-type]
        norm_eps=float(description.get("layer_norm_eps", 1e-6 if dinov2 else 1e-12)),
        layer_scale=float(description.get("layerscale_value", 1.0)) if dinov2 else None,
    )


def _table(kind: str, config: ModelConfig) -> Table:
    dinov2 = kind.startswith("dinov2")
    table: dict[str, Entry] = {
        "cls_token": same("embeddings.cls_token"),
        "pos_embed": same("embeddings.position_embeddings"),
        **linear("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        **linear("norm", "layernorm"),
    }
    table |= linear("head", "classifier")
    if config.num_registers:
        table["reg_token"] = same(f"embeddings.{'distillation_token' if kind == 'deit' else 'register_tokens'}")
    parts = _DINOV2 if dinov2 else _VIT
    if config.activation == "swiglu":
        parts = parts | {"mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"}
    for block in range(config.depth):
        ours, theirs = f"blocks.{block}.", f"encoder.layer.{block}."
        for mine, other in parts.items():
            table |= linear(ours + mine, theirs + other)
        for tensor in ("weight", "bias") if config.qkv_bias else ("weight",):
            names = (f"{theirs}attention.attention.{part}.{tensor}" for part in ("query", "key", "value"))
            table[f"{ours}attn.qkv.{tensor}"] = stacked(*names)
        if dinov2:
            for number in (1, 2):
                table[f"{ours}ls{number}.gamma"] = same(f"{theirs}layer_scale{number}.lambda1")
    return of_model(table, config, whose=f"Hugging Face's {_MODELS[kind]}")


_VIT = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_DINOV2 = {
    "norm1": "norm1",
    "attn.proj": "attention.output.dense",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def _preprocessing(fields: Mapping[str, Any]) -> Preprocessing | None:
    """What the image processor says; None where it says too little."""
    try:
        crops = bool(fields.get("do_center_crop"))
        shortest = fields["size"]["shortest_edge"] if crops else None
        side = fields["crop_size"]["height"] if crops else None
        return Preprocessing(
            mean=tuple(map(float, fields["image_mean"])),
            std=tuple(map(float, fields["image_std"])),
            interpolation=_RESAMPLE[fields["resample"]],
            crop_pct=float(side) / float(shortest) if side and shortest else 1.0,
            crop_mode="center" if crops else "squash",
        )
    except (KeyError, TypeError, ValueError):
        return None


def _class_names(description: Mapping[str, Any], num_classes: int) -> tuple[str, ...] | None:
    labels = description.get("id2label")
    if not num_classes or not isinstance(labels, dict) or set(labels) != {str(i) for i in range(num_classes)}:
        return None
    names = tuple(str(labels[str(number)]) for number in range(num_classes))
    return None if names == tuple(f"LABEL_{number}" for number in range(num_classes)) else names
