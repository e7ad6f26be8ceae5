"""What the loop builds from a config: the model with its first weights, and what is minimised."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from vitscale.config.schema import ModelConfig, RunConfig
from vitscale.data.augment import normalize
from vitscale.data.batch import Batch
from vitscale.engines.base import Objective
from vitscale.models.patch import draw_patch_size
from vitscale.models.vit import VisionTransformer
from vitscale.train.losses import classification_loss


def build_model(config: ModelConfig, *, device: torch.device, seed: int) -> VisionTransformer:
    """The model with random weights; the same numbers on every rank.

    Its memory is filled with NaN before it is initialised, so that a tensor which `init_weights` forgets is loud.
    """
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(seed)
    model.init_weights()
    return model


def build_objective(config: RunConfig) -> Objective:
    """(model, micro-batch) -> sum of the losses of its valid samples; pixels are normalised on the device."""
    return partial(_objective, config)


def _objective(config: RunConfig, model: nn.Module, batch: Batch) -> Tensor:
    images = normalize(batch.images, mean=config.data.mean, std=config.data.std)
    sizes = config.model.patch_sizes
    drawn = {"patch_size": draw_patch_size(config.seed, batch.step, sizes)} if sizes else {}
    logits = model(images, **drawn)
    return classification_loss(
        logits, batch.labels, batch.valid, config.loss, partners=batch.partners, shares=batch.shares
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout and stochastic depth: other on every rank and step, the same when a resumed run repeats a step."""
    # SplitMix64's finaliser spreads neighbouring numbers over all 64 bits
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
    torch.manual_seed(mixed ^ (mixed >> 31))
