from __future__ import annotations

import base64
import io
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitscale.monitor.figures import (
    Curve,
    chart,
    cosine_similarity,
    kernel_tiles,
    principal_kernels,
    short_number,
    similarity_tiles,
    smoothed,
    thin,
)


def decode(uri: str) -> NDArray[np.uint8]:
    head, _, data = uri.partition(",")
    assert head == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    assert image.format == "PNG"
    return np.asarray(image)


def test_similarity_is_the_cosine() -> None:
    positions = np.random.default_rng(0).standard_normal((6, 5))
    similarity = cosine_similarity(positions, (2, 3))
    assert similarity.shape == (2, 3, 2, 3)
    for row, column, other_row, other_column in np.ndindex(2, 3, 2, 3):
        one, other = positions[row * 3 + column], positions[other_row * 3 + other_column]
        expected = sum(a * b for a, b in zip(one, other, strict=True)) / math.sqrt(sum(one**2) * sum(other**2))
        assert similarity[row, column, other_row, other_column] == pytest.approx(expected)


def test_each_tile_shows_its_own_positions_similarities_enlarged() -> None:
    similarity = np.zeros((2, 3, 2, 3))
    similarity[1, 2, 0, 1] = 1.0
    pixels = decode(similarity_tiles(similarity, low=0.0, high=1.0))
    scale = 640 // (3 * 4 - 1)
    assert pixels.shape == ((2 * 3 - 1) * scale, (3 * 4 - 1) * scale, 4)
    darkest, brightest = (68, 1, 84), (253, 231, 37)  # viridis
    bright = (pixels[..., :3] == brightest).all(axis=-1)
    rows, columns = np.nonzero(bright)
    assert (rows.min() // scale, columns.min() // scale) == (1 * 3 + 0, 2 * 4 + 1)
    assert bright.sum() == scale**2  # a whole cell and nothing between
    gap = pixels[..., 3] == 0
    assert gap[2 * scale : 3 * scale].all()
    assert (pixels[~gap & ~bright][:, :3] == darkest).all()


def test_a_large_grid_shows_some_tiles_of_it() -> None:
    similarity = np.zeros((40, 40, 40, 40))
    assert decode(similarity_tiles(similarity, low=0, high=1, most=8)).shape == (8 * 41 - 1, 8 * 41 - 1, 4)


def test_principal_kernels_are_those_of_scikit_learn() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    kernels = np.random.default_rng(0).standard_normal((40, 3, 2, 4)) * np.linspace(0.1, 3, 24).reshape(3, 2, 4)
    components, explained = principal_kernels(kernels, 5)
    pca = decomposition.PCA(n_components=5).fit(kernels.reshape(40, -1))
    assert components.shape == (5, 3, 2, 4)
    np.testing.assert_allclose(np.abs(components.reshape(5, -1)), np.abs(pca.components_), atol=1e-8)
    assert explained == pytest.approx(pca.explained_variance_ratio_.sum())
    assert (components.reshape(5, -1).max(axis=1) == np.abs(components.reshape(5, -1)).max(axis=1)).all()


def test_kernels_are_shown_in_colour_around_grey() -> None:
    kernels = np.zeros((3, 3, 8, 8))
    kernels[0, 0] = 2.0  # red
    kernels[1, 2] = -0.1  # the opposite of blue
    pixels = decode(kernel_tiles(kernels, columns=2))
    scale = 640 // (2 * 9 - 1)
    assert pixels.shape == (17 * scale, 17 * scale, 4)
    assert tuple(pixels[0, 0]) == (255, 128, 128, 255)
    assert tuple(pixels[0, 9 * scale]) == (128, 128, 0, 255)
    assert tuple(pixels[9 * scale, 0]) == (128, 128, 128, 255)
    assert pixels[9 * scale, 9 * scale, 3] == 0  # no fourth filter


def test_kernels_of_one_channel_are_grey() -> None:
    pixels = decode(kernel_tiles(np.random.default_rng(0).standard_normal((4, 1, 4, 4))))
    shown = pixels[pixels[..., 3] == 255]
    assert (shown[:, 0] == shown[:, 1]).all()
    assert len(np.unique(shown[:, 0])) > 8


def test_chart_is_one_element_of_the_pages_colours() -> None:
    svg = chart("loss", [Curve("raw", range(1, 101), np.linspace(3, 1, 100).tolist())], restarts=[40, 60], smooth=True)
    assert svg is not None
    assert ET.fromstring(svg).tag == "svg"
    assert "http" not in svg
    assert "var(--chart-line)" in svg
    assert "var(--chart-faint)" in svg
    assert svg.count("var(--chart-mark)") == 3  # two restarts and the legend
    assert "#010a" not in svg
    assert "width=" not in svg.partition(">")[0]


def test_charts_of_one_page_share_no_ids() -> None:
    curve = Curve("x", [1, 2, 3], [1.0, 2.0, 1.0], points=True)
    found = []
    for name in ("one", "two"):
        svg = chart(name, [curve])
        assert svg is not None
        root = ET.fromstring(svg)
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        used = [value[1:] for element in root.iter() if (value := element.get("href"))]
        assert used
        assert set(used) <= set(ids)
        found += ids
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("values", [[], [1.0], [math.nan, math.nan, 1.0]])
def test_too_few_values_make_no_chart(values: list[float]) -> None:
    assert chart("x", [Curve("x", range(len(values)), values)]) is None


def test_a_gap_and_a_long_range_can_be_drawn() -> None:
    assert chart("x", [Curve("x", range(6), [1e-3, 1.0, math.nan, math.inf, 1e4, 2.0])], smooth=True) is not None
    assert chart("x", [Curve("x", range(3), [0.0, 0.0, 0.0])]) is not None


def test_thinning_keeps_spikes_and_gaps() -> None:
    values = np.sin(np.arange(100_000) / 9000)
    values[77_777], values[12_345] = 50.0, -50.0
    values[50_000:60_000] = np.nan
    steps, kept = thin(np.arange(100_000.0), values)
    assert len(steps) <= 800
    assert (np.diff(steps) > 0).all()
    assert kept[steps == 77_777] == 50
    assert kept[steps == 12_345] == -50
    assert np.isnan(kept[(steps > 50_500) & (steps < 59_500)]).all()
    assert np.isnan(kept).sum() > 10


def test_smoothing_follows_without_lag_and_bridges_no_gap() -> None:
    line = np.linspace(0, 10, 200)
    np.testing.assert_allclose(smoothed(line)[20:-20], line[20:-20])
    constant = np.full(50, 3.0)
    constant[20] = np.nan
    np.testing.assert_allclose(smoothed(constant), constant)
    noise = np.random.default_rng(0).standard_normal(1000)
    assert smoothed(noise).std() < 0.2


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0003, "0.0003"), (0, "0"), (999, "999"), (1500, "1,500"), (12_000, "12k"), (1_500_000, "1.5M"), (3e9, "3G")],
)
def test_short_number(number: float, text: str) -> None:
    assert short_number(number) == text
