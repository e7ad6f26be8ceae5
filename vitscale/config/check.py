"""What the keys of a run owe each other, as far as it can be said without the world and without the data.

Bounds of a single key are part of its type in `schema`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vitscale.config.schema import DataConfig, Duration, ModelConfig, RunConfig


@dataclass(frozen=True)
class Finding:
    """A conflict between keys; `keys` are all that take part, the one to change first."""

    keys: tuple[str, ...]
    message: str


def check_run(config: RunConfig) -> Iterator[Finding]:
    """Every conflict within `config`."""
    yield from check_model(config.model)
    yield from _check_task(config)
    yield from _check_data(config.data)
    yield from _check_batch(config)
    yield from _check_durations(config)


def check_model(model: ModelConfig) -> Iterator[Finding]:
    """Every conflict within one model, for whatever it is used."""
    if model.embed_dim % model.num_heads:
        yield Finding(
            ("model.num_heads", "model.embed_dim"),
            f"{model.num_heads} heads do not divide embed_dim {model.embed_dim}; "
            f"allowed: {_nearest_divisors(model.embed_dim, model.num_heads)}",
        )
    size = model.image_size
    height, width = (size, size) if isinstance(size, int) else size
    if height % model.patch_size or width % model.patch_size:
        sides = [_multiples_around(side, model.patch_size) for side in dict.fromkeys((height, width))]
        yield Finding(
            ("model.image_size", "model.patch_size"),
            f"patches of {model.patch_size} do not fill images of {height} x {width} pixels; "
            f"allowed: multiples of {model.patch_size}, here {' and '.join(sides)}",
        )


def _check_task(config: RunConfig) -> Iterator[Finding]:
    model = config.model
    if model.in_channels != 3:
        yield Finding(
            ("model.in_channels",), f"training images are RGB, not of {model.in_channels} channels; allowed: 3"
        )
    if model.num_classes == 0:
        yield Finding(("model.num_classes",), "a model without a head cannot be trained; allowed: 1 or more")
    largest = model.image_size if isinstance(model.image_size, int) else max(model.image_size)
    if config.data.eval_resize is not None and config.data.eval_resize < largest:
        yield Finding(
            ("data.eval_resize", "model.image_size"),
            f"images whose shorter side is {config.data.eval_resize} may hold no crop of {largest} pixels; "
            f"allowed: {largest} or more",
        )
    if config.evaluate.every is not None and config.data.validation is None:
        yield Finding(("evaluate.every", "data.validation"), "there is nothing to evaluate on; set data.validation too")


def _check_data(data: DataConfig) -> Iterator[Finding]:
    for key, (low, high) in (("crop_area", data.crop_area), ("crop_ratio", data.crop_ratio)):
        if low > high:
            yield Finding((f"data.{key}",), f"{low:g} is larger than {high:g}; allowed: [smallest, largest]")


def _check_batch(config: RunConfig) -> Iterator[Finding]:
    batch, micro, streams = config.global_batch, config.engine.micro_batch, config.data.streams
    if micro is not None and batch % micro:
        reason = "is more than" if micro > batch else "does not divide"
        yield Finding(
            ("engine.micro_batch", "global_batch"),
            f"{micro} {reason} global_batch {batch}; allowed: {_nearest_divisors(batch, micro)}",
        )
    if streams is not None and batch % streams:
        yield Finding(
            ("data.streams", "global_batch"),
            f"{streams} does not divide global_batch {batch}; allowed: {_nearest_divisors(batch, streams)}",
        )


def _check_durations(config: RunConfig) -> Iterator[Finding]:
    if config.duration.unit == "percent":
        yield Finding(("duration",), f"'{config.duration}' of what? allowed: epochs, steps or samples")
    warmup, keep_every, every = config.schedule.warmup, config.checkpoint.keep_every, config.checkpoint.every
    whole = Duration(100, "percent") if warmup.unit == "percent" else config.duration
    if warmup.unit == whole.unit and warmup.value > whole.value:
        yield Finding(("schedule.warmup", "duration"), f"'{warmup}' is longer than the run; allowed: up to '{whole}'")
    if keep_every is not None and keep_every.unit == every.unit and not _is_multiple(keep_every, every):
        yield Finding(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"'{keep_every}' is not a multiple of checkpoint.every '{every}', so that few checkpoints would be kept",
        )


def _is_multiple(longer: Duration, shorter: Duration) -> bool:
    ratio = longer.value / shorter.value
    return ratio >= 1 and abs(ratio - round(ratio)) < 1e-9


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` just below and just above `wanted`, for a message."""
    if number > 10**9:  # the search below would take seconds
        return f"a divisor of {number}"
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below, above = [d for d in divisors if d < wanted][-1:], [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)


def _multiples_around(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
