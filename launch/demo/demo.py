"""From a folder of images to a fine-tuned ViT: the commands of vitscale on real images, one after the other.

    make demo                     scikit-learn's 1,797 scanned digits, a few minutes on two CPU cores
    make demo DATA=fashion-mnist  Debian's dataset-fashion-mnist, 70,000 images

Half way through pretraining one of the two ranks is killed with SIGKILL; the run goes on from its last checkpoint by
itself. Everything is left in runs/demo: shards, runs, model files, report.html.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.table import Table

ROOT = Path("runs/demo")
FASHION = Path("/usr/share/datasets/fashion-mnist")
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Settings:
    """What differs between the data sets, so that either takes minutes on two cores."""

    epochs: float
    finetune_epochs: float
    shard_samples: int
    overrides: tuple[str, ...] = ()


SETTINGS = {
    "digits": Settings(epochs=60, finetune_epochs=8, shard_samples=128),
    "fashion-mnist": Settings(
        epochs=3, finetune_epochs=1, shard_samples=4096, overrides=("schedule.warmup=10 percent",)
    ),
}


def main() -> None:
    """Run the demo from start to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=sorted(SETTINGS), default="digits")
    parser.add_argument("--epochs", type=float, help="of pretraining; fine-tuning is shortened alike")
    arguments = parser.parse_args()
    data, settings = arguments.data, SETTINGS[arguments.data]
    epochs = arguments.epochs or settings.epochs
    finetune_epochs = settings.finetune_epochs * epochs / settings.epochs
    shutil.rmtree(ROOT, ignore_errors=True)
    pretrained, finetuned = ROOT / "pretrain", ROOT / "finetune"

    title(f"Images: {data}")
    write_images(data)
    title("Pack them into shards, with an index, and check those")
    for split in ("train", "validation"):
        shards = f"{ROOT}/shards/{split}"
        vitscale("data", "pack", f"{ROOT}/images/{split}", shards, "--shard-samples", str(settings.shard_samples))
        vitscale("data", "verify", shards)

    title("Pretrain on two processes; one of them is killed half way")
    duration = f"duration={epochs:g} epochs"
    threading.Thread(target=kill_a_rank, args=(pretrained, epochs / 2), daemon=True).start()
    launch = ("--on", "local", "--gpus-per-node", "2")
    vitscale("launch", "configs/demo/pretrain.yaml", *launch, duration, *settings.overrides)
    show_restart(pretrained)
    vitscale("checkpoint", "list", str(pretrained))

    title("Export at the resolution of pretraining and at twice that")
    before, start = ROOT / "exported-24px.safetensors", ROOT / "exported-48px.safetensors"
    vitscale("export", str(pretrained), str(before))
    vitscale("export", str(pretrained), str(start), "--resolution", "48")

    title("Fine-tune at twice the resolution")
    duration = f"duration={finetune_epochs:g} epochs"
    vitscale("finetune", "configs/demo/finetune.yaml", "--from", str(start), duration, *settings.overrides)
    after = ROOT / "finetuned-48px.safetensors"
    vitscale("export", str(finetuned), str(after))

    title("Top-1 on held-out images")
    rows = [
        ("pretrained, 24 px", evaluate(before)),
        ("the same, exported at 48 px", evaluate(start)),
        ("fine-tuned, 48 px", evaluate(after)),
    ]
    for run in (pretrained, finetuned):
        vitscale("report", str(run))
    table = Table("model", "top-1", "images")
    for name, result in rows:
        table.add_row(name, f"{100 * result['top1']:.2f} %", str(result["count"]))
    console.print(table)
    console.print(f"Look at {pretrained}/report.html and {finetuned}/report.html")


def title(text: str) -> None:
    """A heading between the steps."""
    console.print(f"\n== {text}", style="bold")


def vitscale(*arguments: str) -> None:
    """Run one command as a user would, and stop the demo if it fails."""
    console.print(f"$ vitscale {shlex.join(arguments)}", style="cyan")
    on_cpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # the demo needs two processes, which one GPU would not take
    done = subprocess.run([sys.executable, "-m", "vitscale", *arguments], env=on_cpus, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def evaluate(model: Path) -> dict[str, float]:
    """`vitscale eval` on the validation shards, its JSON read back."""
    out = model.with_suffix(".eval.json")
    vitscale("eval", str(model), "--data", f"{ROOT}/shards/validation", "--json", str(out))
    result: dict[str, float] = json.loads(out.read_text())
    return result


# ------------------------------------------------------------------------------------------------ images
def write_images(data: str) -> None:
    """Class folders of PNG files under images/train and images/validation."""
    count = 0
    for split, label, place, pixels in digits() if data == "digits" else fashion_mnist():
        folder = ROOT / "images" / split / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{place:05d}.png")
        count += 1
    console.print(f"{count} images in {ROOT}/images")


def digits() -> Iterator[tuple[str, int, int, NDArray[np.uint8]]]:
    """scikit-learn's digits, 8 x 8 with 17 grey levels; every fifth is held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for place, (image, label) in enumerate(zip(bunch.images, bunch.target, strict=True)):
        yield "validation" if place % 5 == 4 else "train", int(label), place, (image * 255 / 16).astype(np.uint8)


def fashion_mnist() -> Iterator[tuple[str, int, int, NDArray[np.uint8]]]:
    """Fashion-MNIST's own split, 28 x 28."""
    if not FASHION.exists():
        sys.exit(f"{FASHION} is not there; install Debian's package: apt-get install dataset-fashion-mnist")
    for split, prefix in (("train", "train"), ("validation", "t10k")):
        labels = np.frombuffer(unzip(FASHION / f"{prefix}-labels-idx1-ubyte.gz"), np.uint8, offset=8)
        pixels = np.frombuffer(unzip(FASHION / f"{prefix}-images-idx3-ubyte.gz"), np.uint8, offset=16)
        for place, image in enumerate(pixels.reshape(-1, 28, 28)):
            yield split, int(labels[place]), place, image


def unzip(path: Path) -> bytes:
    """All of a .gz file."""
    with gzip.open(path) as file:
        return file.read()


# ------------------------------------------------------------------------------------------------ the accident
def kill_a_rank(run_dir: Path, epoch: float) -> None:
    """Wait until the metrics endpoint says that `epoch` is reached, show some of it, and kill rank 1."""
    while (values := scrape(run_dir)).get("vitscale_epoch", 0) < epoch:
        time.sleep(0.2)
    console.print(f"\n== Metrics at {endpoint(run_dir)}", style="bold")
    for name in ("vitscale_current_step", "vitscale_loss", "vitscale_grad_norm", "vitscale_learning_rate"):
        console.print(f"{name} {values.get(name)}")
    ranks = psutil.Process().children(recursive=True)
    victim = next(process for process in ranks if environment(process).get("RANK") == "1")
    console.print(f"== kill -9 {victim.pid}, rank 1", style="bold red")
    victim.kill()


def environment(process: psutil.Process) -> dict[str, str]:
    """The variables of another process; none when it has just ended."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def endpoint(run_dir: Path) -> str:
    """Where the run says that it serves its metrics."""
    where = json.loads((run_dir / "prometheus.json").read_text())
    return f"http://{where['host']}:{where['port']}/metrics"


def scrape(run_dir: Path) -> dict[str, float]:
    """The plain values at the run's metrics endpoint; none while it is not up."""
    try:
        with urllib.request.urlopen(endpoint(run_dir), timeout=2) as reply:
            lines = reply.read().decode().splitlines()
    except (OSError, ValueError):
        return {}
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")}


def show_restart(run_dir: Path) -> None:
    """The loss around the kill, from metrics.jsonl: as trained before, and as trained again from the checkpoint."""
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    restarts: list[int] = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("event") == "start":
            restarts.append(record["step"])
        elif "loss" in record:
            (before if len(restarts) < 2 else after)[record["step"]] = record["loss"]
    console.print(f"\n== The run went on from step {restarts[-1]}", style="bold")
    table = Table("step", "loss before the kill", "loss after the restart")
    last = max(before)
    for step in sorted(step for step in {*before, *after} if restarts[-1] - 40 <= step <= last + 40):
        cells = (f"{losses[step]:.6f}" if step in losses else "" for losses in (before, after))
        table.add_row(str(step), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
