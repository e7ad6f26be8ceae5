"""Pictures for the report: curves as SVG, what a model has learned as PNG. Pure functions; no display, no state.

An SVG names its colours as CSS variables (`--chart-ink`, `--chart-line`, ...), so that the page around it decides about
light and dark. A PNG is scaled up without smoothing and transparent between its tiles.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]

_POINTS = 800  # that a curve is drawn with at most
_COLOURS = {
    "#010a01": "var(--chart-ink)",
    "#010a02": "var(--chart-grid)",
    "#010a03": "var(--chart-line)",
    "#010a04": "var(--chart-faint)",
    "#010a05": "var(--chart-mark)",
    "#010a06": "var(--chart-second)",
}
_INK, _GRID, _LINE, _FAINT, _MARK, _SECOND = _COLOURS
_STYLE: dict[Any, Any] = {  # Any: the stubs' keys are literals that differ between versions
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
}


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: Its name in the legend.
        steps: Rising.
        values: One a step; what is not finite leaves a gap.
        points: Draw each value as a dot too: for few, far apart.
    """

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    points: bool = False


def chart(
    name: str, curves: Sequence[Curve], *, restarts: Sequence[int] = (), smooth: bool = False, wide: bool = False
) -> str | None:
    """Values over steps as an `<svg>` element; None when there are not two finite values to draw a line through.

    Args:
        name: Identifier that is unique in the page.
        curves: One or two.
        restarts: Steps with a vertical mark.
        smooth: Draw the values faint, and over them a smooth line.
        wide: For the whole width of a page instead of half.
    """
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if all(np.isfinite(curve.values).sum() < 2 for curve in curves):
        return None
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(13.4, 3.4) if wide else (6.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
        for curve, colour in zip(curves, (_LINE, _SECOND), strict=False):
            steps, values = np.asarray(curve.steps, np.float64), np.asarray(curve.values, np.float64)
            if smooth:
                axes.plot(*thin(steps, values), color=_FAINT, linewidth=1)
                values = smoothed(values)
            axes.plot(
                *thin(steps, values),
                color=colour,
                label=curve.label,
                marker="o" if curve.points else "",
                markersize=4.5,
            )
        if min(finite) > 0 and max(finite) / min(finite) > 100:
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axes.margins(x=0.01)
        for index, step in enumerate(restarts):
            axes.axvline(step, color=_MARK, linewidth=1.2, linestyle=(0, (4, 3)), label="" if index else "restart")
        if len(curves) > 1 or restarts:
            axes.legend(loc="best", frameon=False, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(14 if wide else 7, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
        axes.set_axisbelow(True)
        return _svg(name, figure)


def _svg(name: str, figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(
        file, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:xlink)?|version)="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)  # else the charts of one page share ids
    text = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    return text


def thin(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Few enough points to draw; of each stretch the least and the greatest, so that no spike is lost."""
    if len(steps) <= _POINTS:
        return steps, values
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(steps)), _POINTS // 2):
        finite = stretch[np.isfinite(values[stretch])]
        if len(finite):
            kept += sorted({int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])})
        else:
            kept.append(int(stretch[0]))  # the gap
    return steps[kept], values[kept]


def smoothed(values: Floats) -> Floats:
    """Mean over each value's neighbours, weighted by a bell about a fiftieth of all values wide; gaps do not count."""
    sigma = max(0.8, len(values) / 50)
    reach = math.ceil(3 * sigma)
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    there = np.isfinite(values)
    total = np.convolve(np.where(there, values, 0), bell)[reach:-reach]
    weight = np.convolve(there.astype(np.float64), bell)[reach:-reach]
    return np.where(there, total / np.where(there, weight, 1), np.nan)


def short_number(value: float) -> str:
    """`12k`, `1.5M`, `0.0003`: three digits at most."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cosine_similarity(positions: Floats, grid: tuple[int, int]) -> Floats:
    """Cosine of each position's embedding with every position's.

    Args:
        positions: `[rows * columns, dim]`.
        grid: (rows, columns).

    Returns:
        `[rows, columns, rows, columns]`: the first two name the position, the others whom it is compared with.
    """
    unit = positions / np.maximum(np.linalg.norm(positions, axis=1, keepdims=True), 1e-12)
    similarity: Floats = unit @ unit.T
    return similarity.reshape(*grid, *grid)


def similarity_tiles(similarity: Floats, *, low: float, high: float, most: int = 24) -> str:
    """One tile a position, each a map of its similarity to all, as a PNG in a data URI.

    Args:
        similarity: `[rows, columns, rows, columns]`.
        low: What the darkest colour stands for.
        high: What the brightest colour stands for.
        most: Tiles in a row or column; of a larger grid evenly spaced positions are shown.
    """
    chosen = [np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int)) for size in similarity.shape[:2]]
    tiles = similarity[np.ix_(*chosen)]
    scaled = np.clip((tiles - low) / max(high - low, 1e-12), 0, 1)
    return _tiled(matplotlib.colormaps["viridis"](scaled)[..., :3], gap=1)


def principal_kernels(kernels: Floats, count: int = 28) -> tuple[Floats, float]:
    """The first principal components of the patch embedding's filters (figure 7, left, of arXiv:2010.11929).

    Args:
        kernels: `[dim, channels, height, width]`.
        count: How many at most.

    Returns:
        `[components, channels, height, width]`, each of length 1 and with its largest weight above 0, and the share
        of the filters' variance that they explain.
    """
    flat = kernels.reshape(len(kernels), -1)
    _, sizes, directions = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    directions = directions[:count]
    largest = np.abs(directions).argmax(axis=1)
    directions = directions * np.sign(directions[np.arange(len(directions)), largest])[:, None]
    explained = float((sizes[:count] ** 2).sum() / max((sizes**2).sum(), 1e-12))
    return directions.reshape(-1, *kernels.shape[1:]), explained


def kernel_tiles(kernels: Floats, *, columns: int = 7) -> str:
    """Filters as pictures around grey, each by its own largest weight, as a PNG in a data URI.

    Args:
        kernels: `[filters, channels, height, width]`; three channels are red, green and blue, others are averaged.
        columns: Filters in a row.
    """
    largest = np.abs(kernels).max(axis=(1, 2, 3), keepdims=True)
    shown = 0.5 + 0.5 * kernels / np.maximum(largest, 1e-12)
    if shown.shape[1] != 3:
        shown = shown.mean(axis=1, keepdims=True).repeat(3, axis=1)
    rows = -(-len(shown) // columns)
    pictures = np.full((rows * columns, *shown.shape[2:], 4), 0.0)
    pictures[: len(shown), ..., :3] = shown.transpose(0, 2, 3, 1)
    pictures[: len(shown), ..., 3] = 1
    return _tiled(pictures.reshape(rows, columns, *pictures.shape[1:]), gap=max(1, shown.shape[-1] // 8))


def _tiled(tiles: Floats, *, gap: int) -> str:
    """Tiles `[rows, columns, height, width, 3 or 4]` of 0..1, `gap` pixels apart, scaled up whole pixels."""
    rows, columns, height, width, channels = tiles.shape
    canvas = np.zeros((rows, height + gap, columns, width + gap, 4))
    canvas[:, :height, :, :width, :channels] = tiles.transpose(0, 2, 1, 3, 4)
    if channels == 3:
        canvas[:, :height, :, :width, 3] = 1
    flat = canvas.reshape(rows * (height + gap), columns * (width + gap), 4)[:-gap, :-gap]
    scale = max(1, 640 // max(flat.shape[:2]))
    pixels = (flat * 255).round().astype(np.uint8).repeat(scale, axis=0).repeat(scale, axis=1)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, "png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
