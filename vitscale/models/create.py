"""A model by its name in the papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from vitscale.config.load import model_from_dict
from vitscale.config.sizes import dimensions
from vitscale.models.vit import VisionTransformer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from vitscale.models.position import Resize


class ModelOverrides(TypedDict, total=False):
    """The fields of `ModelConfig` that say what a model computes, where they document themselves."""

    image_size: int | tuple[int, int]
    dynamic_image_size: bool
    in_channels: int
    patch_size: int
    patch_stride: int | None
    patch_padding: Literal["none", "same", "corner"]
    patch_sizes: tuple[int, ...]
    patch_dropout: float
    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    num_fcs: int
    num_classes: int
    representation_size: int | None
    pool: Literal["cls", "gap", "cls_gap", "map", "none"]
    class_token: bool | None
    num_registers: int
    pos_embed: Literal["learned", "sincos", "sincos_mae", "rotary"]
    pos_embed_prefix: Literal["all", "class", "none"]
    pos_embed_resize: Resize
    pre_norm: bool
    final_norm: Literal["tokens", "pooled", "both", "none"] | None
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    block: Literal["sequential", "parallel"]
    qkv_bias: bool
    qk_norm: bool
    qk_scale: float | None
    v_shortcut: bool
    activation: Literal["gelu", "gelu_tanh", "swiglu"]
    layer_scale: float | None
    dropout: float
    attention_dropout: float
    drop_path: float
    drop_path_schedule: Literal["linear", "constant"]
    frozen_stages: int


def create_model(name: str, **overrides: Unpack[ModelOverrides]) -> VisionTransformer:
    """A new model with initialised weights; `torch.manual_seed` decides which.

    Args:
        name: Size and patch, e.g. `B/16`, or one of a family, e.g. `DINOv2-g/14`.
        **overrides: Fields of the model that differ from the defaults and from what the name says, e.g.
            `image_size=384`.

    Raises:
        ValueError: No such model, no such field, or a value that is not allowed; the message says what is.
    """
    return VisionTransformer(model_from_dict({"name": name, **dimensions(name), **overrides}))
