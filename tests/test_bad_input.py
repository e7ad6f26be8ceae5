"""Mistakes as a user meets them on the command line: a sentence or two, the right exit code, never a traceback.

What each part says by itself is tested beside the part; a full disk, checkpoints that are damaged or of another run in
`tests/train`; everything that `launch` finds before it starts in `tests/cluster/test_preflight.py`.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from helpers.command_line import Said, run_main
from helpers.runs import newest, vitscale, write_config, write_shards
from helpers.tars import labelled, make_tar

from vitscale.config.load import load_config
from vitscale.data.index import index_shards
from vitscale.errors import EXIT_FAILED, EXIT_USAGE
from vitscale.models.vit import VisionTransformer
from vitscale.weights.content import Preprocessing
from vitscale.weights.io import save_model


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def config(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path, shards)


def sentence(said: Said, code: int) -> str:
    """The one line on stderr, without the program's name."""
    assert said.code == code, said
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("vitscale: ")
    return line.removeprefix("vitscale: ")


# ------------------------------------------------------------------------------------------------ config
@pytest.mark.parametrize("command", ["train", "launch"])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["experiment7"], "experiment7: no such file"),
        (["rum.yaml"], "rum.yaml: no such file; did you mean 'run.yaml'?"),
        (["demo/pretrian.yaml"], "demo/pretrian.yaml: no such file; did you mean 'demo/pretrain.yaml'?"),
        (["."], ".: is a folder; name a file in it: run.yaml"),
        (["run.yaml", "optm.lr=1"], "command line: optm: unknown key; did you mean 'optim'?"),
        (["run.yaml", "optim.lr=fast"], "command line: optim.lr: found 'fast'; allowed: number > 0"),
        (["run.yaml", "lr"], "command line: 'lr' is not of the form key=value, e.g. optim.lr=1e-3"),
    ],
)
def test_wrong_configs_and_overrides(command: str, words: list[str], line: str, config: Path) -> None:
    assert sentence(run_main(command, *words), EXIT_USAGE) == line


def test_wrong_keys_in_a_file_are_told_with_their_lines_all_at_once(config: Path) -> None:
    config.write_text(config.read_text().replace("global_batch: 8", "global_batch: eight\nlearning_rate: 1e-3"))
    places = {text.split(":")[0]: number for number, text in enumerate(config.read_text().splitlines(), 1)}
    done = run_main("train", "run.yaml")
    assert (done.code, done.out) == (EXIT_USAGE, "")
    first, second = done.err.removeprefix("vitscale: ").splitlines()
    assert first.startswith(f"run.yaml:{places['global_batch']}: global_batch: found 'eight'; allowed: ")
    assert second.startswith(f"run.yaml:{places['learning_rate']}: learning_rate: unknown key")


def test_the_module_and_the_script_end_alike(config: Path) -> None:
    done = vitscale("train", "experiment7", cwd=config.parent)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr == "vitscale: experiment7: no such file\n"


# ------------------------------------------------------------------------------------------------ words
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trani", "run.yaml"], "No such command 'trani'"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "run.yaml", "--gpus", "2"], "No such option"),
        (["launch", "run.yaml", "--gpus-per-node", "0"], "--gpus-per-node"),
        (["launch", "run.yaml", "--max-restarts", "-1"], "--max-restarts"),
        (["launch", "run.yaml", "--on", "slurm"], "slurm"),
        (["finetune", "run.yaml"], "--from"),
        (["eval", "run"], "--data"),
        (["data", "pack", "images"], "Missing argument 'OUT'"),
    ],
)
def test_wrong_words(words: list[str], told: str, config: Path) -> None:
    done = run_main(*words)
    assert done.code == EXIT_USAGE
    assert "Traceback" not in done.err
    assert told in done.err
    assert "Usage: " in done.err


# ------------------------------------------------------------------------------------------------ runs that cannot be
def test_a_launch_that_cannot_be(shards: Path, config: Path) -> None:
    told = sentence(run_main("launch", "run.yaml", "--gpus-per-node", 3), EXIT_USAGE)
    assert told == "global_batch is 8, which 3 ranks do not divide; 6 or 9 would do"
    told = sentence(run_main("launch", "run.yaml", "engine.micro_batch=3"), EXIT_USAGE)
    assert told == "command line: engine.micro_batch: 3 does not divide global_batch 8; allowed: 2 or 4"
    told = sentence(run_main("launch", "run.yaml", f"data.train={shards}/tarin"), EXIT_USAGE)
    assert told.endswith(f"{shards} holds images, train, validation; did you mean 'train'?")
    told = sentence(run_main("launch", "run.yaml", "model.num_classes=2"), EXIT_USAGE)
    assert told == "data.train has 3 classes, model.num_classes is 2; set it to 3 or more"
    told = sentence(run_main("launch", "run.yaml", "run_dir=run.yaml/run"), EXIT_USAGE)
    assert told.startswith("run_dir: run.yaml/run cannot be written (Not a directory); name a folder that ")


def test_an_index_that_does_not_match_its_shards(config: Path, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "changed")
    one, other = sorted((shards / "train").glob("*.tar"))[:2]
    one.write_bytes(one.read_bytes()[:1024])
    changed = f"data.train={shards}/train"
    told = sentence(run_main("launch", "run.yaml", changed), EXIT_USAGE)
    assert f"{one} has 1,024 bytes, the index says " in told
    assert f"`vitscale data index {shards}/train`" in told
    # the right size and another content is found by whoever reads all of it
    one.write_bytes(other.read_bytes())
    assert run_main("launch", "run.yaml", changed, "--dry-run").code == 0
    done = run_main("data", "verify", shards / "train")
    assert done.code == EXIT_FAILED
    assert one.name in done.err
    assert "Traceback" not in done.err


@pytest.mark.integration
def test_labels_outside_the_classes(config: Path, tmp_path: Path) -> None:
    """Half of the samples say class 7 of three: written down one by one, and too many to go on."""
    folder = tmp_path / "labels"
    folder.mkdir()
    wrong = {f"s{number:03d}.cls" for number in range(15)}
    members = [(name, b"7" if name in wrong else content) for name, content in labelled(range(30))]
    make_tar(folder / "a.tar", members)
    index_shards(str(folder / "a.tar"), classes=("a", "b", "c"))
    done = vitscale("train", config, f"data.train={folder}", "data.validation=null")
    assert done.returncode == EXIT_FAILED
    assert "Traceback" not in done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert re.search(
        r"\d+ of \d+ samples could not be used \(label \d+\), more than data.max_bad_fraction = 0.01", told
    )
    journal = tmp_path / "run/bad_samples.jsonl"
    assert str(journal) in told
    first = json.loads(journal.read_text().splitlines()[0])
    assert first["shard"] == "a.tar"
    assert f"{first['key']}.cls" in wrong
    assert (first["reason"], first["detail"]) == ("label", "label 7 out of range, there are 3 classes")

    found = run_main("data", "verify", folder)
    assert found.code == EXIT_FAILED
    assert first["key"] in found.err


@pytest.mark.integration
def test_a_run_over_shards_of_which_one_in_a_hundred_is_damaged_ends_and_names_each(
    config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    damage = {"s017": lambda c: c[:-28], "s123": lambda c: b"", "s250": lambda c: b"no picture at all"}
    members = []
    for name, content in labelled(range(300)):
        key, _, field = name.partition(".")
        members.append((name, damage[key](content) if field != "cls" and key in damage else content))
    assert sum(1 for name, content in members if (name, content) not in labelled(range(300))) == 3
    make_tar(folder / "a.tar", members)
    index_shards(str(folder / "a.tar"), classes=("a", "b", "c"))
    done = vitscale("train", config, f"data.train={folder}", "data.validation=null", "duration=1 epoch")
    assert done.returncode == 0, done.stderr
    journal = [json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()]
    assert {line["key"]: line["reason"] for line in journal} == {
        "s017": "truncated", "s123": "empty", "s250": "not_an_image"
    }  # fmt: skip
    assert newest(tmp_path / "run", 'bad_samples_total{reason="image"}') == 3


@pytest.mark.integration
def test_weights_of_another_model(config: Path, tmp_path: Path) -> None:
    """In a file whose name YAML and shells would take apart."""
    other = load_config(config, ["model.embed_dim=32"]).model
    model = VisionTransformer(other)
    model.init_weights()
    path = tmp_path / 'it\'s a "modèle": 模型 😀 #1.safetensors'
    prepared = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=1.0)
    save_model(path, model.state_dict(), other, preprocessing=prepared, class_names=None)
    done = vitscale("finetune", config, "--from", path)
    assert done.returncode == EXIT_FAILED
    (told,) = done.stderr.splitlines()
    assert "cls_token: [1, 1, 32] in place of [1, 1, 16]" in told
    assert told.endswith(
        "Give the model section the dimensions of the weights; only image size, patch size and classes may differ."
    )


@pytest.mark.integration
def test_a_port_in_use(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = vitscale("train", config, f"monitor.prometheus_port={port}", "duration=2 steps")
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if f"port {port} " in line]
    found = re.search(r"WARNING port \d+ is in use; Prometheus metrics are at http://127\.0\.0\.1:(\d+)/metrics$", told)
    assert found, told
    assert int(found[1]) > port


# ------------------------------------------------------------------------------------------------ what is not there
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["eval", "nope", "--data", "shards"], "nope cannot be read: No such file or directory"),
        (["eval", ".", "--data", "shards"], ". is a folder without checkpoints; name a run, a step folder or a model"),
        (
            ["export", "run.yaml", "out"],
            "run.yaml begins with b'checkpoi'; a model file is safetensors, .npz, or what torch",
        ),
        (["checkpoint", "list", "nope"], "nope holds no checkpoints; name the folder of a run (its run_dir)"),
        (["checkpoint", "verify", "."], ". holds no checkpoints; name the folder of a run (its run_dir)"),
        (["report", "nope"], "nope is not a folder; give the folder of a run, its run_dir"),
        (["report", "."], ". holds neither config.yaml nor metrics.jsonl; give the folder of a run, its run_dir"),
        (["schema", "nope/schema.json"], "nope/schema.json cannot be written: No such file or directory"),
        (["data", "pack", "nope", "out"], "the source nope cannot be read: No such file or directory"),
        (["data", "index", "nope"], "no shards found for 'nope': . holds run.yaml"),
        (["data", "verify", "nope/*.tar"], "no shards found for 'nope/*.tar': . holds run.yaml"),
    ],
)
def test_what_is_not_there(words: list[str], line: str, config: Path) -> None:
    said = run_main(*words)
    assert said.code in (EXIT_FAILED, EXIT_USAGE)
    assert sentence(said, said.code).startswith(line)  # type: ignore[arg-type]
