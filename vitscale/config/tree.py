"""Values that remember where they were written, and what is said about them when they are wrong.

A config is a tree of entries before it is a `RunConfig`: each file, each `base:` and each override gives one tree,
and `merge` lays one over another. Pure functions; nothing here knows YAML or the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from vitscale.errors import EXIT_USAGE, UserError


@dataclass(frozen=True, order=True)
class Place:
    """Where something was written; `line` counts from 1, and is 0 where a whole file or a command line is meant."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


COMMAND_LINE = Place("command line")

Path: TypeAlias = tuple[str, ...]
"""The keys that lead to an entry: `("optim", "lr")`."""


@dataclass(frozen=True)
class Entry:
    """One value with its place: of the key in a mapping, of the value in a list."""

    value: bool | int | float | str | list[Entry] | dict[str, Entry] | None
    place: Place
    shown: str = ""
    """The value as a message shows it: a scalar as it was written."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    place: Place
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), self.key, self.message) if part)


def fail(problems: Sequence[Problem]) -> NoReturn:
    """Raise a UserError that lists all problems, one a line, by file and line; the command line's come last."""
    lines = (str(p) for p in sorted(problems, key=lambda p: (p.place.file == COMMAND_LINE.file, p.place)))
    raise UserError("\n".join(dict.fromkeys(lines)), exit_code=EXIT_USAGE)


def merge(low: Entry, high: Entry) -> Entry:
    """`high` laid over `low`: mappings merge key by key, everything else replaces.

    A merged mapping stands where `high` wrote it, or, where that is the command line, in the file.
    """
    if not (isinstance(low.value, dict) and isinstance(high.value, dict)):
        return high
    both = {key: merge(low.value[key], entry) for key, entry in high.value.items() if key in low.value}
    place = low.place if high.place == COMMAND_LINE else high.place
    return Entry({**low.value, **high.value, **both}, place, "a mapping")


def find(tree: Entry, path: Path) -> Entry | None:
    """The entry at `path`, or None."""
    for key in path:
        if not isinstance(tree.value, dict) or key not in tree.value:
            return None
        tree = tree.value[key]
    return tree


def place_of(tree: Entry, path: Path) -> Place:
    """The place of the entry at `path`, or of the innermost section on the way to it that was written."""
    entries = (find(tree, path[:end]) for end in range(len(path), 0, -1))
    return next((entry.place for entry in entries if entry), tree.place)


def without(tree: Entry, path: Path) -> Entry:
    """The tree without the entry at `path`."""
    if not isinstance(tree.value, dict) or path[0] not in tree.value:
        return tree
    rest = {key: entry for key, entry in tree.value.items() if key != path[0]}
    if len(path) > 1:
        rest[path[0]] = without(tree.value[path[0]], path[1:])
    return Entry(rest, tree.place)


def sequence(items: list[Entry], place: Place) -> Entry:
    """The entry of a list; short ones are shown whole."""
    is_short = len(items) <= 4 and not any(isinstance(item.value, list | dict) for item in items)
    return Entry(
        items, place, f"[{', '.join(item.shown for item in items)}]" if is_short else f"a list of {len(items)}"
    )


def plain(tree: Entry) -> Any:
    """The bare value: dicts, lists and scalars."""
    if isinstance(tree.value, dict):
        return {key: plain(entry) for key, entry in tree.value.items()}
    if isinstance(tree.value, list):
        return [plain(entry) for entry in tree.value]
    return tree.value


def placed(value: Any, place: Place) -> Entry:
    """The inverse of `plain`: every value of `value`, recursively, at one place."""
    if isinstance(value, Mapping):
        return Entry({str(key): placed(item, place) for key, item in value.items()}, place, "a mapping")
    if isinstance(value, list | tuple):
        return sequence([placed(item, place) for item in value], place)
    return Entry(value, place, repr(value))
