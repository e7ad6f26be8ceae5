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
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitscale.engines.base import Engine, Fragment, Kind
from vitscale.errors import UserError
from vitscale.world import World

log = logging.getLogger(__name__)

FORMAT, VERSION = "vitscale-checkpoint", 1
_STEP = re.compile(r"step_(\d{8,})$")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*$")
_CHUNK = 1 << 22


class CheckpointError(UserError):
    """A checkpoint could not be written or is not whole; raised on every rank."""


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
        state: What else the run needs to go on; JSON values. `step` and the engine's scalars are added.

    Raises:
        CheckpointError: On every rank, when one of them could not write; checkpoints that were there are intact.
    """
    final = folder(run_dir) / f"step_{step:08d}"
    aside = final.with_name(f".{final.name}.tmp")
    what = f"the checkpoint of step {step}"
    if world.is_first:
        error = _attempt(lambda: _fresh(aside))
        _agree(world, error, aside, what)
    else:
        _agree(world, "", aside, what)
    _agree(world, _attempt(lambda: _write_rank(aside, world.rank, engine)), aside, what)
    whole = {**state, "step": step, "engine": engine.state(), "ranks": world.world_size, "time": time.time()}
    publish = (lambda: _publish(aside, final, world.world_size, whole)) if world.is_first else (lambda: None)
    _agree(world, _attempt(publish), aside, what)
    return Saved(final, sum(entry["bytes"] for entry in _read_index(final)["files"].values()))


def _attempt(action: Any) -> str:
    """Do it; what went wrong in words, or an empty string."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = getattr(error, "filename", None)
        return f"{name}: {reason}" if name else reason
    return ""


def _agree(world: World, error: str, aside: Path, what: str) -> None:
    """Go on together, or fail together with every rank's error."""
    errors = {rank: text for rank, text in enumerate(world.gather_text(error, what=what)) if text}
    if not errors:
        return
    if world.is_first:
        shutil.rmtree(aside, ignore_errors=True)
    told = "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
    raise CheckpointError(f"{what} could not be written ({told}); the checkpoints before it are intact")


def _fresh(aside: Path) -> None:
    aside.parent.mkdir(parents=True, exist_ok=True)
    for stale in aside.parent.glob(".*"):
        shutil.rmtree(stale)
    aside.mkdir()


def _write_rank(aside: Path, rank: int, engine: Engine) -> None:
    """This rank's tensors, and beside them what the index will say of them."""
    path = aside / f"rank-{rank:05d}.safetensors"
    fragments = [fragment for fragment in engine.fragments() if fragment.values.numel()]
    save_file({_key(f): f.values.detach().float().cpu().contiguous() for f in fragments}, path)
    _sync(path)
    ranges = [[f.kind, f.name, list(f.shape), f.start, f.values.numel()] for f in fragments]
    part = {"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path), "ranges": ranges}
    _write_json(aside / f"part-{rank:05d}.json", part)


def _publish(aside: Path, final: Path, ranks: int, state: Mapping[str, Any]) -> None:
    """Merge what the ranks said into the index, and give the folder its name."""
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for rank in range(ranks):
        path = aside / f"part-{rank:05d}.json"
        part = json.loads(path.read_text())
        files[part["file"]] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        for kind, name, shape, start, length in part["ranges"]:
            tensor = tensors.setdefault(f"{kind}/{name}", {"shape": shape, "ranges": []})
            assert tensor["shape"] == shape, f"ranks disagree on the shape of {name}"
            tensor["ranges"].append([part["file"], start, length])
        path.unlink()
    for tensor in tensors.values():
        tensor["ranges"].sort(key=lambda item: item[1])
    gaps = _gaps(tensors)
    assert not gaps, f"the ranks' ranges do not add up to the model: {gaps}"
    _write_json(aside / "state.json", state)
    files["state.json"] = {"bytes": (aside / "state.json").stat().st_size, "sha256": _sha256(aside / "state.json")}
    body = {"format": FORMAT, "version": VERSION, "files": files, "tensors": tensors}
    _write_json(aside / "index.json", {**body, "sha256": _digest(body)})
    _sync(aside)
    if final.exists():  # a run that was set back writes a step again
        shutil.rmtree(_renamed_away(final))
    aside.rename(final)
    _sync(final.parent)


def _key(fragment: Fragment) -> str:
    return f"{fragment.kind}/{fragment.name}@{fragment.start}"


def _gaps(tensors: Mapping[str, Any]) -> list[str]:
    """Tensors whose ranges, in order, do not cover every value exactly once."""
    wrong = []
    for name, tensor in tensors.items():
        end = 0
        for _, start, length in tensor["ranges"]:
            if start != end:
                break
            end += length
        if end != math.prod(tensor["shape"]):
            wrong.append(name)
    return wrong


# ------------------------------------------------------------------------------------------------ reading
class Checkpoint:
    """One step folder, opened for reading; only the ranges that are asked for are read.

    Attributes:
        path: The folder.
        state: What `save` was given, and `step`, `engine`, `ranks`, `time`.
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
        result = torch.empty(length)
        for file, begin, size in tensor["ranges"]:
            low, high = max(start, begin), min(start + length, begin + size)
            if low < high:
                values = self._file(file).get_slice(f"{kind}/{name}@{begin}")
                result[low - start : high - start] = values[low - begin : high - begin]
        return result

    def state_dict(self, kind: Kind) -> dict[str, Tensor]:
        """Every tensor of a kind, whole."""
        return {n: self.read(n, kind, 0, math.prod(s)).reshape(s) for n, s in self.shapes(kind).items()}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]


def read(path: str | Path) -> Checkpoint:
    """Open a step folder.

    Raises:
        CheckpointError: It is not a checkpoint, or its index is damaged.
    """
    path = Path(path)
    index = _read_index(path)
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
        listed = "\n  ".join(differing[:20])
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
    paths = [path for _, path in reversed(_steps(run_dir))]
    if world is not None:  # one listing for all: another rank's view of a network folder may be older
        listing = world.gather_text(json.dumps([path.name for path in paths]), what="the list of checkpoints")[0]
        paths = [folder(run_dir) / name for name in json.loads(listing)]
    damaged = []
    for path in paths:
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


def verify(path: Path, *, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with a step folder: files that miss, or differ from the index in size or checksum.

    Args:
        path: The step folder.
        rank: Which share of the files is read, of `ranks`.
        ranks: See `rank`.
    """
    try:
        index = _read_index(path)
    except CheckpointError as error:
        return [error.message]
    problems = [f"{name} does not cover its tensor" for name in _gaps(index["tensors"])]
    for place, (name, entry) in enumerate(sorted(index["files"].items())):
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != entry["bytes"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, the index says {entry['bytes']}")
        elif place % ranks == rank and _sha256(file) != entry["sha256"]:
            problems.append(f"{name} is damaged: its checksum is not that of the index")
    return problems


def _verify_together(path: Path, world: World) -> list[str]:
    mine = verify(path, rank=world.rank, ranks=world.world_size)
    told = world.gather_text(json.dumps(mine), what=f"verifying {path.name}")
    return list(dict.fromkeys(problem for text in told for problem in json.loads(text)))


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((path / "index.json").read_text())
        digest = index.pop("sha256")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} holds no index.json; it is not a checkpoint") from error
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/index.json is damaged ({error})") from error
    if digest != _digest(index):
        raise CheckpointError(f"{path}/index.json is damaged: its checksum differs")
    if (index["format"], index["version"]) != (FORMAT, VERSION):
        raise CheckpointError(f"{path} has format {index['format']} {index['version']}; this vitscale reads {VERSION}")
    odd = [name for name in index["files"] if not _PLAIN_NAME.match(name)]
    if odd:
        raise CheckpointError(f"{path}/index.json names {odd[0]!r}, which is no file of that folder")
    return index


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
            engine, ranks, when = str(state["config"]["engine"]["kind"]), int(state["ranks"]), float(state["time"])
        except (CheckpointError, KeyError, TypeError):
            engine, ranks, when = "?", 0, path.stat().st_mtime
        entries.append(Entry(path, step, when, size, engine, ranks, problems))
    return entries


def prune(run_dir: str | Path, *, keep_last: int, keep_every: int | None) -> list[Path]:
    """Delete old checkpoints: not the newest `keep_last`, and none at a multiple of `keep_every` steps.

    Returns:
        The folders that are gone.
    """
    steps = _steps(run_dir)
    gone = []
    for step, path in steps[: max(0, len(steps) - keep_last)]:
        if not (keep_every and step % keep_every == 0):
            shutil.rmtree(_renamed_away(path), ignore_errors=True)
            gone.append(path)
    return gone


def _steps(run_dir: str | Path) -> list[tuple[int, Path]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = ((_STEP.match(path.name), path) for path in folder(run_dir).iterdir())
        return sorted((int(match[1]), path) for match, path in found if match)
    return []


def _renamed_away(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    return hidden


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value))
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Any) -> Iterable[bytes]:
    return iter(lambda: file.read(_CHUNK), b"")


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
