"""Encoded bytes -> the uint8 RGB pixels that a model sees.

    picture = open_picture(content)                     reads the header alone
    picture.height, picture.width                       as a person sees it: after EXIF's rotation
    picture.crop(box, (224, 224))                       decodes, cuts, resizes with antialiasing

What the bytes are decides, not what they are named. A JPEG of 8 bits, gray or colour, goes through libjpeg-turbo: where
vitscale's own library was built (`jpeg_crop`) only the part that is shown is decoded, else all of it by simplejpeg, to
the same pixels; both let other threads run meanwhile. CMYK and everything else go through Pillow. Colours come out as
Pillow's `convert("RGB")` gives them, so that transparency is dropped, but for 16-bit gray, which is scaled to 8 bits.
A picture too large to be one is refused before it is decoded. Nothing here starts a process or changes global state,
and any number of threads may decode at once.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitscale.data.jpeg import JpegHeader, exif_orientation, read_jpeg_header, without_profiles
from vitscale.data.jpeg_crop import CropFailed, available, crop_jpeg

Interpolation = Literal["bicubic", "bilinear"]
Reason = Literal["empty", "not_an_image", "unsupported", "too_large", "truncated", "corrupt"]
Pixels = NDArray[np.uint8]

MAX_PIXELS = 2**30 // 12
"""89 million, Pillow's limit too: 256 MiB of RGB in one thread."""
MAX_SCANS = 500
"""Of a progressive JPEG; each costs as much as a whole picture, and encoders write about ten."""

_END = b"\xff\xd9"
_TAIL = 4096
"""Bytes at the end of a JPEG in which its end is looked for; cameras append a little."""

Image.init()  # all readers now: threads would race to load them
_FORMATS: list[str] = [
    name for name in ("PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG") if name in Image.OPEN
]
_NOT_READ = {b"\xff\x0a": "JPEG XL", b"\0\0\0\x0cJXL ": "JPEG XL", b"\0\0\0\x0cjP  ": "JPEG 2000"}


class BadImage(Exception):
    """Bytes that give no picture.

    Attributes:
        reason: One of a few words that never change.
        detail: What was found.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Box(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Picture:
    """A picture of which the header was read.

    Attributes:
        height: In pixels, upright.
        width: In pixels, upright.
    """

    height: int
    width: int
    _orientation: int
    _decode: Callable[[], Pixels]
    _decode_part: Callable[[Box], Pixels] | None

    def pixels(self) -> Pixels:
        """All of it, upright, uint8 RGB `[height, width, 3]`.

        Raises:
            BadImage: It cannot be decoded.
        """
        return _upright(self._decode(), self._orientation)

    def crop(self, box: Box, size: tuple[int, int], *, interpolation: Interpolation = "bicubic") -> Tensor:
        """The part `box`, resized with antialiasing to `size` (height, width): uint8 RGB `[3, height, width]`.

        Raises:
            BadImage: It cannot be decoded.
        """
        part = self._part(box)
        if not (part.flags.c_contiguous and part.flags.writeable):
            part = part.copy()  # by numpy: torch would do it with a team of threads for each of ours
        pixels = torch.from_numpy(part).permute(2, 0, 1)
        if tuple(part.shape[:2]) == size:
            return pixels
        return torch.nn.functional.interpolate(pixels[None], size=size, mode=interpolation, antialias=True)[0]

    def _part(self, box: Box) -> Pixels:
        """The pixels of `box`, upright, decoding no more than they need where that can be."""
        if self._decode_part is not None:
            try:
                return _upright(self._decode_part(_as_stored(box, self)), self._orientation)
            except CropFailed:  # damaged, or only odd: decoding all of it tells the one from the other
                pass
        return self.pixels()[box.top : box.top + box.height, box.left : box.left + box.width]


def decoder_name() -> str:
    """What decodes JPEGs here, in words for a log."""
    if available():
        return "vitscale's library, only the part that is shown"
    return "simplejpeg, whole; a C compiler and libjpeg-turbo's headers at installation would save a sixth of the time"


def open_picture(content: bytes) -> Picture:
    """Read the header of an image file of any name.

    Raises:
        BadImage: No image, one of a kind that cannot be read, or one with too many pixels.
    """
    if not content:
        raise BadImage("empty", "0 bytes")
    if content.startswith(b"\xff\xd8"):
        return _open_jpeg(content)
    for magic, kind in _NOT_READ.items():
        if content.startswith(magic):
            raise BadImage("unsupported", kind)
    image = _open_with_pillow(content)
    # not `getexif`: for a PNG it decodes, and after that failed `load` hands out what there is as if it were whole
    exif = image.info.get("exif", b"").removeprefix(b"Exif\0\0")
    return _picture(image.height, image.width, exif_orientation(exif), lambda: _load_with_pillow(content))


def _picture(
    height: int,
    width: int,
    orientation: int,
    decode: Callable[[], Pixels],
    decode_part: Callable[[Box], Pixels] | None = None,
) -> Picture:
    if height < 1 or width < 1:
        raise BadImage("corrupt", f"{width} x {height} pixels")
    if height * width > MAX_PIXELS:
        raise BadImage("too_large", f"{width} x {height} pixels, more than {MAX_PIXELS:,} in all")
    if orientation >= 5:
        height, width = width, height
    return Picture(height, width, orientation, decode, decode_part)


def _open_jpeg(content: bytes) -> Picture:
    header = read_jpeg_header(content)
    if header is None:
        raise BadImage("truncated", f"a JPEG of {len(content):,} bytes without the start of a picture")
    if header.precision != 8 or not header.lossy:
        raise BadImage("unsupported", f"a JPEG of {header.precision} bits, coding {header.coding:#x}")
    if header.progressive and (scans := content.count(b"\xff\xda")) > MAX_SCANS:
        raise BadImage("too_large", f"a JPEG of {scans:,} scans")
    size = (header.height, header.width)
    part = None
    if available() and _in_parts(content, header):
        part = lambda box: crop_jpeg(content, size, **box._asdict())  # noqa: E731
    return _picture(*size, header.orientation, lambda: _load_jpeg(content, header), part)


def _in_parts(content: bytes, header: JpegHeader) -> bool:
    """Whether a part can be decoded by itself: one scan, gray or colour, and whole as far as its last bytes tell."""
    return header.baseline and header.components in (1, 3) and content.rfind(_END, len(content) - _TAIL) >= 0


def _load_jpeg(content: bytes, header: JpegHeader) -> Pixels:
    if header.components in (1, 3):
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(content, "RGB")
        except ValueError:  # damaged, or only odd: Pillow tells the one from the other
            pass
        else:
            return pixels
    return _load_with_pillow(without_profiles(content, header))


def _open_with_pillow(content: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage("too_large", str(error)) from None
    except UnidentifiedImageError:
        if content[4:8] == b"ftyp":
            raise BadImage("unsupported", f"a file of kind {content[8:12]!r} that Pillow cannot read") from None
        raise BadImage("not_an_image", f"{len(content):,} bytes that begin with {content[:8]!r}") from None
    except Exception as error:  # Pillow's readers raise nearly any kind
        raise _damage(error) from None


def _load_with_pillow(content: bytes) -> Pixels:
    image = _open_with_pillow(content)
    try:
        image.load()
        if image.mode == "I" or image.mode.startswith("I;16"):
            return _from_16_bits(image)
        if image.mode == "F":
            raise BadImage("unsupported", "floating point pixels")
        if "transparency" in image.info:
            image = image.convert("RGBA")  # Pillow warns of a palette with transparency that becomes RGB at once
        return np.asarray(image.convert("RGB"))
    except BadImage:
        raise
    except Exception as error:
        raise _damage(error) from None


def _from_16_bits(image: Image.Image) -> Pixels:
    """Gray of 16 bits; Pillow's own conversion would clip at 255, so that nearly all is white."""
    values: NDArray[Any] = np.asarray(image).clip(0, 65535).astype(np.uint32)
    gray = ((values * 255 + 32767) // 65535).astype(np.uint8)
    return np.repeat(gray[:, :, None], 3, axis=2)


def _damage(error: Exception) -> BadImage:
    text = str(error) or type(error).__name__
    return BadImage("truncated" if "truncated" in text.lower() else "corrupt", text)


def _as_stored(box: Box, picture: Picture) -> Box:
    """Where the pixels of an upright box lie in the file; `_upright` in reverse."""
    orientation = picture._orientation
    top, left, height, width = box
    if orientation in (3, 4, 7, 8):
        top = picture.height - top - height
    if orientation in (2, 3, 6, 7):
        left = picture.width - left - width
    return Box(left, top, width, height) if orientation >= 5 else Box(top, left, height, width)


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Undo EXIF's orientation: 2 to 4 mirror and turn, 5 to 8 also swap the axes (EXIF 2.32, tag 0x0112)."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
