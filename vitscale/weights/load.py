"""A model file -> a model, at the resolution and with the classes wanted."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from vitscale.models.vit import VisionTransformer
from vitscale.weights.adapt import adapt
from vitscale.weights.io import load_weights


def load_model(
    path: str | os.PathLike[str], *, image_size: int | tuple[int, int] | None = None, num_classes: int | None = None
) -> VisionTransformer:
    """The model in a file of vitscale or timm, in float32 on the host, in evaluation mode.

    Args:
        path: The model file.
        image_size: Height and width of the images, or one number for a square; unset: as in the file. Learned
            positions are resized.
        num_classes: Width of the classifier; unset: as in the file. Another number begins the classifier anew at
            zero, and 0 takes it off.

    Raises:
        UserError: The file cannot be read, or is no model known here.
        ValueError: The patch size does not divide `image_size`.
    """
    weights = load_weights(path)
    target = replace(
        weights.config,
        image_size=weights.config.image_size if image_size is None else image_size,
        num_classes=weights.config.num_classes if num_classes is None else num_classes,
    )
    same_classes = target.num_classes == weights.config.num_classes
    adapted = adapt(weights.state, weights.config, target, head="keep" if same_classes else "zero")
    with torch.device("meta"):
        model = VisionTransformer(target)
    model.to_empty(device="cpu").load_state_dict(adapted.state)
    return model.eval()
