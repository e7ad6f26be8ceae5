"""Ranks started, watched, ended together and started again, on this machine."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from helpers.runs import (
    assert_same_tensors,
    losses,
    records,
    start,
    tensors,
    vitscale,
    wait_for_checkpoint,
    wait_until,
    write_config,
    write_shards,
)

pytestmark = pytest.mark.integration

ON_TWO = ("--on", "local", "--gpus-per-node", 2)
LONG = {"duration": "240 steps", "checkpoint": {"every": "40 steps", "keep_last": 2}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """The running ranks below a launcher."""
    found = {}
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if "RANK" in process.environ() and "train" in process.cmdline():
                found[int(process.environ()["RANK"])] = process
        except psutil.Error:
            continue
    return found


def starts(run_dir: Path) -> list[float]:
    return [record["step"] for record in records(run_dir) if "event" in record]


def test_a_run_to_its_end(shards: Path, tmp_path: Path) -> None:
    """In a folder whose name a shell would take apart."""
    folder = tmp_path / 'it\'s a "run" $(touch no) ;'
    config = write_config(folder, shards, name="a 'name' with $(words)")
    done = vitscale("launch", config, *ON_TWO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "no").exists()
    logs = sorted((folder / "run/logs").iterdir())
    assert [path.name for path in logs] == ["rank-000.log", "rank-001.log"]
    for path in logs:
        assert "\r" not in path.read_text()
        assert "finished step 20 of 20" in path.read_text()
    assert done.stderr.count("finished step 20 of 20") == 1
    assert done.stderr.count("step 10/20") == 1
    assert "\r" not in done.stdout + done.stderr
    # and once more: nothing is left to do
    again = vitscale("launch", config, *ON_TWO)
    assert again.returncode == 0, again.stderr
    assert max(losses(folder / "run")) == 20


def test_a_killed_rank_is_named_and_the_run_goes_on(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "killed", shards, **LONG)
    output = tmp_path / "output"
    launcher = start("launch", config, *ON_TWO, output=output)
    wait_for_checkpoint(tmp_path / "killed/run")
    ranks = ranks_of(launcher.pid)
    assert sorted(ranks) == [0, 1]
    ranks[1].kill()
    psutil.wait_procs(list(ranks.values()), timeout=30)
    assert not any(process.is_running() for process in ranks.values()), "the other rank outlived the one that was lost"
    assert launcher.wait(timeout=120) == 0
    said = output.read_text()
    assert "rank 0: rank 1 ended during" in said
    assert f"vitscale launch: rank 1 (pid {ranks[1].pid}) was killed by SIGKILL; the other ranks were ended" in said
    assert f"last lines of {tmp_path}/killed/run/logs/rank-001.log:" in said
    assert re.search(r"^  \| .* rank 1 INFO step \d+/240", said, re.MULTILINE)
    assert "vitscale launch: restart 1 of 3, from the last checkpoint" in said
    assert "Traceback" not in said
    first, second = starts(tmp_path / "killed/run")
    assert first == 0
    assert second in range(40, 240, 40)

    whole = write_config(tmp_path / "whole", shards, **LONG)
    assert vitscale("launch", whole, *ON_TWO).returncode == 0
    assert losses(tmp_path / "killed/run") == losses(tmp_path / "whole/run")
    assert_same_tensors(tensors(tmp_path / "killed/run"), tensors(tmp_path / "whole/run"))


def test_after_the_last_restart_it_gives_up(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, duration="4000 steps")
    output = tmp_path / "output"
    launcher = start("launch", config, *ON_TWO, "--max-restarts", 0, output=output)
    wait_for_checkpoint(tmp_path / "run")
    ranks = ranks_of(launcher.pid)
    ranks[0].kill()
    assert launcher.wait(timeout=60) == 1
    assert "rank 0 (pid" in output.read_text()
    assert output.read_text().splitlines()[-1] == "vitscale launch: gave up after 0 restarts"
    assert not any(process.is_running() for process in ranks.values())


def test_what_a_restart_cannot_cure_is_not_tried_again(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards)
    assert vitscale("train", config).returncode == 0
    done = vitscale("launch", config, *ON_TWO, "seed=1")
    assert done.returncode in (1, 2)
    assert "seed: 0 there, 1 here" in done.stderr
    assert "a restart would end the same way" in done.stderr
    assert "restart 1 of" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_and_asks_to_be_started_again(
    number: signal.Signals, shards: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, shards, **LONG)
    output = tmp_path / "output"
    launcher = start("launch", config, *ON_TWO, output=output)
    wait_for_checkpoint(tmp_path / "run")
    ranks = ranks_of(launcher.pid)
    launcher.send_signal(number)
    assert launcher.wait(timeout=60) == 75, output.read_text()
    assert not any(process.is_running() for process in ranks.values())
    said = output.read_text()
    assert "Traceback" not in said
    step = max(losses(tmp_path / "run"))
    assert f"stopped by a signal after step {step} of 240" in said
    again = vitscale("launch", config, *ON_TWO, "duration=260 steps")
    assert again.returncode == 0, again.stderr
    assert starts(tmp_path / "run") == [0, step]


def test_a_rank_that_hangs_is_named(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, cluster={"timeout": 5.0}, **LONG)
    output = tmp_path / "output"
    launcher = start("launch", config, *ON_TWO, "--max-restarts", 0, output=output)
    wait_for_checkpoint(tmp_path / "run")
    ranks = ranks_of(launcher.pid)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    wait_until(lambda: "rank 0: rank 1 did not answer for 5 s during" in output.read_text(), seconds=40)
    assert launcher.wait(timeout=90) == 1
    said = output.read_text()
    assert "Traceback" not in said
    assert re.search(r"vitscale launch: rank 0 \(pid \d+\) ended with exit code 70", said), "not the one that hung"
    assert not any(process.is_running() for process in ranks.values())


def test_a_dry_run_checks_and_starts_nothing(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards)
    done = vitscale("launch", config, *ON_TWO, "--dry-run", "optim.lr=1e-4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"2 x vitscale train {config} optim.lr=1e-4"
    assert not (tmp_path / "run/logs").exists()
    bad = vitscale("launch", config, *ON_TWO, "--dry-run", "global_batch=7")
    assert bad.returncode == 2
    assert "global_batch is 7, which 2 ranks do not divide" in bad.stderr
