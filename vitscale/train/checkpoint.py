"""Checkpoints: written aside by all ranks, renamed whole, verified before they are trusted, pruned.

    run_dir/checkpoints/
      step_00001000/
        rank-00000.safetensors   what rank 0 owns, float32, key `kind/name@start`: a flat range of that tensor
        rank-00001.safetensors
        state.json               step, config, counters, the engine's scalars
        index.json               size and sha256 of every file above, and where each range of each tensor lies
      .step_00001100.tmp/        being written; never read, removed by the next save

Any engine on any number of ranks reads the ranges it needs; no rank ever holds the whole optimizer. Every rank takes
part in `save` and `latest`. A folder is renamed to its final name after all its files are on the disk, and renamed away
before it is deleted, so that what bears the name is whole. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitscale.engines.base import Engine, Fragment, Kind
from vitscale.errors import UserError
from vitscale.train.step_folder import CheckpointError as CheckpointError
from vitscale.train.step_folder import read_index, sha256, sync, write_index, write_json
from vitscale.train.step_folder import verify as verify
from vitscale.weights.write import save_tensors
from vitscale.world import World

log = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{8,})")
_LEFT_BEHIND = re.compile(r"\.step_\d{8,}\.(tmp|old)")
_SHOWN = 20  # differences that one message lists


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on the disk: its folder, and the bytes of all its files."""

    path: Path
    bytes: int


def folder(run_dir: str | Path) -> Path:
    """Where a run's checkpoints are."""
    return Path(run_dir) / "checkpoints"


# ------------------------------------------------------------------------------------------------ writing
def save(run_dir: str | Path, *, step: int, engine: Engine, world: World, state: Mapping[str, Any]) -> Saved:
    """Write a checkpoint; every rank writes what it owns.

    Args:
        run_dir: The run's folder.
        step: Steps done.
        engine: Whose state is saved.
        world: The ranks.
        state: What else the run needs to go on; JSON values. Added are `step`, `engine` (its scalars), `ranks`,
            `time` (seconds since 1970) and `versions`.

    Raises:
        CheckpointError: On every rank, when one of them failed, whatever the reason: the others wait to hear of it.
            Checkpoints that were there are intact.
    """
    final = folder(run_dir) / f"step_{step:08d}"
    aside = final.with_name(f".{final.name}.tmp")
    what = f"the checkpoint of step {step}"

    def go_on(action: Callable[[], int], where: Path, *, taking_part: bool = True) -> int:
        result, error = _attempt(action, where) if taking_part else (0, None)
        _agree(world, error, aside, what)
        return result

    go_on(lambda: _fresh(aside), aside, taking_part=world.is_first)
    file = aside / f"rank-{world.rank:05d}.safetensors"
    go_on(lambda: _write_rank(file, world.rank, engine), file)

    def publish() -> int:
        added = {"step": step, "ranks": world.world_size, "time": time.time(), "versions": _versions()}
        return _publish(aside, final, world.world_size, {**state, **added, "engine": engine.state()})

    size = go_on(publish, aside, taking_part=world.is_first)
    return Saved(final, int(world.all_reduce(torch.tensor([size]), "max", what=what).item()))


@dataclass(frozen=True)
class _Failure:
    words: str
    cause: Exception


def _attempt(action: Callable[[], int], where: Path) -> tuple[int, _Failure | None]:
    """Do it; its result, or 0 and what went wrong. Any error: a rank that left alone would leave the others waiting."""
    try:
        return action(), None
    except UserError as error:
        return 0, _Failure(error.message, error)
    except OSError as error:
        return 0, _Failure(f"{error.filename or where}: {error.strerror or error}", error)
    except SafetensorError as error:
        reason = re.sub(r"^Error while serializing: (I/O error: )?|\s*\(os error \d+\)$", "", str(error))
        return 0, _Failure(f"{where}: {reason}", error)
    except Exception as error:
        return 0, _Failure(f"{where}: {type(error).__name__}: {error}", error)


def _agree(world: World, error: _Failure | None, aside: Path, what: str) -> None:
    """Go on together, or fail together with every rank's error."""
    texts = world.gather_text(error.words if error else "", what=what)
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    if not told:
        return
    if world.is_first:
        shutil.rmtree(aside, ignore_errors=True)
    message = f"{what} could not be written ({told}); the checkpoints before it are intact"
    raise CheckpointError(message) from (error.cause if error else None)


def _versions() -> dict[str, str]:
    """What wrote the checkpoint; no entry for vitscale where it runs without being installed."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(PackageNotFoundError):
        versions["vitscale"] = version("vitscale")
    return versions


def _fresh(aside: Path) -> int:
    aside.parent.mkdir(parents=True, exist_ok=True)
    for stale in aside.parent.iterdir():
        if _LEFT_BEHIND.fullmatch(stale.name):
            shutil.rmtree(stale, ignore_errors=True)
    aside.mkdir()
    return 0


def _write_rank(file: Path, rank: int, engine: Engine) -> int:
    """This rank's tensors, and beside them what the index will say of them; the bytes of the tensors' file."""
    fragments = [fragment for fragment in engine.fragments() if fragment.values.numel()]
    save_tensors({_key(f): f.values.detach().float().cpu().contiguous() for f in fragments}, file)
    sync(file)
    size = file.stat().st_size
    ranges = [[f.kind, f.name, list(f.shape), f.start, f.values.numel()] for f in fragments]
    part = {"file": file.name, "bytes": size, "sha256": sha256(file), "ranges": ranges}
    write_json(file.with_name(f"part-{rank:05d}.json"), part)
    return size


def _publish(aside: Path, final: Path, ranks: int, state: Mapping[str, Any]) -> int:
    """Merge what the ranks said into the index, and give the folder its name; the bytes of all that it lists."""
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        path = aside / f"part-{rank:05d}.json"
        part = json.loads(path.read_text())
        files[part["file"]] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        for kind, name, shape, start, length in part["ranges"]:
            tensor = tensors.setdefault(f"{kind}/{name}", {"shape": shape, "ranges": []})
            if tensor["shape"] != shape:
                raise CheckpointError(f"ranks disagree on the shape of {kind}/{name}: {tensor['shape']} and {shape}")
            tensor["ranges"].append([part["file"], start, length])
        path.unlink()
    for tensor in tensors.values():
        tensor["ranges"].sort(key=lambda item: item[1])
    file = aside / "state.json"
    write_json(file, state)
    files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    write_index(aside, files=files, tensors=tensors)
    sync(aside)
    _rename(aside, final)
    return sum(entry["bytes"] for entry in files.values())


def _rename(aside: Path, final: Path) -> None:
    """Give a complete folder its name; one that has the name, in a run that was set back, goes only after that.

    Between the two renames neither has the name: a run killed then goes on from the step that it was set back to.
    """
    before = _renamed_away(final) if final.exists() else None
    try:
        aside.rename(final)
    except OSError:
        if before is not None:
            before.rename(final)
        raise
    sync(final.parent)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def _key(fragment: Fragment) -> str:
    return f"{fragment.kind}/{fragment.name}@{fragment.start}"


# ------------------------------------------------------------------------------------------------ reading
class Checkpoint:
    """One step folder, opened for reading; only the ranges that are asked for are read.

    Attributes:
        path: The folder.
        state: What `save` was given, and `step`, `engine`, `ranks`, `time`, `versions`.
        kinds: The kinds of tensors that it holds.
    """

    def __init__(self, path: Path, index: Mapping[str, Any], state: dict[str, Any]) -> None:
        self.path = path
        self.state = state
        self._tensors: Mapping[str, Any] = index["tensors"]
        self._open: dict[str, Any] = {}
        self.kinds = frozenset(key.split("/", 1)[0] for key in self._tensors)

    def shapes(self, kind: Kind) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a kind."""
        prefix = f"{kind}/"
        return {k[len(prefix) :]: tuple(t["shape"]) for k, t in self._tensors.items() if k.startswith(prefix)}

    def read(self, name: str, kind: Kind, start: int, length: int) -> Tensor:
        """A flat float32 range of a tensor, on the host.

        Raises:
            CheckpointError: There is no such tensor, or the range lies outside of it.
        """
        tensor = self._tensors.get(f"{kind}/{name}")
        if tensor is None:
            raise CheckpointError(f"{self.path} has no {kind} of {name}; it is a checkpoint of another run")
        if not 0 <= start <= start + length <= math.prod(tensor["shape"]):
            raise CheckpointError(f"{self.path}: {kind} of {name} has shape {tensor['shape']}, not what is asked for")
        result = torch.empty(length, dtype=torch.float32)
        for file, begin, size in tensor["ranges"]:
            low, high = max(start, begin), min(start + length, begin + size)
            if low < high:
                values = self._values(file, f"{kind}/{name}@{begin}", size)
                result[low - start : high - start] = values[low - begin : high - begin]
        return result

    def _values(self, file: str, key: str, size: int) -> Any:
        """The saved range `key`, a slice of which reads no more than itself."""
        path = self.path / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            values = self._open[file].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        if (values.get_dtype(), values.get_shape()) != ("F32", [size]):
            found = f"{values.get_dtype()} {values.get_shape()}"
            raise CheckpointError(f"{path} cannot be read ({key} is {found}, the index says F32 [{size}])")
        return values

    def state_dict(self, kind: Kind) -> dict[str, Tensor]:
        """Every tensor of a kind, whole."""
        return {n: self.read(n, kind, 0, math.prod(s)).reshape(s) for n, s in self.shapes(kind).items()}


def read(path: str | Path) -> Checkpoint:
    """Open a step folder.

    Raises:
        CheckpointError: It is not a checkpoint, or its index is damaged.
    """
    path = Path(path)
    index = read_index(path)
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}/state.json cannot be read ({error})") from error
    return Checkpoint(path, index, state)


def restore(checkpoint: Checkpoint, engine: Engine) -> None:
    """Give an engine the state of a checkpoint; an average that it did not keep begins at its weights.

    Raises:
        CheckpointError: It is of another model; every tensor that differs is named.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in engine.model.named_parameters()}
    found = checkpoint.shapes("param")
    differing = [
        f"{name}: {found.get(name, 'nothing')} there, {wanted.get(name, 'nothing')} in this model"
        for name in sorted({*wanted, *found})
        if wanted.get(name) != found.get(name)
    ]
    if differing:
        if len(differing) > _SHOWN:
            differing[_SHOWN:] = [f"and {len(differing) - _SHOWN} more"]
        listed = "\n  ".join(differing)
        raise CheckpointError(f"{checkpoint.path} is a checkpoint of another model:\n  {listed}")

    def read_range(name: str, kind: Kind, start: int, length: int) -> Tensor:
        known = kind if kind in checkpoint.kinds or kind != "ema" else "param"
        return checkpoint.read(name, known, start, length)

    engine.load(read_range)
    engine.load_state(checkpoint.state["engine"])


def latest(run_dir: str | Path, world: World | None = None) -> Path | None:
    """The newest checkpoint of a run that is whole, or None for a run that has none.

    Checkpoints that are not are named in the log. With a world, the ranks share the reading.

    Raises:
        CheckpointError: There are checkpoints, but none of them is whole.
    """
    steps = _steps(run_dir) if world is None else _agreed_steps(run_dir, world)
    damaged = []
    for _, path in reversed(steps):
        problems = verify(path) if world is None else _verify_together(path, world)
        if not problems:
            return path
        damaged.append(f"{path}: {'; '.join(problems)}")
        log.warning("checkpoint passed over: %s", damaged[-1])
    if damaged:
        raise CheckpointError(
            "no checkpoint of this run is whole, and it will not begin anew over them; move them away to do that:\n  "
            + "\n  ".join(damaged)
        )
    return None


def _agreed_steps(run_dir: str | Path, world: World) -> list[tuple[int, Path]]:
    """Rank 0's list for all: another rank's view of a network folder may be older."""
    names, error = [], ""
    if world.is_first:
        try:
            names = [path.name for _, path in _steps(run_dir)]
        except CheckpointError as failure:
            error = failure.message
    told = json.loads(
        world.gather_text(json.dumps({"names": names, "error": error}), what="the list of checkpoints")[0]
    )
    if told["error"]:
        raise CheckpointError(told["error"])
    return [(_step_of(name), folder(run_dir) / name) for name in told["names"]]


def _verify_together(path: Path, world: World) -> list[str]:
    mine = verify(path, rank=world.rank, ranks=world.world_size)
    told = world.gather_text(json.dumps(mine), what=f"verifying {path.name}")
    return list(dict.fromkeys(problem for text in told for problem in json.loads(text)))


# ------------------------------------------------------------------------------------------------ the folder
@dataclass(frozen=True)
class Entry:
    """A line of `vitscale checkpoint list`."""

    path: Path
    step: int
    time: float
    bytes: int
    engine: str
    ranks: int
    problems: tuple[str, ...]


def list_checkpoints(run_dir: str | Path) -> list[Entry]:
    """Every checkpoint of a run, oldest first, each read and verified."""
    entries = []
    for step, path in _steps(run_dir):
        problems = tuple(verify(path))
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        try:
            state = read(path).state
            engine, ranks, when = str(state["engine_kind"]), int(state["ranks"]), float(state["time"])
        except (CheckpointError, KeyError, TypeError):
            engine, ranks, when = "?", 0, path.stat().st_mtime
        entries.append(Entry(path, step, when, size, engine, ranks, problems))
    return entries


def prune(run_dir: str | Path, *, keep_last: int, keep_every: int | None, checksums: bool = False) -> list[Path]:
    """Delete old checkpoints: not the newest `keep_last` whole ones, and none at a multiple of `keep_every` steps.

    What is damaged does not count as one of the newest, and is left for a person to look at unless whole ones follow.
    A folder that cannot be deleted is named in the log.

    Args:
        run_dir: The run's folder.
        keep_last: How many, at least 1.
        keep_every: Steps; None: no others.
        checksums: Read the newest before the old ones are deleted; not needed right after `save`, which did that.

    Returns:
        The folders that are gone.
    """
    gone: list[Path] = []
    whole = 0
    for step, path in reversed(_steps(run_dir)):
        if whole < keep_last:
            whole += not verify(path, checksums=checksums)
        elif not (keep_every and step % keep_every == 0):
            try:
                shutil.rmtree(_renamed_away(path), ignore_errors=True)
                gone.append(path)
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error.strerror)
    return gone[::-1]


def _steps(run_dir: str | Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint, oldest first."""
    try:
        paths = [path for path in folder(run_dir).iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder(run_dir)} cannot be read: {error.strerror}") from error
    return sorted((_step_of(path.name), path) for path in paths)


def _step_of(name: str) -> int:
    return int(name.removeprefix("step_"))


def _renamed_away(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    return hidden
