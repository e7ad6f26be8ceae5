"""What each of several real ranks reads, brought together to one hash a step."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from vitscale.config.schema import DataConfig
from vitscale.data.loader import TrainLoader
from vitscale.world import World


def hashes_of_ranks(world: World, config: DataConfig, run_dir: str, start_step: int, steps: int) -> list[str]:
    """The hash of the whole batch at each step, from the shares of all ranks; rank r has r + 1 workers."""

    loader = TrainLoader(
        replace(config, workers=world.rank + 1), image_size=(12, 16), num_classes=3, global_batch=12, seed=5,
        rank=world.rank, world_size=world.world_size, start_step=start_step, run_dir=Path(run_dir),
    )  # fmt: skip
    hashes = []
    for _ in range(steps):
        batch = next(loader)
        whole = []
        for part in (batch.images, batch.labels, batch.valid, batch.ids):
            shares = [torch.empty_like(part) for _ in range(world.world_size)]
            dist.all_gather(shares, part)
            whole.append(torch.cat(shares).contiguous().numpy().tobytes())
        hashes.append(hashlib.sha256(b"".join(whole)).hexdigest())
    loader.close()
    return hashes
