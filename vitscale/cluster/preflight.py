"""What can be known to be wrong with a run before any process starts, all of it at once."""

from __future__ import annotations

import math
import os
import pwd
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vitscale.config.schema import RunConfig
from vitscale.data.loader import check_classes
from vitscale.data.shards import load_index
from vitscale.data.storage import access_of
from vitscale.data.training import load_training
from vitscale.engines.build import check_batch
from vitscale.errors import EXIT_USAGE, UserError
from vitscale.optim.optimizers import slots as slots_of
from vitscale.weights.adapt import expected_shapes


def preflight(config: RunConfig, *, ranks: int) -> None:
    """Check the run against `ranks` processes, the shards and the run folder.

    Raises:
        UserError: Everything found, a line each.
    """
    problems: list[str] = []
    checks: list[Callable[[], object]] = [
        lambda: check_folder(config),
        lambda: check_batch(config.global_batch, world_size=ranks, micro_batch=config.engine.micro_batch),
        lambda: check_shards(config),
    ]
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(error.message)
    if problems:
        raise UserError("\n".join(problems), exit_code=EXIT_USAGE)


def check_folder(config: RunConfig) -> None:
    """The run folder: it can be written, and has room."""
    check_writable(Path(config.run_dir))
    check_space(config)


def check_writable(run_dir: Path) -> None:
    """Create the run folder and try a file in it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise UserError(
            f"run_dir: {run_dir} cannot be written ({error.strerror}); name a folder that {_user()} may write"
        ) from error


def check_shards(config: RunConfig) -> None:
    """Find the shards, and compare their classes with the model's and with each other."""
    train = load_training(config.data).index
    check_classes(train.classes, config.model.num_classes)
    if config.data.validation is None:
        return
    validation = load_index(config.data.validation, access_of(config.data))
    check_classes(validation.classes, config.model.num_classes, key="data.validation")
    if train.classes and validation.classes and train.classes != validation.classes:
        raise UserError(
            f"data.validation has {len(validation.classes)} classes, data.train {len(train.classes)}, and label for "
            "label they are not the same; pack both with one list (`vitscale data pack --classes`)"
        )


def check_space(config: RunConfig) -> None:
    """Compare the free space with what the checkpoints that are still to come need at one time."""
    run_dir, kept = Path(config.run_dir), config.checkpoint.keep_last
    values = sum(math.prod(shape) for shape in expected_shapes(config.model).values())
    slots = 1 + len(slots_of(config.optim)) + (config.optim.ema_decay is not None)
    size = 4 * values * slots
    there = min(kept, sum(1 for _ in run_dir.glob("checkpoints/step_*")))
    needed, free = size * (kept + 1 - there), shutil.disk_usage(run_dir).free
    if free < needed:
        raise UserError(
            f"run_dir: {run_dir} has {free / 1e9:.2f} GB free; {kept} checkpoints and the one being written take "
            f"{needed / 1e9:.2f} GB{' more' if there else ''} (checkpoint.keep_last)"
        )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
