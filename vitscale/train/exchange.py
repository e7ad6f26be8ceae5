"""Weights out of runs and files: opened, exported at another resolution, judged."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vitscale.config.load import model_from_dict
from vitscale.config.schema import DataConfig, ModelConfig
from vitscale.data.augment import normalize
from vitscale.data.loader import EvalLoader
from vitscale.data.names import match_classes
from vitscale.data.shards import load_index
from vitscale.engines.base import Kind
from vitscale.errors import UserError
from vitscale.evaluate.accuracy import Accuracy, evaluate
from vitscale.models.vit import VisionTransformer
from vitscale.train import checkpoint
from vitscale.weights.adapt import Head, adapt
from vitscale.weights.content import Preprocessing, Weights
from vitscale.weights.export import Format, export_model
from vitscale.weights.io import load_weights
from vitscale.world import World

log = logging.getLogger(__name__)

_CROP_SHARE = 0.875
"""Centre crop over the shorter side, where nothing else is said: 224 of 256."""


def open_weights(path: str | Path) -> Weights:
    """The weights in a run folder (its newest checkpoint), a step folder, or a model file of any known format.

    A checkpoint gives its averaged weights where the run keeps an average.

    Raises:
        UserError: There is no such thing, or it cannot be read.
    """
    path = Path(path)
    if not path.is_dir() or (path / "config.json").is_file():  # the latter a folder of Hugging Face
        return load_weights(path)
    step_dir = path if (path / "state.json").exists() else checkpoint.latest(path)
    if step_dir is None:
        raise UserError(f"{path} is a folder without checkpoints; name a run, a step folder or a model file")
    saved = checkpoint.read(step_dir)
    kind: Kind = "ema" if "ema" in saved.kinds else "param"
    return Weights(
        state=saved.state_dict(kind),
        config=model_from_dict(saved.state["config"]["model"]),
        preprocessing=preprocessing_of(saved.state["config"]),
        class_names=tuple(saved.state["classes"]) or None,
        source=f"step {saved.state['step']}, {'averaged' if kind == 'ema' else 'trained'} weights",
    )


def preprocessing_of(config: Mapping[str, Any]) -> Preprocessing:
    """How images must be prepared for a model of this config, which is as `config_to_dict` gives it."""
    data, size = config["data"], config["model"]["image_size"]
    shorter = size if isinstance(size, int) else min(size)
    squash = data["crop"] == "resize"
    resize = shorter if squash else data["eval_resize"] or round(shorter / _CROP_SHARE)
    return Preprocessing(
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=data["interpolation"],
        crop_pct=shorter / resize,
        crop_mode="squash" if squash else "center",
    )


def export(
    source: str | Path,
    out: str | Path,
    *,
    format: Format = "vitscale",
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
) -> str:
    """Write the weights of a run or a file to `out`, at another resolution, patch size or with other classes if asked.

    Args:
        source: What `open_weights` reads.
        out: The file to write.
        format: Whose tool is to load it, see `export_model`.
        image_size: Height and width; the position grid is resized to it.
        patch_size: Side of the patches; the patch kernel is resized by FlexiViT's pseudo-inverse.
        num_classes: A new classifier of this width, at zero; 0 for none.
        classes: Names of the classes wanted, in their order: each takes its row of the classifier from the class of
            that name (or WordNet id) in the source, and is zero where there is none.

    Returns:
        What was written, in words.

    Raises:
        UserError: The source cannot be read or adapted, or the file not be written.
    """
    weights = open_weights(source)
    config = weights.config
    target = replace(
        config,
        image_size=config.image_size if image_size is None else image_size,
        patch_size=config.patch_size if patch_size is None else patch_size,
        num_classes=len(classes) if classes else config.num_classes if num_classes is None else num_classes,
    )
    if target.patch_size != config.patch_size and config.name:
        target = replace(target, name=f"{config.name.rpartition('/')[0]}/{target.patch_size}")
    same_classes = not classes and target.num_classes == config.num_classes
    head: Head = "map" if classes else "keep" if same_classes else "zero"
    matched = match_classes(weights.class_names or (), classes) if classes else None
    state, report = adapt(weights.state, config, target, head=head, classes=matched)
    export_model(
        out,
        state,
        target,
        format=format,
        preprocessing=weights.preprocessing,
        class_names=classes or (weights.class_names if same_classes else None),
    )
    return f"{weights.source}, at {target.image_size} px: {report}"


def evaluate_weights(
    source: str | Path, shards: tuple[str, ...], *, image_size: int | None, batch: int, workers: int
) -> Accuracy:
    """Judge the weights of a run or a file on labelled shards, prepared as the model expects its images.

    Args:
        source: What `open_weights` reads.
        shards: As `data.validation`.
        image_size: Another size than the model's own; positions are resized to it.
        batch: Images a rank evaluates at once.
        workers: Threads that decode.

    Raises:
        UserError: The source or the shards cannot be read, or they do not fit each other.
    """
    weights = open_weights(source)
    if not weights.config.num_classes:
        raise UserError(f"{source} has no classifier; fine-tune it, or export it with --num-classes and train that")
    _compare_classes(weights, load_index(shards).classes, source)
    target = weights.config if image_size is None else replace(weights.config, image_size=image_size)
    state, _ = adapt(weights.state, weights.config, target, head="keep")
    world = World.start()
    try:
        model = VisionTransformer(target)
        model.load_state_dict(state)
        loader = EvalLoader(
            _eval_config(weights.preprocessing, target, shards, workers),
            image_size=target.image_size,
            num_classes=target.num_classes,
            batch=batch,
            rank=world.rank,
            world_size=world.world_size,
        )
        mean, std = loader.config.mean, loader.config.std
        with closing(loader):
            return evaluate(model.to(world.device), loader, prepare=partial(normalize, mean=mean, std=std), world=world)
    finally:
        world.end()


def _eval_config(
    preprocessing: Preprocessing | None, model: ModelConfig, shards: tuple[str, ...], workers: int
) -> DataConfig:
    size = model.image_size if isinstance(model.image_size, int) else min(model.image_size)
    plain = DataConfig(train=shards, validation=shards, workers=workers)
    if preprocessing is None:
        log.warning(
            "the file does not say how images were prepared: mean and std %s, crop %g assumed", plain.mean, _CROP_SHARE
        )
        return plain
    if len(preprocessing.mean) != 3 or len(preprocessing.std) != 3:
        raise UserError(f"a model of {len(preprocessing.mean)} channels cannot be judged on RGB images")
    if preprocessing.interpolation == "nearest":
        raise UserError("the file asks for images resized by nearest neighbours, which evaluation does not do")
    return replace(
        plain,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        crop="resize" if preprocessing.crop_mode == "squash" else plain.crop,
        eval_resize=max(size, round(size / preprocessing.crop_pct)),
    )


def _compare_classes(weights: Weights, classes: tuple[str, ...], source: str | Path) -> None:
    if weights.class_names and classes and weights.class_names[: len(classes)] != classes:
        raise UserError(
            f"the classes of {source} ({len(weights.class_names)}: {', '.join(weights.class_names[:3])}, ...) are not "
            f"those of the shards ({len(classes)}: {', '.join(classes[:3])}, ...), so its outputs mean other things"
        )
