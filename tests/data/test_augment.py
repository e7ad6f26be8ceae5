"""Boxes against torchvision's own and against formulas; pixels to numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms.v2 import RandomResizedCrop
from torchvision.transforms.v2.functional import center_crop, resize

from vitscale.config.schema import DataConfig
from vitscale.data.augment import View, center_box, eval_view, inception_box, normalize, sample_generator, train_view
from vitscale.data.decode import Box

SIDES = st.integers(1, 700)


def inside(box: Box, height: int, width: int) -> bool:
    return min(box.top, box.left) >= 0 and box.top + box.height <= height and box.left + box.width <= width


@given(SIDES, SIDES, st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 2**40))
def test_a_box_lies_in_its_image(height: int, width: int, seed: int, epoch: int, sample: int) -> None:
    random = sample_generator(seed, epoch, sample)
    box = inception_box(random, height, width, area=(0.05, 1.0), ratio=(3 / 4, 4 / 3))
    assert inside(box, height, width)
    assert min(box.height, box.width) >= 1


@pytest.mark.parametrize(("height", "width"), [(375, 500), (64, 64), (100, 330)])
def test_inception_boxes_are_distributed_as_torchvision_s(height: int, width: int) -> None:
    """Kolmogorov-Smirnov over area, aspect and place of 3,000 boxes each."""
    torch.manual_seed(0)
    area, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    theirs_at = RandomResizedCrop(8, scale=area, ratio=ratio)
    canvas = [torch.empty(3, height, width)]
    theirs = [theirs_at.make_params(canvas) for _ in range(3000)]
    ours = [inception_box(sample_generator(1, 0, i), height, width, area=area, ratio=ratio) for i in range(3000)]
    pairs = [
        ([t["height"] * t["width"] for t in theirs], [b.height * b.width for b in ours]),
        ([t["width"] / t["height"] for t in theirs], [b.width / b.height for b in ours]),
        ([t["top"] for t in theirs], [b.top for b in ours]),
        ([t["left"] for t in theirs], [b.left for b in ours]),
    ]
    for their_numbers, our_numbers in pairs:
        assert stats.ks_2samp(their_numbers, our_numbers).pvalue > 1e-3


def test_inception_box_by_its_formula() -> None:
    random = sample_generator(5, 2, 77)
    share, shape, down, right = sample_generator(5, 2, 77).random(4)
    aspect = math.exp(math.log(0.5) + shape * (math.log(2) - math.log(0.5)))
    area = 400 * 600 * (0.1 + 0.2 * share)
    height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
    expected = Box(int(down * (400 - height + 1)), int(right * (600 - width + 1)), height, width)
    assert inception_box(random, 400, 600, area=(0.1, 0.3), ratio=(0.5, 2)) == expected


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(10, 1000, Box(0, 493, 10, 13)), (1000, 10, Box(493, 0, 13, 10)), (1, 5000, Box(0, 2499, 1, 1))],
)
def test_a_strip_falls_back_to_its_centre(height: int, width: int, expected: Box) -> None:
    """No box of an area above 0.9 fits; torchvision then takes the largest of an allowed aspect in the centre."""
    assert inception_box(sample_generator(0, 0, 0), height, width, area=(0.9, 1.0), ratio=(3 / 4, 4 / 3)) == expected
    params = RandomResizedCrop(8, scale=(0.9, 1.0)).make_params([torch.empty(3, height, width)])
    theirs = Box(params["top"], params["left"], params["height"], params["width"])
    assert abs(np.subtract(theirs, expected)).max() == 0


@given(st.integers(40, 700), st.integers(40, 700), st.sampled_from([(224, 256), (32, 37), (384, 384), (224, 224)]))
def test_center_box_is_resize_then_center_crop(height: int, width: int, sizes: tuple[int, int]) -> None:
    """Of an image that holds its own coordinates, box and torchvision's two steps show the same span to a pixel."""
    size, shorter = sizes
    box = center_box(height, width, size=(size, size), resize=shorter)
    assert inside(box, height, width)
    assert box.height == box.width
    scale = min(height, width) / shorter
    assert abs(box.height - size * scale) <= 0.5 + 1e-9
    assert abs(box.top + box.height / 2 - height / 2) <= 0.5
    assert abs(box.left + box.width / 2 - width / 2) <= 0.5


def test_center_box_shows_what_torchvision_s_two_steps_show() -> None:
    rows = torch.linspace(0, 1, 375)[:, None].expand(375, 500)
    columns = torch.linspace(0, 1, 500)[None].expand(375, 500)
    image = torch.stack([rows, columns, rows])
    expected = center_crop(resize(image, [256], antialias=True), [224, 224])
    box = center_box(375, 500, size=(224, 224), resize=256)
    part = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
    got = resize(part, [224, 224], antialias=True)
    assert (got - expected).abs().max() < 1.5 / 375


def test_center_box_of_another_shape_keeps_the_aspect() -> None:
    box = center_box(300, 300, size=(224, 448), resize=256)
    assert box == Box(75, 0, 150, 300)
    assert center_box(100, 400, size=(50, 100), resize=50) == Box(0, 100, 100, 200)


def test_a_view_depends_on_seed_epoch_and_sample() -> None:
    config = DataConfig(train="x")

    def view(seed: int, epoch: int, sample: int) -> object:
        return train_view(config, 375, 500, size=(224, 224), seed=seed, epoch=epoch, sample=sample)

    assert view(1, 2, 3) == view(1, 2, 3)
    assert len({view(1, 2, 3), view(2, 2, 3), view(1, 3, 3), view(1, 2, 4), view(1, 3, 2), view(2, 1, 3)}) == 6
    assert view(2**63 - 1, 2**40, 2**40) != view(0, 2**40, 2**40)


def test_half_are_mirrored_only_if_asked_for_and_boxes_do_not_depend_on_it() -> None:
    def views(config: DataConfig) -> list[View]:
        return [train_view(config, 50, 60, size=(32, 32), seed=0, epoch=0, sample=i) for i in range(2000)]

    mirrored, upright = views(DataConfig(train="x")), views(DataConfig(train="x", flip=False))
    assert abs(sum(view.flip for view in mirrored) - 1000) < 100
    assert not any(view.flip for view in upright)
    assert [view.box for view in mirrored] == [view.box for view in upright]


def test_crops_of_other_kinds() -> None:
    def box(config: DataConfig) -> Box:
        return train_view(config, 300, 500, size=(100, 100), seed=0, epoch=0, sample=0).box

    assert box(DataConfig(train="x", crop="center")) == Box(0, 100, 300, 300)
    assert box(DataConfig(train="x", crop="resize")) == Box(0, 0, 300, 500)
    assert eval_view(DataConfig(train="x", crop="resize"), 300, 500, size=(100, 100)) == (Box(0, 0, 300, 500), False)
    assert eval_view(DataConfig(train="x", eval_resize=150), 300, 500, size=(100, 100)).box == Box(50, 150, 200, 200)
    assert eval_view(DataConfig(train="x"), 256, 256, size=(224, 224)).box == Box(16, 16, 224, 224)


def test_normalize_by_its_formula() -> None:
    images = torch.randint(0, 256, (5, 3, 7, 8), dtype=torch.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = (images.double() / 255 - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std)[:, None, None]
    got = normalize(images, mean=mean, std=std)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    half = normalize(images, mean=mean, std=std, dtype=torch.bfloat16)
    torch.testing.assert_close(half, expected.to(torch.bfloat16), rtol=2**-7, atol=2**-8)
