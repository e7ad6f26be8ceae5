"""A run's folder -> `report.html`: one page that needs nothing else, to look at and to pass on.

What it shows comes from `metrics.jsonl` and `config.yaml`; what the model has learned, from the newest checkpoint that
verifies, else from a model file in the folder. What is missing is said in the page; only a run that is not there is
an error. The page loads nothing and runs nothing: styles, curves and pictures stand in it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from vitscale.config.load import load_config, model_from_dict
from vitscale.config.schema import ModelConfig, RunConfig
from vitscale.errors import EXIT_USAGE, UserError
from vitscale.models.position import grid_height_width, num_prefix_positions
from vitscale.monitor.figures import (
    Curve,
    chart,
    cosine_similarity,
    kernel_tiles,
    principal_kernels,
    short_number,
    similarity_tiles,
    smoothed,
)
from vitscale.monitor.writers import History, read_history
from vitscale.train import checkpoint
from vitscale.weights.adapt import expected_shapes
from vitscale.weights.io import load_weights

_POSITIONS, _KERNELS = "pos_embed", "patch_embed.proj.weight"


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page, with what it is and a remark."""

    value: str
    name: str
    remark: str = ""


@dataclass(frozen=True)
class Picture:
    """A chart or an image with its heading; without content the page shows `note` in its place."""

    title: str
    note: str
    svg: Markup | None = None
    image: str | None = None
    scale: tuple[str, str] | None = None


@dataclass(frozen=True)
class Learned:
    """The two tensors that the page looks into, as float64.

    Attributes:
        source: Where they come from, in words.
        config: The model that they are of.
        tensors: `pos_embed` and `patch_embed.proj.weight`, where the model has them.
    """

    source: str
    config: ModelConfig
    tensors: Mapping[str, Tensor]


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into the folder of a run.

    Returns:
        The file.

    Raises:
        UserError: There is no such run, or the page cannot be written.
    """
    run_dir = Path(run_dir)
    config_file = run_dir / "config.yaml"
    if not config_file.exists() and not (run_dir / "metrics.jsonl").exists():
        found = "holds neither config.yaml nor metrics.jsonl" if run_dir.is_dir() else "is not a folder"
        raise UserError(f"{run_dir} {found}; give the folder of a run, its run_dir", exit_code=EXIT_USAGE)
    history = read_history(run_dir)
    config, problem = _config(config_file)
    learned, why_not = _learned(run_dir)
    page = _render(
        name=config.name if config else run_dir.resolve().name,
        folder=str(run_dir.resolve()),
        written=time.strftime("%Y-%m-%d %H:%M"),
        facts=_facts(history, config),
        notes=[*_notes(history), *([problem] if problem else [])],
        charts=_charts(history),
        evaluations=_evaluations(history),
        pictures=_pictures(learned, why_not),
        source=learned.source if learned else "",
        config=config_file.read_text(encoding="utf-8", errors="replace") if config_file.exists() else "",
    )
    path = run_dir / "report.html"
    try:
        aside = path.with_suffix(".html.tmp")
        aside.write_text(page, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the report needs a folder that this user may write") from error
    return path


def _render(**values: object) -> str:
    template = resources.files("vitscale.monitor").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(values)


def _config(path: Path) -> tuple[RunConfig | None, str]:
    """The run's config, or why it cannot be read."""
    if not path.exists():
        return None, "The run has no config.yaml."
    try:
        return load_config(path), ""
    except UserError as error:
        return None, f"config.yaml does not fit this version of vitscale: {error.message}"


# ---------------------------------------------------------------------- numbers


def _facts(history: History, config: RunConfig | None) -> list[Fact]:
    facts: list[Fact] = []
    if history.records:
        epochs = history.series("epoch")[1]
        remarks = [f"{epochs[-1]:.3g} epochs"] if epochs else []
        remarks += [f"planned: {config.duration}"] if config else []
        facts.append(Fact(f"{history.records[-1].step:,}", "steps", ", ".join(remarks)))
    losses = [loss for loss in history.series("loss")[1] if math.isfinite(loss)]
    if losses:
        facts.append(Fact(f"{smoothed(np.asarray(losses))[-1]:.4g}", "loss at the end", f"from {losses[0]:.4g}"))
    for row in _evaluations(history)[-1:]:
        facts.append(Fact(row["top-1"], "top-1", f"step {row['step']}, {row['weights']} weights"))
    rates = [rate for rate in history.series("images_per_second")[1] if math.isfinite(rate)]
    if rates:
        facts.append(Fact(short_number(statistics.median(rates)), "images/s", "median of the records"))
    if history.attempts:
        seconds = sum(attempt.end - attempt.start for attempt in history.attempts)
        wall = history.attempts[-1].end - history.attempts[0].start
        facts.append(Fact(_duration(seconds), "running", f"{_duration(wall)} on the clock"))
        restarts = len(history.attempts) - 1
        at = ", ".join(f"{attempt.step:,}" for attempt in history.attempts[1:4])
        more = ", ..." if restarts > 3 else ""
        facts.append(
            Fact(str(restarts), "restart" if restarts == 1 else "restarts", f"from step {at}{more}" if at else "")
        )
        run = history.attempts[-1].run
        if "engine" in run:
            ranks = run.get("ranks", "?")
            facts.append(Fact(run["engine"], "engine", f"{ranks} rank{'s' * (ranks != '1')}"))
    if config:
        facts.append(Fact(*_model(config.model)))
    return facts


def _model(model: ModelConfig) -> tuple[str, str, str]:
    rows, columns = grid_height_width(model)
    size = f"{rows * model.patch_size}x{columns * model.patch_size}"
    free = f"{model.embed_dim} wide, {model.depth} deep"
    return (f"ViT-{model.name}" if model.name else free), "model", f"{size} px, {rows}x{columns} patches"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


def _notes(history: History) -> list[str]:
    """What a person should know before trusting the curves."""
    if not history.records:
        return ["No metrics are recorded yet."]
    last: dict[str, float] = {}
    for record in history.records:
        last |= record.values
    notes = []
    if skipped := last.get("skipped_steps_total"):
        notes.append(f"Skipped steps, whose loss or gradients were not finite: {skipped:,.0f}.")
    bad = {key.split('"')[1]: count for key, count in last.items() if key.startswith("bad_samples_total") and count}
    if bad:
        reasons = ", ".join(f"{reason} {count:,.0f}" for reason, count in bad.items())
        notes.append(f"Samples that could not be used: {sum(bad.values()):,.0f} ({reasons}); see bad_samples.jsonl.")
    if failures := last.get("checkpoint_failures_total"):
        notes.append(f"Checkpoints that could not be written: {failures:,.0f}.")
    return notes


def _evaluations(history: History) -> list[dict[str, str]]:
    """A row for each evaluation, in percent."""
    rows = []
    for record in history.records:
        for weights in ("trained", "ema"):
            values = {
                name: record.values.get(f'evaluation_{name}{{weights="{weights}"}}', math.nan)
                for name in ("top1_ratio", "top5_ratio", "loss")
            }
            if not math.isnan(values["top1_ratio"]):
                rows.append(
                    {
                        "step": f"{record.step:,}",
                        "weights": "averaged" if weights == "ema" else "trained",
                        "top-1": f"{100 * values['top1_ratio']:.2f}%",
                        "top-5": f"{100 * values['top5_ratio']:.2f}%",
                        "loss": f"{values['loss']:.4g}",
                    }
                )
    return rows


# ---------------------------------------------------------------------- pictures


def _charts(history: History) -> list[Picture]:
    restarts = [attempt.step for attempt in history.attempts[1:]]

    def picture(name: str, title: str, curves: Sequence[Curve], *, smooth: bool = False, wide: bool = False) -> Picture:
        drawn = [curve for curve in curves if curve.values]
        svg = chart(name, drawn, restarts=restarts, smooth=smooth, wide=wide) if drawn else None
        count = max((len(curve.values) for curve in curves), default=0)
        note = f"Not enough records for a curve: {count}." if count else "Not recorded."
        return Picture(title, note, svg=Markup(svg) if svg else None)

    def curve(key: str, label: str = "", *, points: bool = False, factor: float = 1.0) -> Curve:
        steps, values = history.series(key)
        return Curve(label, steps, [factor * value for value in values], points=points)

    pictures = [
        picture("loss", "Training loss", [curve("loss", "smoothed")], smooth=True, wide=True),
        picture("rate", "Learning rate", [curve("learning_rate", "learning rate")]),
        picture("gradient", "Gradient norm", [curve("grad_norm", "smoothed")], smooth=True),
        picture("speed", "Images per second", [curve("images_per_second", "smoothed")], smooth=True),
    ]
    accuracy = [
        curve(f'evaluation_top1_ratio{{weights="{weights}"}}', label, points=True, factor=100)
        for weights, label in (("trained", "trained"), ("ema", "averaged"))
    ]
    if any(len(line.values) > 1 for line in accuracy):
        pictures.append(picture("accuracy", "Top-1 on validation, percent", accuracy))
    return pictures


def _learned(run_dir: Path) -> tuple[Learned | None, str]:
    """What the newest checkpoint, else a model file, holds of positions and kernels; or why there is none."""
    try:
        newest = checkpoint.latest(run_dir)
        if newest is not None:
            return _from_checkpoint(newest), ""
    except UserError as error:
        return None, error.message
    for file in sorted(run_dir.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            weights = load_weights(file)
        except UserError:
            continue
        tensors = {name: weights.state[name].double() for name in (_POSITIONS, _KERNELS) if name in weights.state}
        return Learned(file.name, weights.config, tensors), ""
    return None, "The run has no checkpoint or model file yet."


def _from_checkpoint(path: Path) -> Learned:
    saved = checkpoint.read(path)
    config = model_from_dict(saved.state["config"]["model"])
    kind: Literal["ema", "param"] = "ema" if "ema" in saved.kinds else "param"
    shapes = expected_shapes(config)
    tensors = {
        name: saved.read(name, kind, 0, math.prod(shapes[name])).reshape(shapes[name]).double()
        for name in (_POSITIONS, _KERNELS)
        if name in shapes
    }
    words = "averaged" if kind == "ema" else "trained"
    return Learned(f"{words} weights of step {saved.state['step']:,}", config, tensors)


def _pictures(learned: Learned | None, why_not: str) -> list[Picture]:
    titles = ("Similarity of position embeddings", "Patch embedding filters")
    if learned is None:
        return [Picture(title, why_not) for title in titles]
    return [_similarity(titles[0], learned), _filters(titles[1], learned)]


def _similarity(title: str, learned: Learned) -> Picture:
    if _POSITIONS not in learned.tensors:
        return Picture(title, "The model learns no positions.")
    rows, columns = grid_height_width(learned.config)
    positions = learned.tensors[_POSITIONS][0, num_prefix_positions(learned.config) :].numpy()
    similarity = cosine_similarity(positions, (rows, columns))
    others = similarity.reshape(rows * columns, -1)[~np.eye(rows * columns, dtype=bool)]
    low, high = (float(others.min()), float(others.max())) if len(others) else (-1.0, 1.0)
    note = (
        f"Each of the {rows}x{columns} tiles stands for one patch, and shows the cosine similarity of its learned "
        "position with that of every patch. A model that has found out about space shows a bright spot at the tile's "
        "own place, with its row and column."
    )
    return Picture(
        title,
        note,
        image=similarity_tiles(similarity, low=low, high=high),
        scale=(f"{low:.2f}", f"{high:.2f}"),
    )


def _filters(title: str, learned: Learned) -> Picture:
    if _KERNELS not in learned.tensors:
        return Picture(title, "The model has no patch embedding of its own.")
    kernels, explained = principal_kernels(learned.tensors[_KERNELS].numpy())
    note = (
        f"The first {len(kernels)} principal components of the {learned.config.embed_dim} filters that turn a patch of "
        f"pixels into a token; they explain {100 * explained:.0f}% of the filters' variance."
    )
    return Picture(title, note, image=kernel_tiles(kernels))
