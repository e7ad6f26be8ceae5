"""From a tree of placed values to a `RunConfig`, or to everything that is wrong with it.

pydantic finds what is wrong with single keys, `check` what is wrong between keys. Both are reported together: where
a key is wrong, its default stands in for it, and conflicts that involve it are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from vitscale.config.check import Finding, check_model, check_run
from vitscale.config.describe import dotted_keys, hints, is_section, item_of, type_text
from vitscale.config.schema import ModelConfig, RunConfig
from vitscale.config.sizes import dimensions
from vitscale.config.tree import (
    COMMAND_LINE,
    Entry,
    Path,
    Problem,
    fail,
    find,
    merge,
    place_of,
    placed,
    plain,
    without,
)
from vitscale.errors import did_you_mean

_STAND_INS = {"name": "-", "run_dir": "-", "duration": "1 steps", "global_batch": 1}


@cache
def _run_adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)


@cache
def _model_adapter() -> TypeAdapter[ModelConfig]:
    return TypeAdapter(ModelConfig)


def to_run(tree: Entry, problems: list[Problem]) -> RunConfig:
    """The run that `tree` describes.

    Args:
        tree: The whole config, all bases and overrides merged.
        problems: What could not be read; reported with the rest. Where there is any, nothing is said about missing
            keys and conflicts, since what would settle them may be in what could not be read.

    Raises:
        UserError: Anything is wrong; the message lists everything, one line each.
    """
    tree, unknown_name = _expand_name(tree)
    errors: dict[Path, ErrorDetails] = {}
    try:
        config = _run_adapter().validate_json(json.dumps(plain(tree)))
    except ValidationError as error:
        errors = _by_key(RunConfig, error)
        config = _run_adapter().validate_json(json.dumps(plain(_healed(tree, errors))))
    missing = {path: details for path, details in errors.items() if _is_missing(path, details)}
    found = [*unknown_name, *_problems(RunConfig, tree, {p: d for p, d in errors.items() if p not in missing})]
    if not problems:
        found += [problem for path in missing for problem in _missing(RunConfig, tree, path)]
        wrong = {problem.key.partition("[")[0] for problem in found}
        if unknown_name:
            wrong |= {f"model.{key}" for key in dimensions("B/16") if find(tree, ("model", key)) is None}
        found += [_conflict(finding, tree) for finding in check_run(config) if not _involves(finding, wrong)]
    if problems or found:
        fail([*problems, *found])
    return config


def _healed(tree: Entry, errors: Iterable[Path]) -> Entry:
    """The tree without what is wrong and with something for what is missing, so that the rest can be checked."""
    for path in errors:
        tree = without(tree, path)
    return merge(placed(_STAND_INS, tree.place), tree)


def _expand_name(tree: Entry) -> tuple[Entry, list[Problem]]:
    """The tree with the fields that `model.name` implies beneath those that were written."""
    name = find(tree, ("model", "name"))
    if name is None or not isinstance(name.value, str):
        return tree, []
    try:
        implied = placed({"model": dimensions(name.value)}, name.place)
    except ValueError as error:
        return tree, [Problem(name.place, "model.name", str(error))]
    return Entry(merge(implied, tree).value, tree.place), []


def _conflict(finding: Finding, tree: Entry) -> Problem:
    """The problem at the first of the finding's keys that was written."""
    paths = [tuple(key.split(".")) for key in finding.keys]
    path = next((path for path in paths if find(tree, path)), paths[0])
    return Problem(place_of(tree, path), ".".join(path), finding.message)


def _involves(finding: Finding, wrong: set[str]) -> bool:
    return any(key == bad or key.startswith(f"{bad}.") for key in finding.keys for bad in wrong)


def _by_key(cls: type, error: ValidationError) -> dict[Path, ErrorDetails]:
    """One error a key: a union reports each of its members; the sentence of a parser is kept before others."""
    by_key: dict[Path, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        path = _path(cls, details["loc"])
        if path not in by_key or details["type"] == "value_error":
            by_key[path] = details
    return by_key


def _path(cls: type, loc: tuple[int | str, ...]) -> Path:
    """The keys in a pydantic location; what it adds for members of unions and items of lists is cut off."""
    path: Path = ()
    hint: Any = cls
    for part in loc:
        if not is_section(hint):
            break
        path = (*path, str(part))
        hint = hints(hint).get(str(part))
    return path


def _is_missing(path: Path, details: ErrorDetails) -> bool:
    return details["type"] == "missing" and details["loc"] == path  # else it is an item of a list that is missing


def _hint(cls: Any, path: Path) -> Any:
    """The type at `path` of the section `cls`; None for an unknown key."""
    for key in path:
        cls = hints(cls).get(key)
    return cls


def _problems(cls: type, tree: Entry, errors: Mapping[Path, ErrorDetails]) -> Iterator[Problem]:
    for path, details in errors.items():
        section, inner = item_of(_hint(cls, path)), details["loc"][len(path) :]
        if section is not None and inner:
            yield _in_list(section, tree, path, inner, details)
            continue
        if details["type"] == "unexpected_keyword_argument":
            message = _unknown(path[-1], _hint(cls, path[:-1]))
        elif details["type"] == "value_error":
            message = str(details["ctx"]["error"])
        else:
            message = _wrong(find(tree, path) or tree, _hint(cls, path), details)
        yield Problem(place_of(tree, path), ".".join(path), message)


def _in_list(section: type, tree: Entry, path: Path, inner: Sequence[int | str], details: ErrorDetails) -> Problem:
    """What is wrong with an item of a list of sections, or with one of its keys."""
    items = find(tree, path)
    number, key = int(inner[0]), str(inner[1]) if len(inner) > 1 else None
    item = items.value[number] if items and isinstance(items.value, list) else tree
    name = f"{'.'.join(path)}[{number}]" + (f".{key}" if key else "")
    if key is None:
        allowed = ", ".join(field.name for field in fields(section))
        return Problem(item.place, name, f"found {item.shown}; allowed: a section with keys among {allowed}")
    if details["type"] == "unexpected_keyword_argument":
        return Problem(place_of(item, (key,)), name, _unknown(key, section))
    if details["type"] == "missing":
        return Problem(item.place, name, f"missing, and it has no default; allowed: {type_text(hints(section)[key])}")
    return Problem(place_of(item, (key,)), name, _wrong(find(item, (key,)) or item, hints(section)[key], details))


def _missing(cls: type, tree: Entry, path: Path) -> Iterator[Problem]:
    """A key without a default that was not given; of a missing section, each such key in it."""
    hint = _hint(cls, path)
    if is_section(hint):
        for field in fields(hint):
            if field.default is MISSING and field.default_factory is MISSING:
                yield from _missing(cls, tree, (*path, field.name))
    else:
        message = f"missing, and it has no default; allowed: {type_text(hint)}"
        yield Problem(place_of(tree, path), ".".join(path), message)


def _unknown(name: str, parent: Any) -> str:
    names = [field.name for field in fields(parent)]
    everywhere = list(dotted_keys(RunConfig))
    if name in everywhere:
        section, key = name.split(".")
        return f"unknown key; in a file write '{key}' into the section '{section}'"
    hint = did_you_mean(name, [*names, "base"] if parent is RunConfig else names)
    elsewhere = [key for key in everywhere if key.split(".")[-1] == name]
    if not hint and elsewhere:
        hint = f"; did you mean {' or '.join(repr(key) for key in elsewhere)}?"
    return f"unknown key{hint or '; allowed: ' + ', '.join(names)}"


def _wrong(entry: Entry, hint: Any, details: ErrorDetails) -> str:
    message = f"found {entry.shown}; allowed: {type_text(hint)}"
    if details["type"] == "literal_error" and isinstance(entry.value, str):
        return message + did_you_mean(entry.value, [str(choice) for choice in get_args(hint)])
    if "text" in type_text(hint) and isinstance(entry.value, bool | int | float):
        return f"{message}; put quotes around it to make it text"
    if details["type"] == "bool_type" and str(entry.value).lower() in ("on", "off", "yes", "no"):
        return f"{message}; {entry.value} is plain text in YAML 1.2"
    return message


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Every key of the run, also those that `model.name` implies; JSON-able, durations as text."""
    return dict(_run_adapter().dump_python(config, mode="json"))


def model_to_dict(model: ModelConfig) -> dict[str, Any]:
    """Every field of the model; JSON-able, and what `model_from_dict` reads."""
    return dict(_model_adapter().dump_python(model, mode="json"))


def model_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The model that `values` describe. `name` is taken as a label, nothing is filled in from it.

    Raises:
        ValueError: Unknown fields, wrong types or values; the message lists everything.
    """
    tree = placed(values, COMMAND_LINE)
    try:
        model = _model_adapter().validate_json(json.dumps(plain(tree)))
    except ValidationError as error:
        problems = _problems(ModelConfig, tree, _by_key(ModelConfig, error))
        raise ValueError("; ".join(f"model.{problem.key}: {problem.message}" for problem in problems)) from None
    if conflicts := list(check_model(model)):
        raise ValueError("; ".join(f"{conflict.keys[0]}: {conflict.message}" for conflict in conflicts))
    return model


def implied_fields(model: ModelConfig) -> set[str]:
    """The fields that `model.name` implies as they are, and that a file need not repeat."""
    implied = dimensions(model.name) if model.name else {}
    return {key for key, value in implied.items() if getattr(model, key) == value}
