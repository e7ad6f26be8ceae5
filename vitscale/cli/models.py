"""Commands for models: `models`, `eval`, `export`, `import`."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from vitscale.cli.arguments import Source, write_text


class Protocol(str, Enum):
    """How a model is judged."""

    top1 = "top1"


class Format(str, Enum):
    """Formats of model files that export writes."""

    vitscale = "vitscale"
    timm = "timm"
    huggingface = "huggingface"
    mmpretrain = "mmpretrain"
    bigvision = "bigvision"
    onnx = "onnx"


class Gelu(str, Enum):
    """Kinds of GELU."""

    gelu = "gelu"
    gelu_tanh = "gelu_tanh"


def list_names(
    resolution: Annotated[int, typer.Option(min=1, help="Image size that the GFLOPs are for.")] = 224,
) -> None:
    """List the models of the papers with their parameters and the GFLOPs of one image, a multiply-add being two.

    Example: `vitscale models --resolution 448`
    """
    from vitscale.errors import EXIT_USAGE, UserError
    from vitscale.models.zoo import list_models

    try:
        sizes = list_models(image_size=resolution)
    except ValueError as error:
        raise UserError(
            f"--resolution {resolution}: {error}; 224 and 448 suit all models", exit_code=EXIT_USAGE
        ) from None
    typer.echo(f"{'name':<16}{'parameters':>12}{'GFLOPs':>12}   at {resolution} px, with 1000 classes")
    for size in sizes:
        typer.echo(f"{size.name:<16}{size.parameters / 1e6:>10,.1f} M{size.flops / 1e9:>12,.1f}")


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
        write_text(out, json.dumps({"protocol": protocol.value, "source": source, **dataclasses.asdict(result)}) + "\n")


def export(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    format: Annotated[Format, typer.Option(help="Whose format the file has.")] = Format.vitscale,
    resolution: Annotated[int | None, typer.Option(min=1, help="Image size; positions are resized to it.")] = None,
    patch_size: Annotated[int | None, typer.Option(min=1, help="Patch size; the patch kernel is resized.")] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=0, help="A new classifier of this width, at zero; 0 for none.")
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Classes wanted, one name or WordNet id a line: their rows of the classifier."
        ),
    ] = None,
) -> None:
    """Write a model file from a run, a step or another file, at any resolution.

    Example: `vitscale export runs/demo/pretrain model.safetensors --resolution 64`
    """
    from vitscale.data.source import read_classes
    from vitscale.errors import EXIT_USAGE, UserError
    from vitscale.train.exchange import export as export_weights

    if classes is not None and num_classes is not None:
        raise UserError("--classes says how many classes there are; leave out --num-classes", exit_code=EXIT_USAGE)
    written = export_weights(
        source,
        out,
        format=format.value,
        image_size=resolution,
        patch_size=patch_size,
        num_classes=num_classes,
        classes=read_classes(str(classes)) if classes is not None else None,
    )
    typer.echo(f"{out}: {written}")


def import_weights(
    source: Annotated[Path, typer.Argument(metavar="WEIGHTS", help="A model file, or a folder of Hugging Face.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Model file to write.")],
    classes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What the outputs are called, one name or WordNet id a line.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads, where the file does not say.")] = None,
    activation: Annotated[Gelu | None, typer.Option(help="Kind of GELU, where the file does not say.")] = None,
    norm_eps: Annotated[float | None, typer.Option(min=0, help="Epsilon of norms, likewise.")] = None,
    image_size: Annotated[
        tuple[int, int] | None, typer.Option(min=1, metavar="HEIGHT WIDTH", help="Image size of positions, likewise.")
    ] = None,
) -> None:
    """Write weights of timm, Hugging Face, mmpretrain, big_vision or vision_transformer as a vitscale model file.

    Example: `vitscale import B_16.npz vit_b16.safetensors`
    """
    from vitscale.data.source import read_classes
    from vitscale.errors import UserError
    from vitscale.weights.content import Known
    from vitscale.weights.io import load_weights, save_model

    known = Known(
        num_heads=heads,
        activation=activation.value if activation else None,
        norm_eps=norm_eps,
        image_size=image_size,
    )
    weights = load_weights(source, known)
    names = weights.class_names
    if classes is not None:
        names = read_classes(str(classes))
        if len(names) != weights.config.num_classes:
            raise UserError(
                f"{classes} names {len(names)} classes, and {source} has {weights.config.num_classes}; give the list "
                "that it was trained with"
            )
    save_model(
        out,
        weights.state,
        weights.config,
        preprocessing=weights.preprocessing,
        class_names=names,
    )
    typer.echo(f"{out}: {weights.source}")
    if weights.left_out:
        typer.echo(f"left out, since a classifier has no use for it: {', '.join(weights.left_out)}")
