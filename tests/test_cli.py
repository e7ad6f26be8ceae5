"""What the commands print and how they end, on one small real run. Who is mistaken is told in `test_bad_input`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import commands, parse, run_main
from helpers.runs import ENVIRONMENT, command, newest, records, vitscale, write_config, write_shards
from helpers.tars import class_folders
from transformers import ViTConfig, ViTModel

from vitscale.config.describe import describe_keys, json_schema
from vitscale.config.load import load_config
from vitscale.errors import EXIT_FAILED, EXIT_USAGE
from vitscale.weights.io import load_weights

WANTED = {"train", "launch", "finetune", "eval", "export", "import", "models", "report", "schema"}
WANTED |= {
    "data pack",
    "data index",
    "data verify",
    "data stats",
    "data exclude",
    "data order",
    "checkpoint list",
    "checkpoint verify",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def config(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("it's a run"), shards)


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    """A run of 20 steps that `vitscale train` did."""
    done = vitscale("train", config)
    assert done.returncode == 0, done.stderr
    return config.parent / "run"


# ------------------------------------------------------------------------------------------------ help
@pytest.mark.parametrize("name", sorted(commands()))
def test_help_has_an_example_that_parses(name: str) -> None:
    done = run_main(*name.split(), "--help")
    assert done.code == 0
    assert done.err == ""
    (example,) = re.findall(r"Example: `(.*)`", commands()[name].help)
    assert example in " ".join(done.out.replace("│", " ").split())
    words = shlex.split(example)
    assert words[0] == "vitscale"
    assert words[1 : 1 + len(name.split())] == name.split(), "the example is of another command"
    assert set(parse(words[1:])) <= {key.key for key in describe_keys()}


def test_every_command_is_there_and_every_option_explained() -> None:
    assert set(commands()) == WANTED
    for name, what in commands().items():
        for parameter in what.params:
            assert parameter.help, f"{name} {parameter.name}"
    done = run_main("--help")
    assert done.code == 0
    for name in WANTED:
        assert name.split()[0] in done.out


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "CONFIG", "--print-config"], ["schema"]])
def test_what_needs_no_model_answers_without_torch(words: list[str], config: Path) -> None:
    code = (
        "import sys\nfrom vitscale.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'deepspeed', 'PIL', 'matplotlib'} & set(sys.modules)))"
    )
    words = [str(config) if word == "CONFIG" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_version() -> None:
    done = run_main("--version")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"vitscale \d+\.\d+\.\d+\n", done.out)


# ------------------------------------------------------------------------------------------------ train
def test_print_config_shows_what_would_run_and_starts_nothing(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards)
    done = run_main("train", config, "optim.lr=3e-4", "data.crop_area=[0.5, 1.0]", "--print-config")
    assert (done.code, done.err) == (0, "")
    (tmp_path / "resolved.yaml").write_text(done.out)
    resolved = load_config(tmp_path / "resolved.yaml")
    assert resolved == load_config(config, ["optim.lr=3e-4", "data.crop_area=[0.5, 1.0]"])
    assert resolved.optim.lr == 3e-4
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_finetune_starts_from_the_weights_of_a_run(run: Path, shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, duration="2 steps", model={"image_size": 16})
    done = vitscale("finetune", config, "init.head=keep", "--from", run)
    assert done.returncode == 0, done.stderr
    assert f"from weights of {run} (step 20, averaged weights)" in done.stderr
    assert "pos_embed" in done.stderr, "positions were resized"
    assert load_config(tmp_path / "run/config.yaml").init.weights == str(run)
    first = next(record for record in records(tmp_path / "run") if "loss" in record)
    assert first["step"] == 1


def test_a_dry_run_can_be_copied_into_a_shell(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's a run"
    config = write_config(folder, shards)
    arguments = ["train", str(config), "name='a b'"]
    done = run_main("launch", *arguments[1:], "--gpus-per-node", 2, "--dry-run")
    assert (done.code, done.err) == (0, "")
    number, times, name, *words = shlex.split(done.out)
    assert (number, times, name) == ("2", "x", "vitscale")
    assert words == arguments
    assert not (folder / "run/logs").exists()


# ------------------------------------------------------------------------------------------------ models
def test_eval_prints_and_writes_what_training_measured(run: Path, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    done = run_main("eval", run, "--data", shards / "validation", "--json", out, "--workers", 0)
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert found["top1"] == newest(run, 'evaluation_top1_ratio{weights="ema"}')
    assert found["loss"] == pytest.approx(newest(run, 'evaluation_loss{weights="ema"}'), rel=1e-5)
    assert (found["count"], found["unreadable"], found["protocol"], found["source"]) == (30, 0, "top1", str(run))
    assert done.out == (
        f"{run}: top-1 {100 * found['top1']:.2f} %, top-5 100.00 %, loss {found['loss']:.4f} on 30 images\n"
    )


@pytest.mark.parametrize("format", ["vitscale", "timm"])
def test_export_at_another_resolution_and_for_other_classes(run: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / "model.safetensors"
    done = run_main("export", run, out, "--format", format, "--resolution", 16, "--num-classes", 7)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{out}: step 20, averaged weights, at 16 px: ")
    weights = load_weights(out)
    assert (weights.config.image_size, weights.config.num_classes) == (16, 7)
    assert weights.state["pos_embed"].shape == (1, 1 + 4 * 4, 16)
    assert not weights.state["head.weight"].any()


def test_models_are_listed_with_timms_parameters() -> None:
    """Those of timm's vit_base_patch16_224, vit_large_patch16_224 and vit_huge_patch14_224, with their heads."""
    done = run_main("models")
    assert (done.code, done.err) == (0, "")
    rows = {line.split()[0]: line.split()[1] for line in done.out.splitlines()[1:]}
    assert (rows["B/16"], rows["L/16"], rows["H/14"]) == ("86.6", "304.3", "632.0")
    refused = run_main("models", "--resolution", 30)
    assert refused.code == 2
    assert refused.err.startswith("vitscale: --resolution 30: model.image_size: patches of 16 do not fill images of 30")


def test_import_says_what_it_recognised(tmp_path: Path) -> None:
    saved = tmp_path / "theirs"
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    ViTModel(config).save_pretrained(saved)
    done = run_main("import", saved, tmp_path / "ours.safetensors")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"{tmp_path}/ours.safetensors: Hugging Face ViT, 16 wide, 1 blocks, 2 heads at 8x8 with 0 classes\n"
        "left out, since a classifier has no use for it: pooler.dense.bias, pooler.dense.weight\n"
    )
    again = load_weights(tmp_path / "ours.safetensors")
    assert again.config.norm_eps == 1e-12
    assert again.config.activation == "gelu"
    for source in (tmp_path / "nothing.npz", tmp_path):
        missing = run_main("import", source, tmp_path / "x.safetensors")
        assert missing.code == 1
        assert str(source) in missing.err


def test_schema_is_printed_or_written(tmp_path: Path) -> None:
    printed = run_main("schema")
    assert (printed.code, printed.err) == (0, "")
    assert json.loads(printed.out) == json_schema()
    written = run_main("schema", tmp_path / "schema.json")
    assert (written.code, written.out, written.err) == (0, "", "")
    assert (tmp_path / "schema.json").read_text() == printed.out


# ------------------------------------------------------------------------------------------------ runs
def test_report_names_its_file(run: Path) -> None:
    done = run_main("report", run)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{run}/report.html\n"
    assert "<html" in (run / "report.html").read_text()


def test_checkpoints_are_listed_and_damage_is_found(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run / "checkpoints", copied / "checkpoints")
    whole = run_main("checkpoint", "verify", copied)
    assert (whole.code, whole.out, whole.err) == (0, "4 checkpoints: all whole\n", "")

    damaged = copied / "checkpoints/step_00000015"
    file = damaged / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    verified = run_main("checkpoint", "verify", copied)
    assert (verified.code, verified.out) == (EXIT_FAILED, "4 checkpoints: 1 damaged\n")
    assert verified.err.startswith(f"{damaged}: ")
    assert len(verified.err.splitlines()) == 1

    listed = run_main("checkpoint", "list", copied)
    assert (listed.code, listed.err) == (0, "")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in listed.out.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["5", "10", "15", "20"]
    assert [row[5] == "whole" for row in rows] == [True, True, False, True]
    assert {(row[3], row[4]) for row in rows} == {("ddp", "1")}


# ------------------------------------------------------------------------------------------------ data
def test_pack_index_verify(tmp_path: Path) -> None:
    images = class_folders(tmp_path / "images", {"cat": 6, "dog": 4})
    (images / "cat" / "notes.txt").write_text("no image")
    out = tmp_path / "shards"
    packed = run_main("data", "pack", images, out, "--shard-samples", 4, "--seed", 3)
    assert packed.code == 0, packed.err
    assert re.fullmatch(rf"{out}: 10 images in 3 shards, 0\.\d MiB, 2 classes\n", packed.out)
    assert f"1 file skipped, named in {out}/skipped.jsonl" in packed.err

    sound = run_main("data", "verify", out)
    assert (sound.code, sound.out) == (0, "10 samples in 3 shards: all sound\n")

    for file in (out / "index.json", *out.glob("*.idx")):
        file.unlink()
    indexed = run_main("data", "index", f"{out}/*.tar")
    assert (indexed.code, indexed.out) == (0, f"{out}: 10 samples in 3 shards indexed\n")
    assert run_main("data", "verify", out).code == 0

    shard = sorted(out.glob("*.tar"))[1]
    content = shard.read_bytes()
    place = content.index(b"\x89PNG")
    shard.write_bytes(content[:place] + b"nothing!" + content[place + 8 :])
    broken = run_main("data", "verify", out)
    assert broken.code == EXIT_FAILED
    assert re.fullmatch(r"10 samples in 3 shards: \d problems?\n", broken.out)
    assert shard.name in broken.err


def test_pack_holds_some_out_with_one_class_list(tmp_path: Path) -> None:
    images = class_folders(tmp_path / "images", {"cat": 10, "dog": 10})
    done = run_main("data", "pack", images, tmp_path / "a", "--validation", 0.2)
    assert done.code == 0, done.err
    assert [line.split(" in ")[0] for line in done.out.splitlines()] == [
        f"{tmp_path}/a/train: 16 images",
        f"{tmp_path}/a/validation: 4 images",
    ]
    more = class_folders(tmp_path / "more", {"dog": 3})
    again = run_main("data", "pack", more, tmp_path / "b", "--classes", tmp_path / "a/train/index.json")
    assert again.code == 0, again.err
    assert "classes without an image: cat" in again.err
    assert json.loads((tmp_path / "b/index.json").read_text())["classes"] == ["cat", "dog"]


# ------------------------------------------------------------------------------------------------ ends
def test_a_closed_pipe_is_no_fault() -> None:
    """`vitscale schema | head -1`."""
    process = subprocess.Popen(
        command("schema"), env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.parametrize("words", [[], ["data"], ["checkpoint"]])
def test_a_bare_group_shows_its_help(words: list[str]) -> None:
    done = run_main(*words)
    assert done.code == EXIT_USAGE
    assert re.search(rf"Usage: .*{' '.join(['vitscale', *words])} .*COMMAND", done.out)
