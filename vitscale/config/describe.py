"""The schema in words: types for messages, every key for the reference, JSON schema for editors."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, TypeAdapter
from pydantic.fields import FieldInfo

from vitscale.config.schema import Duration, RunConfig

_WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Duration: "duration, e.g. '300 epochs'",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


class Key(NamedTuple):
    """One key of a config as the reference shows it."""

    key: str
    """Dotted: `optim.lr`."""
    type: str
    """What may be written, in words."""
    default: str
    """As YAML; `required` where there is none."""
    doc: str
    """The docstring under the field."""


def describe_keys() -> list[Key]:
    """Every key of a run, in the order of the schema."""
    return list(_keys(RunConfig, "", json_schema()))


def dotted_keys(cls: Any, prefix: str = "") -> Iterator[str]:
    """The keys of a section and those of its sections, in the order of the schema."""
    for name, hint in hints(cls).items():
        if is_section(hint):
            yield from dotted_keys(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


def _keys(cls: type, prefix: str, schema: dict[str, Any]) -> Iterator[Key]:
    properties = schema["properties"] if cls is RunConfig else schema["$defs"][cls.__name__]["properties"]
    for field in fields(cls):
        hint = hints(cls)[field.name]
        if is_section(hint):
            yield from _keys(hint, f"{prefix}{field.name}.", schema)
        else:
            doc = " ".join(properties[field.name]["description"].split())
            yield Key(prefix + field.name, type_text(hint), _default_text(field), doc)


def _default_text(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return str(field.default_factory())
    if field.default is MISSING:
        return "required"
    return _yaml_text(field.default)


def _yaml_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    if isinstance(value, tuple):
        return f"[{', '.join(_yaml_text(item) for item in value)}]"
    return str(value)


@cache
def hints(cls: type) -> dict[str, Any]:
    """The types of a section's fields, with their bounds."""
    return get_type_hints(cls, include_extras=True)


def is_section(hint: Any) -> bool:
    """Whether a field of this type is a section with keys of its own."""
    return is_dataclass(hint) and hint is not Duration


def item_of(hint: Any) -> type | None:
    """The section that each item of a list of this type is; None for any other type."""
    for part in (hint, *get_args(hint)):
        inner = get_args(part)[0] if get_args(part) else None
        if is_section(inner):
            return inner
    return None


def type_text(hint: Any) -> str:
    """What may be written for a type, in words: `whole number >= 1 or null`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded_text(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is Literal:
        *first, last = [str(arg) for arg in args]
        return f"{', '.join(first)} or {last}"
    if origin is tuple and args[-1] is Ellipsis:
        return f"list of {type_text(args[0])}"
    if origin is tuple:
        return f"[{', '.join(type_text(arg) for arg in args)}]"
    if is_section(hint):
        return f"a section with keys among {', '.join(field.name for field in fields(hint))}"
    return _WORDS[hint]


def _bounded_text(hint: Any, annotations: tuple[Any, ...]) -> str:
    text, bounds = type_text(hint), []
    for annotation in annotations:
        if isinstance(annotation, AfterValidator):  # the only one is that of schema.Span
            text = text.replace("duration", "duration longer than 0")
        for bound in annotation.metadata if isinstance(annotation, FieldInfo) else ():
            bounds += [f"{sign} {getattr(bound, name)}" for name, sign in _BOUNDS.items() if hasattr(bound, name)]
            if hasattr(bound, "min_length"):
                text = f"non-empty {text}"
    return f"{text} {' and '.join(bounds)}".rstrip()


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors; each field's docstring is its description.

    Nothing is `required` in it, since any key may come from a file named by `base`.
    """
    schema = TypeAdapter(RunConfig).json_schema()
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    base = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Config files that this one is laid over, the later over the earlier: relative to this file, or "
        "a packaged config by its name.",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
