"""Commands for shards: `data pack`, `index`, `verify`, `stats`, `exclude`, `order`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.cli.arguments import Config, Overrides, Shards, count, write_text
from vitscale.errors import EXIT_FAILED, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from vitscale.data.scan import Problem

_SHOWN = 20  # problems that are printed one by one


def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of class folders or class tars, a tar of class tars, a .csv, .tsv or .jsonl of path and label,"
            " parquet files, or shards with an index.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the shards.")],
    shard_samples: Annotated[int, typer.Option(min=1, help="Most samples in a shard.")] = 10_000,
    shard_megabytes: Annotated[int, typer.Option(min=1, help="About the largest size of a shard, in MiB.")] = 256,
    validation: Annotated[float, typer.Option(min=0, max=0.99, help="Share held out, as `OUT/validation`.")] = 0.0,
    classes: Annotated[
        Path | None, typer.Option(help="Class list: a text file with a name a line, or another set's index.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the shuffle.")] = 0,
    max_side: Annotated[int | None, typer.Option(min=1, help="Make images with a longer side this small.")] = None,
    quality: Annotated[int, typer.Option(min=1, max=95, help="Of the JPEGs that those become.")] = 92,
    array: Annotated[
        str | None, typer.Option(metavar="I/N", help="Write part I of N, from 0; all parts into one OUT.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that read and write; the result is the same.")] = 1,
) -> None:
    """Pack images into shards with their index, shuffled.

    Example: `vitscale data pack imagenet/train shards/train --processes 16`
    """
    from vitscale.data.pack import pack_source
    from vitscale.data.source import read_classes
    from vitscale.data.sources import scan_source

    found = scan_source(source, str(out), None if classes is None else read_classes(str(classes)))
    report = pack_source(
        found,
        str(out),
        shard_samples=shard_samples,
        shard_bytes=shard_megabytes << 20,
        seed=seed,
        validation=validation,
        max_side=max_side,
        quality=quality,
        part=None if array is None else _part(array),
        processes=processes,
    )
    if report is None:
        typer.echo(f"{out}: part {array} is written; the part that ends last makes the index")
        return
    for split in report.splits:
        typer.echo(f"{split.folder}: {count(split.samples, 'image')} in {count(split.shards, 'shard')}, "
                   f"{split.bytes / 2**20:.1f} MiB, {count(len(report.classes), 'class', 'classes')}")  # fmt: skip
    if report.empty:
        more = f", and {len(report.empty) - _SHOWN} more" if len(report.empty) > _SHOWN else ""
        typer.echo(f"classes without an image: {', '.join(report.empty[:_SHOWN])}{more}", err=True)
    if report.skipped:
        typer.echo(f"{count(len(report.skipped), 'file')} skipped, named in {out}/skipped.jsonl", err=True)


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
        f"{', '.join(report.folders)}: {count(report.samples, 'sample')} in {count(report.shards, 'shard')} indexed"
    )


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
        f"{count(report.samples, 'sample')} in {count(report.shards, 'shard')}: "
        + ("all sound" if report.sound else count(len(report.problems), "problem"))
    )
    if not report.sound:
        raise typer.Exit(EXIT_FAILED)


def stats(
    shards: Shards,
    processes: Annotated[int, typer.Option(min=1, help="Shards read at once.")] = 1,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write all of it there.")] = None,
) -> None:
    """Say what a set holds: images a class, sizes, aspects, bytes. Only headers of images are read.

    Example: `vitscale data stats runs/demo/shards/train`
    """
    from vitscale.data.stats import statistics

    found = statistics(tuple(shards), processes=processes)
    typer.echo(f"{count(found.samples, 'sample')} in {count(found.shards, 'shard')}, {found.bytes / 2**20:,.1f} MiB; "
               f"{count(found.unusable, 'sample')} without a readable image or label")  # fmt: skip
    typer.echo(f"{'':<18}{'least':>10}{'5 %':>10}{'median':>10}{'95 %':>10}{'most':>10}")
    for name in ("images_per_class", "height", "width", "aspect", "image_bytes"):
        row = getattr(found, name)
        numbers = "".join(f"{value:>10,.6g}" for value in (row.least, row.p5, row.median, row.p95, row.most))
        typer.echo(f"{name.replace('_', ' '):<18}{numbers}")
    if found.empty_classes:
        typer.echo(f"{found.empty_classes:,} of {count(found.classes, 'class', 'classes')} without an image")
    if out is not None:
        write_text(out, found.json())


def exclude(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of shards with its index.json.")],
    samples: Annotated[
        Path, typer.Option("--samples", metavar="FILE", help="A line `SHARD KEY` each, or a run's bad_samples.jsonl.")
    ],
) -> None:
    """Leave samples out of training and evaluation; the order of all others stays as it is, also for runs under way.

    Example: `vitscale data exclude shards/train --samples runs/vit/bad_samples.jsonl`
    """
    from vitscale.data.exclude import exclude as exclude_samples
    from vitscale.data.exclude import read_names

    typer.echo(f"{folder}: {count(exclude_samples(str(folder), read_names(str(samples))), 'sample')} more left out")


def show_order(
    config: Config,
    overrides: Overrides = None,
    step: Annotated[int, typer.Option(min=0, help="The step, from 0.")] = 0,
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this rank reads.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks, with --rank.")] = 1,
) -> None:
    """Print which samples make up a step of a run, a line each: id, epoch, shard, place in the shard.

    Example: `vitscale data order configs/demo/pretrain.yaml --step 1000`
    """
    from vitscale.config.load import load_config
    from vitscale.data.loader import check_shares
    from vitscale.data.training import load_training

    run = load_config(config, overrides or [])
    training = load_training(run.data)
    order = training.order(run.data, seed=run.seed, global_batch=run.global_batch)
    check_shares(run.global_batch, ranks, run.data.streams)
    plan = order.plan(order.rank_positions(step, rank or 0, ranks if rank is not None else 1)[0])
    typer.echo(f"# step {step}, order {order.digest(step)}")
    for sample, epoch, shard, place in zip(plan.ids, plan.epochs, plan.shards, plan.places, strict=True):
        typer.echo(f"{sample}\t{epoch}\t{training.index.names[shard]}\t{place}")


def _part(array: str) -> tuple[int, int]:
    """`3/64` as numbers."""
    number, slash, total = array.partition("/")
    if not (slash and number.isdigit() and total.isdigit() and int(number) < int(total)):
        raise UserError(f"--array {array}: a part is I/N with I from 0 to N - 1, e.g. 3/64", exit_code=EXIT_USAGE)
    return int(number), int(total)


def _tell_problems(problems: Sequence[Problem]) -> None:
    for problem in problems[:_SHOWN]:
        typer.echo(problem, err=True)
    if len(problems) > _SHOWN:
        typer.echo(f"... and {len(problems) - _SHOWN:,} more", err=True)
