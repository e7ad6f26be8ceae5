"""A real ViT-Ti/16 and real images, against timm on the same pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from vitscale.weights.io import load_weights
from vitscale.weights.load import load_model

FILE = "vit_ti16_timm_fp16.safetensors"


@pytest.fixture(scope="module")
def images(shared_data: Path) -> Tensor:
    """Every third image, squeezed to 384 pixels by Pillow's bicubic, normalised."""
    files = sorted((shared_data / "imagenet100").glob("*/*.JPEG"))[::3]
    pixels = [np.asarray(Image.open(file).convert("RGB").resize((384, 384))) for file in files]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.mark.parametrize(("image_size", "count"), [(224, 34), (384, 4)])
@torch.no_grad()
def test_logits_are_timms(shared_data: Path, images: Tensor, image_size: int, count: int) -> None:
    images = torch.nn.functional.interpolate(images[:count], size=image_size, mode="bilinear", antialias=True)
    state = load_file(shared_data / FILE)
    grid = image_size // 16
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], [grid, grid], [14, 14])
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=image_size).eval()
    theirs.load_state_dict(state)
    ours = load_model(shared_data / FILE, image_size=image_size)
    expected, logits = theirs(images), ours(images)
    # Logits of up to 20 in float32: 1e-5 of that, of which twelve blocks use a tenth.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(logits.argmax(dim=1), expected.argmax(dim=1))
    labels = 30 * torch.arange(count)  # every tenth class is there, every third of these is read
    assert (logits.argmax(dim=1) == labels).float().mean() > 0.7


def test_the_file_is_recognised(shared_data: Path) -> None:
    weights = load_weights(shared_data / FILE)
    assert weights.source == (
        "timm ViT (safetensors), Ti/16 at 224x224 with 1000 classes, its grid of positions taken as square"
    )
    assert weights.config.num_heads == 3
