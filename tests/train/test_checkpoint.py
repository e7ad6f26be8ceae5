"""What is saved is what is read, by any layout; what is kept, listed and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.engine_runs import Case, Run, advance, build, held
from helpers.ranks import run_ranks
from helpers.split_engine import SplitEngine, engine_of, hidden, owned, same, small_model, world_of_one
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitscale.engines.base import Kind
from vitscale.errors import UserError
from vitscale.train import checkpoint
from vitscale.train.checkpoint import CheckpointError
from vitscale.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of_one() as world:
        yield world


@pytest.fixture(scope="module")
def many_ranges(world: World, tmp_path_factory: pytest.TempPathFactory) -> checkpoint.Checkpoint:
    """A checkpoint of one rank that owns each tensor in several ranges."""
    run_dir = tmp_path_factory.mktemp("many_ranges")
    return checkpoint.read(_save(run_dir, world, 3, parts=11))


def _save(run_dir: Path, world: World, step: int, *, parts: int = 2) -> Path:
    engine = engine_of(world, step, parts=parts)
    return checkpoint.save(run_dir, step=step, engine=engine, world=world, state={"note": step}).path


# ------------------------------------------------------------------------------------------------ one rank
def test_a_step_is_a_folder_of_plain_files(world: World, tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, step=1000, engine=engine_of(world, 7), world=world, state={"seed": 5})
    assert saved.path == tmp_path / "checkpoints" / "step_00001000"
    assert sorted(p.name for p in saved.path.iterdir()) == ["index.json", "rank-00000.safetensors", "state.json"]
    index = json.loads((saved.path / "index.json").read_text())
    assert (index["format"], index["version"]) == ("vitscale-checkpoint", 1)
    assert index["files"]["rank-00000.safetensors"]["bytes"] == (saved.path / "rank-00000.safetensors").stat().st_size
    assert saved.bytes == sum(entry["bytes"] for entry in index["files"].values())
    assert hidden(tmp_path) == []
    state = checkpoint.read(saved.path).state
    assert (state["step"], state["seed"], state["ranks"]) == (1000, 5, 1)
    assert state["engine"] == {"updates": 7.0}
    assert state["versions"]["torch"] == torch.__version__


def test_what_was_saved_comes_back(world: World, tmp_path: Path) -> None:
    path = _save(tmp_path, world, 3)
    fresh = engine_of(world, 99)
    checkpoint.restore(checkpoint.read(path), fresh)
    assert same(fresh, engine_of(world, 3))
    assert fresh.state() == {"updates": 3.0}


@settings(max_examples=60)
@given(data=st.data(), kind=st.sampled_from(["param", "exp_avg", "ema"]))
def test_any_range_of_any_tensor_is_read(many_ranges: checkpoint.Checkpoint, data: st.DataObject, kind: Kind) -> None:
    expected = SplitEngine(small_model()).fill(3).tensors
    name = data.draw(st.sampled_from(sorted(many_ranges.shapes(kind))))
    flat = expected[kind, name].reshape(-1)
    start = data.draw(st.integers(0, len(flat)))
    length = data.draw(st.integers(0, len(flat) - start))
    values = many_ranges.read(name, kind, start, length)
    assert values.dtype == torch.float32
    assert torch.equal(values, flat[start : start + length])


def test_whole_tensors_for_export(many_ranges: checkpoint.Checkpoint) -> None:
    expected = SplitEngine(small_model()).fill(3).tensors
    state = many_ranges.state_dict("ema")
    assert many_ranges.kinds == {"param", "exp_avg", "ema"}
    assert many_ranges.shapes("ema") == {name: tuple(p.shape) for name, p in small_model().named_parameters()}
    assert all(torch.equal(state[name], expected["ema", name]) for name in many_ranges.shapes("ema"))
    small_model().load_state_dict(state)


def test_what_is_not_there_is_named(many_ranges: checkpoint.Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"step_00000003 has no momentum_buffer of 0\.bias"):
        many_ranges.read("0.bias", "momentum_buffer", 0, 1)
    with pytest.raises(CheckpointError, match=r"has no param of blocks\.7\.bias"):
        many_ranges.read("blocks.7.bias", "param", 0, 1)
    with pytest.raises(CheckpointError, match=r"param of 0\.bias has shape \[5\]"):
        many_ranges.read("0.bias", "param", 3, 3)


def test_another_model_is_refused_with_what_differs(many_ranges: checkpoint.Checkpoint) -> None:
    engine = SplitEngine(nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2), nn.Linear(2, 2)))
    with pytest.raises(UserError, match="a checkpoint of another model") as caught:
        checkpoint.restore(many_ranges, engine)
    assert "0.weight: (5, 3) there, (6, 3) in this model" in caught.value.message
    assert "3.bias: nothing there, (2,) in this model" in caught.value.message
    assert "2.bias" not in caught.value.message, "what is equal is not listed"
    assert not any(values.any() for values in engine.tensors.values()), "nothing was loaded"


def test_a_long_list_of_differences_says_how_long(world: World, tmp_path: Path) -> None:
    engine = SplitEngine(nn.Sequential(*[nn.Linear(1, 1) for _ in range(15)]))
    saved = checkpoint.save(tmp_path, step=1, engine=engine, world=world, state={})
    with pytest.raises(CheckpointError, match=r"another model(?s:.*)and 12 more"):
        checkpoint.restore(checkpoint.read(saved.path), SplitEngine(nn.Linear(2, 2)))


def test_an_average_that_was_not_kept_begins_at_the_weights(world: World, tmp_path: Path) -> None:
    engine = engine_of(world, 2, kinds=("param", "exp_avg"))
    path = checkpoint.save(tmp_path, step=1, engine=engine, world=world, state={}).path
    fresh = engine_of(world, 9)
    checkpoint.restore(checkpoint.read(path), fresh)
    for name, _ in fresh.model.named_parameters():
        assert torch.equal(fresh.tensors["ema", name], engine.tensors["param", name])


def test_a_step_that_is_saved_again_replaces_the_old_one(world: World, tmp_path: Path) -> None:
    path = _save(tmp_path, world, 4)
    checkpoint.save(tmp_path, step=4, engine=engine_of(world, 8), world=world, state={})
    assert checkpoint.read(path).state["engine"] == {"updates": 8.0}
    assert hidden(tmp_path) == []


def test_only_what_saving_left_behind_is_removed(world: World, tmp_path: Path) -> None:
    _save(tmp_path, world, 1)
    folder = tmp_path / "checkpoints"
    (folder / ".step_00000002.tmp").mkdir()
    (folder / ".step_00000000.old").mkdir()
    (folder / ".nfs0000000001").write_text("a network file system's own")
    (folder / ".snapshot").mkdir()
    _save(tmp_path, world, 2)
    assert hidden(tmp_path) == [".nfs0000000001", ".snapshot"]


# ------------------------------------------------------------------------------------------------ which are kept
def _kept(run_dir: Path) -> list[int]:
    return [entry.step for entry in checkpoint.list_checkpoints(run_dir)]


def test_the_last_ones_and_every_kth_are_kept(world: World, tmp_path: Path) -> None:
    for step in range(1, 8):
        _save(tmp_path, world, step)
    gone = checkpoint.prune(tmp_path, keep_last=2, keep_every=3)
    assert [path.name for path in gone] == [f"step_{step:08d}" for step in (1, 2, 4, 5)]
    assert _kept(tmp_path) == [3, 6, 7]
    assert hidden(tmp_path) == []
    assert checkpoint.prune(tmp_path, keep_last=2, keep_every=3) == []


@pytest.mark.parametrize("checksums", [False, True])
def test_the_newest_whole_one_is_never_deleted(world: World, tmp_path: Path, checksums: bool) -> None:
    for step in (1, 2, 3, 4):
        path = _save(tmp_path, world, step)
        if step > 2:
            file = path / "rank-00000.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data if checksums else data[:-1])
    checkpoint.prune(tmp_path, keep_last=1, keep_every=None, checksums=checksums)
    assert _kept(tmp_path) == [2, 3, 4]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step_00000002"


def test_a_folder_that_cannot_be_deleted_ends_no_run(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        _save(tmp_path, world, step)
    blocked = tmp_path / "checkpoints" / ".step_00000001.old"
    blocked.write_text("a file where the folder is to be renamed to")
    assert checkpoint.prune(tmp_path, keep_last=1, keep_every=None) == []
    assert "step_00000001" in caplog.text
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step_00000002"


def test_a_run_is_listed_oldest_first(world: World, tmp_path: Path) -> None:
    state = {"engine_kind": "ddp"}
    for step in (20, 3):
        checkpoint.save(tmp_path, step=step, engine=engine_of(world, step), world=world, state=state)
    (tmp_path / "checkpoints" / "step_00000020" / "state.json").unlink()
    (tmp_path / "checkpoints" / "step_00000099").write_text("no folder")
    three, twenty = checkpoint.list_checkpoints(tmp_path)
    assert (three.step, three.engine, three.ranks, three.problems) == (3, "ddp", 1, ())
    assert three.bytes == sum(file.stat().st_size for file in three.path.iterdir())
    assert (twenty.step, twenty.problems) == (20, ("state.json is missing",))
    assert checkpoint.list_checkpoints(tmp_path / "nowhere") == []


def test_latest_of_a_run_that_has_none(world: World, tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path, world) is None
    (tmp_path / "checkpoints" / ".step_00000001.tmp").mkdir(parents=True)
    assert checkpoint.latest(tmp_path, world) is None


# ------------------------------------------------------------------------------------------------ several ranks
def save_over_ranks(world: World, run_dir: Path) -> list[str]:
    """Save cut in ranges, and a model with fewer values than there are ranks; what `latest` says meanwhile."""
    checkpoint.save(run_dir, step=5, engine=engine_of(world, 5, parts=2), world=world, state={})
    newest = checkpoint.latest(run_dir, world)
    lonely = SplitEngine(nn.Linear(1, 1, bias=False), rank=world.rank, ranks=world.world_size).fill(1)
    checkpoint.save(run_dir / "lonely", step=1, engine=lonely, world=world, state={})
    return [str(newest), str(checkpoint.latest(run_dir / "lonely", world))]


@pytest.mark.integration
def test_what_two_ranks_saved_any_number_of_ranks_reads(tmp_path: Path) -> None:
    told = run_ranks(2, save_over_ranks, tmp_path)
    path = tmp_path / "checkpoints" / "step_00000005"
    assert told == [[str(path), str(tmp_path / "lonely" / "checkpoints" / "step_00000001")]] * 2
    assert sorted(p.name for p in path.glob("rank-*")) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    saved = checkpoint.read(path)
    assert saved.state["ranks"] == 2
    for ranks in (1, 2, 3, 5):
        for rank in range(ranks):
            fresh = SplitEngine(small_model(), rank=rank, ranks=ranks)
            checkpoint.restore(saved, fresh)
            assert same(fresh, SplitEngine(small_model(), rank=rank, ranks=ranks).fill(5))
            assert owned(fresh), "every rank owned something"


def train_and_save(world: World, run_dir: Path, cases: list[Case]) -> dict[str, list[float]]:
    """Three steps, a checkpoint, three more: the losses after the checkpoint."""
    losses = {}
    for case in cases:
        engine, run = build(world, case), Run()
        advance(world, engine, run, range(3))
        checkpoint.save(run_dir / str(case), step=3, engine=engine, world=world, state={})
        advance(world, engine, run, range(3, 6))
        losses[str(case)] = run.losses[3:]
    return losses


@pytest.mark.integration
def test_a_resumed_run_is_bit_identical_to_one_never_stopped(world: World, tmp_path: Path) -> None:
    case, never_stopped, resumed = Case("ddp"), Run(), Run()
    engine = build(world, case)
    advance(world, engine, never_stopped, range(3))
    path = checkpoint.save(tmp_path, step=3, engine=engine, world=world, state={}).path
    advance(world, engine, never_stopped, range(3, 6))
    fresh = build(world, case, seed=8)
    checkpoint.restore(checkpoint.read(path), fresh)
    advance(world, fresh, resumed, range(3, 6))
    assert resumed.losses == never_stopped.losses[3:]
    for one, other in zip(held(engine), held(fresh), strict=True):
        assert one[:3] == other[:3]
        assert (one[3] == other[3]).all()


@pytest.mark.integration
@pytest.mark.slow
def test_one_process_goes_on_from_what_two_ranks_of_any_engine_saved(world: World, tmp_path: Path) -> None:
    cases = [Case("ddp"), Case("deepspeed", 1), Case("deepspeed", 2)]
    losses = run_ranks(2, train_and_save, tmp_path, cases)[0]
    for case in cases:
        path = checkpoint.latest(tmp_path / str(case))
        assert path is not None
        engine, run = build(world, Case("ddp"), seed=8), Run()
        checkpoint.restore(checkpoint.read(path), engine)
        advance(world, engine, run, range(3, 6))
        # float32: only the order of sums differs; moments at zero would be off by more than 1e-3
        assert run.losses == pytest.approx(losses[str(case)], rel=1e-4), str(case)
