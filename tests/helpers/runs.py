"""Whole runs of a few seconds: shards, a config for them, and the `vitscale` command as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import yaml
from helpers.packing import pack_folder
from helpers.tars import class_folders
from torch import Tensor

from vitscale.train import checkpoint

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def write_shards(folder: Path, *, images: int = 30, classes: int = 3) -> Path:
    """`folder/train` and `folder/validation`: `images` a class, and a third of that held out."""
    for split, count in (("train", images), ("validation", images // 3)):
        source = class_folders(folder / "images" / split, {f"c{number}": count for number in range(classes)})
        pack_folder(str(source), str(folder / split), shard_samples=16)
    return folder


def write_config(folder: Path, shards: Path, **sections: object) -> Path:
    """A run of 20 steps of a model of one block, in `folder/run`; `sections` replace keys, one level deep."""
    run: dict[str, object] = {
        "name": "tiny",
        "run_dir": str(folder / "run"),
        "duration": "20 steps",
        "global_batch": 8,
        "data": {"train": str(shards / "train"), "validation": str(shards / "validation"), "workers": 1},
        "model": {
            "image_size": 8,
            "patch_size": 4,
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "mlp_dim": 32,
            "num_classes": 3,
            "dropout": 0.1,
            "drop_path": 0.1,
        },
        "optim": {"lr": 1e-2, "ema_decay": 0.9},
        "schedule": {"warmup": "10 percent"},
        "engine": {"precision": "float32"},
        "checkpoint": {"every": "5 steps", "keep_last": 100},
        "monitor": {"every": 1, "tensorboard": False, "prometheus_port": None},
        "cluster": {"timeout": 60.0},
    }
    for key, value in sections.items():
        section = run.get(key)
        run[key] = {**section, **value} if isinstance(section, dict) and isinstance(value, dict) else value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def command(*arguments: object) -> list[str]:
    """The words that run `vitscale` with this Python."""
    return [sys.executable, "-m", "vitscale", *map(str, arguments)]


def vitscale(*arguments: object, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """What `vitscale ARGUMENTS` says and how it ends."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start(*arguments: object, output: Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """`vitscale ARGUMENTS`, running, `before` it e.g. `nohup`; what it says goes to the file `output`."""
    with output.open("w") as file:
        process = subprocess.Popen(
            [*before, *command(*arguments)],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_heed_signals,
        )
    _started.append(process)
    return process


_started: list[subprocess.Popen[str]] = []


def _heed_signals() -> None:
    """Take back what a shell in the background or nohup around the tests set."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def end_started() -> None:
    """Kill what `start` began and a failed test left running."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    """Wait for something that happens soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def wait_for_checkpoint(run_dir: Path) -> None:
    """Wait for the first whole step of a run."""
    wait_until(lambda: any((run_dir / "checkpoints").glob("step_*")))


def records(run_dir: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl; those of a start have a key `event`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step, as last trained."""
    return {int(record["step"]): record["loss"] for record in records(run_dir) if "loss" in record}


def newest(run_dir: Path, key: str) -> float:
    """The last value that a metric had."""
    return [record[key] for record in records(run_dir) if key in record][-1]


def tensors(run_dir: Path) -> dict[str, Tensor]:
    """Everything in the newest checkpoint: `param/head.weight`, `exp_avg/...`, `ema/...`."""
    path = checkpoint.latest(run_dir)
    assert path is not None
    saved = checkpoint.read(path)
    return {f"{kind}/{name}": tensor for kind in saved.kinds for name, tensor in saved.state_dict(kind).items()}


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal in every bit."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
