"""Every config that is shipped is a run, and what configs and messages tell people to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers.command_line import command_of, commands, parse
from helpers.runs import ROOT

from vitscale.config.describe import describe_keys
from vitscale.config.load import load_config, packaged_configs
from vitscale.engines.build import check_batch
from vitscale.models.vit import VisionTransformer

CONFIGS = ROOT / "configs"
RUNS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml") if path.parent.name != "base")
BASES = sorted(path.relative_to(CONFIGS).as_posix() for path in (CONFIGS / "base").glob("*.yaml"))
TEXTS = [*CONFIGS.rglob("*.yaml"), *(ROOT / "vitscale").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]

_COMMAND = re.compile(r"^#+ +vitscale (.*)$", re.MULTILINE)
_QUOTED = re.compile(r"`vitscale (\w[^`\n]*)`")
_PATH = re.compile(r"(?<![\w./-])(?:configs|docs|launch|tests)/[\w./-]*\w\.(?:yaml|json|md|py|png|sh|txt)\b")


def processes(config: str) -> int:
    """How many the command in a config's header starts."""
    header = (CONFIGS / config).read_text()
    found = re.search(r"^#.*--gpus-per-node (\d+)", header, re.MULTILINE)
    return int(found[1]) if found else 1


# ------------------------------------------------------------------------------------------------ configs
def test_there_are_configs() -> None:
    assert RUNS
    assert BASES
    assert packaged_configs() == CONFIGS


@pytest.mark.parametrize("name", RUNS)
def test_a_config_is_a_run_that_can_be_built(name: str) -> None:
    config = load_config(CONFIGS / name)
    assert load_config(name) == config, "by name, as where vitscale is installed"
    check_batch(config.global_batch, world_size=processes(name), micro_batch=config.engine.micro_batch)
    with torch.device("meta"):
        VisionTransformer(config.model)


@pytest.mark.parametrize("name", RUNS)
def test_a_config_opens_with_its_paper_what_to_expect_and_how_to_start_it(name: str) -> None:
    (header,) = re.findall(r"\A(?:#.*\n)+", (CONFIGS / name).read_text())
    assert "Expected:" in header
    (command,) = _COMMAND.findall(header)
    words = shlex.split(command)
    assert words[1] == f"configs/{name}"
    assert set(parse(words)) <= {key.key for key in describe_keys()}


def test_runs_do_not_share_a_folder() -> None:
    folders = [load_config(name).run_dir for name in RUNS]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("name", BASES)
def test_a_base_needs_only_what_makes_a_run(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"base: base/{Path(name).name}\nname: a\nrun_dir: b\nduration: 1 steps\nglobal_batch: 8\n")
    load_config(run, ["data.train=shards"])


# ------------------------------------------------------------------------------------------------ messages
def test_commands_in_sentences_and_messages_exist() -> None:
    wrong = []
    for path in TEXTS:
        for line in _QUOTED.findall(path.read_text()):
            name, rest = command_of(line.split())
            command = commands().get(name)
            known = {option for parameter in command.params for option in parameter.opts} if command else set()
            options = {word.split("=")[0] for word in rest if re.fullmatch(r"--[a-z-]+(=.*)?", word)}
            if (not name and not line.isupper()) or (command and not options <= known | {"--help"}):
                wrong.append(f"{path.relative_to(ROOT)}: {line}")
    assert wrong == []


def test_files_that_are_named_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        for name in _PATH.findall(path.read_text())
        if not (ROOT / name).exists()
    ]
    assert wrong == []
