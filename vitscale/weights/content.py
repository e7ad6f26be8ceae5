"""What a model file holds, whatever its format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.position import image_height_width

Interpolation: TypeAlias = Literal["nearest", "bilinear", "bicubic"]
CropMode: TypeAlias = Literal["center", "squash"]
_Which: TypeAlias = Literal["all", "class", "none"]
_HEAD_DIM = 64


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
class Known:
    """What a user knows of a model whose file holds tensors alone; None where the usual is meant.

    Attributes:
        num_heads: Attention heads in a block.
        activation: Of the MLP.
        norm_eps: Epsilon of every norm.
        image_size: Height and width that the positions are for.
    """

    num_heads: int | None = None
    activation: Literal["gelu", "gelu_tanh"] | None = None
    norm_eps: float | None = None
    image_size: tuple[int, int] | None = None

    def given(self) -> dict[str, Any]:
        """What is known, by the names of the model's fields."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def told_heads(known: Known, embed_dim: int, usual: int | None) -> int:
    """Number of heads: as known, else the usual one of these dimensions, else 64 wide each.

    Raises:
        UserError: None of these gives a number that divides the width.
    """
    if known.num_heads is not None:
        if embed_dim % known.num_heads:
            raise UserError(f"{known.num_heads} heads do not divide a width of {embed_dim}")
        return known.num_heads
    if usual is not None:
        return usual
    if embed_dim % _HEAD_DIM:
        raise UserError(
            f"the number of heads cannot be told: a width of {embed_dim} is no known size and not a multiple of "
            f"{_HEAD_DIM}, the usual width of a head; give it with --heads"
        )
    return embed_dim // _HEAD_DIM


def told_grid(known: Known, patch_size: int, positions: Mapping[_Which, int]) -> tuple[int | tuple[int, int], _Which]:
    """Image size that positions are for, and which of the tokens before the patches are among them.

    Args:
        known: An image size, where the grid is not square.
        patch_size: Side of a patch.
        positions: What is left for the grid where all of the tokens before the patches have positions, or some.

    Raises:
        UserError: No such grid.
    """
    for which, count in positions.items():
        if known.image_size is not None:
            rows, columns = (side // patch_size for side in known.image_size)
            if rows * columns == count and not any(side % patch_size for side in known.image_size):
                return known.image_size, which
        elif (side := math.isqrt(max(count, 0))) and side * side == count:
            return side * patch_size, which
    counts = " or ".join(str(count) for count in positions.values())
    if known.image_size is not None:
        height, width = known.image_size
        raise UserError(
            f"positions for {counts} patches, which images of {height}x{width} in {patch_size}s do not have"
        )
    raise UserError(
        f"positions for {counts} patches, which is no square grid; give the image size of a file that does not say "
        "it with --image-size HEIGHT WIDTH"
    )


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
