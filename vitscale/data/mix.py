"""Mixup and CutMix on the device: two samples side by side in the global batch become mixtures of each other.

Positions 2k and 2k + 1 are partners, and what is drawn for a step follows from (seed, step) and the place in the global
batch. So where each rank's share is even, neither the number of ranks nor the micro-batches nor a resume change what is
mixed. A sample whose partner cannot be used stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitscale.config.schema import DataConfig
from vitscale.data.batch import Batch

_DOMAIN = 3  # keeps these numbers apart from all others that are drawn from the same seed


def is_mixing(config: DataConfig) -> bool:
    """Whether a config asks for mixtures."""
    return config.mixup > 0 or config.cutmix > 0


def mix(batch: Batch, config: DataConfig, *, seed: int, first: int, global_batch: int) -> Batch:
    """A rank's share of a step, mixed.

    mixup (https://arxiv.org/abs/1710.09412): share * image + (1 - share) * partner's image, rounded to whole levels.
    cutmix (https://arxiv.org/abs/1905.04899): a rectangle of the partner's, of 1 - share of the area.

    Args:
        batch: On the device, of an even number of samples.
        config: How often, how much, and which.
        seed: Of the run.
        first: Place of the share's first sample in the global batch, even.
        global_batch: Samples in the step.

    Returns:
        The batch with `partners` and `shares` set.
    """
    shares, boxes = draw(config, seed=seed, step=batch.step, count=global_batch, size=tuple(batch.images.shape[2:]))
    mine = slice(first, first + len(batch))
    images, device = batch.images, batch.images.device
    other = _swapped(images)
    valid = batch.valid & _swapped(batch.valid)
    weight = torch.from_numpy(shares[mine]).to(device, non_blocking=True)
    box = torch.from_numpy(boxes[mine]).to(device, non_blocking=True)
    weight = torch.where(valid, weight, 1.0)
    cut = (_inside(box, images.shape[2], images.shape[3]) & valid[:, None, None])[:, None]
    blended = weight[:, None, None, None] * images + (1 - weight)[:, None, None, None] * other
    is_cut = (box[:, 2] > box[:, 0])[:, None, None, None]
    mixed = torch.where(is_cut, torch.where(cut, other, images).to(blended.dtype), blended)
    return replace(batch, images=mixed.round().to(torch.uint8), partners=_swapped(batch.labels), shares=weight)


def draw(
    config: DataConfig, *, seed: int, step: int, count: int, size: tuple[int, ...]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """What a step's samples keep of themselves.

    Returns:
        Shares float32 `[count]`, and boxes int64 `[count, 4]` (top, left, bottom, right), empty where images blend.
    """
    key = np.array([seed, _DOMAIN], np.uint64)
    random = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, step], np.uint64)))
    draws = count if config.mix_mode == "elem" else 1
    happens = random.random(draws) < config.mix_probability
    cuts = random.random(draws) < (config.mix_switch if config.mixup and config.cutmix else float(config.cutmix > 0))
    blend = random.beta(config.mixup, config.mixup, draws) if config.mixup else np.ones(draws)
    keep = random.beta(config.cutmix, config.cutmix, draws) if config.cutmix else np.ones(draws)
    height, width = size
    rows, columns = (np.floor(side * np.sqrt(1 - keep)).astype(np.int64) for side in (height, width))
    middle_row, middle_column = random.integers(0, height, draws), random.integers(0, width, draws)
    boxes = np.stack([
        np.clip(middle_row - rows // 2, 0, height), np.clip(middle_column - columns // 2, 0, width),
        np.clip(middle_row + rows // 2, 0, height), np.clip(middle_column + columns // 2, 0, width),
    ], axis=1)  # fmt: skip
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    boxes[~(happens & cuts) | (area == 0)] = 0
    shares = np.where(happens, np.where(cuts, 1 - area / (height * width), blend), 1.0)
    repeat = 1 if config.mix_mode == "elem" else count
    return np.repeat(shares.astype(np.float32), repeat), np.repeat(boxes, repeat, axis=0)


def _swapped(tensor: Tensor) -> Tensor:
    """Each sample's partner in its place."""
    return tensor.view(-1, 2, *tensor.shape[1:]).flip(1).view(tensor.shape)


def _inside(boxes: Tensor, height: int, width: int) -> Tensor:
    """Which pixels lie in each box, bool `[batch, height, width]`."""
    rows = torch.arange(height, device=boxes.device)[None, :, None]
    columns = torch.arange(width, device=boxes.device)[None, None, :]
    top, left, bottom, right = (side[:, None, None] for side in boxes.unbind(dim=1))
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
