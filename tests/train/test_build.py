"""What is minimised: the loss of the model at the patch size of the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from helpers.runs import losses, write_config, write_shards
from helpers.split_engine import world_of_one
from helpers.timm_vit import randomise
from helpers.tiny import global_batch

from vitscale.config.load import load_config
from vitscale.data.augment import normalize
from vitscale.models.patch import draw_patch_size
from vitscale.models.vit import VisionTransformer
from vitscale.train.build import build_objective
from vitscale.train.loop import train
from vitscale.train.losses import classification_loss

FLEXIBLE = ["model.patch_sizes=[2,4,8]"]


def test_a_flexible_model_is_trained_at_the_patch_size_of_the_step(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tmp_path), [*FLEXIBLE, "model.num_classes=10"])
    model = VisionTransformer(config.model).eval()
    randomise(model)
    drawn = set()
    for step in range(12):
        batch = replace(global_batch(step, 8), step=step)
        patch = draw_patch_size(config.seed, step, (2, 4, 8))
        drawn.add(patch)
        images = normalize(batch.images, mean=config.data.mean, std=config.data.std)
        expected = classification_loss(model(images, patch_size=patch), batch.labels, batch.valid, config.loss)
        assert torch.equal(build_objective(config)(model, batch), expected)
    assert drawn == {2, 4, 8}


def test_training_draws_them(tmp_path: Path) -> None:
    """Other patches give other losses, from the second step on, whose weights are those of the first step's patches."""
    shards = write_shards(tmp_path / "shards")
    runs = {}
    for name, overrides in (("plain", []), ("flexible", FLEXIBLE), ("again", FLEXIBLE)):
        folder = tmp_path / name
        with world_of_one() as world:
            train(load_config(write_config(folder, shards, duration="6 steps"), overrides), world)
        runs[name] = losses(folder / "run")
    assert runs["flexible"] == runs["again"]
    assert runs["flexible"] != runs["plain"]
