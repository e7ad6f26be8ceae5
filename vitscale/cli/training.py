"""Commands that train: `train`, `finetune`, `launch`."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from vitscale.cli.arguments import Config, Overrides
from vitscale.errors import EXIT_CRASHED, EXIT_REQUEUE, UserError

if TYPE_CHECKING:
    from vitscale.config.schema import RunConfig


class Platform(str, Enum):
    """Where ranks are started."""

    local = "local"


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


def finetune(
    config: Config,
    source: Annotated[str, typer.Option("--from", metavar="CHECKPOINT_OR_WEIGHTS", help="Where weights come from.")],
    overrides: Overrides = None,
) -> None:
    """Train from given weights, adapted to the config's image size and classes.

    Example: `vitscale finetune configs/demo/finetune.yaml --from runs/demo/pretrain`
    """
    from vitscale.config.load import load_config

    weights = f"init.weights={json.dumps(source, ensure_ascii=False)}"
    sys.exit(_train(load_config(config, [*(overrides or []), weights])))


def launch(
    config: Config,
    overrides: Overrides = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Processes on a node, one a GPU; CPU ranks without.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=1, help="Number of nodes; one, with `--on local`.")] = 1,
    on: Annotated[Platform, typer.Option(help="Where to start the ranks.")] = Platform.local,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Restarts after a crash; else `cluster.max_restarts`.")
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
        typer.echo(f"{gpus_per_node} x vitscale {shlex.join(arguments)}")
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
    from vitscale.cluster.orphans import end_with_parent
    from vitscale.logs import start_logging
    from vitscale.train.claim import claimed
    from vitscale.train.loop import train as train_run
    from vitscale.world import World

    end_with_parent()
    world = World.start(timeout=config.cluster.timeout)
    log = logging.getLogger("vitscale")
    try:
        start_logging(config.run_dir, world.rank)
        with claimed(config.run_dir, world):
            result = train_run(config, world)
    except UserError as error:
        log.error("%s", error.message)
        return error.exit_code
    except Exception:
        log.exception("rank %d ended by a fault in the program", world.rank)
        return EXIT_CRASHED
    world.end()
    return 0 if result.finished else EXIT_REQUEUE
