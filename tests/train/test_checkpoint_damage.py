"""What is damaged is found and named, and the checkpoint before is taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.split_engine import engine_of, forge, world_of_one
from safetensors.torch import save_file

from vitscale.errors import UserError
from vitscale.train import checkpoint
from vitscale.train.checkpoint import CheckpointError
from vitscale.world import World

RANK_FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of_one() as world:
        yield world


@pytest.fixture
def run_dir(world: World, tmp_path: Path) -> Path:
    """A run with the steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step=step, engine=engine_of(world, step, parts=3), world=world, state={})
    return tmp_path


def _step(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def _flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit in the values": (lambda path: _flip(path / RANK_FILE, -3), f"{RANK_FILE} is damaged: its checksum"),
    "bit in the header": (lambda path: _flip(path / RANK_FILE, 20), f"{RANK_FILE} is damaged: its checksum"),
    "truncated": (lambda path: _truncate(path / RANK_FILE), rf"{RANK_FILE} has \d+ bytes, the index says \d+"),
    "deleted": (lambda path: (path / RANK_FILE).unlink(), f"{RANK_FILE} is missing"),
    "bit in the state": (lambda path: _flip(path / "state.json", 12), r"state\.json is damaged: its checksum"),
    "no state": (lambda path: (path / "state.json").unlink(), r"state\.json is missing"),
    "no index": (lambda path: (path / "index.json").unlink(), r"holds no index\.json"),
    "bit in the index": (lambda path: _flip(path / "index.json", 60), r"index\.json is damaged"),
    "truncated index": (lambda path: _truncate(path / "index.json"), r"index\.json is damaged"),
    "empty index": (lambda path: (path / "index.json").write_bytes(b""), r"index\.json is damaged"),
    "list as index": (lambda path: (path / "index.json").write_text("[]"), r"index\.json is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_step_before_is_taken(
    run_dir: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, message = DAMAGES[name]
    assert checkpoint.verify(_step(run_dir, 2)) == []
    damage(_step(run_dir, 2))
    (problem,) = checkpoint.verify(_step(run_dir, 2))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(problem)
    assert checkpoint.latest(run_dir) == _step(run_dir, 1)
    assert problem in caplog.text
    assert "step_00000002" in caplog.text


def test_a_run_never_begins_anew_over_damaged_checkpoints(run_dir: Path, world: World) -> None:
    (_step(run_dir, 1) / RANK_FILE).unlink()
    _truncate(_step(run_dir, 2) / RANK_FILE)
    for ranks in (None, world):
        with pytest.raises(UserError, match="no checkpoint of this run is whole") as caught:
            checkpoint.latest(run_dir, ranks)
        assert "step_00000001: rank-00000.safetensors is missing" in caught.value.message
        assert "step_00000002: rank-00000.safetensors has" in caught.value.message


def test_without_checksums_only_names_and_sizes_are_looked_at(run_dir: Path) -> None:
    _flip(_step(run_dir, 2) / RANK_FILE, -3)
    assert checkpoint.verify(_step(run_dir, 2), checksums=False) == []
    _truncate(_step(run_dir, 2) / RANK_FILE)
    assert "bytes" in checkpoint.verify(_step(run_dir, 2), checksums=False)[0]


def test_a_file_that_cannot_be_read_is_a_problem_and_no_traceback(run_dir: Path) -> None:
    (_step(run_dir, 2) / RANK_FILE).unlink()
    (_step(run_dir, 2) / RANK_FILE).symlink_to("/proc/self/mem")  # reading gives EIO, as a dying disk does
    size = (_step(run_dir, 2) / RANK_FILE).stat().st_size

    def as_large(index: dict[str, Any]) -> None:
        index["files"][RANK_FILE]["bytes"] = size

    forge(_step(run_dir, 2), as_large)
    (problem,) = checkpoint.verify(_step(run_dir, 2))
    assert problem.startswith(f"{RANK_FILE} cannot be read")
    assert checkpoint.latest(run_dir) == _step(run_dir, 1)


def test_reading_a_damaged_step_by_name_says_so(run_dir: Path) -> None:
    saved = checkpoint.read(_step(run_dir, 1))
    _truncate(_step(run_dir, 1) / RANK_FILE)
    with pytest.raises(CheckpointError, match=rf"step_00000001/{RANK_FILE} cannot be read"):
        saved.read("0.bias", "param", 0, 5)
    saved = checkpoint.read(_step(run_dir, 2))
    (_step(run_dir, 2) / RANK_FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"step_00000002/{RANK_FILE} cannot be read"):
        saved.read("0.bias", "param", 0, 5)
    (_step(run_dir, 2) / "state.json").write_text("[1, 2")
    with pytest.raises(CheckpointError, match=r"step_00000002/state\.json cannot be read"):
        checkpoint.read(_step(run_dir, 2))
    with pytest.raises(CheckpointError, match=r"holds no index\.json; it is not a checkpoint"):
        checkpoint.read(run_dir)


@pytest.mark.parametrize("values", [torch.zeros(1), torch.zeros(5, dtype=torch.float64)])
def test_a_range_of_another_length_or_type_is_not_taken(run_dir: Path, values: torch.Tensor) -> None:
    saved = checkpoint.read(_step(run_dir, 2))
    keys = {f"param/0.bias@{start}": values.clone() for start in range(5)}
    save_file(keys, _step(run_dir, 2) / RANK_FILE)
    with pytest.raises(CheckpointError, match=rf"{RANK_FILE} cannot be read"):
        saved.read("0.bias", "param", 0, 5)


# ------------------------------------------------------------------------------------------------ an index that lies
def _first_range(index: dict[str, Any]) -> list[Any]:
    found: list[Any] = index["tensors"]["param/0.weight"]["ranges"][0]
    return found


def _outside(index: dict[str, Any]) -> None:
    index["files"]["../elsewhere.safetensors"] = index["files"][RANK_FILE]


def _range_outside(index: dict[str, Any]) -> None:
    _first_range(index)[0] = "../elsewhere.safetensors"


def _line_end(index: dict[str, Any]) -> None:
    index["files"][f"{RANK_FILE}\n"] = index["files"][RANK_FILE]


def _gap(index: dict[str, Any]) -> None:
    _first_range(index)[1] = 1


def _overlap(index: dict[str, Any]) -> None:
    _first_range(index)[2] += 1


def _newer(index: dict[str, Any]) -> None:
    index["version"] = 2


def _no_files(index: dict[str, Any]) -> None:
    del index["files"]


def _words(index: dict[str, Any]) -> None:
    _first_range(index)[2] = "all"


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "file outside": (_outside, r"names '\.\./elsewhere\.safetensors', which is no file of that folder"),
    "range outside": (_range_outside, r"names '\.\./elsewhere\.safetensors', which is no file of that folder"),
    "line end": (_line_end, "which is no file of that folder"),
    "gap": (_gap, r"param/0\.weight is not whole"),
    "overlap": (_overlap, r"param/0\.weight is not whole"),
    "newer": (_newer, "has format vitscale-checkpoint 2; this vitscale reads 1"),
    "no files": (_no_files, r"index\.json is damaged"),
    "words for numbers": (_words, r"index\.json is damaged"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies_is_refused(run_dir: Path, name: str) -> None:
    change, message = LIES[name]
    file = _step(run_dir, 2) / RANK_FILE
    (_step(run_dir, 2).parent / "elsewhere.safetensors").write_bytes(file.read_bytes())
    forge(_step(run_dir, 2), change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(_step(run_dir, 2))
    assert checkpoint.latest(run_dir) == _step(run_dir, 1)


def test_nothing_is_unpickled(run_dir: Path, tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (mark,))

    torch.save({"param/0.bias@0": Harm()}, _step(run_dir, 2) / RANK_FILE)
    assert checkpoint.verify(_step(run_dir, 2))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read(_step(run_dir, 2)).read("0.bias", "param", 0, 5)
    assert not mark.exists()


# ------------------------------------------------------------------------------------------------ several ranks
def choose_together(world: World, run_dir: Path) -> str:
    """Two steps, the files of the second damaged; each rank reads half of the files, all choose the same."""
    for step in (1, 2):
        checkpoint.save(run_dir, step=step, engine=engine_of(world, step), world=world, state={})
    world.barrier("the damage")
    if world.is_first:
        _flip(_step(run_dir, 2) / "rank-00001.safetensors", -3)
    world.barrier("the damage is done")
    return str(checkpoint.latest(run_dir, world))


def unreadable_for_the_first(world: World, run_dir: Path) -> str:
    """The list of steps cannot be had: every rank hears so."""
    try:
        checkpoint.latest(run_dir, world)
    except CheckpointError as error:
        return error.message
    return ""


def choose(world: World, run_dir: Path) -> list[str]:
    loop = run_dir / "loop"
    if world.is_first:
        loop.mkdir()
        (loop / "checkpoints").symlink_to("checkpoints")  # points to itself: ELOOP
    world.barrier("the folder")
    return [choose_together(world, run_dir), unreadable_for_the_first(world, loop)]


@pytest.mark.integration
def test_all_ranks_choose_the_same_step(tmp_path: Path) -> None:
    told = run_ranks(2, choose, tmp_path, timeout=240)
    assert [rank[0] for rank in told] == [str(_step(tmp_path, 1))] * 2
    assert told[0][1] == told[1][1]
    assert "cannot be read" in told[0][1]


def test_a_state_that_is_not_finite_survives(world: World, tmp_path: Path) -> None:
    state = {"totals": {"loss": float("nan")}, "name": "größe"}
    saved = checkpoint.save(tmp_path, step=1, engine=engine_of(world, 1), world=world, state=state)
    found = checkpoint.read(saved.path).state
    assert found["totals"]["loss"] != found["totals"]["loss"]
    assert found["name"] == "größe"
    assert json.loads((saved.path / "state.json").read_text())["step"] == 1
