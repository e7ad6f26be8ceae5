"""What each rank says, and where it is found again."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitscale.errors import UserError
from vitscale.logs import last_lines, log_path, start_logging

SPEAK = """\
import logging, os, sys
from vitscale.logs import STEPS, start_logging
start_logging(sys.argv[1], int(sys.argv[2]))
logging.getLogger(STEPS).info("step 1/2")
logging.getLogger("vitscale.train.loop").info("saved it")
logging.getLogger("other.library").info("chatter")
logging.getLogger("other.library").warning("beware é")
print("printed", flush=True)
os.write(2, b"native code\\n")
"""

CRASH = """\
import ctypes, sys
from vitscale.logs import start_logging
start_logging(sys.argv[1], int(sys.argv[2]))
ctypes.string_at(0)
"""

BAR = """\
import logging, sys
from vitscale.logs import STEPS, start_logging
from vitscale.progress import progress
start_logging(sys.argv[1], 0)
with progress(3, "run", unit="steps") as bar:
    for step in (1, 2, 3):
        bar.advance()
        logging.getLogger(STEPS).info("step %d/3", step)
    logging.getLogger("vitscale.train.loop").info("saved it")
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_rank_0_speaks_on_the_terminal_and_into_its_file(tmp_path: Path) -> None:
    done = python(SPEAK, tmp_path, 0)
    assert done.returncode == 0, done.stderr
    logged = log_path(tmp_path, 0).read_text(encoding="utf-8").splitlines()
    assert [line[9:] for line in logged] == [
        "rank 0 INFO step 1/2",
        "rank 0 INFO saved it",
        "rank 0 WARNING beware é",
    ]
    assert done.stderr.splitlines() == [*logged, "native code"]
    assert done.stdout == "printed\n"


def test_other_ranks_speak_into_their_file_alone(tmp_path: Path) -> None:
    done = python(SPEAK, tmp_path, 11)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert log_path(tmp_path, 11) == tmp_path / "logs/rank-011.log"
    logged = log_path(tmp_path, 11).read_text(encoding="utf-8").splitlines()
    assert [line[9:] for line in logged[:3]] == [
        "rank 11 INFO step 1/2",
        "rank 11 INFO saved it",
        "rank 11 WARNING beware é",
    ]
    assert logged[3:] == ["printed", "native code"]


def test_a_restart_appends(tmp_path: Path) -> None:
    for _ in range(2):
        assert python(SPEAK, tmp_path, 0).returncode == 0
    assert log_path(tmp_path, 0).read_text().count("saved it") == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_of_native_code_leaves_its_place(rank: int, tmp_path: Path) -> None:
    assert python(CRASH, tmp_path, rank).returncode == -signal.SIGSEGV
    text = log_path(tmp_path, rank).read_text()
    assert "Fatal Python error: Segmentation fault" in text
    assert "string_at" in text


def test_step_lines_are_not_shown_beside_a_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", BAR, str(tmp_path)], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert shown.count(b"saved it") == 1
    assert b"INFO step" not in shown
    assert b"3/3" in shown
    logged = log_path(tmp_path, 0).read_text()
    assert [line[9:] for line in logged.splitlines()] == [
        *(f"rank 0 INFO step {step}/3" for step in (1, 2, 3)),
        "rank 0 INFO saved it",
    ]
    assert "\r" not in logged
    assert "\x1b" not in logged


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(UserError) as caught:
        start_logging(tmp_path, 0)
    assert caught.value.message == (f"{tmp_path}/logs: File exists; run_dir must be a folder that this user may write")


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    path.write_bytes(b"")
    assert last_lines(path, 3) == []
    path.write_bytes(b"one\ntwo\xff\nthree")
    assert last_lines(path, 2) == ["two�", "three"]
    assert last_lines(path, 9) == ["one", "two�", "three"]
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(path, 2) == ["line 99998", "line 99999"]
