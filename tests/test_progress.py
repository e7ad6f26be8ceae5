"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from vitscale.progress import duration, progress


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1000, "packing", every=0.0) as shown:
        for _ in range(4):
            shown.advance(250)
    text = capsys.readouterr()
    assert text.out == ""
    lines = text.err.splitlines()
    assert [line.split(" images")[0] for line in lines] == [
        "packing: 250 of 1,000",
        "packing: 500 of 1,000",
        "packing: 750 of 1,000",
        "packing: 1,000 of 1,000",
    ]
    assert lines[0].endswith("left")
    assert "\r" not in text.err
    assert "\x1b" not in text.err


def test_work_done_before_does_not_count_for_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1000, "packing", done=1000):
        pass
    assert capsys.readouterr().err == "packing: 1,000 of 1,000 images in 0 s, 0/s\n"


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(10, "packing", every=0.0, shown=False) as shown:
        shown.advance()
    assert capsys.readouterr().err == ""


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    call = (
        "from vitscale.progress import progress\nwith progress(10, 'packing') as p:\n  [p.advance() for _ in range(10)]"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", call], stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 4096):
            text += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    assert b"packing" in text
    assert b"10/10" in text
    assert b"images/s" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (750, "12 min 30 s"), (11100, "3 h 05 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
