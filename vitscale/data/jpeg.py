"""What the header of a JPEG says, read without a decoder: size, kind of coding, colours, EXIF orientation."""

from __future__ import annotations

import struct
from typing import NamedTuple

_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
_SCAN, _APP1, _APP2 = 0xDA, 0xE1, 0xE2
_ORIENTATION = 0x0112


class JpegHeader(NamedTuple):
    """What is known before anything is decoded.

    Attributes:
        height: In pixels, as stored.
        width: In pixels, as stored.
        components: 1 gray, 3 colour, 4 CMYK or YCCK.
        precision: Bits of a sample.
        coding: Low byte of the frame's marker: 0xC0 baseline, 0xC1 extended, 0xC2 progressive, 0xC9.. arithmetic.
        orientation: EXIF's, 1 to 8; 1 where there is none or it cannot be read.
        profiles: Byte ranges of the APP1 and APP2 segments: EXIF, XMP, colour profiles, further pictures.
    """

    height: int
    width: int
    components: int
    precision: int
    coding: int
    orientation: int
    profiles: tuple[tuple[int, int], ...]

    @property
    def progressive(self) -> bool:
        """Whether the picture comes in several scans, each over all of it."""
        return self.coding in (0xC2, 0xCA)

    @property
    def baseline(self) -> bool:
        """Whether its rows come one after the other, by Huffman's code."""
        return self.coding in (0xC0, 0xC1)

    @property
    def lossy(self) -> bool:
        """Whether it is one of the codings that decoders know: not lossless, not hierarchical."""
        return self.coding in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)


def read_jpeg_header(content: bytes) -> JpegHeader | None:
    """The header of a JPEG, or None when it ends or breaks before it says how large the picture is."""
    orientation = 1
    profiles: list[tuple[int, int]] = []
    at, end = 2, len(content)
    while at + 4 <= end:
        if content[at] != 0xFF:
            at = content.find(b"\xff", at)  # decoders pass over what lies between two segments
            if at < 0:
                return None
            continue
        marker = content[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0x00 or marker in _ALONE:
            at += 2
            continue
        length = int.from_bytes(content[at + 2 : at + 4], "big")
        if marker == _SCAN or length < 2:
            return None
        if marker in _FRAMES:
            if at + 10 > end:
                return None
            precision, height, width, components = struct.unpack_from(">BHHB", content, at + 4)
            return JpegHeader(height, width, components, precision, marker, orientation, tuple(profiles))
        if marker in (_APP1, _APP2):
            profiles.append((at, min(at + 2 + length, end)))
            if marker == _APP1 and content[at + 4 : at + 10] == b"Exif\0\0":
                orientation = exif_orientation(content[at + 10 : at + 2 + length])
        at += 2 + length
    return None


def without_profiles(content: bytes, header: JpegHeader) -> bytes:
    """The same picture without EXIF and profiles, which may be damaged and which decoding does not need."""
    kept, at = [], 0
    for start, stop in header.profiles:
        kept.append(content[at:start])
        at = stop
    return b"".join((*kept, content[at:]))


def exif_orientation(tiff: bytes) -> int:
    """The orientation in a TIFF header's first directory; 1 when it says none that makes sense."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        if order is None:
            return 1
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == _ORIENTATION:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
