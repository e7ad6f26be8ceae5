"""Real training of several ranks that writes down what every micro-batch holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import vitscale.train.loop as loop
from vitscale.config.load import load_config
from vitscale.data.batch import Batch
from vitscale.engines.base import Objective
from vitscale.world import World


def train_and_note(world: World, config: str, overrides: list[str], notes: str, last: int) -> int:
    """Train, noting step, sample, hash of its image and label of all that is trained on; give up after `last`."""
    build = loop.build_objective
    loop.build_objective = lambda run: partial(_noting, build(run), Path(notes) / f"rank-{world.rank}.jsonl", last)
    try:
        return loop.train(load_config(config, overrides), world).step
    except _Enough:
        return last
    finally:
        loop.build_objective = build


class _Enough(Exception):
    """The step after which this process was to end."""


def _noting(objective: Objective, notes: Path, last: int, model: nn.Module, batch: Batch) -> Tensor:
    if batch.step > last:
        raise _Enough
    lines = [
        {"step": batch.step, "id": int(sample), "hash": hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16],
         "label": int(label), "of": len(batch)}
        for sample, image, label in zip(batch.ids, batch.images, batch.labels, strict=True)
    ]  # fmt: skip
    with notes.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
        os.fsync(file.fileno())
    return objective(model, batch)


def seen(notes: Path) -> dict[int, list[tuple[int, str, int]]]:
    """(sample, hash, label) of each step, over all ranks, sorted; a step done twice counts once."""
    steps: dict[int, dict[int, tuple[int, str, int]]] = defaultdict(dict)
    for file in notes.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            record: dict[str, Any] = json.loads(line)
            found = (record["id"], record["hash"], record["label"])
            assert steps[record["step"]].setdefault(record["id"], found) == found, (
                "a step done again shows other pixels"
            )
    return {step: sorted(samples.values()) for step, samples in steps.items()}
