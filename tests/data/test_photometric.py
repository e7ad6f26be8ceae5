"""RandAugment, three-augment, jitter and erasing, against torchvision and Pillow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tars import labelled, make_tar
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from vitscale.config.schema import DataConfig
from vitscale.data import photometric
from vitscale.data.augment import sample_generator
from vitscale.data.batch import Batch
from vitscale.data.index import index_shards
from vitscale.data.loader import EvalLoader, TrainLoader
from vitscale.data.photometric import OPERATIONS, apply, augment

PLAIN = DataConfig(train="x")
TORCHVISIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip


def picture(height: int = 40, width: int = 56) -> Image.Image:
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:height, :width]
    waves = np.stack([np.sin(rows / 5 + k) * 60 + columns * 2 + 40 for k in range(3)], axis=-1)
    return Image.fromarray((waves + random.normal(0, 12, waves.shape)).clip(20, 230).astype(np.uint8))


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
@pytest.mark.parametrize("bin_", [0, 9, 21, 30])
@pytest.mark.parametrize("sign", [1, -1])
def test_operations_are_torchvisions_at_every_magnitude(number: int, bin_: int, sign: int) -> None:
    image = picture()
    space = RandAugment()._augmentation_space(31, image.size[::-1])
    assert tuple(space) == TORCHVISIONS
    magnitudes, signed = space[TORCHVISIONS[number]]
    magnitude = float(magnitudes[bin_]) if magnitudes.ndim else 0.0
    assert signed == (OPERATIONS[number] in photometric._SIGNED)
    magnitude *= sign if signed else 1
    expected = _apply_op(image, TORCHVISIONS[number], magnitude, InterpolationMode.NEAREST, None)
    found = apply(image, OPERATIONS[number], sign * bin_ / 30)
    np.testing.assert_array_equal(np.array(found), np.array(expected))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_strengths_beyond_the_table_do_no_harm(operation: Any) -> None:
    for strength in (1.5, 2.0, -1.5, -2.0, 3.0):
        assert np.array(apply(picture(), operation, strength)).shape == (40, 56, 3)


def test_operations_and_signs_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[tuple[str, bool]] = Counter()

    def note(image: Image.Image, operation: str, strength: float) -> Image.Image:
        drawn[operation, strength < 0] += 1
        assert abs(strength) == 1.5
        return image

    monkeypatch.setattr(photometric, "apply", note)
    config = replace(PLAIN, augment="randaugment", randaugment_ops=3, randaugment_magnitude=15.0)
    for sample in range(2800):
        augment(np.zeros((8, 8, 3), np.uint8), config, sample_generator(0, 0, sample, domain=2))
    assert sum(drawn.values()) == 3 * 2800
    for operation in OPERATIONS:
        total = drawn[operation, False] + drawn[operation, True]
        assert total == pytest.approx(600, abs=110)  # four and a half standard deviations
        negative = drawn[operation, True] / total
        assert negative == (pytest.approx(0.5, abs=0.1) if operation in photometric._SIGNED else 0)


def test_three_augment_is_one_of_three() -> None:
    image, seen = picture(), Counter[str]()
    gray, solar = np.array(F.to_grayscale(image, 3)), np.array(ImageOps.solarize(image, 128))
    for sample in range(300):
        found = np.array(photometric.three_augment(image, sample_generator(0, 0, sample, domain=2)))
        kind = "gray" if (found == gray).all() else "solarize" if (found == solar).all() else "blur"
        seen[kind] += 1
        if kind == "blur":
            least, most = (np.array(image.filter(ImageFilter.GaussianBlur(sigma))).std() for sigma in (0.1, 2.0))
            assert most - 0.01 <= found.std() <= least + 0.01
    assert all(count == pytest.approx(100, abs=35) for count in seen.values())
    assert len(seen) == 3


def test_jitter_is_a_product_of_torchvisions_changes() -> None:
    image = picture()
    random = sample_generator(3, 1, 7, domain=2)
    factors, order = random.uniform(0.7, 1.3, 3), random.permutation(3)
    expected = image
    for number in order:
        change = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)[number]
        expected = change(expected, float(factors[number]))
    found = photometric.color_jitter(image, 0.3, sample_generator(3, 1, 7, domain=2))
    np.testing.assert_array_equal(np.array(found), np.array(expected))


@pytest.mark.parametrize("fill", ["mean", "noise"])
def test_erased_rectangles_have_torchvisions_areas_and_shapes(fill: Any) -> None:
    config = replace(PLAIN, erasing=0.5, erasing_fill=fill, mean=(0.2, 0.4, 0.6), std=(0.05, 0.05, 0.05))
    image = np.zeros((64, 64, 3), np.uint8)
    areas, erased = [], 0
    for sample in range(400):
        found = augment(image, config, sample_generator(0, 0, sample, domain=2))
        changed = found.any(axis=2)
        if not changed.any():
            continue
        erased += 1
        rows, columns = changed.any(axis=1).sum(), changed.any(axis=0).sum()
        assert changed.sum() == rows * columns  # one whole rectangle
        areas.append(rows * columns / 64**2)
        assert 0.25 <= rows / columns <= 4
        inside = found[changed].astype(float)
        if fill == "mean":
            assert (inside == np.rint(255 * np.array(config.mean))).all()
    assert erased == pytest.approx(200, abs=45)
    assert min(areas) > 0.015
    assert max(areas) < 0.36
    assert np.mean(areas) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.03)
    if fill == "noise":
        assert inside.std(axis=0) == pytest.approx(255 * 0.05, rel=0.4)


# ------------------------------------------------------------------------------------------------ in the loader
@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    make_tar(folder / "a.tar", labelled(range(24), classes=3))
    index_shards(str(folder), progress=False)
    return folder


def batches(config: DataConfig, run_dir: Path, *, rank: int = 0, ranks: int = 1, start: int = 0) -> list[Batch]:
    loader = TrainLoader(
        config, image_size=16, num_classes=3, global_batch=8, seed=0, rank=rank, world_size=ranks, start_step=start,
        run_dir=run_dir,
    )  # fmt: skip
    found = [next(loader) for _ in range(4)]
    loader.close()
    return found


def test_what_is_drawn_depends_on_the_sample_and_the_epoch_alone(shards: Path, tmp_path: Path) -> None:
    plain = DataConfig(train=str(shards), workers=0)
    config = replace(plain, augment="randaugment", color_jitter=0.4, erasing=0.5)
    expected = batches(config, tmp_path)
    assert all(
        (a.images == b.images).all()
        for a, b in zip(batches(replace(config, workers=3), tmp_path), expected, strict=True)
    )
    halves = [batches(config, tmp_path, rank=rank, ranks=2) for rank in range(2)]
    for step, whole in enumerate(expected):
        assert (torch.cat([half[step].images for half in halves]) == whole.images).all()
    resumed = batches(config, tmp_path, start=2)
    assert (resumed[0].images == expected[2].images).all()
    unchanged = batches(plain, tmp_path)
    assert (unchanged[0].ids == expected[0].ids).all()
    assert not (unchanged[0].images == expected[0].images).all()
    first, again = expected[0], batches(config, tmp_path, start=3)[0]  # the next epoch
    there = {int(sample): image for sample, image in zip(again.ids, again.images, strict=True)}
    both = [
        (image, there[int(sample)])
        for sample, image in zip(first.ids, first.images, strict=True)
        if int(sample) in there
    ]
    assert both
    assert not all((one == other).all() for one, other in both)


def test_evaluation_is_not_augmented(shards: Path) -> None:
    plain = DataConfig(train=str(shards), validation=str(shards), workers=0)
    for config in (plain, replace(plain, augment="randaugment", erasing=1.0, color_jitter=1.0)):
        loader = EvalLoader(config, image_size=16, num_classes=3, batch=24, rank=0, world_size=1)
        (batch,) = loader
        if config is plain:
            expected = batch.images
    assert (batch.images == expected).all()
