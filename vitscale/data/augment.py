"""Which part of an image is shown, whether mirrored; and pixels made numbers on the device.

What is drawn for a sample depends on (seed, epoch, sample id) and the image's size alone: ranks, workers and resumes
change nothing.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitscale.config.schema import DataConfig
from vitscale.data.decode import Box

_DOMAIN = 1  # keeps these numbers apart from all others that are drawn from the same seed
_TRIES = 10


class View(NamedTuple):
    """What a model sees of an image: the part, and whether left and right are exchanged."""

    box: Box
    flip: bool


def sample_generator(seed: int, epoch: int, sample: int, *, domain: int = _DOMAIN) -> np.random.Generator:
    """The random numbers of one sample in one epoch: Philox, whose counter and key are just these.

    `domain` is another for each purpose, so that what one draws does not move the others.
    """
    key = np.array([seed, domain], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, epoch, sample], np.uint64)))


def train_view(
    config: DataConfig, height: int, width: int, *, size: tuple[int, int], seed: int, epoch: int, sample: int
) -> View:
    """What is shown of a training image of `height` times `width` pixels; `size` is (height, width) of the result."""
    random = sample_generator(seed, epoch, sample)
    mirrored = random.random() < 0.5  # drawn in any case, so that `flip` does not change the boxes
    flip = config.flip and mirrored
    if config.crop == "inception":
        return View(inception_box(random, height, width, area=config.crop_area, ratio=config.crop_ratio), flip)
    if config.crop == "center":
        return View(center_box(height, width, size=size, resize=min(size)), flip)
    return View(Box(0, 0, height, width), flip)


def eval_view(config: DataConfig, height: int, width: int, *, size: tuple[int, int]) -> View:
    """What is shown of an image that is judged: the centre, or all of it where training squeezes the whole image."""
    if config.crop == "resize":
        return View(Box(0, 0, height, width), False)
    return View(center_box(height, width, size=size, resize=config.eval_resize or round(min(size) / 0.875)), False)


def inception_box(
    random: np.random.Generator, height: int, width: int, *, area: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """A part of random area and aspect: torchvision's `RandomResizedCrop`, after Szegedy et al. 2014.

    Ten tries; then the largest part in the centre whose aspect is within bounds.

    Args:
        random: Draws four numbers a try.
        height: Of the image.
        width: Of the image.
        area: Smallest and largest share of the image's area.
        ratio: Smallest and largest width over height; its logarithm is uniform.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        share, shape, down, right = random.random(4).tolist()
        target = height * width * (area[0] + (area[1] - area[0]) * share)
        aspect = math.exp(low + (high - low) * shape)
        box_width, box_height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = int(down * (height - box_height + 1)), int(right * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    box_height, box_width = height, width
    if width / height < ratio[0]:
        box_height = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        box_width = min(width, max(1, round(height * ratio[1])))
    return _centred(height, width, box_height, box_width)


def center_box(height: int, width: int, *, size: tuple[int, int], resize: int) -> Box:
    """The part that "resize the shorter side to `resize`, then cut `size` from the centre" shows, as one box.

    Where the image is too small for it, the largest part in the centre that has the shape of `size`.
    """
    scale = min(min(height, width) / resize, height / size[0], width / size[1])
    box_height = min(height, max(1, round(size[0] * scale)))
    box_width = min(width, max(1, round(size[1] * scale)))
    return _centred(height, width, box_height, box_width)


def _centred(height: int, width: int, box_height: int, box_width: int) -> Box:
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def normalize(
    images: Tensor,
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(pixel / 255 - mean) / std per channel, on the device of `images`.

    Args:
        images: uint8 `[batch, 3, height, width]`.
        mean: Of pixels in 0..1.
        std: Of pixels in 0..1.
        dtype: Of the result; computed in float32.
    """
    scale, shift = _scale_and_shift(mean, std, images.device)
    return torch.addcmul(shift, images.float(), scale).to(dtype)


@functools.lru_cache(maxsize=32)
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """float32 `[3, 1, 1]` each; kept on the device, since making them makes the host wait."""
    scale = [1 / (255 * s) for s in std]
    shift = [-m / s for m, s in zip(mean, std, strict=True)]
    return torch.tensor(scale, device=device)[:, None, None], torch.tensor(shift, device=device)[:, None, None]
