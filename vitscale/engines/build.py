"""The engine that a config asks for. DeepSpeed is imported only where it is used."""

from __future__ import annotations

from typing import Literal

from torch import nn

from vitscale.config.schema import EngineConfig, OptimConfig
from vitscale.engines.base import Engine, Objective
from vitscale.engines.native import NativeEngine
from vitscale.errors import EXIT_USAGE, UserError
from vitscale.world import World


def build_engine(
    model: nn.Module,
    objective: Objective,
    *,
    optim: OptimConfig,
    engine: EngineConfig,
    world: World,
    global_batch: int,
) -> Engine:
    """Give `model` to an engine.

    Args:
        model: The bare model with its initial weights; moved to the device. Ranks other than 0 take rank 0's weights.
        objective: See `base.Objective`.
        optim: The optimizer, clipping and average.
        engine: Which engine, and how.
        world: The ranks.
        global_batch: Samples in one step, over all ranks.

    Raises:
        UserError: The ranks do not divide `global_batch`, or `engine.micro_batch` not a rank's share.
    """
    micro_batch = check_batch(global_batch, world_size=world.world_size, micro_batch=engine.micro_batch)
    model.to(world.device)
    if engine_kind(engine, world_size=world.world_size) == "ddp":
        return NativeEngine(model, objective, optim=optim, engine=engine, world=world, micro_batch=micro_batch)
    from vitscale.engines.zero import ZeroEngine

    return ZeroEngine(model, objective, optim=optim, engine=engine, world=world, micro_batch=micro_batch)


def engine_kind(engine: EngineConfig, *, world_size: int) -> Literal["ddp", "deepspeed"]:
    """Which engine a config means on so many ranks."""
    if engine.kind == "auto":
        return "deepspeed" if world_size > 1 else "ddp"
    return engine.kind


def check_batch(global_batch: int, *, world_size: int, micro_batch: int | None) -> int:
    """Samples a rank takes through the model at once.

    Raises:
        UserError: The numbers do not divide one another.
    """
    share, rest = divmod(global_batch, world_size)
    if rest or not share:
        below, above = share * world_size, (share + 1) * world_size
        right = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"global_batch is {global_batch}, which {world_size} ranks do not divide; {right} would do",
            exit_code=EXIT_USAGE,
        )
    if micro_batch is None:
        return share
    if micro_batch < 1 or share % micro_batch:
        right = str(next(size for size in range(min(max(micro_batch, 1), share), 0, -1) if share % size == 0))
        raise UserError(
            f"engine.micro_batch is {micro_batch}, but global_batch {global_batch} over {world_size} "
            f"{'rank' if world_size == 1 else 'ranks'} is {share} samples a rank, which it does not divide; "
            f"{right} would do",
            exit_code=EXIT_USAGE,
        )
    return micro_batch
