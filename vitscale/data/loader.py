"""Batches for one rank, in training without end and in evaluation once over.

    order  (which samples)  ->  plans  ->  assemble (read, decode, crop)  ->  Batch

What a batch holds is a function of (shards, seed, step) and of this rank's place; `workers` and `prefetch` change only
how fast it comes. A sample that cannot be used keeps its slot, masked by `valid`.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitscale.config.schema import DataConfig
from vitscale.data import photometric
from vitscale.data.assemble import Assembler, Bad, What
from vitscale.data.augment import View, eval_view, sample_generator, train_view
from vitscale.data.batch import Batch
from vitscale.data.decode import decoder_name
from vitscale.data.mix import is_mixing
from vitscale.data.mixture import MixtureOrder
from vitscale.data.order import Plan, eval_batches, eval_ids, eval_plan
from vitscale.data.photometric import Pixels
from vitscale.data.reader import samples_per_run
from vitscale.data.sample import label_of
from vitscale.data.shards import load_index
from vitscale.data.storage import access_of
from vitscale.data.training import TrainingSet, load_training
from vitscale.errors import EXIT_USAGE, UserError

log = logging.getLogger(__name__)

BAD_SAMPLES = "bad_samples.jsonl"
_PLANNED = 4096  # samples whose places are computed at once
_SHOWN = 3


class TrainLoader:
    """One rank's share of every step, from `start_step` on, for ever.

    Args:
        config: Where the shards are and how their images are shown.
        image_size: Height and width, or one number for a square.
        num_classes: Labels must be below it.
        global_batch: Samples in a step, over all ranks.
        seed: Of order, crops and flips.
        rank: This rank.
        world_size: Number of ranks.
        start_step: First step to give.
        run_dir: Where `bad_samples.jsonl` is appended to.

    Attributes:
        order: Which samples make up which step.
        index: The shards.
        num_samples: Samples in an epoch.
        samples_read: Samples given so far, bad ones included.
        bad: Bad samples given so far, by reason.

    Raises:
        UserError: Shards that cannot be found or do not fit the model; ranks or streams that do not divide the batch.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        image_size: int | tuple[int, int],
        num_classes: int,
        global_batch: int,
        seed: int,
        rank: int,
        world_size: int,
        start_step: int,
        run_dir: Path,
    ) -> None:
        training = load_training(config)
        self.index = training.index
        check_classes(self.index.classes, num_classes)
        check_shares(global_batch, world_size, config.streams)
        if is_mixing(config) and global_batch // world_size % 2:
            raise UserError(
                f"data.mixup and data.cutmix mix neighbours, and {global_batch} samples on {world_size} ranks leave "
                "one of each rank without; make global_batch a multiple of twice the ranks",
                exit_code=EXIT_USAGE,
            )
        self.order = training.order(config, seed=seed, global_batch=global_batch)
        log.info("JPEGs are decoded by %s", decoder_name())
        if isinstance(self.order, MixtureOrder):
            shares = zip(training.names, self.order.shares, strict=True)
            log.info("of every batch: %s", ", ".join(f"{share:.2%} {name}" for name, share in shares))
        self.num_samples = self.order.num_samples
        self.samples_read = 0
        self.bad: Counter[str] = Counter()
        self._untold: Counter[What] = Counter()
        self._read: Counter[int] = Counter()
        self._journal = Path(run_dir) / BAD_SAMPLES
        self._rank, self._world_size, self._share = rank, world_size, global_batch // world_size
        self._next_step = start_step
        ahead = config.workers * config.prefetch
        size = _height_and_width(image_size)
        self._assembler = Assembler(
            self.index,
            view=partial(_train_view, config, size, seed),
            augment=partial(_augment, config, seed) if photometric.is_on(config) else None,
            size=size,
            interpolation=config.interpolation,
            label=partial(_label, training, num_classes),
            workers=config.workers,
            ahead=ahead,
            capacity=2 * self.order.samples_in_use(world_size) + (ahead + 1) * self._share,
        )
        self._batches = self._assembler.batches(self._plans(start_step))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        done = next(self._batches)
        self.samples_read += len(done.batch)
        if done.bad:
            self.bad.update(bad.reason for bad in done.bad)
            self._untold.update(bad.what for bad in done.bad)
            self._write(done.bad)
        if isinstance(self.order, MixtureOrder):
            self._read.update(self.order.source_of(done.batch.ids.numpy()).tolist())
        batch = replace(done.batch, step=self._next_step)
        self._next_step += 1
        return batch

    def take_bad(self) -> dict[What, int]:
        """Bad samples since the last call, by what was wrong."""
        counts = dict(self._untold)
        self._untold.clear()
        return counts

    def take_sources(self) -> dict[int, tuple[int, float]]:
        """Of each source of a mixture: samples given here since the last call, and epochs of it so far."""
        if not isinstance(self.order, MixtureOrder):
            return {}
        counts = {n: (self._read[n], epochs) for n, epochs in enumerate(self.order.epochs(self._next_step))}
        self._read.clear()
        return counts

    def close(self) -> None:
        """End the threads."""
        self._assembler.close()

    def _plans(self, step: int) -> Iterator[Plan]:
        steps = max(1, min(_PLANNED // self._share, self.num_samples // (self._share * self._world_size)))
        while True:
            positions = self.order.rank_positions(step, self._rank, self._world_size, steps=steps)
            plan = self.order.plan(positions.reshape(-1))
            for i in range(0, len(plan.ids), self._share):
                yield Plan(*(column[i : i + self._share] for column in plan))
            step += steps

    def _write(self, bad: list[Bad]) -> None:
        """One line a sample, all in one write, since the ranks share the file."""
        lines = [
            json.dumps(
                {"shard": b.shard, "key": b.key, "reason": b.reason, "detail": b.detail, "step": self._next_step}
            )
            for b in bad
        ]
        try:
            file = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, ("\n".join(lines) + "\n").encode())
            finally:
                os.close(file)
        except OSError as error:
            log.warning("%s cannot be written (%s); not in it: %s", self._journal, error.strerror, "; ".join(lines))


class EvalLoader:
    """One rank's share of the validation set: each sample once over all ranks, the same number of batches on each.

    Args:
        config: Where the shards are and how their images are shown.
        image_size: Height and width, or one number for a square.
        num_classes: Labels must be below it.
        batch: Samples in a batch; the last ones are padded.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        config: As given.
        index: The shards.
        num_samples: Samples in the set, over all ranks.
        bad: Samples that could not be used so far, on this rank, by reason.

    Raises:
        UserError: No validation shards, or some that do not fit the model.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        image_size: int | tuple[int, int],
        num_classes: int,
        batch: int,
        rank: int,
        world_size: int,
    ) -> None:
        if config.validation is None:
            raise UserError("data.validation is not set; name the shards to evaluate on", exit_code=EXIT_USAGE)
        self.config = config
        self.index = load_index(config.validation, access_of(config))
        check_classes(self.index.classes, num_classes, key="data.validation")
        self.num_samples = self.index.num_samples
        self.bad: Counter[str] = Counter()
        self._batch, self._rank, self._world_size = batch, rank, world_size
        self._run = samples_per_run(self.index)
        ahead = config.workers * config.prefetch
        size = _height_and_width(image_size)
        self._assembler = Assembler(
            self.index,
            view=partial(_eval_view, config, size),
            augment=None,
            size=size,
            interpolation=config.interpolation,
            label=lambda shard, fields: label_of(fields, num_classes),
            workers=config.workers,
            ahead=ahead,
            capacity=2 * self._run,
        )

    def __len__(self) -> int:
        return eval_batches(self.num_samples, self._batch, self._world_size)

    def __iter__(self) -> Iterator[Batch]:
        shown: list[Bad] = []
        for done in self._assembler.batches(self._plan(number) for number in range(len(self))):
            self.bad.update(bad.reason for bad in done.bad)
            shown += done.bad[: _SHOWN - len(shown)]
            yield done.batch
        if shown:
            told = "; ".join(f"{b.shard}: {b.key or 'a sample'}: {b.reason}, {b.detail}" for b in shown)
            log.warning("%d validation samples could not be used, such as %s", self.bad.total(), told)

    def close(self) -> None:
        """End the threads."""
        self._assembler.close()

    def _plan(self, number: int) -> Plan:
        ids = eval_ids(self.num_samples, self._batch, self._rank, self._world_size, number)
        return eval_plan(self.index.samples, ids, run=self._run)


def check_classes(classes: Sequence[str], num_classes: int, *, key: str = "data.train") -> None:
    """Compare the classes of a set with the model; `key` of the config names the set.

    Raises:
        UserError: There are more than the model tells apart.
    """
    if num_classes and len(classes) > num_classes:
        raise UserError(
            f"{key} has {len(classes)} classes, model.num_classes is {num_classes}; set it to {len(classes)} or more",
            exit_code=EXIT_USAGE,
        )


def check_shares(global_batch: int, world_size: int, streams: int | None) -> None:
    """Compare the batch with the ranks and, where given, with the streams.

    Raises:
        UserError: One does not divide the other.
    """
    if global_batch % world_size:
        raise UserError(
            f"global_batch {global_batch} cannot be shared by {world_size} ranks; make it a multiple of {world_size}, "
            f"such as {max(1, round(global_batch / world_size)) * world_size}",
            exit_code=EXIT_USAGE,
        )
    if streams is not None and global_batch % streams:
        raise UserError(f"data.streams {streams} does not divide global_batch {global_batch}", exit_code=EXIT_USAGE)


def _height_and_width(image_size: int | tuple[int, int]) -> tuple[int, int]:
    return (image_size, image_size) if isinstance(image_size, int) else image_size


def _label(training: TrainingSet, num_classes: int, shard: int, fields: Mapping[str, bytes]) -> int:
    return training.label(shard, fields, num_classes)


def _train_view(
    config: DataConfig, size: tuple[int, int], seed: int, epoch: int, sample: int, height: int, width: int
) -> View:
    return train_view(config, height, width, size=size, seed=seed, epoch=epoch, sample=sample)


def _augment(config: DataConfig, seed: int, epoch: int, sample: int, image: Pixels) -> Pixels:
    random = sample_generator(seed, epoch, sample, domain=photometric.DOMAIN)
    return photometric.augment(image, config, random)


def _eval_view(config: DataConfig, size: tuple[int, int], epoch: int, sample: int, height: int, width: int) -> View:
    return eval_view(config, height, width, size=size)
