"""How fast training images come from shards: vitscale against what its users have today. Prints tables, judges nothing.

    python tests/bench/data.py [--images 1024] [--rounds 5] [--size small|large]

Every contender reads the same JPEG shards, takes the same kind of crop (Inception, 224 pixels, bicubic, flip) and has
two workers. They run in turn, each round in a process of its own, after one round that is not counted; the medians are
printed. Images per CPU-second count the CPU time of all processes of a contender once it runs: on a node that decides
how many cores a GPU needs. Packages that are not installed are said to be missing; of scikit-image and scikit-learn one
must be, for their photos.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

BATCH, WORKERS, SIDE, CLASSES = 64, 2, 224, 10
SIZES = {"small": (375, 500), "large": (900, 1200)}


# ------------------------------------------------------------------------------------------------ the corpus
def photos() -> list[Image.Image]:
    """Real photos that scientific packages ship."""
    found = []
    if importlib.util.find_spec("sklearn"):
        from sklearn.datasets import load_sample_images

        found += [Image.fromarray(image) for image in load_sample_images().images]
    if importlib.util.find_spec("skimage"):
        from skimage import data

        found += [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "coffee", "chelsea")]
    if not found:
        sys.exit("photos are missing: pip install scikit-image scikit-learn")
    return found


def make_corpus(folder: Path, images: int, size: tuple[int, int]) -> None:
    """Class folders of crops of the photos, enlarged to `size`, of quality 92; packed as the shards for all."""
    from vitscale.data.pack import pack_source
    from vitscale.data.source import scan_folder

    random = np.random.default_rng(0)
    originals = photos()
    for number in range(images):
        original = originals[number % len(originals)]
        scale = random.uniform(0.6, 1.0) * min(original.height / size[0], original.width / size[1])
        height, width = int(size[0] * scale), int(size[1] * scale)
        top, left = random.integers(original.height - height + 1), random.integers(original.width - width + 1)
        part = original.crop((left, top, left + width, top + height)).resize(size[::-1], Image.Resampling.LANCZOS)
        noise = random.integers(-14, 15, (*size, 3), np.int16)  # a sensor's, which resizing takes away
        noisy = np.asarray(part, np.int16) + noise
        file = folder / "images" / f"class{number % CLASSES}" / f"{number:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=92)
    source = scan_folder(str(folder / "images"))
    pack_source(source, str(folder / "shards"), shard_samples=max(1, images // 8), progress=False)


# ------------------------------------------------------------------------------------------------ contenders
def vitscale(folder: Path, workers: int = WORKERS) -> Iterator[int]:
    from vitscale.config.schema import DataConfig
    from vitscale.data.loader import TrainLoader

    config = DataConfig(train=str(folder / "shards"), workers=workers)
    loader = TrainLoader(
        config, image_size=SIDE, num_classes=CLASSES, global_batch=BATCH, seed=0, rank=0, world_size=1, start_step=0,
        run_dir=folder,
    )  # fmt: skip
    try:
        for batch in loader:
            yield len(batch)
    finally:
        loader.close()


def vitscale_in_one_thread(folder: Path) -> Iterator[int]:
    import torch

    torch.set_num_threads(1)
    yield from vitscale(folder, workers=0)


def vitscale_without_library(folder: Path) -> Iterator[int]:
    from vitscale.data import decode

    decode.available = lambda: False
    yield from vitscale(folder)


def _tars(folder: Path) -> list[str]:
    return sorted(map(str, (folder / "shards").glob("*.tar")))


def _webdataset(folder: Path, decode: Callable[[bytes], Any]) -> Iterator[int]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset = (
        wds.WebDataset(_tars(folder), shardshuffle=100, resampled=True, seed=0)
        .shuffle(500)
        .to_tuple("jpg", "cls")
        .map_tuple(decode, int)
        .batched(BATCH)
    )
    for images, _ in DataLoader(dataset, batch_size=None, num_workers=WORKERS):
        yield len(images)


def webdataset_with_pillow(folder: Path) -> Iterator[int]:
    from torchvision import transforms as T

    transform = T.Compose([
        T.RandomResizedCrop(SIDE, (0.05, 1), interpolation=T.InterpolationMode.BICUBIC),
        T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(0.5, 0.5),
    ])  # fmt: skip
    return _webdataset(folder, lambda content: transform(Image.open(io.BytesIO(content)).convert("RGB")))


def webdataset_with_torchvision(folder: Path) -> Iterator[int]:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2 as T

    transform = T.Compose([
        T.RandomResizedCrop(SIDE, (0.05, 1), interpolation=T.InterpolationMode.BICUBIC, antialias=True),
        T.RandomHorizontalFlip(),
    ])  # fmt: skip

    def decode(content: bytes) -> Any:
        return transform(decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB))

    return _webdataset(folder, decode)


def timms_reader(folder: Path) -> Iterator[int]:
    import timm.data

    lengths = [shard["samples"] for shard in json.loads((folder / "shards/index.json").read_text())["shards"]]
    names = [Path(tar).name for tar in _tars(folder)]
    split = {"name": "train", "filenames": names, "shard_lengths": lengths, "num_samples": sum(lengths)}
    (folder / "shards" / "_info.json").write_text(json.dumps({"splits": {"train": split}}))
    while True:
        dataset = timm.data.create_dataset(
            "wds/", str(folder / "shards"), split="train", is_training=True, batch_size=BATCH, input_img_mode="RGB"
        )
        loader = timm.data.create_loader(
            dataset, (3, SIDE, SIDE), BATCH, is_training=True, use_prefetcher=False, no_aug=False, scale=(0.05, 1),
            interpolation="bicubic", num_workers=WORKERS, color_jitter=None, persistent_workers=False,
        )  # fmt: skip
        for images, _ in loader:
            yield len(images)


def mosaic_streaming(folder: Path) -> Iterator[int]:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader
    from torchvision import transforms as T

    there = folder / "mds"
    if not there.exists():
        with MDSWriter(out=str(there), columns={"image": "bytes", "label": "int"}) as writer:
            for file in sorted((folder / "images").glob("*/*.jpg")):
                writer.write({"image": file.read_bytes(), "label": int(file.parent.name.removeprefix("class"))})
    transform = T.Compose([
        T.RandomResizedCrop(SIDE, (0.05, 1), interpolation=T.InterpolationMode.BICUBIC),
        T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(0.5, 0.5),
    ])  # fmt: skip

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, place: int) -> Any:
            sample = super().__getitem__(place)
            return transform(Image.open(io.BytesIO(sample["image"])).convert("RGB")), sample["label"]

    dataset = Images(local=str(there), shuffle=True, batch_size=BATCH)
    while True:
        for images, _ in DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS):
            yield len(images)


def dali_on_cpu(folder: Path) -> Iterator[int]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)  # type: ignore[misc]
    def pipeline() -> Any:
        jpegs, labels = fn.readers.webdataset(
            paths=_tars(folder),
            ext=["jpg", "cls"],
            random_shuffle=True,
            initial_fill=500,
            missing_component_behavior="error",
        )
        images = fn.decoders.image_random_crop(jpegs, random_area=[0.05, 1], random_aspect_ratio=[0.75, 4 / 3])
        images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_CUBIC, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    pipe = pipeline()
    pipe.build()
    while True:
        images, _ = pipe.run()
        yield len(images)


def one_thread(folder: Path) -> Iterator[int]:
    """What the machine can do at all: decode, crop and resize in a loop, from memory."""
    import torch

    from vitscale.config.schema import DataConfig
    from vitscale.data.augment import train_view
    from vitscale.data.decode import open_picture

    torch.set_num_threads(1)
    config = DataConfig(train="")
    contents = [file.read_bytes() for file in sorted((folder / "images").glob("*/*.jpg"))]
    epoch = 0
    while True:
        for number, content in enumerate(contents):
            picture = open_picture(content)
            view = train_view(
                config, picture.height, picture.width, size=(SIDE, SIDE), seed=0, epoch=epoch, sample=number
            )
            picture.crop(view.box, (SIDE, SIDE))
            yield 1
        epoch += 1


CONTENDERS: dict[str, tuple[Callable[[Path], Iterator[int]], str | None]] = {
    "webdataset, Pillow, torchvision": (webdataset_with_pillow, "webdataset"),
    "webdataset, torchvision on uint8": (webdataset_with_torchvision, "webdataset"),
    "timm's reader and transforms": (timms_reader, "timm"),
    "MosaicML Streaming, Pillow": (mosaic_streaming, "streaming"),
    "DALI on the CPU": (dali_on_cpu, "nvidia.dali"),
    "vitscale without its library": (vitscale_without_library, None),
    "vitscale": (vitscale, None),
    "vitscale, one thread": (vitscale_in_one_thread, None),
    "decode and crop alone, one thread": (one_thread, None),
}


# ------------------------------------------------------------------------------------------------ measuring
def measure(name: str, folder: Path, images: int) -> None:
    """Print images per second and per CPU-second of one contender, its start not counted."""
    batches = CONTENDERS[name][0](folder)
    warm = 0
    while warm < images // 4:
        warm += next(batches)
    begin, cpu = time.perf_counter(), _cpu_seconds()
    done = 0
    while done < images:
        done += next(batches)
    result = {"rate": done / (time.perf_counter() - begin), "per_cpu_second": done / (_cpu_seconds() - cpu)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # some contenders' workers take their time to end


def _cpu_seconds() -> float:
    """Of this process and all below it, ended ones included."""
    this = psutil.Process()
    return sum(this.cpu_times()[:4]) + sum(sum(child.cpu_times()[:4]) for child in this.children(recursive=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--only", nargs="*", help="contenders whose names contain one of these words")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        measure(arguments.run[0], Path(arguments.run[1]), arguments.images)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_corpus(folder, arguments.images, SIZES[arguments.size])
        files = list((folder / "images").glob("*/*.jpg"))
        mean = statistics.mean(file.stat().st_size for file in files) / 1000
        print(f"{len(files)} images of {SIZES[arguments.size]}, {mean:.0f} kB; batch {BATCH}, {WORKERS} workers")
        compare(folder, arguments.images, arguments.rounds, arguments.only)


def compare(folder: Path, images: int, rounds: int, only: list[str] | None) -> None:
    """Run the contenders in turn and print the medians."""
    names = [name for name in CONTENDERS if not only or any(word in name for word in only)]
    missing = [name for name in names if (package := CONTENDERS[name][1]) and not _installed(package)]
    names = [name for name in names if name not in missing]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            command = [sys.executable, __file__, "--images", str(images), "--run", name, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
            said = json.loads(done.stdout.strip().splitlines()[-1])
            if number:
                results[name].append((said["rate"], said["per_cpu_second"]))
    base = next(iter(results))
    print(f"{'':<36}{'images/s':>10}{'per CPU-second':>16}{'against the first':>19}")
    for name, found in results.items():
        rate, per_cpu = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median(mine[1] / others[1] for mine, others in zip(found, results[base], strict=True))
        print(f"{name:<36}{rate:>10,.0f}{per_cpu:>16,.0f}{ratio:>19.2f}")
    for name in missing:
        print(f"{name:<36}{'not installed':>10}")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
