"""An engine of given tensors, cut over ranks as ZeRO-3 cuts: for the tests of checkpoints, which train nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitscale.data.batch import Batch
from vitscale.engines.base import Fragment, Kind, Read, StepResult
from vitscale.world import World

KINDS: tuple[Kind, ...] = ("param", "exp_avg", "ema")


class SplitEngine:
    """Tensors of a kind lie end to end and are cut into equal parts, dealt to the ranks in turn.

    A cut may fall inside a tensor, and a rank may own several ranges of one tensor, or none.

    Args:
        model: Gives names and shapes.
        rank: Whose parts.
        ranks: Of how many.
        parts: Parts for each rank.
        kinds: What is kept of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int = 0,
        ranks: int = 1,
        parts: int = 1,
        kinds: tuple[Kind, ...] = KINDS,
    ) -> None:
        self.model = model
        self.scalars = {"updates": 0.0}
        self.tensors = {(kind, n): torch.zeros(p.shape) for kind in kinds for n, p in model.named_parameters()}
        self._kinds = kinds
        total = sum(p.numel() for p in model.parameters())
        edges = [total * cut // (ranks * parts) for cut in range(ranks * parts + 1)]
        self._mine = [(edges[cut], edges[cut + 1]) for cut in range(rank, ranks * parts, ranks)]

    def fill(self, number: float) -> SplitEngine:
        """Give every value one that no other value has, and that differs from `number` to `number`."""
        for place, tensor in enumerate(self.tensors.values()):
            tensor.copy_((torch.arange(tensor.numel()) + 1000.0 * place + 0.125 * number).reshape(tensor.shape))
        self.scalars = {"updates": number}
        return self

    def step(self, batch: Batch, *, rate: float) -> StepResult:
        raise NotImplementedError("the tests of checkpoints train nothing")

    def fragments(self) -> Iterator[Fragment]:
        for kind in self._kinds:
            begin = 0
            for name, parameter in self.model.named_parameters():
                flat = self.tensors[kind, name].view(-1)
                for low, high in self._mine:
                    start, end = max(low - begin, 0), min(high - begin, len(flat))
                    if start < end:
                        yield Fragment(name, kind, start, flat[start:end], tuple(parameter.shape))
                begin += len(flat)

    def load(self, read: Read) -> None:
        for fragment in self.fragments():
            fragment.values.copy_(read(fragment.name, fragment.kind, fragment.start, len(fragment.values)))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        yield self.model

    def state(self) -> dict[str, float]:
        return dict(self.scalars)

    def load_state(self, state: dict[str, float]) -> None:
        self.scalars = dict(state)


class FailingEngine(SplitEngine):
    """One whose state cannot be had: what `fail` raises comes after the first range."""

    fail: Callable[[], None]

    def fragments(self) -> Iterator[Fragment]:
        for fragment in super().fragments():
            yield fragment
            self.fail()


def small_model(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2))


def owned(engine: SplitEngine) -> dict[tuple[str, str, int], Tensor]:
    """A copy of the ranges that the engine's rank owns."""
    return {(f.kind, f.name, f.start): f.values.clone() for f in engine.fragments()}


def same(one: SplitEngine, other: SplitEngine) -> bool:
    """Whether two engines of one layout own the same, bit for bit."""
    mine, theirs = owned(one), owned(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def engine_of(world: World, number: float, **options: Any) -> SplitEngine:
    return SplitEngine(small_model(), rank=world.rank, ranks=world.world_size, **options).fill(number)


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a step's index and give it the checksum of what it says now, as one who means harm would."""
    file = path / "index.json"
    index = json.loads(file.read_text())
    del index["sha256"]
    change(index)
    digest = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**index, "sha256": digest}))


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing fails as on a full disk, for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def hidden(run_dir: Path) -> list[str]:
    """Folders under `checkpoints` that are being written or deleted."""
    return sorted(name for name in os.listdir(run_dir / "checkpoints") if name.startswith("."))


@contextlib.contextmanager
def world_of_one() -> Iterator[World]:
    world = World.start(timeout=20, device=torch.device("cpu"))
    try:
        yield world
    finally:
        world.end()
