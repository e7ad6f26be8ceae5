"""Parts of JPEGs, against all of the picture decoded by simplejpeg, and against Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitscale.data import decode
from vitscale.data.decode import BadImage, Box, open_picture
from vitscale.data.jpeg_crop import CropFailed, available, crop_jpeg

pytestmark = pytest.mark.skipif(
    not available(),
    reason="jpeg_crop.c was not compiled, for which a C compiler and libjpeg-turbo's headers are needed",
)

SUBSAMPLING = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth, with edges and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7 + k) * np.cos(y / (5 + k)) * 100 + 128 for k in range(3)], axis=-1)
    waves[height // 3 : height // 2] = 255 - waves[height // 3 : height // 2]
    return Image.fromarray((waves + random.normal(0, 8, waves.shape)).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **{"quality": 92, **options})
    return file.getvalue()


@given(
    sides=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    where=st.tuples(*[st.floats(0, 1)] * 4),
    subsampling=st.sampled_from(sorted(SUBSAMPLING)),
    gray=st.booleans(),
    restarts=st.booleans(),
)
def test_every_part_is_that_of_the_whole_picture(
    sides: tuple[int, int], where: tuple[float, ...], subsampling: str, gray: bool, restarts: bool
) -> None:
    height, width = sides
    image = photo(height, width).convert("L" if gray else "RGB")
    options = {"restart_marker_blocks": 2} if restarts else {}
    content = jpeg(image, **options, **({} if gray else {"subsampling": SUBSAMPLING[subsampling]}))
    rows, columns = 1 + int(where[0] * (height - 1)), 1 + int(where[1] * (width - 1))
    top, left = int(where[2] * (height - rows)), int(where[3] * (width - columns))
    part = crop_jpeg(content, (height, width), top=top, left=left, height=rows, width=columns)
    whole = simplejpeg.decode_jpeg(content, "RGB")
    np.testing.assert_array_equal(part, whole[top : top + rows, left : left + columns])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_parts_of_turned_pictures(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = jpeg(photo(60, 90), exif=exif)
    picture = open_picture(content)
    assert picture._decode_part is not None
    whole = picture.pixels()
    for box in (Box(0, 0, picture.height, picture.width), Box(7, 11, 20, 30), Box(picture.height - 5, 3, 5, 40)):
        expected = whole[box.top : box.top + box.height, box.left : box.left + box.width]
        np.testing.assert_array_equal(picture._part(box), expected)


def test_the_view_is_pillows_to_54_decibels() -> None:
    """Mean squared error over many crops of pictures with fine detail, of 255 squared."""
    errors = []
    for seed in range(6):
        image = photo(375, 500, seed)
        content = jpeg(image)
        decoded = Image.open(io.BytesIO(content)).convert("RGB")
        for box in (Box(10, 20, 300, 300), Box(101, 37, 150, 201), Box(0, 0, 375, 500), Box(200, 300, 90, 70)):
            view = open_picture(content).crop(box, (224, 224)).numpy().transpose(1, 2, 0).astype(float)
            part = decoded.crop((box.left, box.top, box.left + box.width, box.top + box.height))
            expected = np.asarray(part.resize((224, 224), Image.Resampling.BICUBIC)).astype(float)
            errors.append(np.mean((view - expected) ** 2))
    assert 10 * np.log10(255**2 / np.mean(errors)) > 54


def test_views_are_the_same_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    content = jpeg(photo(123, 211))
    box = Box(31, 57, 60, 101)
    there = open_picture(content).crop(box, (48, 48))
    monkeypatch.setattr(decode, "available", lambda: False)
    picture = open_picture(content)
    assert picture._decode_part is None
    assert (picture.crop(box, (48, 48)) == there).all()


def test_what_is_cut_or_damaged_where_it_is_shown_is_left_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    content = jpeg(photo(200, 200))
    for length in (len(content) // 2, len(content) - 2):
        with pytest.raises(BadImage) as caught:
            open_picture(content[:length]).crop(Box(0, 0, 20, 20), (8, 8))
        assert caught.value.reason == "truncated"
    begin = content.index(b"\xff\xda") + 400
    damaged = content[:begin] + b"\xff\xd9" * 20 + content[begin + 40 :]
    with pytest.raises(CropFailed):
        crop_jpeg(damaged, (200, 200), top=100, left=0, height=50, width=50)
    found = open_picture(damaged).crop(Box(100, 0, 50, 50), (8, 8))
    monkeypatch.setattr(decode, "available", lambda: False)
    assert (open_picture(damaged).crop(Box(100, 0, 50, 50), (8, 8)) == found).all()


@pytest.mark.parametrize("options", [{"progressive": True}, {}], ids=["progressive", "CMYK"])
def test_what_has_no_parts_is_decoded_whole(options: dict[str, Any]) -> None:
    image = photo(40, 40) if options else photo(40, 40).convert("CMYK")
    assert open_picture(jpeg(image, **options))._decode_part is None


def test_another_size_than_said_is_refused() -> None:
    with pytest.raises(CropFailed, match="another size than its header says"):
        crop_jpeg(jpeg(photo(40, 40)), (40, 48), top=0, left=0, height=8, width=8)
