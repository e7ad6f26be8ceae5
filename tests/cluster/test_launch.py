"""Ranks started, watched, ended together and started again, on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from helpers.runs import (
    ENVIRONMENT,
    ROOT,
    command,
    losses,
    records,
    start,
    vitscale,
    wait_for_checkpoint,
    wait_until,
    write_config,
    write_shards,
)

from vitscale.errors import EXIT_FAILED, EXIT_REQUEUE
from vitscale.train import checkpoint

pytestmark = pytest.mark.integration

ON_TWO = ("--on", "local", "--gpus-per-node", 2)
LONG = {"duration": "60 steps", "checkpoint": {"every": "20 steps", "keep_last": 2}}
PLAIN = {"engine": {"kind": "ddp"}, "evaluate": {"every": None}}  # starts sooner than DeepSpeed


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or waits for its parent to take note."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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


def all_gone(ranks: dict[int, psutil.Process], *, seconds: float) -> bool:
    """Whether the ranks end by themselves in time."""
    return not psutil.wait_procs(list(ranks.values()), timeout=seconds)[1]


def starts(run_dir: Path) -> list[float]:
    """The steps that the attempts began at."""
    return [record["step"] for record in records(run_dir) if "event" in record]


# ------------------------------------------------------------------------------------------------ to the end
@pytest.fixture(scope="module")
def finished(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run to its end, in a folder whose name a shell would take apart; its config and what the launcher said."""
    folder = tmp_path_factory.mktemp("finished") / 'it\'s a "run" $(touch no) ;'
    config = write_config(folder, shards, name="a 'name' with $(words)")
    return config, vitscale("launch", config, *ON_TWO, cwd=folder)


def test_a_run_to_its_end(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    config, done = finished
    run_dir = config.parent / "run"
    assert done.returncode == 0, done.stderr
    assert not (config.parent / "no").exists()
    logs = sorted((run_dir / "logs").iterdir())
    assert [path.name for path in logs] == ["rank-000.log", "rank-001.log"]
    for rank, path in enumerate(logs):
        text = path.read_text()
        assert "\r" not in text
        assert f"rank {rank} INFO finished step 20 of 20" in text
    assert done.stdout == ""
    assert done.stderr == logs[0].read_text(), "what rank 0 logs, once, and nothing else"
    # a run that is at its end ends again
    again = vitscale("launch", config, *ON_TWO)
    assert again.returncode == 0, again.stderr
    assert starts(run_dir) == [0, 20]
    assert max(losses(run_dir)) == 20


def test_what_a_restart_cannot_cure_is_not_tried_again(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    config, _ = finished
    done = vitscale("launch", config, *ON_TWO, "seed=1")
    assert done.returncode == EXIT_FAILED
    assert done.stderr.count("seed: 0 there, 1 here") == 1
    assert re.fullmatch(
        r"vitscale launch: rank \d \(pid \d+\) ended with exit code 1; a restart would end the same way",
        done.stderr.splitlines()[-1],
    )
    assert "vitscale launch: restart" not in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------ ranks that die
def test_a_killed_rank_is_named_and_the_run_goes_on(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, **LONG)
    output = tmp_path / "output"
    launcher = start("launch", config, *ON_TWO, output=output)
    wait_until(lambda: "step 27/60" in output.read_text())
    ranks = ranks_of(launcher.pid)
    assert sorted(ranks) == [0, 1]
    ranks[1].kill()
    assert all_gone(ranks, seconds=60), "the other rank outlived the one that was lost"
    assert launcher.wait(timeout=120) == 0
    said = output.read_text()
    assert "rank 0: rank 1 ended during" in said
    assert f"vitscale launch: rank 1 (pid {ranks[1].pid}) was killed by SIGKILL; the other ranks were ended" in said
    assert f"last lines of {tmp_path}/run/logs/rank-001.log:" in said
    assert re.search(r"^  \| .* rank 1 INFO step 2[567]/60", said, re.MULTILINE)
    assert "vitscale launch: restart 1 of 3, from the last checkpoint" in said
    assert "Traceback" not in said
    # the steps since the last checkpoint were done twice, with one result
    assert starts(tmp_path / "run") == [0, 20]
    found = records(tmp_path / "run")
    restart = max(place for place, record in enumerate(found) if "event" in record)
    first, second = (
        {record["step"]: record["loss"] for record in part if "loss" in record}
        for part in (found[:restart], found[restart:])
    )
    assert list(second) == list(range(21, 61))
    assert {step: first[step] for step in range(21, 27)} == {step: second[step] for step in range(21, 27)}


def test_after_the_last_restart_it_gives_up(shards: Path, tmp_path: Path) -> None:
    """Rank 1 dies at once, each time, while rank 0 is still starting and is ended with SIGTERM."""
    config = write_config(tmp_path, shards)
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1': os._exit(9)\n")
    done = subprocess.run(
        command("launch", config, *ON_TWO, "--max-restarts", 1),
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == EXIT_FAILED
    lines = [re.sub(r"pid \d+", "pid", line) for line in done.stderr.splitlines()]
    died = [
        "vitscale launch: rank 1 (pid) ended with exit code 9; the other ranks were ended",
        f"  last lines of {tmp_path}/run/logs/rank-001.log: there is no such file",
    ]
    assert lines == [
        *died,
        "vitscale launch: restart 1 of 1, from the last checkpoint",
        *died,
        "vitscale launch: gave up after 1 restart",
    ]


def test_a_rank_that_hangs_is_named(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, cluster={"timeout": 10.0}, **LONG | PLAIN)
    output = tmp_path / "output"
    launcher = start("launch", config, *ON_TWO, "--max-restarts", 0, output=output)
    wait_for_checkpoint(tmp_path / "run")
    ranks = ranks_of(launcher.pid)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    wait_until(lambda: "rank 0: rank 1 did not answer for 10 s during" in output.read_text())
    wait_until(lambda: has_ended(ranks[0]))  # before the other one, awake again, ends too
    os.kill(ranks[1].pid, signal.SIGCONT)  # else it is killed after the 30 s that torch's agent gives it
    assert launcher.wait(timeout=120) == EXIT_FAILED
    said = output.read_text()
    assert "Traceback" not in said
    assert f"vitscale launch: rank 0 (pid {ranks[0].pid}) ended with exit code 70" in said, "not the one that hung"
    assert all_gone(ranks, seconds=10)


# ------------------------------------------------------------------------------------------------ launchers that end
@pytest.fixture(scope="module")
def endless(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose run the tests below start, end and start again."""
    folder = tmp_path_factory.mktemp("endless")
    return write_config(
        folder, shards, duration="60000 steps", checkpoint={"every": "30000 steps", "keep_last": 2}, **PLAIN
    )


def begin(config: Path, output: Path, *before: str) -> tuple[subprocess.Popen[str], dict[int, psutil.Process]]:
    """Launch, and wait until it trains, from the step where it was saved before."""
    run_dir = config.parent / "run"
    saved = checkpoint.latest(run_dir)
    attempts = len(starts(run_dir)) if saved else 0
    launcher = start("launch", config, *ON_TWO, output=output, before=before)
    first = int(saved.name.removeprefix("step_")) if saved else 0
    wait_until(lambda: f"step {first + 3}/" in output.read_text())
    assert starts(run_dir)[attempts:] == [first]
    return launcher, ranks_of(launcher.pid)


def saved_by_a_signal(config: Path, output: Path) -> None:
    """The newest checkpoint is that of the last step, and the terminal says why."""
    newest = checkpoint.latest(config.parent / "run")
    assert newest is not None
    step = max(losses(config.parent / "run"))
    assert newest.name == f"step_{step:08d}"
    *_, saved, stopped = output.read_text().splitlines()
    assert f"saved {newest}" in saved
    assert stopped.endswith(f"INFO stopped by a signal after step {step} of 60000")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_saves_and_asks_to_be_started_again(
    number: signal.Signals, endless: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    launcher, ranks = begin(endless, output)
    launcher.send_signal(number)
    assert launcher.wait(timeout=120) == EXIT_REQUEUE, output.read_text()
    assert all_gone(ranks, seconds=10)
    saved_by_a_signal(endless, output)
    assert "Traceback" not in output.read_text()


def test_a_second_ctrl_c_ends_at_once(endless: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    launcher, ranks = begin(endless, output)
    os.kill(ranks[1].pid, signal.SIGSTOP)  # rank 0 waits for it a minute before it gives up
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 128 + signal.SIGINT
    assert all_gone(ranks, seconds=10)
    assert "Traceback" not in output.read_text()


def test_nohup_is_heeded_and_usr1_saves(endless: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    launcher, ranks = begin(endless, output, "nohup")
    launcher.send_signal(signal.SIGHUP)
    before = max(losses(endless.parent / "run"))
    wait_until(lambda: max(losses(endless.parent / "run")) > before + 5)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=120) == EXIT_REQUEUE, output.read_text()
    assert all_gone(ranks, seconds=10)
    saved_by_a_signal(endless, output)


def test_no_rank_outlives_a_launcher_that_is_killed(endless: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    launcher, ranks = begin(endless, output)
    launcher.kill()
    launcher.wait()
    assert all_gone(ranks, seconds=30)
    saved_by_a_signal(endless, output)
