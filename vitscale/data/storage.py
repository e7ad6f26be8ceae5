"""Where shards lie: local paths, http(s), s3, gs; ranges of bytes out of them, tried again when that may help.

Everything remote goes through fsspec. A time-out, a reset connection, an answer of 5xx or one too short is tried again
after a wait that doubles and is never quite the same, so that a thousand ranks do not return at one moment; what
cannot pass (not found, not allowed) is said at once. `pipe:` runs a command whose output is a shard, if it is allowed.
"""

from __future__ import annotations

import functools
import os
import random
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vitscale.config.schema import DataConfig
from vitscale.errors import UserError

TRIES = 3
REMOTE_TRIES = 6
BACK_OFF = 0.1
"""Seconds before the second try; each further wait is four times as long, give or take a half."""

_PASSING_STATUS = (408, 425, 429)
_CONNECT_SECONDS = 10
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
T = TypeVar("T")


class TooShort(OSError):
    """Fewer bytes came than were asked for, or others."""


class GiveUp(Exception):
    """Raised while reading by who knows that trying again cannot help."""


_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, UserError, GiveUp)


@dataclass(frozen=True)
class Access:
    """How shards are reached; fields as in `DataConfig`, sizes in bytes."""

    cache_dir: str | None = None
    cache_bytes: int = 0
    timeout: float = 60.0
    allow_pipe: bool = False


LOCAL = Access()


def access_of(config: DataConfig) -> Access:
    """What a config says of access."""
    return Access(
        cache_dir=config.cache_dir,
        cache_bytes=int(config.cache_gigabytes * 1e9),
        timeout=config.read_timeout,
        allow_pipe=config.allow_pipe,
    )


def is_remote(path: str) -> bool:
    """Whether `path` is not one of this machine's files."""
    return path.startswith("pipe:") or bool(_URL.match(path))


def local_path(path: str) -> str:
    """A `file:` URL as a path; anything else as it is."""
    return re.sub(r"^file:(//(localhost)?(?=/))?", "", path)


def read_range(path: str, start: int, length: int, access: Access) -> bytes:
    """`length` bytes of a remote file from `start` on, in one attempt.

    Raises:
        OSError: Fewer bytes are there, or the file cannot be read; a remote one may raise other kinds.
    """
    content: bytes = filesystem(path, access).cat_file(path, start=start, end=start + length)
    if len(content) > length:
        raise GiveUp(f"{path}: the server sends {len(content):,} bytes where {length:,} of them were asked for; it "
                        "must serve ranges, or give data.cache_dir")  # fmt: skip
    if len(content) != length:
        raise TooShort(f"{len(content):,} bytes at {start:,} instead of {length:,}")
    return content


def read_whole(path: str, access: Access, *, length: int | None = None) -> bytes:
    """All bytes of a small file, tried again; a remote one also where it is not of the `length` that is known.

    Raises:
        OSError: It cannot be read.
    """
    if not is_remote(path):
        return with_retries(path, lambda: _read_local(path))

    def read() -> bytes:
        content: bytes = filesystem(path, access).cat_file(path)
        if length is not None and len(content) != length:
            raise TooShort(f"{len(content):,} bytes instead of {length:,}")
        return content

    return with_retries(path, read)


def file_size(path: str, access: Access) -> int:
    """Length in bytes, in one attempt.

    Raises:
        OSError: The file cannot be reached, or its server does not say.
    """
    if not is_remote(path):
        return os.stat(path).st_size
    size = filesystem(path, access).info(path).get("size")
    if size is None:
        raise OSError("the server does not say how long the file is")
    return int(size)


def list_names(folder: str, access: Access) -> list[str]:
    """Names of what lies directly in a folder; empty where the protocol cannot list.

    Raises:
        OSError: The folder cannot be listed.
    """
    if not is_remote(folder):
        return os.listdir(folder)
    if folder.startswith("http"):
        return []
    found: list[str] = filesystem(folder, access).ls(folder, detail=False)
    return [os.path.basename(name.rstrip("/")) for name in found]


def glob_remote(pattern: str, access: Access) -> list[str]:
    """URLs that a pattern matches, sorted."""
    store = filesystem(pattern, access)
    return sorted(store.unstrip_protocol(name) for name in store.glob(pattern))


def download(path: str, to: str, access: Access) -> None:
    """Write all of a remote file, or of a command's output, into a local one, in one attempt.

    Raises:
        OSError: It cannot be read; a remote one may raise other kinds.
    """
    if path.startswith("pipe:"):
        _run(path.removeprefix("pipe:"), to, access)
        return
    filesystem(path, access).get_file(path, to)


def with_retries(path: str, read: Callable[[], T]) -> T:
    """`read()`, tried again with growing waits while it fails for a reason that may pass.

    Raises:
        OSError: The last failure, whatever kind it was, with the number of tries.
    """
    tries = REMOTE_TRIES if is_remote(path) else TRIES
    for attempt in range(tries):
        try:
            return read()
        except _LASTING:
            raise
        except Exception as error:  # remote file systems raise nearly any kind
            if not (is_remote(path) or isinstance(error, OSError)):
                raise
            text = str(error) or type(error).__name__
            if _lasts(error):
                raise OSError(text) from error
            if attempt == tries - 1:
                raise OSError(f"{text} ({tries} tries)") from error
            time.sleep(BACK_OFF * 4**attempt * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable")


@functools.lru_cache(maxsize=16)
def _filesystem(protocol: str, timeout: float) -> Any:
    import fsspec

    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        import aiohttp

        waits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout)
        options = {"client_kwargs": {"timeout": waits}}
    elif protocol in ("s3", "s3a"):
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": timeout, "retries": {"max_attempts": 1}}
        options = {"config_kwargs": limits, "use_listings_cache": False}
    elif protocol in ("gs", "gcs"):
        options = {"requests_timeout": timeout, "use_listings_cache": False}
    try:
        return fsspec.filesystem(protocol, **options)
    except ImportError:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install 'vitscale[{extra}]'" if extra else "install the package that fsspec names for it"
        raise UserError(f"{protocol}:// needs a package that is not installed: {remedy}") from None
    except ValueError:
        raise UserError(f"{protocol}:// is no place that shards can be read from; http, https, s3 and gs are") from None


def filesystem(path: str, access: Access) -> Any:
    """Fsspec's file system for a URL.

    Raises:
        UserError: There is none, or its package is missing.
    """
    if path.startswith("pipe:"):
        raise UserError(f"{path!r}: what a command prints can only be read from a cache; set data.cache_dir")
    return _filesystem(path.split("://", 1)[0], access.timeout)


def _read_local(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _lasts(error: Exception) -> bool:
    """Whether another try cannot help: the server understood and refused, or was not asked for want of credentials."""
    if "Credentials" in type(error).__name__:
        return True
    status = getattr(error, "status", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _PASSING_STATUS


def _run(command: str, to: str, access: Access) -> None:
    """A command without a shell, its output into a file."""
    if not access.allow_pipe:
        raise UserError(f"'pipe:{command}' runs a command; set data.allow_pipe: true if you trust where it comes from")
    with open(to, "wb") as file:
        try:
            done = subprocess.run(shlex.split(command), stdout=file, stderr=subprocess.PIPE, check=False)
        except (OSError, ValueError) as error:
            raise OSError(f"{command!r} cannot be run: {error}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{command!r} ended with exit code {done.returncode}: {said[-1] if said else 'it says nothing'}")
