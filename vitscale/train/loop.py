"""Training, from a config to a finished run: read this first.

`train` is the only place where the parts meet; what happens at a step is found by reading down. Steps are counted by
the samples they consumed: a step that was skipped, since its loss or gradients were not finite, moves the data and the
schedule on like any other.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitscale.config.load import config_to_dict, dump_config
from vitscale.config.schema import Duration, RunConfig
from vitscale.data.augment import normalize
from vitscale.data.loader import EvalLoader, TrainLoader
from vitscale.data.mix import is_mixing, mix
from vitscale.data.shards import ShardIndex
from vitscale.data.training import load_training
from vitscale.engines.base import Engine
from vitscale.engines.build import build_engine, engine_kind
from vitscale.engines.parallelize import apply_checkpointing
from vitscale.evaluate.accuracy import Accuracy, evaluate
from vitscale.logs import STEPS
from vitscale.monitor.health import BadLimit, SkipLimit, Throughput, memory
from vitscale.monitor.metrics import Recorder
from vitscale.monitor.writers import open_writers, read_history
from vitscale.optim.schedules import is_time, rate
from vitscale.progress import progress
from vitscale.train import checkpoint
from vitscale.train.build import build_model, build_objective, seed_step
from vitscale.train.start import find_start
from vitscale.world import World

log = logging.getLogger(__name__)
steps_log = logging.getLogger(STEPS)


@dataclass(frozen=True)
class TrainResult:
    """How training ended.

    Attributes:
        step: Steps done, over all attempts.
        finished: False when a signal ended it early, with a checkpoint to go on from.
        accuracy: The last evaluation, if there was one.
    """

    step: int
    finished: bool
    accuracy: Accuracy | None


def train(config: RunConfig, world: World) -> TrainResult:
    """Train the run that `config` describes, from where it stands, to its end or to a signal.

    Raises:
        UserError: Anything that a person can mend, on every rank alike.
    """
    # ------------------------------------------------------------------ how much there is to do, in steps
    run_dir = Path(config.run_dir)
    index = load_training(config.data).index
    in_steps = partial(Duration.steps, num_samples=index.num_samples, global_batch=config.global_batch)
    total = in_steps(config.duration, total=None)
    warmup = in_steps(config.schedule.warmup, total=total)
    save_every = in_steps(config.checkpoint.every, total=total)
    keep_every = in_steps(config.checkpoint.keep_every, total=total) if config.checkpoint.keep_every else None
    evaluate_every = in_steps(config.evaluate.every, total=total) if config.evaluate.every else total

    # ------------------------------------------------------------------ model, and where its weights come from
    start = find_start(config, data_digest=index.digest, world=world)
    model = build_model(config.model, device=world.device, seed=config.seed)
    start.fill(model, config, classes=index.classes)
    apply_checkpointing(model, config.model.activation_checkpointing)

    # ------------------------------------------------------------------ the engine spreads it over the ranks
    engine = build_engine(
        model,
        build_objective(config),
        optim=config.optim,
        engine=config.engine,
        world=world,
        global_batch=config.global_batch,
    )
    if start.checkpoint is not None:
        checkpoint.restore(start.checkpoint, engine)
    step = start.step

    # ------------------------------------------------------------------ batches, from the step that comes next
    loader = TrainLoader(
        config.data,
        image_size=config.model.image_size,
        num_classes=config.model.num_classes,
        global_batch=config.global_batch,
        seed=config.seed,
        rank=world.rank,
        world_size=world.world_size,
        start_step=step,
        run_dir=run_dir,
    )

    # ------------------------------------------------------------------ who is told
    about = {
        "name": config.name,
        "model": config.model.name or f"{config.model.embed_dim}x{config.model.depth}/{config.model.patch_size}",
        "engine": engine_kind(config.engine, world_size=world.world_size),
        "ranks": str(world.world_size),
    }
    restarts = len(read_history(run_dir).attempts) if world.is_first else 0
    writers = open_writers(config.monitor, run_dir=run_dir, world=world, step=step, run=about, totals=start.totals)
    recorder = Recorder(world, writers, totals=start.totals)
    recorder.record("restarts", restarts)
    skips, bad, throughput = SkipLimit(config.monitor.max_skipped), BadLimit(config.data.max_bad_fraction), Throughput()
    if world.is_first:
        (run_dir / "config.yaml").write_text(dump_config(config))
    log.info("step %d of %d, from %s; order %s", step, total, start.words, loader.order.digest(step))

    # ------------------------------------------------------------------ training
    accuracy: Accuracy | None = None
    stopped = False
    with ExitStack() as stack:
        stack.callback(recorder.close)
        stack.callback(loader.close)
        bar = stack.enter_context(progress(total, config.name, unit="steps", done=step, shown=on_terminal(world)))
        batches = iter(loader)
        end_of_step = time.perf_counter()
        while step < total and not stopped:
            begin = time.perf_counter()
            batch = next(batches)
            recorder.record("data_wait_seconds_total", time.perf_counter() - begin)

            learning_rate = config.optim.lr * rate(
                step, total=total, warmup=warmup, kind=config.schedule.kind, final=config.schedule.final
            )
            batch = batch.to(world.device)
            if is_mixing(config.data):
                first = world.rank * len(batch)
                batch = mix(batch, config.data, seed=config.seed, first=first, global_batch=config.global_batch)
            seed_step(config.seed, step, world.rank)
            with world.waiting(f"step {step + 1}"):
                result = engine.step(batch, rate=learning_rate)
            step += 1
            bar.advance()

            recorder.record("loss", result.loss)
            recorder.record("grad_norm", result.grad_norm)
            recorder.record("learning_rate", learning_rate)
            recorder.record("step_total", 1)
            recorder.record("images_total", len(batch))
            throughput.add(config.global_batch)
            skips.observe(step, rate=learning_rate, loss=result.loss, skipped=result.skipped)
            now = time.perf_counter()
            recorder.record("step_duration_seconds", now - end_of_step)
            stopped = world.stop_requested(step)

            # -------------------------------------------------------------- is it time: evaluate, tell, save
            saving = stopped or is_time(step, every=save_every, total=total)
            evaluating = not stopped and is_time(step, every=evaluate_every, total=total)
            if evaluating and config.data.validation is not None:
                with throughput.paused():
                    accuracy = evaluate_run(config, engine, world, recorder)
            if saving or evaluating or step % config.monitor.every == 0:
                recorder.record("epoch", step * config.global_batch / index.num_samples)
                recorder.record("images_per_second", throughput.read())
                recorder.record("skipped_steps_total", skips.check())
                for reason, count in loader.take_bad().items():
                    recorder.record("bad_samples_total", count, label=reason)
                for number, (count, epochs) in loader.take_sources().items():
                    recorder.record("source_images_total", count, label=str(number))
                    recorder.record("source_epochs", epochs, label=str(number))
                for name, value in memory(world.device).items():
                    recorder.record(name, value)
                tell(recorder.flush(step), total)
                bad.check(recorder.totals, run_dir=run_dir)
            if saving:
                with throughput.paused():
                    state = run_state(config, index, recorder, engine=about["engine"])
                    save_run(config, engine, world, recorder, step=step, state=state, must=stopped or step == total)
                    if world.is_first:
                        checkpoint.prune(run_dir, keep_last=config.checkpoint.keep_last, keep_every=keep_every)
            end_of_step = time.perf_counter()
        recorder.flush(step)  # what the last checkpoint said of itself

    log.info("stopped by a signal after step %d of %d" if stopped else "finished step %d of %d", step, total)
    return TrainResult(step=step, finished=step == total, accuracy=accuracy)


def evaluate_run(config: RunConfig, engine: Engine, world: World, recorder: Recorder) -> Accuracy:
    """Judge the averaged weights, or those trained, on the validation shards."""
    begin = time.perf_counter()
    averaged = config.evaluate.ema and config.optim.ema_decay is not None
    loader = EvalLoader(
        config.data,
        image_size=config.model.image_size,
        num_classes=config.model.num_classes,
        batch=config.evaluate.batch,
        rank=world.rank,
        world_size=world.world_size,
    )
    with closing(loader), engine.averaged() if averaged else nullcontext(engine.model) as model:
        accuracy = evaluate(
            model,
            loader,
            prepare=partial(normalize, mean=config.data.mean, std=config.data.std),
            world=world,
            precision=getattr(torch, config.engine.precision),
        )
    label = "ema" if averaged else "trained"
    recorder.record("evaluation_top1_ratio", accuracy.top1, label=label)
    recorder.record("evaluation_top5_ratio", accuracy.top5, label=label)
    recorder.record("evaluation_loss", accuracy.loss, label=label)
    recorder.record("evaluation_duration_seconds", time.perf_counter() - begin)
    return accuracy


def run_state(config: RunConfig, index: ShardIndex, recorder: Recorder, *, engine: str) -> dict[str, Any]:
    """What a checkpoint keeps beside the tensors, so that the run can go on or be understood."""
    return {
        "name": config.name,
        "config": config_to_dict(config),
        "engine_kind": engine,
        "classes": list(index.classes),
        "data_digest": index.digest,
        "totals": recorder.totals,
    }


def save_run(
    config: RunConfig,
    engine: Engine,
    world: World,
    recorder: Recorder,
    *,
    step: int,
    state: dict[str, Any],
    must: bool,
) -> None:
    """Write a checkpoint; one that fails is said and counted, and ends the run only if it is the last (`must`)."""
    begin = time.perf_counter()
    try:
        saved = checkpoint.save(config.run_dir, step=step, engine=engine, world=world, state=state)
    except checkpoint.CheckpointError as error:
        recorder.record("checkpoint_failures_total", 1)
        if must:
            raise
        log.error("%s; training goes on and tries again at the next checkpoint", error.message)
        return
    recorder.record("checkpoint_duration_seconds", time.perf_counter() - begin)
    if world.is_first:
        recorder.record("checkpoint_size_bytes", saved.bytes)
    recorder.record("checkpoint_step", step)
    recorder.record("checkpoint_timestamp_seconds", time.time())
    log.info("saved %s, %.1f MB", saved.path, saved.bytes / 1e6)


def tell(values: Mapping[str, float], total: int) -> None:
    """One line of a log for people."""
    words = [f"step {values['current_step']:.0f}/{total}"]
    for label, key, form in _LINE:
        if key in values:
            words.append(f"{label} {values[key]:{form}}")
    steps_log.info("  ".join(words))


_LINE = (
    ("loss", "loss", ".4f"),
    ("grad norm", "grad_norm", ".3f"),
    ("rate", "learning_rate", ".3g"),
    ("images/s", "images_per_second", ",.0f"),
    ("top-1", 'evaluation_top1_ratio{weights="ema"}', ".2%"),
    ("top-1", 'evaluation_top1_ratio{weights="trained"}', ".2%"),
)


def on_terminal(world: World) -> bool:
    """Whether someone may be watching a progress bar; in a file the lines of `tell` say the same."""
    return world.is_first and sys.stderr.isatty()
