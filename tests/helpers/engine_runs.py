"""What the engine tests do inside each rank, and the plain loop that they are held against."""

from __future__ import annotations

import functools
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from helpers.tiny import global_batch, nan_for_ids, objective, share, tiny
from numpy.typing import NDArray
from torch import Tensor, nn

from vitscale.config.schema import EngineConfig, OptimConfig
from vitscale.data.batch import Batch
from vitscale.engines.base import Engine
from vitscale.engines.build import build_engine
from vitscale.engines.parallelize import apply_checkpointing
from vitscale.world import World

SIZE = 16  # samples in a global batch
STEPS = 6
HALF = 3
CLIP = 2.5
EPS = 1e-4  # the gradient of the keys' bias is zero but for rounding, which Adam would blow up to full steps
Array = NDArray[np.float32]
Whole = dict[tuple[str, str], Array]
"""(name, kind) -> the whole flattened tensor"""


@dataclass(frozen=True)
class Case:
    """One way of training the tiny model."""

    kind: Literal["ddp", "deepspeed"]
    stage: Literal[0, 1, 2] = 2
    micro: int | None = None
    checkpointing: Literal["none", "full", "offload"] = "none"
    precision: Literal["float32", "bfloat16"] = "float32"
    optimizer: Literal["adamw", "sgd"] = "adamw"

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(kind=self.optimizer, lr=1e-2, eps=EPS, clip_norm=CLIP, ema_decay=0.9)

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(kind=self.kind, zero_stage=self.stage, precision=self.precision, micro_batch=self.micro)

    def __str__(self) -> str:
        kind = self.kind if self.kind == "ddp" else f"zero{self.stage}"
        return f"{kind}-{self.precision}-{self.optimizer}-micro{self.micro}-{self.checkpointing}"


@dataclass
class Run:
    """What one case gave on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    fragments: list[tuple[str, str, int, Array, tuple[int, ...]]] = field(default_factory=list)
    half: Whole = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def rate(step: int) -> float:
    return 1e-2 * (1 - step / 10)


def build(world: World, case: Case, *, seed: int = 0, bad: Tensor | None = None) -> Engine:
    model = tiny(seed=seed)
    apply_checkpointing(model, case.checkpointing)
    goal = objective if bad is None else functools.partial(nan_for_ids, bad)
    return build_engine(model, goal, optim=case.optim, engine=case.engine, world=world, global_batch=SIZE)


def advance(world: World, engine: Engine, run: Run, steps: range) -> None:
    for step in steps:
        result = engine.step(share(global_batch(step, SIZE), world.rank, world.world_size), rate=rate(step))
        run.losses.append(result.loss.item())
        run.norms.append(result.grad_norm.item())
        run.skipped.append(bool(result.skipped))


def held(engine: Engine) -> list[tuple[str, str, int, Array, tuple[int, ...]]]:
    return [(f.name, f.kind, f.start, f.values.numpy().copy(), f.shape) for f in engine.fragments()]


def whole(engine: Engine) -> Whole:
    """The whole state, put together from the fragments of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held(engine))
    return assemble([fragment for fragments in everyone for fragment in fragments])


def assemble(fragments: list[tuple[str, str, int, Array, tuple[int, ...]]]) -> Whole:
    """Whole tensors from fragments; fails where they overlap or leave a gap."""
    tensors: Whole = {}
    covered: dict[tuple[str, str], NDArray[np.int64]] = {}
    for name, kind, start, values, shape in fragments:
        assert values.dtype == np.float32
        assert values.ndim == 1
        tensor = tensors.setdefault((name, kind), np.zeros(int(np.prod(shape)), np.float32))
        times = covered.setdefault((name, kind), np.zeros(len(tensor), np.int64))
        assert start + len(values) <= len(tensor), f"{kind} of {name} ends beyond its shape"
        tensor[start : start + len(values)] = values
        times[start : start + len(values)] += 1
    wrong = [key for key, times in covered.items() if (times != 1).any()]
    assert not wrong, f"not every value exactly once: {wrong}"
    return tensors


def reader(state: Whole) -> Any:
    def read(name: str, kind: str, start: int, length: int) -> Tensor:
        return torch.from_numpy(state[name, kind][start : start + length].copy())

    return read


def plain(optimizer: str, steps: int, *, skip: int | None = None) -> tuple[Run, Whole]:
    """The same training as one process of plain PyTorch; `skip` leaves one step out.

    Returns:
        Losses and norms, with the state at half time; the state at the end.
    """
    model = tiny()
    vectors = {"cls_token", "pos_embed"} | {name for name, p in model.named_parameters() if p.ndim == 1}
    groups = [
        {"params": [p for name, p in model.named_parameters() if name not in vectors], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if name in vectors], "weight_decay": 0.0},
    ]
    torch_optimizer: torch.optim.Optimizer
    if optimizer == "adamw":
        torch_optimizer = torch.optim.AdamW(groups, eps=EPS, foreach=False, fused=False)
    else:
        torch_optimizer = torch.optim.SGD(groups, momentum=0.9, foreach=False, fused=False)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = Run()
    for step in range(steps):
        if step == skip:
            continue
        if step == HALF:
            run.half = plain_state(model, torch_optimizer, average)
        batch = global_batch(step, SIZE)
        logits = model(batch.images[batch.valid].float() / 127.5 - 1)
        loss = nn.functional.cross_entropy(logits, batch.labels[batch.valid], label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in torch_optimizer.param_groups:
            group["lr"] = rate(step)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter.detach()
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    return run, plain_state(model, torch_optimizer, average)


def plain_state(model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]) -> Whole:
    state: Whole = {}
    for name, parameter in model.named_parameters():
        state[name, "param"] = parameter.detach().numpy().reshape(-1).copy()
        state[name, "ema"] = average[name].numpy().reshape(-1).copy()
        for slot, values in optimizer.state[parameter].items():
            if slot != "step":
                state[name, slot] = values.numpy().reshape(-1).copy()
    return state


def train_cases(world: World, cases: list[Case], resumes: list[tuple[Case, Whole, float]]) -> dict[str, Any]:
    """Train every case from the start, and every resume from a state at half time, with all that is watched on the way.

    Returns:
        `runs` and `resumed` by case, `stdout`: all that the process wrote there, `imported_early`: whether DeepSpeed
        was imported before an engine asked for it.
    """
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        runs: dict[str, Run] = {}
        imported_early = None
        for case in cases:
            if case.kind == "deepspeed" and imported_early is None:
                imported_early = "deepspeed" in sys.modules
            runs[str(case)] = from_start(world, case)
        resumed = {str(case): from_half(world, case, state, updates) for case, state, updates in resumes}
        sys.stdout.flush()
        file.seek(0)
        stdout = file.read().decode()
    return {"runs": runs, "resumed": resumed, "stdout": stdout, "imported_early": imported_early}


def from_start(world: World, case: Case) -> Run:
    # every rank has other weights, which the engine must make rank 0's
    engine = build(world, case, seed=world.rank)
    run = Run()
    initial = whole(engine)
    run.notes["exact"] = all(
        np.array_equal(initial[name, kind], p.detach().numpy().reshape(-1))
        for name, p in tiny().named_parameters()
        for kind in ("param", "ema")
    )
    run.notes["names"] = sorted(engine.model.state_dict()) == sorted(tiny().state_dict())
    advance(world, engine, run, range(HALF))
    run.half = whole(engine)
    run.state = engine.state()
    run.notes["average"] = watch_average(engine)
    advance(world, engine, run, range(HALF, STEPS))
    run.fragments = held(engine)
    again = from_half(world, case, run.half, run.state["updates"])
    run.notes["resumes_bit_identically"] = again.losses == run.losses[HALF:] and all(
        np.array_equal(one[3], other[3]) for one, other in zip(again.fragments, run.fragments, strict=True)
    )
    return run


def from_half(world: World, case: Case, state: Whole, updates: float) -> Run:
    engine = build(world, case, seed=7)
    engine.load(reader(state))
    engine.load_state({"updates": updates})
    run = Run()
    advance(world, engine, run, range(HALF, STEPS))
    run.fragments = held(engine)
    run.state = engine.state()
    return run


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach().float().clone() for name, p in engine.model.named_parameters()}


def watch_average(engine: Engine) -> dict[str, bool]:
    """Use the average, leave it by an error, and say what was seen."""
    average = {name: values for (name, kind), values in whole(engine).items() if kind == "ema"}
    before, state = weights(engine), whole(engine)
    dtype = next(engine.model.parameters()).dtype
    seen = {}
    try:
        with engine.averaged() as model:
            inside = {
                name: np.array_equal(
                    p.detach().float().numpy().reshape(-1), torch.from_numpy(average[name]).to(dtype).float().numpy()
                )
                for name, p in model.named_parameters()
            }
            seen["averaged"] = all(inside.values())
            raise KeyError("left by an error")
    except KeyError:
        pass
    after = weights(engine)
    seen["restored"] = all(torch.equal(before[name], after[name]) for name in before)
    again = whole(engine)
    seen["state"] = all(np.array_equal(state[key], again[key]) for key in state)
    seen["differs"] = not all(np.array_equal(before[name].numpy().reshape(-1), average[name]) for name in before)
    return seen


def skip_cases(world: World, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Three unsound steps after `HALF` sound ones: what they said, and whether they changed anything."""
    return {str(case): _skip(world, case) for case in cases}


def _skip(world: World, case: Case) -> dict[str, Any]:
    size = SIZE // world.world_size
    # a valid sample in the last rank's share of step HALF
    batch = global_batch(HALF, SIZE)
    bad = batch.ids[batch.valid][-1:]
    assert (bad % SIZE) // size == world.world_size - 1
    engine = build(world, case, bad=bad)
    run = Run()
    advance(world, engine, run, range(HALF))
    before, model_before = whole(engine), weights(engine)
    updates = engine.state()
    advance(world, engine, run, range(HALF, HALF + 1))  # not a number on one rank
    nothing = share(batch, world.rank, world.world_size)
    empty = Batch(nothing.images, nothing.labels, torch.zeros_like(nothing.valid), nothing.ids)
    result = engine.step(empty, rate=rate(HALF))  # no valid sample on any rank
    after, model_after = whole(engine), weights(engine)
    unchanged = all(np.array_equal(before[key], after[key]) for key in before)
    unchanged &= all(torch.equal(model_before[name], model_after[name]) for name in model_before)
    same_updates = updates == engine.state()
    advance(world, engine, run, range(HALF + 1, STEPS))
    return {
        "losses": run.losses,
        "skipped": run.skipped,
        "norms": run.norms,
        "empty_skipped": bool(result.skipped),
        "unchanged": unchanged,
        "same_updates": same_updates,
        "whole": whole(engine),
    }


def one_dies(world: World, case: Case) -> None:
    """The last rank is killed in the second step's forward, while the others go on to share gradients."""
    calls = 0

    def deadly(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2 and world.rank == world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return objective(model, batch)

    engine = build_engine(tiny(), deadly, optim=case.optim, engine=case.engine, world=world, global_batch=SIZE)
    advance(world, engine, Run(), range(2))
