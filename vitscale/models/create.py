"""A model by its name in the papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from vitscale.config.load import model_from_dict
from vitscale.config.sizes import dimensions
from vitscale.models.vit import VisionTransformer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ModelOverrides(TypedDict, total=False):
    """The fields of `ModelConfig` that say what a model computes, where they document themselves."""

    image_size: int | tuple[int, int]
    in_channels: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    num_classes: int
    pool: Literal["cls", "gap"]
    qkv_bias: bool
    activation: Literal["gelu", "gelu_tanh"]
    norm_eps: float
    dropout: float
    attention_dropout: float
    drop_path: float


def create_model(name: str, **overrides: Unpack[ModelOverrides]) -> VisionTransformer:
    """A new model with initialised weights; `torch.manual_seed` decides which.

    Args:
        name: Size and patch, e.g. `B/16`.
        **overrides: Fields of the model that differ from the defaults and from what the name says, e.g.
            `image_size=384`.

    Raises:
        ValueError: No such model, no such field, or a value that is not allowed; the message says what is.
    """
    return VisionTransformer(model_from_dict({"name": name, **dimensions(name), **overrides}))
