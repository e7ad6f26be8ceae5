"""From what a person writes (a folder, tars, brace ranges, globs) to entries of `index.json`, or a sentence why not."""

from __future__ import annotations

import functools
import glob
import json
import os
import re
from typing import Any, NamedTuple

from braceexpand import braceexpand

from vitscale.data.storage import (
    LOCAL,
    Access,
    GiveUp,
    glob_remote,
    is_remote,
    list_names,
    local_path,
    read_whole,
)
from vitscale.errors import UserError, did_you_mean

FORMAT = "vitscale-index"
VERSION = 1
INDEX = "index.json"
UNFINISHED = ".vitscale-pack"
"""Folder that lies in the output of a pack until it has ended."""


class ShardEntry(NamedTuple):
    """One shard of an `index.json`, and the class list that stands there."""

    name: str
    path: str
    sidecar: str
    samples: int
    bytes: int
    sha256: str
    classes: tuple[str, ...]
    excluded: tuple[int, ...] = ()
    """Places of samples that keep their place in the order and are left out of all else."""


def find_shards(spec: str | tuple[str, ...], access: Access = LOCAL) -> list[ShardEntry]:
    """The index entry of every shard that `spec` names, in that order.

    Raises:
        UserError: Nothing found, a shard without an index or not in it, or one named twice.
    """
    entries: list[ShardEntry] = []
    for part in (spec,) if isinstance(spec, str) else spec:
        for path in expand(part, access):
            entries += _folder_entries(path, access) if is_folder(path) else [_tar_entry(path, access)]
    seen: set[str] = set()
    for entry in entries:
        if entry.path in seen:
            raise UserError(f"shard {entry.path} is named twice in {spec!r}; each shard may stand there once")
        seen.add(entry.path)
    if not entries:
        raise UserError(f"no shards in {spec!r}: its index lists none")
    return entries


def find_tars(spec: str | tuple[str, ...], access: Access = LOCAL) -> list[str]:
    """Every tar that `spec` names, indexed or not; those of a folder in order of their names.

    Raises:
        UserError: Nothing found.
    """
    tars: list[str] = []
    for part in (spec,) if isinstance(spec, str) else spec:
        for path in expand(part, access):
            if is_folder(path):
                tars += _no_empty(part, [os.path.join(path, name) for name in tars_in(path, access)])
            else:
                tars.append(path)
    return tars


def is_folder(path: str) -> bool:
    """Whether `path` is a folder; a URL is one where it does not end in `.tar`."""
    if is_remote(path):
        return not path.startswith("pipe:") and not path.split("?")[0].endswith(".tar")
    return os.path.isdir(path)


def expand(spec: str, access: Access = LOCAL) -> list[str]:
    """Paths and URLs that one spec stands for: lists (`@FILE`), brace ranges, then globs; the local ones exist.

    Raises:
        UserError: Nothing there, or only a part of what a brace range names.
    """
    if spec.startswith("@"):
        return [path for line in _lines(spec[1:], access) for path in expand(line, access)]
    if spec.startswith("pipe:") and not access.allow_pipe:
        raise UserError(f"{spec!r} runs a command; set data.allow_pipe: true if you trust where it comes from")
    try:
        patterns = list(braceexpand(local_path(spec)))
    except ValueError:
        raise UserError(f"{spec!r}: a brace is not closed; a range is written {{000..127}}") from None
    if is_remote(spec):
        return [path for pattern in patterns for path in _expand_remote(pattern, access)]
    paths: list[str] = []
    missing: list[str] = []
    for pattern in patterns:
        pattern = os.path.expanduser(pattern)
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        paths += found
        if not found:
            missing.append(pattern)
    if not paths:
        raise UserError(f"no shards found for {spec!r}: {_nearby(missing[0])}")
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(f"{len(missing)} of the {len(patterns)} shards of {spec!r} do not exist: {shown}")
    return paths


def _expand_remote(pattern: str, access: Access) -> list[str]:
    """What a URL with or without wildcards stands for."""
    path = pattern.partition("://")[2].partition("/")[2]  # without the host, which may be an address in brackets
    if pattern.startswith("pipe:") or not any(sign in path for sign in "*["):
        return [pattern]
    if pattern.startswith("http"):
        raise UserError(f"{pattern!r}: a web server does not say what it holds; write a range {{000..127}} or a list")
    try:
        found = glob_remote(pattern, access)
    except Exception as error:  # remote file systems raise nearly any kind
        raise UserError(f"{pattern!r} cannot be listed: {error}") from None
    if not found:
        raise UserError(f"no shards found for {pattern!r}")
    return found


def _lines(path: str, access: Access) -> list[str]:
    """The specs in a list, one a line; empty lines and those that begin with # are passed over."""
    try:
        text = read_whole(local_path(path), access).decode()
    except (OSError, GiveUp, UnicodeDecodeError) as error:
        raise UserError(f"the list @{path} cannot be read: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    specs = [line for line in lines if line and not line.startswith("#")]
    if not specs:
        raise UserError(f"the list @{path} names no shards")
    if nested := next((line for line in specs if line.startswith("@")), None):
        raise UserError(f"the list @{path} names another list, {nested}; write its lines there")
    return specs


def tars_in(folder: str, access: Access = LOCAL) -> list[str]:
    """Names of the tars that lie directly in `folder`, sorted; hidden ones left out. A web server lists none.

    Raises:
        UserError: The folder cannot be listed.
    """
    try:
        names = list_names(folder, access)
    except UserError:
        raise
    except Exception as error:  # remote file systems raise nearly any kind
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{folder} cannot be read: {reason}") from None
    return sorted(name for name in names if name.endswith(".tar") and not name.startswith("."))


def read_index(folder: str, access: Access = LOCAL) -> list[ShardEntry]:
    """All entries of the `index.json` in `folder`.

    Raises:
        UserError: No index, or one that this version cannot read.
    """
    path = os.path.join(folder, INDEX)
    try:
        content = json.loads(read_whole(path, access))
    except FileNotFoundError:
        raise UserError(_without_index(folder)) from None
    except (OSError, GiveUp) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path} cannot be read: {reason}") from None
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); make it again with `vitscale data index {folder}`"
        ) from None
    return _entries(path, content)


def merge_classes(entries: list[ShardEntry]) -> tuple[str, ...]:
    """The one class list that the shards share; shards without a list take that of the others.

    Raises:
        UserError: Two shards whose labels mean different things.
    """
    holders = list({id(entry.classes): entry for entry in entries if entry.classes}.values())
    for other in holders[1:]:
        if other.classes != holders[0].classes:
            raise UserError(_different(holders[0], other))
    return holders[0].classes if holders else ()


def _different(one: ShardEntry, other: ShardEntry) -> str:
    """A sentence about the first place where two class lists part."""
    label = next((i for i, (a, b) in enumerate(zip(one.classes, other.classes, strict=False)) if a != b), None)
    if label is None:
        how = f"{len(one.classes)} and {len(other.classes)} classes"
    else:
        how = f"label {label} is {one.classes[label]!r} in one and {other.classes[label]!r} in the other"
    return (
        f"shards {one.path} and {other.path} have different class lists ({how}); pack both with one list: "
        "`vitscale data pack --classes`"
    )


@functools.lru_cache(maxsize=8)
def _by_path(folder: str, modified: int, access: Access) -> dict[str, ShardEntry]:
    return {_identity(entry.path): entry for entry in read_index(folder, access)}


def _identity(path: str) -> str:
    return path if is_remote(path) else os.path.realpath(path)


def _tar_entry(path: str, access: Access) -> ShardEntry:
    folder = os.path.dirname(path) or "."
    if path.startswith("pipe:"):
        raise UserError(
            f"{path!r} has no index beside it: `vitscale data index {path!r} --out FOLDER`, then give FOLDER"
        )
    index = os.path.join(folder, INDEX)
    modified = os.stat(index).st_mtime_ns if os.path.exists(index) else 0
    entry = _by_path(folder, modified, access).get(_identity(path))
    if entry is None:
        raise UserError(f"{path} is not in {index}; run `vitscale data index {folder}`")
    return entry


def _folder_entries(folder: str, access: Access) -> list[ShardEntry]:
    entries = read_index(folder, access)
    if any(entry.path.startswith("pipe:") for entry in entries) and not access.allow_pipe:
        raise UserError(f"{folder}/{INDEX} names commands to run (pipe:); set data.allow_pipe: true if you trust them")
    listed = {os.path.basename(entry.path) for entry in entries}
    added = [name for name in tars_in(folder, access) if name not in listed]
    if added:
        shown = ", ".join(added[:3]) + (f" and {len(added) - 3} more" if len(added) > 3 else "")
        raise UserError(f"{folder}/{INDEX} does not list {shown}; run `vitscale data index {folder}`")
    return entries


def _entries(path: str, content: Any) -> list[ShardEntry]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f'{path} is not an index of shards: "format" is not "{FORMAT}"')
    if content.get("version") != VERSION:
        raise UserError(f"{path} has version {content.get('version')!r}; this vitscale reads version {VERSION}")
    folder = os.path.dirname(path)
    classes = content.get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f'{path}: "classes" is not a list of names')
    shared = tuple(classes)
    shards = content.get("shards")
    if not isinstance(shards, list):
        raise UserError(f'{path}: "shards" is not a list')
    return [_entry(path, folder, number, shard, shared) for number, shard in enumerate(shards)]


def _entry(path: str, folder: str, number: int, shard: Any, classes: tuple[str, ...]) -> ShardEntry:
    try:
        name, samples, size, sha256 = (shard[key] for key in ("name", "samples", "bytes", "sha256"))
    except (TypeError, KeyError) as error:
        raise UserError(f"{path}: shard {number} lacks {error}") from None
    sound = isinstance(name, str) and isinstance(sha256, str) and type(samples) is int and type(size) is int
    if not sound or not name or samples < 0 or size < 0:
        raise UserError(f"{path}: shard {number} is not a name, two counts and a checksum: {json.dumps(shard)}")
    excluded = shard.get("excluded", [])
    if not isinstance(excluded, list) or not all(type(place) is int and 0 <= place < samples for place in excluded):
        raise UserError(f'{path}: "excluded" of shard {number} is not a list of places below {samples}')
    tar = name if is_remote(name) else os.path.join(folder, name)
    return ShardEntry(name, tar, sidecar_path(folder, name), samples, size, sha256, classes, tuple(excluded))


def sidecar_path(folder: str, name: str) -> str:
    """Where the offsets of shard `name` lie, given the folder of the `index.json`."""
    own = os.path.basename(name).removesuffix(".tar")
    return os.path.join(folder, (re.sub(r"[^\w.+-]+", "_", own) if name.startswith("pipe:") else own) + ".idx")


def _without_index(folder: str) -> str:
    if is_remote(folder):
        return (
            f"no {INDEX} in {folder}; make one here with `vitscale data index {folder} --out FOLDER`, and give FOLDER"
        )
    if any(
        os.path.exists(os.path.join(place, UNFINISHED)) for place in (folder, os.path.dirname(os.path.abspath(folder)))
    ):
        return f"{folder} holds a pack that did not end; run the same `vitscale data pack` again"
    tars = tars_in(folder)
    if tars:
        return f"no {INDEX} in {folder}, where {len(tars)} tars lie; make it with `vitscale data index {folder}`"
    inside = [name for name in ("train", "validation") if os.path.exists(os.path.join(folder, name, INDEX))]
    if inside:
        return f"no {INDEX} in {folder}; its folders have one: {', '.join(os.path.join(folder, i) for i in inside)}"
    return f"no shards found in {folder}: {_holds(folder)}"


def _no_empty(spec: str, tars: list[str]) -> list[str]:
    if not tars:
        raise UserError(f"no shards found for {spec!r}: {_holds(spec)}")
    return tars


def _nearby(path: str) -> str:
    """What lies where `path` was looked for."""
    folder = os.path.dirname(path) or "."
    while folder not in ("/", ".", "") and not os.path.isdir(folder):
        path, folder = folder, os.path.dirname(folder) or "."
    if not os.path.isdir(folder):
        return f"{folder} does not exist"
    name = os.path.basename(path)
    return f"{_holds(folder)}{did_you_mean(name, os.listdir(folder))}"


def _holds(folder: str) -> str:
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{folder} holds {shown or 'nothing'}"
