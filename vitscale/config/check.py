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
    yield from _check_grid(model)
    yield from _check_parts(model)


def _check_grid(model: ModelConfig) -> Iterator[Finding]:
    size, patch = model.image_size, model.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    if model.patch_sizes and (model.patch_stride is not None or model.patch_padding != "none"):
        key = "patch_stride" if model.patch_stride is not None else "patch_padding"
        allowed = "null" if key == "patch_stride" else "none"
        yield Finding(
            (f"model.{key}", "model.patch_sizes"), f"patches of several sizes lie side by side; allowed: {allowed}"
        )
    elif model.patch_padding == "none" and (model.patch_stride or patch) != patch:
        if min(height, width) < patch:
            yield Finding(
                ("model.image_size", "model.patch_size"),
                f"images of {height} x {width} pixels hold no patch of {patch}; allowed: {patch} or more",
            )
    elif model.patch_padding == "none":
        keys = ("model.image_size", "model.patch_sizes" if model.patch_sizes else "model.patch_size")
        for unit in model.patch_sizes or (patch,):
            if height % unit or width % unit:
                sides = [_multiples_around(side, unit) for side in dict.fromkeys((height, width))]
                yield Finding(
                    keys,
                    f"patches of {unit} do not fill images of {height} x {width} pixels; "
                    f"allowed: multiples of {unit}, here {' and '.join(sides)}",
                )
        if model.patch_sizes and min(height, width) < patch:
            yield Finding(
                keys, f"images of {height} x {width} pixels hold no patch of {patch}; allowed: {patch} or more"
            )


def _check_parts(model: ModelConfig) -> Iterator[Finding]:
    if model.class_token is False and model.pool in ("cls", "cls_gap"):
        yield Finding(
            ("model.class_token", "model.pool"),
            f"pool: {model.pool} reads the class token; allowed: true, or pool: gap, map or none",
        )
    head_dim = model.embed_dim // model.num_heads
    if model.pos_embed in ("sincos", "sincos_mae") and model.embed_dim % 4:
        yield Finding(
            ("model.embed_dim", "model.pos_embed"),
            f"{model.pos_embed} gives a quarter each to sines and cosines of row and column, and 4 does not divide "
            f"{model.embed_dim}; allowed: {_multiples_around(model.embed_dim, 4)}",
        )
    if model.pos_embed == "rotary" and head_dim % 4:
        yield Finding(
            ("model.num_heads", "model.embed_dim", "model.pos_embed"),
            f"rotary positions need heads whose width is a multiple of 4, not {head_dim}; allowed: another number of "
            "heads",
        )
    if model.activation == "swiglu" and model.num_fcs != 2:
        yield Finding(("model.num_fcs", "model.activation"), "SwiGLU has two layers; allowed: 2")
    if model.frozen_stages > model.depth:
        yield Finding(
            ("model.frozen_stages", "model.depth"),
            f"there are {model.depth} blocks, and {model.frozen_stages} cannot be frozen; allowed: 0 to {model.depth}",
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
    if (data.train is None) == (not data.mixture):
        what = "both are given" if data.mixture else "no shards to train on"
        yield Finding(
            ("data.train", "data.mixture"), f"{what}; allowed: one set in data.train, or several in data.mixture"
        )
    names = [source.name for source in data.mixture]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield Finding(("data.mixture",), f"two sources are called {twice!r}; each needs a name of its own")
    if data.mixture and data.streams is not None:
        yield Finding(("data.streams", "data.mixture"), "each source of a mixture has its own streams; allowed: null")
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
    if len(config.data.mixture) > batch:
        yield Finding(
            ("global_batch", "data.mixture"),
            f"a batch of {batch} has no sample of each of {len(config.data.mixture)} sources; allowed: as many or more",
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
