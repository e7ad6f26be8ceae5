"""Images of every kind: the right pixels, or the right reason."""

from __future__ import annotations

import csv
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resized_crop

from vitscale.data.decode import MAX_PIXELS, BadImage, Box, open_picture
from vitscale.data.jpeg import read_jpeg_header

RNG = np.random.default_rng(0)


def photo(height: int, width: int) -> np.ndarray:
    """Smooth colours with an upright asymmetry, uint8 `[height, width, 3]`."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / 9 + k) * 60 + columns * 120 / width + 60 for k in range(3)]
    return np.stack(waves, axis=2).clip(0, 255).astype(np.uint8)


def encode(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    picture.save(file, kind, **options)
    return file.getvalue()


def reason(content: bytes) -> str:
    with pytest.raises(BadImage) as caught:
        open_picture(content).pixels()
    return caught.value.reason


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_lossless_kinds_come_back_as_they_were(kind: str) -> None:
    pixels = photo(30, 41)
    if kind == "GIF":
        pixels = np.asarray(Image.fromarray(pixels).quantize(64).convert("RGB"))
    picture = open_picture(encode(pixels, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert (picture.height, picture.width) == (30, 41)
    np.testing.assert_array_equal(picture.pixels(), pixels)


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"optimize": True}]
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_is_what_pillow_makes_of_it(mode: str, options: dict[str, object]) -> None:
    content = encode(Image.fromarray(photo(61, 83)).convert(mode), "JPEG", **options)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    assert np.abs(open_picture(content).pixels() - expected).max() <= 1  # another build of libjpeg-turbo may round else


def test_an_rgb_jpeg_without_colour_transform() -> None:
    pixels = photo(40, 40)
    content = encode(pixels, "JPEG", keep_rgb=True, quality=98)
    assert np.abs(open_picture(content).pixels().astype(int) - pixels).max() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(photo(24, 40), kind, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        expected = np.asarray(ImageOps.exif_transpose(image))
    picture = open_picture(content)
    assert (picture.height, picture.width) == expected.shape[:2]
    assert np.abs(picture.pixels().astype(int) - expected).max() <= 1
    part = picture.crop(Box(3, 2, 10, 12), (10, 12)).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(part, picture.pixels()[3:13, 2:14])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("value", "expected"), [(6, 6), (0, 1), (9, 1)])
def test_orientation_in_either_byte_order(order: str, value: int, expected: int) -> None:
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, value, 0)
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1) + entry
    content = encode(photo(8, 8), "JPEG", exif=b"Exif\0\0" + tiff + b"\0\0\0\0")
    header = read_jpeg_header(content)
    assert header is not None
    assert header.orientation == expected


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff\x01", b"garbage"])
def test_damaged_exif_does_no_harm(exif: bytes) -> None:
    clean = encode(photo(20, 20), "JPEG")
    segment = b"Exif\0\0" + exif
    content = clean[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + clean[2:]
    np.testing.assert_array_equal(open_picture(content).pixels(), open_picture(clean).pixels())
    cmyk = encode(Image.fromarray(photo(20, 20)).convert("CMYK"), "JPEG")
    content = cmyk[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + cmyk[2:]
    np.testing.assert_array_equal(open_picture(content).pixels(), open_picture(cmyk).pixels())


def test_16_bit_gray_is_scaled_not_clipped() -> None:
    values = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    pixels = open_picture(encode(values, "PNG")).pixels()
    np.testing.assert_array_equal(pixels[:, :, 0], np.round(values / 257).astype(np.uint8))
    assert (pixels == pixels[:, :, :1]).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_every_mode_becomes_rgb_as_pillow_does_it(mode: str) -> None:
    image = Image.fromarray(photo(16, 24)).convert(mode)
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(open_picture(encode(image, "PNG")).pixels(), expected)


def test_palette_with_transparency_keeps_its_colours() -> None:
    image = Image.fromarray(photo(16, 24)).quantize(16)
    content = encode(image, "PNG", transparency=bytes(range(0, 256, 16)))
    np.testing.assert_array_equal(open_picture(content).pixels(), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(224, 224), (32, 64), (300, 100)])
def test_crop_is_torchvision_s(size: tuple[int, int], interpolation: str) -> None:
    content = encode(photo(120, 170), "JPEG")
    picture = open_picture(content)
    box = Box(11, 20, 90, 117)
    expected = resized_crop(
        torch.from_numpy(picture.pixels()).permute(2, 0, 1),
        *box,
        size,
        InterpolationMode(interpolation),
        antialias=True,
    )
    got = picture.crop(box, size, interpolation=interpolation)
    assert got.dtype == torch.uint8
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5000), (5000, 1), (2, 3)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_odd_shapes(height: int, width: int, kind: str) -> None:
    picture = open_picture(encode(photo(height, width), kind))
    assert picture.crop(Box(0, 0, height, width), (32, 32)).shape == (3, 32, 32)


@pytest.mark.parametrize("options", [{"quality": 90}, {"progressive": True}])
def test_a_jpeg_cut_anywhere_never_passes_for_whole(options: dict[str, object]) -> None:
    content = encode(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8), "JPEG", **options)
    for cut in range(2, len(content) - 40, 41):
        assert reason(content[:cut]) in ("truncated", "corrupt")


def test_a_png_cut_or_damaged_anywhere_gives_a_reason() -> None:
    content = encode(RNG.integers(0, 256, (40, 40, 3), dtype=np.uint8), "PNG")
    for cut in range(8, len(content) - 60, 97):
        assert reason(content[:cut]) in ("truncated", "corrupt", "not_an_image")
        damaged = content[:cut] + bytes([content[cut] ^ 0x55]) + content[cut + 1 :]
        assert reason(damaged) in ("truncated", "corrupt", "not_an_image")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"hello, world", "not_an_image"),
        (b"\xff\xd8", "truncated"),
        (b"\xff\xd8\xff\xd9", "truncated"),
        (b"\xff\xd8" + b"\0" * 100, "truncated"),
        (b"\x89PNG\r\n\x1a\n", "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
        (b"\xff\x0a" + b"\0" * 50, "unsupported"),
    ],
)
def test_what_is_no_image(content: bytes, expected: str) -> None:
    assert reason(content) == expected


def test_pictures_too_large_are_refused_by_their_header() -> None:
    def png(width: int, height: int) -> bytes:
        content = encode(photo(1, 1), "PNG")
        chunk = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
        return content[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + content[33:]

    def jpeg(width: int, height: int) -> bytes:
        content = encode(photo(8, 8), "JPEG")
        at = content.index(b"\xff\xc0") + 5
        return content[:at] + struct.pack(">HH", height, width) + content[at + 4 :]

    side = int(MAX_PIXELS**0.5)
    for make in (png, jpeg):
        with pytest.raises(BadImage, match="too_large"):
            open_picture(make(side + 2, side + 2))
        with pytest.raises(BadImage, match="too_large"):
            open_picture(make(60_000, 60_000))
    assert open_picture(jpeg(side, side)).height == side


def test_a_jpeg_of_a_thousand_scans_is_refused() -> None:
    content = encode(photo(64, 64), "JPEG", progressive=True)
    start = content.index(b"\xff\xda")
    with pytest.raises(BadImage, match="too_large: a JPEG of 1,"):
        open_picture(content[:start] + content[start:-2] * 150 + content[-2:])


GOOD = {
    "cmyk_ycck_adobe2.jpg": (30.2, 5.4, 7.4),
    "cmyk_adobe0.jpg": (127.5, 127.5, 43.8),
    "png_named.JPEG": (89.7, 80.1, 95.4),
    "progressive_icc_orient6.jpg": (114.7, 117.3, 96.3),
    "gray.jpg": (84.7, 84.7, 84.7),
    "rgb16.png": (82.2, 98.5, 110.7),
    "gray16.png": (30192.5 / 257,) * 3,
    "exif_orient6.jpg": (89.7, 80.1, 95.3),
    "bad_exif_gray.jpg": (125.5, 125.5, 125.5),
    "one_pixel.jpg": (127.0, 127.0, 39.0),
    "arithmetic.jpg": (146.4, 90.5, 81.5),
    "alpha.webp": (33.9, 25.9, 27.1),
    "multi.mpo": (137.2, 138.6, 135.1),
}
BAD = {
    "truncated_baseline.jpg": "truncated",
    "truncated_progressive.jpg": "truncated",
    "broken_stream.png": "corrupt",
    "jpeg12.jpg": "unsupported",
    "bomb.gif": "too_large",
    "tiny.jxl": "unsupported",
    "zero_byte.jpg": "empty",
}
DEPENDS_ON_PILLOW = {"photo.avif", "bomb_17000.avif"}


def test_corner_images(shared_data: Path) -> None:
    """Mean colours as other decoders of the manifest have them, or the reason; from several threads at once."""
    folder = shared_data / "corner-images"
    with open(folder / "manifest.tsv", encoding="utf-8") as file:
        names = {row["file"] for row in csv.DictReader(file, delimiter="\t")}
    assert names == GOOD.keys() | BAD.keys() | DEPENDS_ON_PILLOW

    def judge(name: str) -> str | np.ndarray:
        try:
            return open_picture((folder / name).read_bytes()).pixels().reshape(-1, 3).mean(axis=0)
        except BadImage as bad:
            return bad.reason

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(names, pool.map(judge, names), strict=True))
    for name, mean in GOOD.items():
        np.testing.assert_allclose(found[name], mean, atol=0.4, err_msg=name)
    assert {name: found[name] for name in BAD} == BAD


def test_real_photos_are_as_pillow_decodes_them(shared_data: Path) -> None:
    for path in sorted((shared_data / "imagenet100").glob("*/*"))[::5]:
        with Image.open(path) as image:
            expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)
        assert np.abs(open_picture(path.read_bytes()).pixels() - expected).max() <= 1
