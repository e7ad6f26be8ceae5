"""What is found wrong with a run before any process starts: each message, and all of them at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.packing import pack_folder
from helpers.runs import vitscale, write_config, write_shards
from helpers.tars import class_folders

from vitscale.cluster.preflight import check_writable, preflight
from vitscale.config.load import load_config
from vitscale.errors import EXIT_USAGE, UserError

NOBODY = 65534


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards")


def problems(config: Path, *overrides: str, ranks: int = 2) -> list[str]:
    """The lines of what preflight says; none when all is well."""
    said: list[UserError] = []
    try:
        preflight(load_config(config, overrides), ranks=ranks)
    except UserError as error:
        said.append(error)
    assert all(error.exit_code == EXIT_USAGE for error in said)
    return [line for error in said for line in error.message.splitlines()]


def test_a_sound_run_passes_and_has_its_folder(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, run_dir=str(tmp_path / "runs/deep/down"))
    assert problems(config) == []
    assert list((tmp_path / "runs/deep/down").iterdir()) == []


# ------------------------------------------------------------------------------------------------ the run folder
def test_a_folder_below_a_file(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "file/run"
    (line,) = problems(write_config(tmp_path, shards, run_dir=str(run_dir)))
    assert line.startswith(f"run_dir: {run_dir} cannot be written (Not a directory); name a folder that ")


@contextmanager
def unprivileged() -> Iterator[str]:
    """Act as a user who is not root; the name."""
    if os.geteuid() != 0:
        yield os.environ["USER"]
        return
    os.seteuid(NOBODY)
    try:
        yield "nobody"
    finally:
        os.seteuid(0)


def test_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", os.environ.get("USER", "root"))  # sudo and job scripts leave the wrong one there
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o500)
    with unprivileged() as user, pytest.raises(UserError) as caught:
        check_writable(folder / "run")
    assert caught.value.message == (
        f"run_dir: {folder}/run cannot be written (Permission denied); name a folder that {user} may write"
    )


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_file_system_that_is_read_only(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards)
    with mounted(tmp_path / "run", "ro"):
        (line,) = problems(config)
    assert line.startswith(f"run_dir: {tmp_path}/run cannot be written (Read-only file system)")


def test_not_enough_room_for_the_checkpoints(shards: Path, tmp_path: Path) -> None:
    """48 blocks of width 6144, as in ViT-22B: 12 * 6144**2 parameters each, with two moments and an average."""
    large = ["embed_dim=6144", "depth=48", "num_heads=48", f"mlp_dim={4 * 6144}"]
    config = write_config(tmp_path, shards, checkpoint={"keep_last": 999})
    (line,) = problems(config, *(f"model.{size}" for size in large))
    found = re.fullmatch(
        rf"run_dir: {tmp_path}/run has [0-9.]+ GB free; 999 checkpoints and the one being written take ([0-9.]+) GB "
        r"\(checkpoint\.keep_last\)",
        line,
    )
    assert found, line
    assert float(found[1]) == pytest.approx(1000 * 48 * 12 * 6144**2 * 4 * 4 / 1e9, rel=1e-3)


def test_checkpoints_that_are_there_need_no_more_room(shards: Path, tmp_path: Path) -> None:
    """A run that is started again on a disk that holds all it keeps."""
    dim, mlp, depth = 16, 32, 2
    block = 4 * dim + (dim + 1) * 3 * dim + (dim + 1) * dim + (dim + 1) * mlp + (mlp + 1) * dim
    parameters = (3 * 4 * 4 + 1) * dim + dim + 5 * dim + depth * block + 2 * dim + (dim + 1) * 3
    size = 4 * 4 * parameters  # with two moments and an average, in float32
    with mounted(tmp_path / "run", f"size={4 * size}") as run_dir:
        config = write_config(tmp_path, shards, checkpoint={"keep_last": 2})
        assert problems(config) == []
        for step in (5, 10):
            (run_dir / f"checkpoints/step_{step:08d}").mkdir(parents=True)
            (run_dir / f"checkpoints/step_{step:08d}/rank-00000.safetensors").write_bytes(bytes(size))
        assert problems(config) == []
        (run_dir / "other").write_bytes(bytes(int(1.2 * size)))
        (line,) = problems(config)
    assert "2 checkpoints and the one being written take 0.00 GB more (checkpoint.keep_last)" in line


# ------------------------------------------------------------------------------------------------ batch and shards
@pytest.mark.parametrize(
    ("ranks", "override", "line"),
    [
        (3, "seed=1", "global_batch is 8, which 3 ranks do not divide; 6 or 9 would do"),
        (
            2,
            "engine.micro_batch=8",
            "engine.micro_batch is 8, but global_batch 8 over 2 ranks is 4 samples a rank, which it does not divide; "
            "4 would do",
        ),
    ],
)
def test_ranks_and_micro_batches_divide_the_batch(
    ranks: int, override: str, line: str, shards: Path, tmp_path: Path
) -> None:
    assert problems(write_config(tmp_path, shards), override, ranks=ranks) == [line]


def test_no_shards(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards)
    assert problems(config, f"data.train={shards}/tarin") == [
        f"no shards found for '{shards}/tarin': {shards} holds images, train, validation; did you mean 'train'?"
    ]
    assert problems(config, f"data.validation={shards}/images")[0].startswith(f"no shards found in {shards}/images: ")


def test_a_shard_that_is_not_the_one_of_the_index(shards: Path, tmp_path: Path) -> None:
    shard = sorted((shards / "train").glob("*.tar"))[0]
    before = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + bytes(512))
    (line,) = problems(write_config(tmp_path, shards))
    assert f"{shard} has {before + 512:,} bytes, the index says {before:,}" in line
    assert f"`vitscale data index {shards}/train`" in line
    shard.unlink()
    (line,) = problems(write_config(tmp_path, shards))
    assert f"{shard} should have {before:,} bytes and cannot be read (No such file or directory)" in line


def test_classes_that_the_model_does_not_have(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, model={"num_classes": 2})
    assert problems(config) == ["data.train has 3 classes, model.num_classes is 2; set it to 3 or more"]


def test_validation_of_other_classes(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards)
    for name, classes in (("others", ("c0", "c1", "x")), ("fewer", ("c0", "c1"))):
        images = class_folders(tmp_path / "images" / name, dict.fromkeys(classes, 2))
        pack_folder(str(images), str(tmp_path / name))
        assert problems(config, f"data.validation={tmp_path}/{name}") == [
            f"data.validation has {len(classes)} classes, data.train 3, and label for label they are not the same; "
            "pack both with one list (`vitscale data pack --classes`)"
        ]


def test_validation_of_too_many_classes_where_training_names_none(shards: Path, tmp_path: Path) -> None:
    index = shards / "train/index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"classes": []}))
    config = write_config(tmp_path, shards, model={"num_classes": 2})
    assert problems(config) == ["data.validation has 3 classes, model.num_classes is 2; set it to 3 or more"]


def test_everything_is_said_at_once(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path, shards, run_dir=str(tmp_path / "file/run"))
    lines = problems(config, f"data.train={tmp_path}/nowhere", ranks=5)
    assert [line.split(" ")[0] for line in lines] == ["run_dir:", "global_batch", "no"]


@pytest.mark.integration
def test_launch_says_it_and_starts_nothing(shards: Path, tmp_path: Path) -> None:
    done = vitscale("launch", write_config(tmp_path, shards), "--on", "local", "--gpus-per-node", 3)
    assert done.returncode == EXIT_USAGE
    assert done.stderr == "vitscale: global_batch is 8, which 3 ranks do not divide; 6 or 9 would do\n"
    assert not (tmp_path / "run/logs").exists()
