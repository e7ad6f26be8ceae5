"""Images made smaller before they are packed, so that shards of huge photos are read and decoded faster."""

from __future__ import annotations

import io

from PIL import Image

from vitscale.data.decode import open_picture


def shrink(content: bytes, *, max_side: int, quality: int) -> bytes | None:
    """The image with its longer side at most `max_side`, as a JPEG, upright; None where it is small enough as it is.

    Args:
        content: An encoded image of any kind.
        max_side: In pixels.
        quality: Of the JPEG, 1 to 95.

    Raises:
        BadImage: It cannot be decoded.
    """
    picture = open_picture(content)
    longer = max(picture.height, picture.width)
    if longer <= max_side:
        return None
    size = tuple(max(1, round(side * max_side / longer)) for side in (picture.width, picture.height))
    small = Image.fromarray(picture.pixels()).resize((size[0], size[1]), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=quality)
    return file.getvalue()
