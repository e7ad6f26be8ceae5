"""The models of the papers by name, with their parameters and the work of one forward pass; nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitscale.config.load import model_from_dict
from vitscale.config.schema import ModelConfig
from vitscale.config.sizes import dimensions
from vitscale.models.position import grid_height_width, num_prefix_tokens
from vitscale.models.vit import VisionTransformer

NAMES = (
    *("Ti/16", "S/32", "S/16", "S/8", "B/32", "B/16", "B/8", "L/32", "L/16", "L/14", "H/14"),
    *("So400m/14", "g/14", "G/14", "e/14", "22B/14"),
    *("DeiT3-S/16", "DeiT3-B/16", "DeiT3-L/16", "DeiT3-H/14"),
    *("DINOv2-S/14", "DINOv2-B/14", "DINOv2-L/14", "DINOv2-g/14"),
    *("DINOv2reg-S/14", "DINOv2reg-B/14", "DINOv2reg-L/14", "DINOv2reg-g/14"),
    *("DINOv3-S/16", "DINOv3-S+/16", "DINOv3-B/16", "DINOv3-L/16", "DINOv3-H+/16", "DINOv3-7B/16"),
)
"""Sizes at the patches that the papers have; `create_model` takes any patch."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """One line of the table of models.

    Attributes:
        name: What `create_model` takes.
        image_size: Side of the images in pixels.
        parameters: All of them, the classifier included.
        flops: Floating point operations of one image's forward pass, a multiplication and an addition counted as two.
    """

    name: str
    image_size: int
    parameters: int
    flops: int


def list_models(*, image_size: int = 224, num_classes: int = 1000) -> list[ModelSize]:
    """Every model of the papers, in the order of `NAMES`.

    Args:
        image_size: Side of the images in pixels.
        num_classes: Width of the classifier; 0 for none.

    Raises:
        ValueError: A patch size does not divide `image_size`; patches of all the models listed divide 224 and 448.
    """
    table = []
    for name in NAMES:
        config = model_from_dict(
            {"name": name, **dimensions(name), "image_size": image_size, "num_classes": num_classes}
        )
        table.append(
            ModelSize(
                name=name,
                image_size=image_size,
                parameters=count_parameters(config),
                flops=count_flops(config),
            )
        )
    return table


def count_parameters(config: ModelConfig) -> int:
    """Parameters of a model, trained or frozen."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    return sum(parameter.numel() for parameter in model.parameters())


def count_flops(config: ModelConfig) -> int:
    """Operations of one image's forward pass: those of the matrix products, an addition and a multiplication two.

    The papers leave out the rest too (norms, activations, softmax), a few percent. "GFLOPs" are this over 1e9 in
    "Scaling Vision Transformers", and half of it in DeiT's tables, which count a multiply-add as one.
    """
    dim, rows_columns = config.embed_dim, grid_height_width(config)
    patches = rows_columns[0] * rows_columns[1]
    tokens = patches + num_prefix_tokens(config)
    layers = 3 if config.activation == "swiglu" else 2
    mlp = layers * dim * config.mlp_dim + (config.num_fcs - 2) * config.mlp_dim**2
    block = tokens * (4 * dim * dim + mlp) + 2 * tokens * tokens * dim
    embedding = patches * config.in_channels * config.patch_size**2 * dim
    pool = 0
    if config.pool == "map":  # one query: keys and values of all patches, two products with them, its own two layers
        pool = patches * 2 * dim * dim + 2 * patches * dim + 2 * dim * dim + 2 * dim * config.mlp_dim
    read = tokens if config.pool == "none" else 1
    pooled = 2 * dim if config.pool == "cls_gap" else dim
    hidden = config.representation_size
    head = pooled * (hidden or 0) + (hidden or pooled) * config.num_classes
    return 2 * (embedding + config.depth * block + pool + read * head)
