"""YAML files, their bases and `key=value` overrides -> `RunConfig`, and back.

    base: [../base/vit.yaml, ../base/imagenet.yaml]    # this file is laid over these, the later over the earlier
    model: {name: B/16}                                # mappings merge, everything else replaces
    optim:
      lr: 1e-3

Everything wrong is said at once, as `file:line: key: what is wrong; what is allowed`.

The YAML read here is the part of YAML 1.2 that means the same to every reader: `1e-3` and `10_000` are numbers; `on`,
`off`, `yes`, `no` and `12:30` are text, never booleans or base-60 numbers; duplicate keys, anchors' aliases, merge
keys (`<<`) and tags are refused. No object is ever built from a tag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from vitscale.config.describe import describe_keys, json_schema
from vitscale.config.schema import RunConfig
from vitscale.config.tree import COMMAND_LINE, Entry, Place, Problem, fail, merge, sequence
from vitscale.config.validate import config_to_dict, implied_fields, model_from_dict, model_to_dict, to_run
from vitscale.errors import did_you_mean, nearest

__all__ = [
    "config_to_dict",
    "describe_keys",
    "dump_config",
    "json_schema",
    "load_config",
    "model_from_dict",
    "model_to_dict",
    "packaged_configs",
]

_OVERRIDE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(.*)", re.DOTALL)
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = re.compile(rf"[-+]?{_DIGITS}|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_MAX_NUMBER = 40  # characters; what is longer is text
_NAMED = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf"), float("inf")),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run.

    Args:
        path: A YAML file, or the name of a packaged config, e.g. `demo/pretrain.yaml`.
        overrides: `key.sub=value`, the value read as YAML; the last of a key wins.

    Raises:
        UserError: Anything is wrong with it; the message lists everything, one line each. Exit code 2.
    """
    problems: list[Problem] = []
    file = _locate(Path(path), Path())
    if file is None:
        fail([Problem(Place(str(path)), "", f"no such file{_similar_files(Path(path), Path())}")])
    tree = _read_with_bases(file, (), problems)
    for override in overrides:
        if entry := _read_override(override, problems):
            tree = merge(tree, entry) if tree else None
    return to_run(tree, problems) if tree else fail(problems)


def dump_config(config: RunConfig) -> str:
    """The run as YAML that `load_config` reads back to an equal run.

    Fields that `model.name` implies are left out, so that overriding the name changes them.
    """
    data = config_to_dict(config)
    data["model"] = {key: value for key, value in data["model"].items() if key not in implied_fields(config.model)}
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100))


def packaged_configs() -> Path:
    """The folder of the configs that come with vitscale: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shared = package / "_share" / "configs"
    return shared if shared.is_dir() else package.parent / "configs"


def _locate(path: Path, folder: Path) -> Path | None:
    """`path` relative to `folder`, else among the packaged configs; None where there is neither."""
    candidates = (Path(os.path.normpath(folder / path)), packaged_configs() / path)
    return next((candidate for candidate in candidates if os.path.exists(candidate)), None)


def _similar_files(path: Path, folder: Path) -> str:
    """`"; did you mean 'x'?"` for a file that is not there: one beside where it should be, else a packaged one."""
    parent = (folder / path).parent
    names = [found.name for found in parent.glob("*.y*ml")] if parent.is_dir() else []
    if beside := nearest(path.name, names):
        return f"; did you mean {str(path.with_name(beside))!r}?"
    return did_you_mean(str(path), [str(f.relative_to(packaged_configs())) for f in packaged_configs().rglob("*.yaml")])


def _read_with_bases(path: Path, chain: tuple[Path, ...], problems: list[Problem]) -> Entry | None:
    """The tree of a file laid over those of its bases, as far as these can be read; None if it cannot itself."""
    tree = _read_file(path, problems)
    if tree is None or not isinstance(tree.value, dict):
        return None
    chain = (*chain, path)
    own = Entry({key: entry for key, entry in tree.value.items() if key != "base"}, tree.place)
    merged = Entry({}, tree.place)
    for base in _bases(tree.value.get("base"), problems):
        if low := _read_base(base, chain, problems):
            merged = merge(merged, low)
    return merge(merged, own)


def _bases(entry: Entry | None, problems: list[Problem]) -> Iterator[Entry]:
    if entry is None:
        return
    for item in entry.value if isinstance(entry.value, list) else [entry]:
        if isinstance(item.value, str):
            yield item
        else:
            problems.append(Problem(item.place, "base", f"found {item.shown}; allowed: a file name or a list of them"))


def _read_base(base: Entry, chain: tuple[Path, ...], problems: list[Problem]) -> Entry | None:
    name, folder = Path(str(base.value)), chain[-1].parent
    path = _locate(name, folder)
    if path is None:
        where = f"no file {base.shown} in {str(folder)!r} or among the packaged configs"
        problems.append(Problem(base.place, "base", where + _similar_files(name, folder)))
        return None
    if any(path.samefile(earlier) for earlier in chain):
        circle = " -> ".join(str(part) for part in (*chain, path))
        problems.append(Problem(base.place, "base", f"files are each other's base: {circle}; take one of them out"))
        return None
    return _read_with_bases(path, chain, problems)


def _read_file(path: Path, problems: list[Problem]) -> Entry | None:
    place = Place(str(path))
    if path.is_dir():
        names = ", ".join(sorted(found.name for found in path.glob("*.yaml"))) or "no *.yaml in it"
        problems.append(Problem(place, "", f"is a folder; name a file in it: {names}"))
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        problems.append(Problem(place, "", "is not text in UTF-8; a config is a YAML file"))
        return None
    except OSError as error:
        problems.append(Problem(place, "", f"cannot be read: {error.strerror}"))
        return None
    return _read_mapping(text, str(path), problems)


def _read_mapping(text: str, file: str, problems: list[Problem]) -> Entry | None:
    found = len(problems)
    tree = _parse(text, _Source(file, problems))
    if tree is not None and isinstance(tree.value, dict):
        return tree
    if len(problems) == found:
        what = f"found {tree.shown}" if tree and tree.value is not None else "the file is empty"
        place = tree.place if tree else Place(file, 1)
        problems.append(Problem(place, "", f"{what}; allowed: a mapping of keys, e.g. 'name: my-run'"))
    return None


def _read_override(override: str, problems: list[Problem]) -> Entry | None:
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        problems.append(Problem(COMMAND_LINE, "", f"{override!r} is not of the form key=value, e.g. optim.lr=1e-3"))
        return None
    key, text = match[1], match[2]
    if key == "base":
        problems.append(Problem(COMMAND_LINE, key, "stands in files only; allowed: the keys of a run"))
        return None
    found = len(problems)
    entry = _parse(text, _Source(COMMAND_LINE.file, problems, key))
    if len(problems) > found:
        return None
    entry = entry or Entry(None, COMMAND_LINE, "nothing")
    for part in reversed(key.split(".")):
        entry = Entry({part: entry}, COMMAND_LINE, "a mapping")
    return entry


@dataclass(frozen=True)
class _Source:
    """What is being read, and where its problems go. `key` is that of an override, whose lines nobody counts."""

    file: str
    problems: list[Problem]
    key: str = ""

    def place(self, line: int) -> Place:
        return COMMAND_LINE if self.key else Place(self.file, line)

    def problem(self, line: int, key: str, message: str) -> None:
        dotted = ".".join(part for part in (self.key, key) if part)
        self.problems.append(Problem(self.place(line), dotted, message))


def _parse(text: str, source: _Source) -> Entry | None:
    """The value in a YAML text; None where there is none, or where it cannot be read, which is then noted."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        return _entry(node, _line(node), "", source) if node else None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        source.problem(line, "", "holds a control character; a config is plain text")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        source.problem(mark.line + 1 if mark else 1, "", _syntax_message(error, bool(source.key)))
    except (ValueError, OverflowError):  # PyYAML calls chr() on whatever number an escape holds
        source.problem(1, "", "holds an escape (\\U...) that is no character")
    except RecursionError:
        source.problem(1, "", "is nested too deeply to be a config")
    return None


def _syntax_message(error: yaml.MarkedYAMLError, is_override: bool) -> str:
    problem = error.problem or "cannot be read"
    if isinstance(error, _RefusedError):
        return problem
    if "'\\t'" in problem:
        return "found a tab; YAML is indented with spaces"
    if "expected a single document" in (error.context or ""):
        return "found a second document (---); allowed: one"
    remedy = "; put quotes around the value, inside those of the shell" if is_override else ""
    return f"cannot be read as YAML: {problem}{remedy or '; put quotes around text that holds one of : # { [ & * !'}"


class _RefusedError(yaml.MarkedYAMLError):
    """Something that is YAML and is not read here."""


class _Loader(yaml.SafeLoader):
    """Composes nodes, and refuses what would make a value depend on more than its own text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refused(f"found the alias *{event.anchor}; write the value out, or share it through 'base:'", event)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise _refused(f"found the tag {tag}; allowed: plain values, text in quotes", event)
        if isinstance(event, yaml.ScalarEvent) and _HALF_CHARACTER.search(event.value):
            raise _refused("found half a character (a lone surrogate); write the whole one", event)
        return super().compose_node(parent, index)


def _refused(problem: str, event: yaml.Event) -> _RefusedError:
    return _RefusedError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _entry(node: yaml.Node, line: int, key: str, source: _Source) -> Entry:
    """The entry of a node; `line` is that of its key, or its own where it has none; `key` is the dotted key."""
    place = source.place(line)
    if isinstance(node, yaml.MappingNode):
        return Entry(_mapping(node, key, source), place, "a mapping")
    if isinstance(node, yaml.SequenceNode):
        return sequence([_entry(item, _line(item), key, source) for item in node.value], place)
    text = str(node.value)
    value = scalar(text) if isinstance(node, yaml.ScalarNode) and node.style is None else text
    return Entry(value, place, repr(value) if isinstance(value, str) else text or "nothing")


def _mapping(node: yaml.MappingNode, key: str, source: _Source) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        line = _line(key_node)
        name = key_node.value
        dotted = f"{key}.{name}" if key else str(name)
        if not isinstance(name, str):
            source.problem(line, key, "a key is a list or a mapping; put quotes around text that starts with { or [")
        elif name == "<<":
            source.problem(line, key, "merge keys (<<) are not read; put what is shared into a file named by 'base:'")
        elif name in entries:
            first = entries[name].place.line
            earlier = f", first in line {first}" if first else ""
            source.problem(line, dotted, f"stands here twice{earlier}; take one of them out")
        else:
            entries[name] = _entry(value_node, line, dotted, source)
    return entries


def scalar(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means."""
    if text in _NAMED:
        return _NAMED[text]
    if len(text) <= _MAX_NUMBER and _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if len(text) <= _MAX_NUMBER and _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Dumper(yaml.SafeDumper):
    """Lists on one line; quotes around text that would be read as something else (PyYAML's rules are YAML 1.1's)."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(scalar(text), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_items(self, items: list[object]) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_items)
