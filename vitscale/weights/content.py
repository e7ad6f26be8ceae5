"""What a model file holds, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.models.position import image_height_width

Interpolation: TypeAlias = Literal["nearest", "bilinear", "bicubic"]
CropMode: TypeAlias = Literal["center", "squash"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How images became what the model was trained on.

    Attributes:
        mean: Subtracted from pixels in 0..1, per channel.
        std: Divided by after that, per channel.
        interpolation: Kind of resizing.
        crop_pct: Side of the centre crop over the shorter side of the resized image.
        crop_mode: `center` resizes the shorter side and cuts the centre out; `squash` resizes the whole image to the
            size wanted, whatever its aspect.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation
    crop_pct: float
    crop_mode: CropMode = "center"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a model file holds.

    Attributes:
        state: The tensors under vitscale's names, in the file's dtypes, on the host.
        config: The model that they are of.
        preprocessing: None where the file does not say.
        class_names: None where the file does not say.
        source: What the file was recognised as, in words.
        left_out: Tensors of the file that its own model has no use for in classification, by their names there.
    """

    state: dict[str, Tensor]
    config: ModelConfig
    preprocessing: Preprocessing | None
    class_names: tuple[str, ...] | None
    source: str
    left_out: tuple[str, ...] = ()


def preprocessing_from(fields: Mapping[str, Any]) -> Preprocessing:
    """Preprocessing from the fields of a JSON object.

    Raises:
        ValueError, KeyError, TypeError: A field is missing or is not what it should be.
    """
    if fields["interpolation"] not in get_args(Interpolation):
        raise ValueError(f"interpolation {fields['interpolation']!r}")
    if fields.get("crop_mode", "center") not in get_args(CropMode):
        raise ValueError(f"crop_mode {fields['crop_mode']!r}")
    return Preprocessing(
        mean=tuple(map(float, fields["mean"])),
        std=tuple(map(float, fields["std"])),
        interpolation=fields["interpolation"],
        crop_pct=float(fields["crop_pct"]),
        crop_mode=fields.get("crop_mode", "center"),
    )


def describe(config: ModelConfig) -> str:
    """A model in a few words."""
    height, width = image_height_width(config)
    name = config.name or f"{config.embed_dim} wide, {config.depth} blocks, {config.num_heads} heads"
    return f"{name} at {height}x{width} with {config.num_classes} classes"
