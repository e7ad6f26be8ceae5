"""What the pages say is there is there: files, commands, options, keys, test files."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vitscale.cli.main import app
from vitscale.config.load import describe_keys

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
KEYS = {key.key for key in describe_keys()}
SECTIONS = {key.rpartition(".")[0] for key in KEYS}


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_of_the_project_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:tests|vitscale|launch|configs|docs)/[\w./]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_list() -> None:
    listed = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in listed + "(README.md)"] == []


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words name, and what follows its name."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words, "a group of commands alone does nothing"
        assert words[0] in command.commands, f"vitscale has no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_their_options_exist(page: Path) -> None:
    lines = [line for text in blocks(page, "", "bash") for line in text.splitlines()]
    spoken = [line.split("vitscale ", 1)[1] for line in lines if re.match(r"^(\$ |srun .*)?vitscale (?!launch:)", line)]
    for line in spoken:
        command, rest = command_of(shlex.split(line, comments=True))
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for word in rest:
            if word.startswith("--"):
                assert word in options, f"{line}: vitscale {command.name} has no {word}"
            elif re.match(r"^[a-z_.]+=", word):
                assert word.split("=")[0] in KEYS, f"{line}: there is no such key"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_keys_exist(page: Path) -> None:
    """Those of YAML blocks that are a run, and those named in text with their section."""

    def flat(tree: object, prefix: str = "") -> list[str]:
        if not isinstance(tree, dict):
            return [prefix.rstrip(".")]
        return [key for name, value in tree.items() for key in flat(value, f"{prefix}{name}.")]

    runs = [tree for tree in map(yaml.safe_load, blocks(page, "yaml")) if "scrape_configs" not in tree]
    keys = [key for tree in runs for key in flat(tree) if key != "base"]
    named = re.findall(r"`([a-z]+\.[a-z_0-9]+)(?:[:=][^`]*)?`", page.read_text())
    sections = {section.split(".")[0] for section in SECTIONS if section}
    files = (".py", ".md", ".json", ".jsonl", ".yaml", ".toml", ".html", ".txt")
    keys += [name for name in named if name.split(".")[0] in sections and not name.endswith(files)]
    modules = {f"{path.parent.name}.{path.stem}" for path in (ROOT / "vitscale").glob("*/*.py")}
    attributes = {"model.blocks"}
    assert [key for key in keys if key not in KEYS | SECTIONS | modules | attributes] == []


def test_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_stale_page_is_named(tmp_path: Path) -> None:
    for folder in ("docs", "configs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "docs/generate.py").write_text((ROOT / "docs/generate.py").read_text())
    command = [sys.executable, str(tmp_path / "docs/generate.py")]
    assert subprocess.run(command, check=False).returncode == 0
    (tmp_path / "docs/metrics.md").write_text("old")
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "docs/metrics.md is out of date; run `make docs`\n")
