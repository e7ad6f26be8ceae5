"""A save that fails or is killed: every rank says so, nobody waits for ever, the checkpoints before are intact."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.split_engine import (
    FailingEngine,
    SplitEngine,
    engine_of,
    file_size_limit,
    hidden,
    same,
    small_model,
    world_of_one,
)

from vitscale.errors import UserError
from vitscale.train import checkpoint
from vitscale.train.checkpoint import CheckpointError
from vitscale.world import World

KILLS = 20


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of_one() as world:
        yield world


def _large(rank: int = 0, ranks: int = 1) -> SplitEngine:
    return SplitEngine(small_model(width=3000), rank=rank, ranks=ranks).fill(1)


def _intact(run_dir: Path, step: int) -> bool:
    """Whether `step` is the newest and holds what was saved, and nothing is left aside."""
    path = checkpoint.latest(run_dir)
    assert path is not None
    fresh = SplitEngine(small_model())
    checkpoint.restore(checkpoint.read(path), fresh)
    return (
        path.name == f"step_{step:08d}" and same(fresh, SplitEngine(small_model()).fill(step)) and not hidden(run_dir)
    )


# ------------------------------------------------------------------------------------------------ one rank
def test_a_file_where_the_folder_should_be(world: World, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"step 1 could not be written \(rank 0: .*checkpoints: File exists\)"):
        checkpoint.save(tmp_path, step=1, engine=engine_of(world, 1), world=world, state={})


def test_a_limit_on_files_is_told_as_a_full_disk_is(world: World, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, engine=engine_of(world, 1), world=world, state={})
    with file_size_limit(1000), pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path, step=2, engine=_large(), world=world, state={})
    assert caught.value.message.startswith("the checkpoint of step 2 could not be written (rank 0: ")
    assert "rank-00000.safetensors: File too large" in caught.value.message
    assert caught.value.message.endswith("the checkpoints before it are intact")
    assert _intact(tmp_path, 1)


def test_a_state_that_is_no_json_is_told_by_name(world: World, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="TypeError: Object of type PosixPath is not JSON serializable") as caught:
        checkpoint.save(tmp_path, step=2, engine=engine_of(world, 2), world=world, state={"note": tmp_path})
    assert isinstance(caught.value.__cause__, TypeError), "the place in the code is not lost"
    assert hidden(tmp_path) == []
    assert checkpoint.latest(tmp_path) is None


def _mount(folder: Path, options: str) -> None:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, some of it in use by the checkpoint of step 1."""
    folder = tmp_path / "disk"
    _mount(folder, "size=256k")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_file_system_that_is_read_only(world: World, small_disk: Path) -> None:
    checkpoint.save(small_disk, step=1, engine=engine_of(world, 1), world=world, state={})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written \(rank 0: .*: Read-only file system\)"):
        checkpoint.save(small_disk, step=2, engine=engine_of(world, 2), world=world, state={})
    assert _intact(small_disk, 1)


# ------------------------------------------------------------------------------------------------ several ranks
def save_on_a_full_disk(world: World, run_dir: Path) -> list[str]:
    """Step 1 fits, step 2 does not, step 3 fits again; what each rank was told."""
    told = []
    for step in (1, 2, 3):
        engine = _large(world.rank, world.world_size) if step == 2 else engine_of(world, step)
        told.append(_told(lambda step=step, engine=engine: _save(run_dir, world, step, engine)))  # type: ignore[misc]
    return told


def _save(run_dir: Path, world: World, step: int, engine: SplitEngine) -> None:
    checkpoint.save(run_dir, step=step, engine=engine, world=world, state={})


def _told(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return error.message
    return ""


@pytest.mark.integration
def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    first, second = run_ranks(2, save_on_a_full_disk, small_disk, timeout=240)
    assert first == second
    assert [bool(text) for text in first] == [False, True, False]
    assert "safetensors: No space left on device" in first[1]
    assert _intact(small_disk, 3)


def fail_on_one_rank(world: World, run_dir: Path) -> dict[str, str]:
    """Saves that fail on rank 1 or rank 0 alone, each in another way; what this rank was told."""
    _save(run_dir, world, 1, engine_of(world, 1))
    told = {}
    engine = FailingEngine(small_model(), rank=world.rank, ranks=world.world_size).fill(2)
    assert isinstance(engine, FailingEngine)

    def no_memory() -> None:
        if world.rank == 1:
            raise RuntimeError("CUDA error: out of memory")

    engine.fail = no_memory
    told["memory"] = _told(lambda: _save(run_dir, world, 2, engine))
    with file_size_limit(1000 if world.rank == 1 else 10**9):
        large = _large(world.rank, world.world_size)
        told["disk"] = _told(lambda: _save(run_dir, world, 2, large))
    twice = SplitEngine(small_model()).fill(2)  # both ranks own everything
    told["twice"] = _told(lambda: _save(run_dir, world, 2, twice))
    half = SplitEngine(small_model(), rank=0, ranks=3).fill(2)  # nobody owns the rest
    told["gap"] = _told(lambda: _save(run_dir, world, 2, half))
    other = SplitEngine(small_model(width=5 + world.rank), rank=world.rank, ranks=2).fill(2)
    told["shapes"] = _told(lambda: _save(run_dir, world, 2, other))
    state = {"note": run_dir} if world.is_first else {}
    told["state"] = _told(
        lambda: checkpoint.save(run_dir, step=2, engine=engine_of(world, 2), world=world, state=state)
    )
    world.barrier("the end")
    return told


@pytest.mark.integration
def test_a_failure_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    begin = time.monotonic()
    first, second = run_ranks(2, fail_on_one_rank, tmp_path, timeout=240)
    assert first == second
    assert "(rank 1: " in first["memory"]
    assert "RuntimeError: CUDA error: out of memory)" in first["memory"]
    assert "rank-00001.safetensors: File too large)" in first["disk"]
    assert "param/0.weight is not whole" in first["twice"]
    assert "is not whole" in first["gap"]
    assert "ranks disagree on the shape of param/1.weight: [5] and [6]" in first["shapes"]
    assert "(rank 0: " in first["state"]
    assert "not JSON serializable" in first["state"]
    assert time.monotonic() - begin < 50, "nobody waited for a time-out"
    assert _intact(tmp_path, 1)


def die_while_saving(world: World, run_dir: Path) -> None:
    _save(run_dir, world, 1, engine_of(world, 1))
    engine = FailingEngine(small_model(), rank=world.rank, ranks=world.world_size).fill(2)
    assert isinstance(engine, FailingEngine)

    def die() -> None:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.fail = die
    _save(run_dir, world, 2, engine)


@pytest.mark.integration
def test_a_rank_that_is_killed_while_saving_is_named(tmp_path: Path, world: World) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, die_while_saving, tmp_path, timeout=240)
    text = str(caught.value)
    assert "rank 1 of 2 was killed by SIGKILL" in text
    assert "rank 1 ended during" in text
    assert "the checkpoint of step 2" in text
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step_00000001"
    checkpoint.save(tmp_path, step=2, engine=engine_of(world, 2), world=world, state={})
    assert _intact(tmp_path, 2)


# ------------------------------------------------------------------------------------------------ kill -9
def save_for_ever(run_dir: Path, ready: int, *, set_back: bool) -> None:
    """Save step after step and prune, until killed; `set_back`: step 1, then step 2 again and again."""
    with world_of_one() as world:
        newest = checkpoint.latest(run_dir, world)
        step = int(checkpoint.read(newest).state["step"]) if newest else 0
        os.write(ready, b"!")
        while True:
            step = min(step + 1, 2) if set_back else step + 1
            _save(run_dir, world, step, engine_of(world, step))
            checkpoint.prune(run_dir, keep_last=2, keep_every=None)


def kill_at_random(run_dir: Path, kills: int, seed: int, set_back: bool) -> dict[str, int]:
    """Fork a process that saves, kill it at a random moment, and look what it left; then again over that."""
    chance = random.Random(seed)
    seen = {"killed in a save": 0, "steps": 0}
    for number in range(kills):
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(run_dir, writable, set_back=set_back)
            finally:
                os._exit(1)
        os.close(writable)
        assert os.read(readable, 1) == b"!", "the process could not go on from what the last kill left"
        os.close(readable)
        time.sleep(chance.uniform(0.0, 0.06) + (0.2 if number == 0 else 0.0))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the process failed before it was killed"
        seen["killed in a save"] += any(name.endswith(".tmp") for name in hidden(run_dir))
        path = checkpoint.latest(run_dir)
        assert path is not None, "the run would begin anew"
        saved = checkpoint.read(path)
        step = int(saved.state["step"])
        # the step that is replaced is gone for an instant; the one before it never is
        assert step >= (1 if set_back else seen["steps"]), "a checkpoint that was whole is gone"
        seen["steps"] = step
        fresh = SplitEngine(small_model())
        checkpoint.restore(saved, fresh)
        assert same(fresh, SplitEngine(small_model()).fill(step))
        assert all(not entry.problems for entry in checkpoint.list_checkpoints(run_dir)), "seen, but not whole"
    return seen


@pytest.mark.integration
@pytest.mark.parametrize("set_back", [False, True])
def test_killed_at_any_moment_a_run_goes_on_from_a_whole_checkpoint(tmp_path: Path, set_back: bool) -> None:
    # a process that holds torch but no threads forks quickly, and safely
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        seen = pool.submit(kill_at_random, tmp_path, KILLS, 7, set_back).result(timeout=120)
    assert seen["killed in a save"] >= KILLS // 4, f"the kills did not hit the saves: {seen}"
