"""The `vitscale` command: one function a command.

What a command needs is imported inside it, so that `vitscale --help` answers at once and without torch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from vitscale.errors import EXIT_CRASHED, EXIT_FAILED, EXIT_REQUEUE, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitscale.config.schema import RunConfig
    from vitscale.data.scan import Problem
    from vitscale.train.checkpoint import Entry

_SHOWN = 20  # problems that are printed one by one

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
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that replace the file's, as YAML.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Source = Annotated[str, typer.Argument(metavar="CHECKPOINT_OR_WEIGHTS", help="A run, a step folder or a model file.")]
Shards = Annotated[list[str], typer.Argument(metavar="SHARDS...", help="Folders or tars; `{000..127}` and `*` work.")]


class Platform(str, Enum):
    """Where ranks are started."""

    local = "local"


class Protocol(str, Enum):
    """How a model is judged."""

    top1 = "top1"


class Format(str, Enum):
    """Formats of model files that export writes."""

    vitscale = "vitscale"
    timm = "timm"


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


# ---------------------------------------------------------------------------------------------- training
@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    print_config: Annotated[bool, typer.Option(help="Print the resolved run and stop.")] = False,
) -> None:
    """Train: one process of a run. torchrun, srun or `vitscale launch` start several.

    Example: `vitscale train configs/demo/pretrain.yaml optim.lr=3e-4`
    """
    from vitscale.config.load import dump_config, load_config

    run = load_config(config, overrides or [])
    if print_config:
        typer.echo(dump_config(run), nl=False)
        return
    sys.exit(_train(run))


@app.command()
def finetune(
    config: Config,
    source: Annotated[str, typer.Option("--from", metavar="CHECKPOINT_OR_WEIGHTS", help="Where weights come from.")],
    overrides: Overrides = None,
) -> None:
    """Train from given weights, adapted to the config's image size and classes.

    Example: `vitscale finetune configs/demo/finetune.yaml --from runs/demo/pretrain`
    """
    from vitscale.config.load import load_config

    sys.exit(_train(load_config(config, [*(overrides or []), f"init.weights={json.dumps(source)}"])))


@app.command()
def launch(
    config: Config,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Processes on a node, one a GPU; CPU ranks without.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=1, help="Number of nodes; one, with `--on local`.")] = 1,
    on: Annotated[Platform, typer.Option(help="Where to start the ranks.")] = Platform.local,
    max_restarts: Annotated[
        int | None, typer.Option(help="Restarts after a crash; else `cluster.max_restarts`.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the command, start nothing.")
    ] = False,
) -> None:
    """Start all processes of a run, watch them, restart from the last checkpoint when one dies.

    Example: `vitscale launch configs/demo/pretrain.yaml --on local --gpus-per-node 2`
    """
    from vitscale.config.load import load_config

    overrides = overrides or []
    run = load_config(config, overrides)
    from vitscale.cluster.preflight import preflight

    preflight(run, ranks=nodes * gpus_per_node)
    arguments = ["train", config, *overrides]
    if dry_run:
        typer.echo(f"{gpus_per_node} x vitscale {' '.join(arguments)}")
        return
    from vitscale.cluster.launch import launch_local

    sys.exit(
        launch_local(
            arguments,
            run_dir=run.run_dir,
            processes=gpus_per_node,
            max_restarts=run.cluster.max_restarts if max_restarts is None else max_restarts,
            timeout=run.cluster.timeout,
        )
    )


def _train(config: RunConfig) -> int:
    """One rank from its start to its exit code."""
    from vitscale.logs import start_logging
    from vitscale.train.loop import train as train_run
    from vitscale.world import World

    world = World.start(timeout=config.cluster.timeout)
    log = logging.getLogger("vitscale")
    try:
        start_logging(config.run_dir, world.rank)
        result = train_run(config, world)
    except UserError as error:
        log.error("%s", error.message)
        return error.exit_code
    except Exception:
        log.exception("rank %d ended by a fault in the program", world.rank)
        return EXIT_CRASHED
    world.end()
    return 0 if result.finished else EXIT_REQUEUE


# ---------------------------------------------------------------------------------------------- models
@app.command("eval")
def evaluate(
    source: Source,
    data: Annotated[list[str], typer.Option("--data", metavar="SHARDS", help="Labelled shards; may be given again.")],
    protocol: Annotated[Protocol, typer.Option(help="How the model is judged.")] = Protocol.top1,
    resolution: Annotated[int | None, typer.Option(min=1, help="Image size, if not the model's own.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images a process evaluates at once.")] = 128,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = 2,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result there.")] = None,
) -> None:
    """Say how good a model is: top-1, top-5 and loss, each image counted once.

    Example: `vitscale eval runs/demo/pretrain --data runs/demo/shards/validation`
    """
    from vitscale.train.exchange import evaluate_weights

    result = evaluate_weights(source, tuple(data), image_size=resolution, batch=batch, workers=workers)
    typer.echo(
        f"{source}: top-1 {100 * result.top1:.2f} %, top-5 {100 * result.top5:.2f} %, loss {result.loss:.4f} "
        f"on {result.count} images" + (f", {result.unreadable} unreadable" if result.unreadable else "")
    )
    if out is not None:
        _write(out, json.dumps({"protocol": protocol.value, "source": source, **dataclasses.asdict(result)}) + "\n")


@app.command()
def export(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    format: Annotated[Format, typer.Option(help="Whose format the file has.")] = Format.vitscale,
    resolution: Annotated[int | None, typer.Option(min=1, help="Image size; positions are resized to it.")] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="A new classifier of this width, at zero; 0 for none.")
    ] = None,
) -> None:
    """Write a model file from a run, a step or another file, at any resolution.

    Example: `vitscale export runs/demo/pretrain model.safetensors --resolution 64`
    """
    from vitscale.train.exchange import export as export_weights

    written = export_weights(source, out, format=format.value, image_size=resolution, num_classes=num_classes)
    typer.echo(f"{out}: {written}")


# ---------------------------------------------------------------------------------------------- data
@data_app.command()
def pack(
    source: Annotated[Path, typer.Argument(help="Folder with a folder of images for each class.")],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    shard_samples: Annotated[int, typer.Option(min=1, help="Most samples in a shard.")] = 10_000,
    shard_megabytes: Annotated[int, typer.Option(min=1, help="About the largest size of a shard, in MiB.")] = 256,
    validation: Annotated[float, typer.Option(min=0, max=0.99, help="Share held out, as `OUT/validation`.")] = 0.0,
    classes: Annotated[
        Path | None, typer.Option(help="Class list: a text file with a name a line, or another set's index.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Processes that read and write; the result is the same.")] = 1,
) -> None:
    """Pack class folders of images into shards with their index, shuffled.

    Example: `vitscale data pack imagenet/train shards/train --processes 16`
    """
    from vitscale.data.pack import pack_folder
    from vitscale.data.source import read_classes

    report = pack_folder(
        str(source),
        str(out),
        shard_samples=shard_samples,
        shard_bytes=shard_megabytes << 20,
        seed=seed,
        classes=None if classes is None else read_classes(str(classes)),
        validation=validation,
        processes=processes,
    )
    for split in report.splits:
        typer.echo(f"{split.folder}: {_count(split.samples, 'image')} in {_count(split.shards, 'shard')}, "
                   f"{split.bytes / 2**20:.1f} MiB, {_count(len(report.classes), 'class', 'classes')}")  # fmt: skip
    if report.empty:
        typer.echo(f"classes without an image: {', '.join(report.empty)}", err=True)
    if report.skipped:
        typer.echo(f"{_count(len(report.skipped), 'file')} skipped, named in {out}/skipped.jsonl", err=True)


@data_app.command("index")
def index_shards(
    shards: Shards,
    out: Annotated[Path | None, typer.Option(help="Folder for the index, if not that of the shards.")] = None,
    classes: Annotated[Path | None, typer.Option(help="Class list: a text file with a name a line.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Shards read at once.")] = 1,
) -> None:
    """Make the index of shards that another tool wrote.

    Example: `vitscale data index '/data/imagenet21k/train-{000000..002047}.tar' --processes 16`
    """
    from vitscale.data.index import index_shards as make_index
    from vitscale.data.source import read_classes

    names = () if classes is None else read_classes(str(classes))
    report = make_index(tuple(shards), None if out is None else str(out), classes=names, processes=processes)
    _tell_problems(report.problems)
    typer.echo(
        f"{', '.join(report.folders)}: {_count(report.samples, 'sample')} in {_count(report.shards, 'shard')} indexed"
    )


@data_app.command()
def verify(
    shards: Shards,
    processes: Annotated[int, typer.Option(min=1, help="Shards read at once.")] = 1,
) -> None:
    """Read everything: checksums, images, labels, duplicate keys. Exit code 1 if something is wrong.

    Example: `vitscale data verify runs/demo/shards/train`
    """
    from vitscale.data.verify import verify_shards

    report = verify_shards(tuple(shards), processes=processes)
    _tell_problems(report.problems)
    typer.echo(
        f"{_count(report.samples, 'sample')} in {_count(report.shards, 'shard')}: "
        + ("all sound" if report.sound else _count(len(report.problems), "problem"))
    )
    if not report.sound:
        raise typer.Exit(EXIT_FAILED)


# ---------------------------------------------------------------------------------------------- runs
@checkpoint_app.command("list")
def list_checkpoints(run: Run) -> None:
    """List a run's checkpoints, and whether each is whole.

    Example: `vitscale checkpoint list runs/demo/pretrain`
    """
    import time

    from rich.console import Console
    from rich.table import Table

    table = Table("step", "written", "size", "engine", "ranks", "state")
    for entry in _checkpoints(run):
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
        size = f"{entry.bytes / 1e6:,.1f} MB"
        state = "whole" if not entry.problems else "; ".join(entry.problems)
        table.add_row(str(entry.step), written, size, entry.engine, str(entry.ranks), state)
    Console().print(table)


@checkpoint_app.command("verify")
def verify_checkpoints(run: Run) -> None:
    """Read every checkpoint of a run and compare sizes and checksums. Exit code 1 if one is damaged.

    Example: `vitscale checkpoint verify runs/demo/pretrain`
    """
    entries = _checkpoints(run)
    damaged = [entry for entry in entries if entry.problems]
    for entry in damaged:
        typer.echo(f"{entry.path}: {'; '.join(entry.problems)}", err=True)
    typer.echo(f"{_count(len(entries), 'checkpoint')}: {f'{len(damaged)} damaged' if damaged else 'all whole'}")
    if damaged:
        raise typer.Exit(EXIT_FAILED)


def _checkpoints(run: Path) -> list[Entry]:
    from vitscale.train.checkpoint import list_checkpoints

    entries = list_checkpoints(run)
    if not entries:
        raise UserError(f"{run} holds no checkpoints; name the folder of a run (its run_dir)")
    return entries


@app.command()
def report(run: Run) -> None:
    """Write `report.html` into the run: curves, evaluations, positions and patch kernels, in one file.

    Example: `vitscale report runs/demo/pretrain`
    """
    from vitscale.monitor.report import write_report

    typer.echo(write_report(run))


@app.command()
def schema(out: Annotated[Path | None, typer.Argument(help="File to write; else it is printed.")] = None) -> None:
    """Print the JSON schema of run files, for editors that check YAML while it is written.

    Example: `vitscale schema configs/schema.json`
    """
    from vitscale.config.load import json_schema

    text = json.dumps(json_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        _write(out, text)


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _tell_problems(problems: Sequence[Problem]) -> None:
    for problem in problems[:_SHOWN]:
        typer.echo(problem, err=True)
    if len(problems) > _SHOWN:
        typer.echo(f"... and {len(problems) - _SHOWN:,} more", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
