"""Names of classes: which of one list is which of another, by WordNet id where names have one, else by the words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vitscale.errors import UserError

_WORDNET = re.compile(r"(?<![A-Za-z0-9])n\d{8}(?!\d)")


def class_key(name: str) -> str:
    """What two names of one class have in common: the WordNet id (`n01440764`, `n01440764 tench`), else the words."""
    found = _WORDNET.search(name)
    return found[0] if found else re.sub(r"[\s_-]+", " ", name).strip().casefold()


def match_classes(source: Sequence[str], target: Sequence[str]) -> tuple[int | None, ...]:
    """For each class of `target` its place in `source`; None where `source` does not have it.

    Raises:
        UserError: A list is empty, or names one class twice, so that it cannot be told which is meant; or no class is
            in both.
    """
    if not source:
        raise UserError("the weights do not say what their classes are called; import them with --classes")
    if not target:
        raise UserError("the data does not say what its classes are called; pack or index it with a class list")
    _places(target, "the classes wanted")
    matches = find_classes(source, target, whose="the weights")
    if all(place is None for place in matches):
        raise UserError(
            f"none of the {len(target)} classes wanted ({target[0]!r}, ...) is among the {len(source)} of the weights "
            f"({source[0]!r}, ...); give both by WordNet id or by the same names"
        )
    return matches


def find_classes(known: Sequence[str], names: Sequence[str], *, whose: str) -> tuple[int | None, ...]:
    """For each of `names` its place in a class list; None where the list does not have it.

    Raises:
        UserError: The list (`whose`) names one class twice.
    """
    places = _places(known, whose)
    return tuple(places.get(class_key(name)) for name in names)


def _places(names: Sequence[str], whose: str) -> dict[str, int]:
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        first = places.setdefault(class_key(name), place)
        if first != place:
            raise UserError(
                f"classes {first} and {place} of {whose} both are {class_key(name)!r}; name each class once, or by "
                "its WordNet id"
            )
    return places
