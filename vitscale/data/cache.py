"""Remote shards kept on this node's disk: filled by one process while others wait, the least used ones given up.

    cache_dir/<hash of URL and checksum>-<name>      a whole shard, compared with the index before it gets this name
    cache_dir/<two digits>.lock                      held, by flock, by the process that fills one of such a hash

All processes of a node share the folder. A shard is deleted while others read it without harm: they hold it open. Where
a shard cannot be kept (larger than the cache, a full disk), it is read from where it lies, and that is said once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vitscale.data.storage import Access, GiveUp, TooShort, download, with_retries

log = logging.getLogger(__name__)

_WAIT = 0.1
_LONGEST_WAIT = 1800.0
"""Seconds after which a shard that another process is filling is read from where it lies."""
_LEFT_BEHIND = 3600.0
"""Age in seconds at which an unfinished file is one of a process that is gone."""
_told: set[str] = set()


def cached(path: str, *, size: int, sha256: str, access: Access) -> str | None:
    """The local copy of a remote shard, made if it is not there; None where it cannot be kept.

    Args:
        path: URL of the shard, or `pipe:` and a command.
        size: Its length, as the index says.
        sha256: Its checksum, likewise.
        access: Where the cache is, and how large it may be.

    Raises:
        OSError: The shard cannot be read, or is another one than the index says.
    """
    assert access.cache_dir is not None
    if size > access.cache_bytes:
        _tell_once(f"{path} ({size / 1e9:.1f} GB) is larger than the cache and read from where it lies")
        return None
    folder = Path(access.cache_dir)
    name = os.path.basename(path.rstrip("/"))[-80:].replace(os.sep, "_").replace(" ", "_")
    key = hashlib.sha256(f"{path}{sha256}".encode()).hexdigest()[:24]
    there = folder / f"{key}-{name}"
    if _touch(there, size):
        return str(there)
    try:
        _make_folder(folder)
        with _locked(folder / f"{key[:2]}.lock") as held:
            if not held:
                _tell_once(f"{path}: another process has been filling the cache for {_LONGEST_WAIT:.0f} s; not waiting")
                return None
            if not _touch(there, size):
                _make_room(folder, size, access.cache_bytes)
                _fill(there, path, size, sha256, access)
    except _CacheError as error:
        _tell_once(f"the cache {folder} cannot be used ({error}); shards are read from where they lie")
        return None
    return str(there)


class _CacheError(GiveUp):
    """The folder, not the shard, is what fails."""


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _CacheError(error.strerror) from None


def _touch(file: Path, size: int) -> bool:
    """Whether the whole shard is there; it is the most recently used one then."""
    try:
        if file.stat().st_size != size:
            return False
        os.utime(file)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a shard, waiting for another process; False after too long a wait."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _CacheError(f"{path.parent}: {error.strerror}") from None
    try:
        deadline = time.monotonic() + _LONGEST_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(_WAIT)
                continue
            except OSError as error:
                raise _CacheError(f"files there cannot be locked: {error.strerror}") from None
            yield True
            return
    finally:
        os.close(descriptor)


def _fill(there: Path, path: str, size: int, sha256: str, access: Access) -> None:
    """Bring the shard, compare it, and give it its name."""
    aside = there.with_name(f"{there.name}.{os.getpid()}.tmp")

    def fetch() -> None:
        try:
            download(path, str(aside), access)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise _CacheError(error.strerror) from None
            raise
        length = aside.stat().st_size
        if length != size:
            raise TooShort(f"{length:,} bytes, the index says {size:,}")
        found = _digest(aside)
        if found != sha256:
            raise OSError(f"its sha256 begins with {found[:12]}, that in the index with {sha256[:12]}")

    try:
        with_retries(path, fetch)
        os.replace(aside, there)
    finally:
        aside.unlink(missing_ok=True)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _make_room(folder: Path, size: int, limit: int) -> None:
    """Delete the least recently used shards until one of `size` bytes fits, and what processes left behind."""
    shards: list[tuple[float, int, Path]] = []
    try:
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                if entry.name.endswith(".tmp"):
                    if time.time() - status.st_mtime > _LEFT_BEHIND:
                        os.unlink(entry.path)
                    else:
                        size += status.st_size  # of another process
                elif not entry.name.endswith(".lock"):
                    shards.append((status.st_mtime, status.st_size, Path(entry.path)))
    except OSError as error:
        raise _CacheError(str(error)) from None
    held = sum(length for _, length, _ in shards)
    for _, length, file in sorted(shards):
        if held + size <= limit:
            return
        file.unlink(missing_ok=True)
        held -= length


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        log.warning("%s", text)
