"""The `vitscale` command: one function a command, in the modules beside this one.

What a command needs is imported inside it, so that `vitscale --help` answers at once and without torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vitscale.cli import data, models, runs, training
from vitscale.cli.arguments import write_text
from vitscale.errors import UserError

app = typer.Typer(
    name="vitscale",
    help="Pretrain Vision Transformers on image sets too large for one machine.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make and check shards.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Look at a run's checkpoints.", no_args_is_help=True)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"vitscale {version('vitscale')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def schema(
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="File to write; else it is printed.")] = None,
) -> None:
    """Print the JSON schema of run files, for editors that check YAML while it is written.

    Example: `vitscale schema configs/schema.json`
    """
    from vitscale.config.load import json_schema

    text = json.dumps(json_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)


app.command()(training.train)
app.command()(training.launch)
app.command()(training.finetune)
app.command("models")(models.list_names)
app.command("eval")(models.evaluate)
app.command()(models.export)
app.command("import")(models.import_weights)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.command()(runs.report)
app.command()(schema)
data_app.command("pack")(data.pack)
data_app.command("index")(data.index_shards)
data_app.command("verify")(data.verify)
data_app.command("stats")(data.stats)
data_app.command("exclude")(data.exclude)
data_app.command("order")(data.show_order)
checkpoint_app.command("list")(runs.list_checkpoints)
checkpoint_app.command("verify")(runs.verify_checkpoints)


def main() -> NoReturn:
    """Run the command line; a user's mistake is a sentence on stderr and an exit code."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        typer.echo(f"vitscale: {error.message}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + 2)
    sys.exit(0)
