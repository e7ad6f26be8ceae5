"""A rectangle of a JPEG, decoded by the library that `jpeg_crop.c` becomes, where it was built.

It decodes only what is asked for, to the same pixels as decoding all of it: libjpeg-turbo interpolates colour from
neighbours, so that some pixels around the rectangle are decoded too and cut off.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LIBRARY = Path(__file__).with_name("_jpeg_crop.so")
_VERSION = 1
_MARGIN = 2
"""Pixels around the rectangle on which its own depend."""
_BLOCK = 31
"""Columns that the decoder may add: it begins at a block of up to 16 pixels, and ends at one."""
_MESSAGE = 200


class CropFailed(Exception):
    """The decoder did not like the bytes; another one may."""


@functools.cache
def _library() -> Callable[..., int] | None:
    """The function, or None where it was not built or is another version's."""
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        if library.vitscale_crop_version() != _VERSION:
            return None
        function = library.vitscale_crop
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_char_p, ctypes.c_ulong, *[ctypes.c_int] * 6, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_char_p
    ]  # fmt: skip
    found: Callable[..., int] = function
    return found


def available() -> bool:
    """Whether the library is there."""
    return _library() is not None


def crop_jpeg(
    content: bytes, size: tuple[int, int], *, top: int, left: int, height: int, width: int
) -> NDArray[np.uint8]:
    """Pixels of a rectangle, uint8 RGB `[height, width, 3]`.

    Args:
        content: A baseline JPEG of 8 bits, gray or colour.
        size: Height and width of the whole picture, as its header says.
        top: First row.
        left: First column.
        height: Rows; the rectangle must lie in the picture.
        width: Columns.

    Raises:
        CropFailed: The rectangle cannot be decoded, or only with pixels made up.
    """
    function = _library()
    assert function is not None, "ask `available` first"
    first_row, first_column = max(top - _MARGIN, 0), max(left - _MARGIN, 0)
    rows = min(top + height + _MARGIN, size[0]) - first_row
    columns = min(left + width + _MARGIN, size[1]) - first_column
    pixels = np.empty((rows, columns + _BLOCK, 3), np.uint8)
    message = ctypes.create_string_buffer(_MESSAGE)
    begins = function(
        content,
        len(content),
        *size,
        first_row,
        first_column,
        rows,
        columns,
        pixels.ctypes.data,
        pixels.strides[0],
        message,
    )
    if begins < 0:
        raise CropFailed(message.value.decode("latin-1"))
    row, column = top - first_row, left - begins
    return pixels[row : row + height, column : column + width]
