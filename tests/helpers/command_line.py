"""The `vitscale` command inside this process, and its commands taken apart; `helpers.runs` starts whole processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer.main

from vitscale.cli.main import app, main

_OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)=")


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: object
    out: str
    err: str


def run_main(*arguments: object) -> Said:
    """What the entry point of the `vitscale` script does with these words, on a terminal of 200 columns."""
    out, err = io.StringIO(), io.StringIO()
    argv, columns = sys.argv, os.environ.get("COLUMNS")
    sys.argv = ["vitscale", *map(str, arguments)]
    os.environ["COLUMNS"] = "200"
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return Said(code, out.getvalue(), err.getvalue())


def commands() -> dict[str, Any]:
    """Every command by its words: `train`, `data pack`, ..."""
    return dict(_walk((), typer.main.get_command(app)))


def _walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(words), command
        return
    for name, below in command.commands.items():
        yield from _walk((*words, name), below)


def command_of(words: list[str]) -> tuple[str, list[str]]:
    """The command that `vitscale WORDS` runs, and the words that are left for it; a group where none is named."""
    command: Any = typer.main.get_command(app)
    names: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        command, names, words = command.commands[words[0]], [*names, words[0]], words[1:]
    return " ".join(names), words


def parse(words: list[str]) -> list[str]:
    """Parse `vitscale WORDS` without running it; the keys that it replaces.

    Raises:
        Exception: click's UsageError, since there is no such command or option, or one is missing.
    """
    name, rest = command_of(words)
    assert name in commands(), f"{words} is no command"
    context = commands()[name].make_context(name, list(rest))
    return [match[1] for value in context.params.get("overrides") or [] if (match := _OVERRIDE.match(value))]
