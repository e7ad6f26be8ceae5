"""A run that was killed and started again is the run that nobody touched."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from helpers.runs import (
    assert_same_tensors,
    losses,
    records,
    start,
    tensors,
    vitscale,
    wait_for_checkpoint,
    write_config,
    write_shards,
)

LONG = {"duration": "300 steps", "checkpoint": {"every": "60 steps", "keep_last": 2}, "evaluate": {"every": None}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.integration
def test_killed_and_resumed_is_bit_identical(shards: Path, tmp_path: Path) -> None:
    whole = write_config(tmp_path / "whole", shards, **LONG)
    killed = write_config(tmp_path / "killed", shards, **LONG)
    done = vitscale("train", whole)
    assert done.returncode == 0, done.stderr

    process = start("train", killed, output=tmp_path / "output")
    wait_for_checkpoint(tmp_path / "killed/run")
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    before = losses(tmp_path / "killed/run")
    assert 60 <= max(before) < 300
    again = vitscale("train", killed)
    assert again.returncode == 0, again.stderr

    starts = [record["step"] for record in records(tmp_path / "killed/run") if "event" in record]
    assert starts[0] == 0
    assert starts[1] in (60, 120, 180, 240)
    expected = losses(tmp_path / "whole/run")
    assert list(expected) == list(range(1, 301))
    assert before == {step: expected[step] for step in before}
    assert losses(tmp_path / "killed/run") == expected
    found = tensors(tmp_path / "killed/run")
    assert {name.split("/")[0] for name in found} == {"param", "exp_avg", "exp_avg_sq", "ema"}
    assert_same_tensors(found, tensors(tmp_path / "whole/run"))
    # a check of the check: another seed gives other numbers everywhere
    other = write_config(tmp_path / "other", shards, seed=1, **LONG)
    assert vitscale("train", other).returncode == 0
    assert all(not torch.equal(tensor, found[name]) for name, tensor in tensors(tmp_path / "other/run").items())


@pytest.mark.integration
def test_resumed_by_other_ranks_and_another_engine(shards: Path, tmp_path: Path) -> None:
    """From two ranks of ZeRO-2 to one of DDP: the samples are the same, sums over them differ in the last digits."""
    plain = {"dropout": 0.0, "drop_path": 0.0}
    whole = write_config(tmp_path / "whole", shards, model=plain)
    moved = write_config(tmp_path / "moved", shards, model=plain)
    on_two = ("--on", "local", "--gpus-per-node", 2, "--max-restarts", 0)
    half = vitscale("launch", moved, *on_two, "engine.kind=deepspeed")
    assert half.returncode == 0, half.stderr
    assert vitscale("train", whole).returncode == 0
    expected = losses(tmp_path / "whole/run")
    assert losses(tmp_path / "moved/run") == pytest.approx(expected, abs=1e-5)

    # take the last steps away and let one process do them again
    for step in ("step_00000020", "step_00000015"):
        for file in (tmp_path / "moved/run/checkpoints" / step).iterdir():
            file.unlink()
        (tmp_path / "moved/run/checkpoints" / step).rmdir()
    again = vitscale("train", moved, "engine.kind=ddp")
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in records(tmp_path / "moved/run") if "event" in record] == [0, 10]
    assert losses(tmp_path / "moved/run") == pytest.approx(expected, abs=1e-5)
    found, wanted = tensors(tmp_path / "moved/run"), tensors(tmp_path / "whole/run")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if name.endswith("qkv.bias"):
            continue  # attention ignores the keys' bias: its gradient is rounding alone, which Adam makes steps of
        torch.testing.assert_close(tensor, wanted[name], atol=2e-4, rtol=1e-3, msg=lambda text, name=name: name + text)


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_and_asks_to_be_started_again(number: signal.Signals, shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, duration="500 steps", checkpoint={"every": "50 steps", "keep_last": 2})
    output = tmp_path / "output"
    process = start("train", config, output=output)
    wait_for_checkpoint(tmp_path / "run")
    process.send_signal(number)
    assert process.wait(timeout=240) == 75
    stopped = [line for line in output.read_text().splitlines() if "stopped by a signal after step" in line]
    assert len(stopped) == 1
    step = max(losses(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints" / f"step_{step:08d}").is_dir()
    assert f"stopped by a signal after step {step} of 500" in stopped[0]

    again = vitscale("train", config)
    assert again.returncode == 0, again.stderr
    assert f"step {step} of 500, from step {step} of this run" in again.stderr
    assert list(losses(tmp_path / "run")) == list(range(1, 501))


@pytest.mark.integration
def test_two_runs_in_one_folder_are_refused(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, duration="5000 steps")
    first = start("train", config, output=tmp_path / "output")
    wait_for_checkpoint(tmp_path / "run")
    for words in (("train", config), ("launch", config, "--on", "local", "--gpus-per-node", 2)):
        second = vitscale(*words)
        assert second.returncode == 1
        assert f"{tmp_path}/run is in use by process {first.pid} on " in second.stderr
        assert "Traceback" not in second.stderr
    assert first.poll() is None
    first.kill()
    first.wait()
    again = vitscale("train", config, f"duration={max(losses(tmp_path / 'run')) + 20} steps")
    assert again.returncode == 0, again.stderr
