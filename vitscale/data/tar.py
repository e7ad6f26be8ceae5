"""Members of a tar, read from a buffer that holds the whole archive or a fragment of it.

Python's `tarfile` spends 20 microseconds on each member and holds the interpreter's lock meanwhile, for which threads
that decode images have to wait; this reader spends three. It knows what shards hold: ustar, GNU long names and pax
headers, all checked against their checksums; compressed archives and sparse files it refuses.
"""

from __future__ import annotations

import mmap
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512
ZEROS = bytes(BLOCK)
Buffer = bytes | mmap.mmap

_REGULAR = frozenset((b"0", b"\0", b"7"))
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_LONGEST_CLOSING = 1 << 20
_META = re.compile(r"__[^/]*__($|/)")
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$", re.DOTALL)


class TarFault(Exception):
    """A place where the bytes are not a tar.

    Attributes:
        offset: Where in the buffer, in bytes.
        reason: What is wrong there.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset = offset
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} at byte {self.offset:,}"


class Member(NamedTuple):
    """One entry of a tar; offsets are bytes in the buffer.

    Attributes:
        name: Path in the archive.
        start: First byte, extended headers included.
        data: First byte of the content.
        size: Length of the content.
        end: First byte after the padded content.
        regular: A plain file; false for folders and links.
    """

    name: str
    start: int
    data: int
    size: int
    end: int
    regular: bool


def split_name(name: str) -> tuple[str, str] | None:
    """Key and lower-case field of a member's name, or None for one that belongs to no sample.

    WebDataset's rule: the last part of the path is split at its first dot, and names in double underscores are notes
    about the shard. Hidden files, such as macOS's `._x.jpg`, are passed over too.
    """
    if _META.match(name) or name.rpartition("/")[2].startswith("."):
        return None
    match = _KEY_AND_FIELD.match(name)
    return (match.group(1), match.group(2).lower()) if match else None


def archive_members(buffer: Buffer) -> Iterator[Member]:
    """Each member of a whole archive, which must be closed by zeros and nothing else.

    A tar that was cut between two members, or inside a header, shows itself only by this.

    Raises:
        TarFault: As `members`, and for an archive that is compressed, cut off or followed by another.
    """
    for magic, kind in _COMPRESSED.items():
        if buffer[: len(magic)] == magic:
            raise TarFault(0, f"a {kind} archive; shards are plain tars, so that parts of them can be read,")
    end = 0
    for member in members(buffer):
        end = member.end
        yield member
    closing = buffer[end : end + _LONGEST_CLOSING]
    while closing[156:157] == b"g":
        end += BLOCK - (-_number(closing[124:136], end) // BLOCK) * BLOCK
        closing = buffer[end : end + _LONGEST_CLOSING]
    if not closing.startswith(ZEROS):
        raise TarFault(end, "the archive is cut off: it ends without the zeros that close a tar,")
    if closing.strip(b"\0") or len(buffer) - end > _LONGEST_CLOSING:
        raise TarFault(end, "the archive is closed but more follows (tars joined by `cat`?)")


def members(buffer: Buffer, start: int = 0, stop: int | None = None) -> Iterator[Member]:
    """Each member whose header lies in `[start, stop)`, until the first block of zeros.

    Raises:
        TarFault: A header that is cut or damaged, a content that ends beyond `stop`, or a kind of tar not known here.
    """
    stop = len(buffer) if stop is None else stop
    position = start
    while position < stop:
        first = position
        long_name: str | None = None
        pax: dict[str, str] = {}
        while True:
            header = _header(buffer, position, stop)
            if header is None:
                if position != first:
                    raise TarFault(position, "the archive ends after an extended header")
                return
            kind = header[156:157]
            size = 0 if kind in _WITHOUT_DATA else int(pax.get("size") or _number(header[124:136], position))
            data = position + BLOCK
            end = data + -(-size // BLOCK) * BLOCK
            if data + size > stop:
                raise TarFault(position, f"a member of {size:,} bytes ends beyond byte {stop:,}, the last one here,")
            position = end
            if kind == b"L":
                long_name = _text(buffer[data : data + size])
            elif kind == b"x":
                pax = _pax(buffer[data : data + size], data)
            elif kind == b"g":
                first = end
            elif kind != b"K":
                break
        if kind == b"S" or (pax and any(key.startswith("GNU.sparse") for key in pax)):
            raise TarFault(first, "a sparse member, which shards may not hold,")
        name = pax.get("path") or long_name or _name(header)
        yield Member(name, first, data, size, end, kind in _REGULAR and not name.endswith("/"))


def _header(buffer: Buffer, at: int, stop: int) -> bytes | None:
    """The 512 bytes at `at` once their checksum holds, or None at the end of the archive."""
    header = buffer[at : min(at + BLOCK, stop)]
    if header == ZEROS or not header:
        return None
    if len(header) < BLOCK:
        raise TarFault(at, f"a header of {len(header)} instead of {BLOCK} bytes")
    unsigned = zlib.adler32(header[:148] + b"        " + header[156:]) & 0xFFFF  # 1 + sum of the bytes, modulo 65521
    if unsigned != (1 + _number(header[148:156], at)) % 65521:
        raise TarFault(at, "a header whose checksum is wrong")
    return header


def _number(field: bytes, at: int) -> int:
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise TarFault(at, "a header that is not one of a tar") from None


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _pax(records: bytes, at: int) -> dict[str, str]:
    """The `length key=value` lines of a pax header."""
    found: dict[str, str] = {}
    while records.strip(b"\0"):
        length, _, _ = records.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(records):
            raise TarFault(at, "a pax header that cannot be parsed")
        key, _, value = records[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        records = records[int(length) :]
    return found
