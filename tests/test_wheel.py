"""The wheel holds what a run needs, and works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers.runs import ROOT

from vitscale.config.load import dump_config, load_config

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    if done.returncode and "No matching distribution found for hatchling" in done.stdout + done.stderr:
        pytest.skip("the build needs hatchling, and no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("vitscale-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `vitscale` script of an environment that has the wheel, and its dependencies from this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    done = pip("--python", python, "install", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/vitscale"


def pip(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(script: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([script, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    ours = {name for name in names if ".dist-info/" not in name}
    assert all(name.startswith("vitscale/") for name in ours), "no tests, no pages"
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in ours)
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vitscale").rglob("*.py")}
    shared = {
        f"vitscale/_share/{path.relative_to(ROOT).as_posix()}"
        for folder in ("configs", "launch")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    library = "vitscale/data/_jpeg_crop.so"
    built = {library} if (ROOT / library).exists() else set()  # the build has put it beside its source
    assert ours == code | shared | built | {"vitscale/monitor/report.html.jinja", "vitscale/py.typed"}
    tag = "py3-none-any" if not built else f"py3-none-{sysconfig.get_platform()}"
    assert wheel.stem.endswith(tag.replace("-", "_").replace(".", "_").replace("py3_none_", "py3-none-"))
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_it_works_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    helped = run(installed, "--help", cwd=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "checkpoint" in helped.stdout
    shown = run(installed, "train", "demo/pretrain.yaml", "seed=7", "--print-config", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == dump_config(load_config(ROOT / "configs/demo/pretrain.yaml", ["seed=7"]))
    mistaken = run(installed, "train", "demo/pretrian.yaml", cwd=tmp_path)
    assert mistaken.returncode == 2
    assert mistaken.stderr == "vitscale: demo/pretrian.yaml: no such file; did you mean 'demo/pretrain.yaml'?\n"
    assert list(tmp_path.iterdir()) == []


def test_it_is_the_wheel_that_runs(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('vitscale').origin)"
    done = run(installed.parent / "python", "-c", code, cwd=tmp_path)
    package = Path(done.stdout.strip()).parent
    assert package.is_relative_to(installed.parents[1])
    assert (package / "monitor/report.html.jinja").is_file()
