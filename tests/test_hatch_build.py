"""The decoder that a wheel is built with, or without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatch_build.py is hatchling's to run")
ROOT = Path(__file__).parents[1]


def checkout(tmp_path: Path) -> Path:
    (tmp_path / "vitscale/data").mkdir(parents=True)
    shutil.copy(ROOT / "vitscale/data/jpeg_crop.c", tmp_path / "vitscale/data")
    return tmp_path


def compile_library(root: Path) -> str:
    import importlib.util

    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said: str = module.compile_library(root)
    return said


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_the_library_is_compiled_or_the_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout(tmp_path)
    library = root / "vitscale/data/_jpeg_crop.so"
    said = compile_library(root)
    assert library.exists() == (said == "")
    assert "\n" not in said
    monkeypatch.setenv("CFLAGS", "-DLIBJPEG_TURBO_VERSION_IS=0 -include nothing_of_this_name.h")
    said = compile_library(root)
    assert "nothing_of_this_name.h" in said
    assert not library.exists()  # an older one would be of another source


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no-such-compiler" in compile_library(checkout(tmp_path))
