from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[[str, str], Path]

MINIMAL = """\
name: run
run_dir: runs/run
duration: 3 epochs
global_batch: 64
data:
  train: shards
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into an empty current folder, so that messages hold its bare name."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> Path:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def minimal() -> str:
    """The keys that have no default."""
    return MINIMAL
