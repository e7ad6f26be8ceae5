"""What several commands have in common: their arguments, and how they speak."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitscale.errors import UserError

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys that replace the file's, as YAML.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Source = Annotated[str, typer.Argument(metavar="CHECKPOINT_OR_WEIGHTS", help="A run, a step folder or a model file.")]
Shards = Annotated[list[str], typer.Argument(metavar="SHARDS...", help="Folders or tars; `{000..127}` and `*` work.")]


def count(number: int, singular: str, plural: str | None = None) -> str:
    """`3 images`, `1 image`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def write_text(path: Path, text: str) -> None:
    """Write a file that a user named.

    Raises:
        UserError: It cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
