"""What can be known to be wrong with a run before any process starts, all of it at once."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vitscale.config.schema import RunConfig
from vitscale.data.loader import check_classes
from vitscale.data.shards import load_index
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
        lambda: check_writable(Path(config.run_dir)),
        lambda: check_batch(config.global_batch, world_size=ranks, micro_batch=config.engine.micro_batch),
        lambda: check_shards(config),
        lambda: check_space(config),
    ]
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(error.message)
    if problems:
        raise UserError("\n".join(problems), exit_code=EXIT_USAGE)


def check_writable(run_dir: Path) -> None:
    """Create the run folder and try a file in it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        user = os.environ.get("USER", f"user {os.getuid()}")
        raise UserError(
            f"run_dir: {run_dir} cannot be written ({error.strerror}); name a folder that {user} may write"
        ) from error


def check_shards(config: RunConfig) -> None:
    """Find the shards, and compare their classes with the model's and with each other."""
    train = load_index(config.data.train)
    check_classes(train.classes, config.model.num_classes)
    if config.data.validation is None:
        return
    validation = load_index(config.data.validation)
    if train.classes and validation.classes and train.classes != validation.classes:
        raise UserError(
            f"data.validation has {len(validation.classes)} classes, data.train {len(train.classes)}, and label for "
            "label they are not the same; pack both with one list (`vitscale data pack --classes`)"
        )


def check_space(config: RunConfig) -> None:
    """Compare the free space with what the checkpoints that are kept need at one time."""
    values = sum(math.prod(shape) for shape in expected_shapes(config.model).values())
    slots = 1 + len(slots_of(config.optim)) + (config.optim.ema_decay is not None)
    needed = 4 * values * slots * (config.checkpoint.keep_last + 1)
    free = shutil.disk_usage(config.run_dir).free
    if free < needed:
        raise UserError(
            f"run_dir: {config.run_dir} has {free / 1e9:.2f} GB free; {config.checkpoint.keep_last} checkpoints and "
            f"the one being written take {needed / 1e9:.2f} GB (checkpoint.keep_last)"
        )
