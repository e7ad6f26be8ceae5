"""Packing class folders: what the shards hold, that they are always the same, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.packing import pack_folder
from helpers.tars import class_folders, image_bytes

from vitscale.data import pack as pack_module
from vitscale.data.shards import ShardIndex, load_index, read_samples
from vitscale.data.source import image_type, read_classes
from vitscale.errors import UserError

COUNTS = {"ant": 20, "bee": 7, "cat": 13}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "source", COUNTS)


def pack(source: Path, out: Path, **options: object) -> pack_module.PackReport:
    return pack_folder(str(source), str(out), progress=False, **options)  # type: ignore[arg-type]


def refused(source: Path, out: Path, **options: object) -> str:
    with pytest.raises(UserError) as error:
        pack(source, out, **options)
    return error.value.message


def content(folder: Path) -> list[tuple[str, int, bytes]]:
    """(key, label, image) of all samples, in order."""
    index: ShardIndex = load_index(str(folder))
    samples = [s for shard, n in enumerate(index.samples) for s in read_samples(index, shard, 0, int(n))]
    return [(s.key, int(s.fields["cls"]), next(v for k, v in s.fields.items() if k != "cls")) for s in samples]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_image_once_with_its_label(source: Path, tmp_path: Path) -> None:
    report = pack(source, tmp_path / "out", shard_samples=12)
    assert report.classes == ("ant", "bee", "cat")
    assert (report.splits[0].shards, report.splits[0].samples, report.skipped) == (4, 40, ())
    index = load_index(str(tmp_path / "out"))
    assert index.samples.tolist() == [10, 10, 10, 10]
    assert index.classes == ("ant", "bee", "cat")
    found = {(label, image) for _, label, image in content(tmp_path / "out")}
    wanted = {(label, path.read_bytes()) for label, name in enumerate(COUNTS) for path in (source / name).iterdir()}
    assert found == wanted
    keys = [key for key, _, _ in content(tmp_path / "out")]
    assert len(set(keys)) == 40
    assert not any("." in key for key in keys)
    assert sorted(os.listdir(tmp_path / "out"))[0] == "index.json"
    assert len(os.listdir(tmp_path / "out")) == 9


def test_shuffled_over_the_whole_set_by_seed(source: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        pack(source, tmp_path / name, shard_samples=10, seed=seed)
    labels = [label for _, label, _ in content(tmp_path / "a")]
    assert labels != sorted(labels)
    assert all(len(set(labels[i : i + 10])) > 1 for i in range(0, 40, 10))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert content(tmp_path / "a") != content(tmp_path / "c")


@pytest.mark.integration
def test_bytes_do_not_depend_on_processes_or_times(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "a", shard_samples=10, validation=0.2)
    for path in source.rglob("*.png"):
        os.utime(path, (1, 1))
    moved = source.rename(tmp_path / "moved")
    pack(moved, tmp_path / "b", shard_samples=10, validation=0.2, processes=2)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_shard_length(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "source", {"a": 200})
    pack(source, tmp_path / "out", shard_bytes=100_000)
    lengths = load_index(str(tmp_path / "out")).bytes
    assert len(lengths) == 5
    assert (lengths <= 100_000).all()


def test_stratified_validation_split(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "source", {"a": 40, "b": 20, "c": 10, "d": 1})
    pack(source, tmp_path / "out", validation=0.1)
    train, held = content(tmp_path / "out" / "train"), content(tmp_path / "out" / "validation")
    assert Counter(label for _, label, _ in held) == {0: 4, 1: 2, 2: 1}
    assert Counter(label for _, label, _ in train) == {0: 36, 1: 18, 2: 9, 3: 1}
    assert not {image for *_, image in train} & {image for *_, image in held}
    assert load_index(str(tmp_path / "out/train")).classes == load_index(str(tmp_path / "out/validation")).classes
    with pytest.raises(UserError, match=r"its folders have one: .*out/train, .*out/validation"):
        load_index(str(tmp_path / "out"))


def test_one_class_map_for_two_sources(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "train")
    other = class_folders(tmp_path / "other", {"cat": 2, "bee": 0})
    report = pack(other, tmp_path / "val", classes=read_classes(str(tmp_path / "train")))
    assert [label for _, label, _ in content(tmp_path / "val")] == [2, 2]
    assert report.empty == ("ant", "bee")
    (other / "bees").mkdir()
    assert refused(other, tmp_path / "x", classes=("ant", "bee", "cat")) == (
        f"class folder {other}/bees is not in the list of 3 classes; did you mean 'bee'?"
    )


def test_an_empty_class_keeps_its_label(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "source", {"a": 2, "b": 0, "c": 3})
    report = pack(source, tmp_path / "out")
    assert report.empty == ("b",)
    assert Counter(label for _, label, _ in content(tmp_path / "out")) == {0: 2, 2: 3}


def test_class_lists(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("ant\n\n bee \ncat\n")
    assert read_classes(str(tmp_path / "classes.txt")) == ("ant", "bee", "cat")
    (tmp_path / "twice.txt").write_text("ant\nbee\nant\n")
    with pytest.raises(UserError, match="class 'ant' stands twice in"):
        read_classes(str(tmp_path / "twice.txt"))
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(UserError, match="names no classes"):
        read_classes(str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match=r"the class list .*missing.txt cannot be read: .*No such file"):
        read_classes(str(tmp_path / "missing.txt"))


def test_what_is_taken_for_an_image(source: Path, tmp_path: Path) -> None:
    ant, bee = source / "ant", source / "bee"
    (ant / "notes.txt").write_text("no image")
    (ant / "empty.png").touch()
    (ant / "broken.png").symlink_to("nowhere.png")
    (ant / ".hidden.png").write_bytes(image_bytes(1))
    (source / ".cache").mkdir()
    (source / "README").touch()
    (ant / "A.B.C.JPEG").write_bytes(image_bytes(900))
    (bee / "deeper").mkdir()
    (bee / "deeper" / "x.png").write_bytes(image_bytes(901, format="JPEG"))
    (bee / "deeper" / "loop").symlink_to(bee)
    (source / "dog").symlink_to(class_folders(tmp_path / "elsewhere", {"dogs": 3}) / "dogs")
    report = pack(source, tmp_path / "out")
    assert [tuple(skip) for skip in report.skipped] == [
        ("ant/broken.png", "cannot be read: No such file or directory"),
        ("ant/empty.png", "empty file"),
        ("ant/notes.txt", "not an image: its first bytes are those of no known format"),
    ]
    assert [json.loads(line)["path"] for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()] == [
        skip.path for skip in report.skipped
    ]
    assert report.splits[0].samples == 45
    assert report.classes == ("ant", "bee", "cat", "dog")
    index = load_index(str(tmp_path / "out"))
    fields = {s.key.partition("-")[2]: set(s.fields) for s in read_samples(index, 0, 0, 45)}
    assert fields["A_B_C"] == {"cls", "png"}
    assert fields["x"] == {"cls", "jpg"}


def test_image_types_of_real_encoders(shared_data: Path) -> None:
    wanted = {"alpha.webp": "webp", "photo.avif": "avif", "tiny.jxl": "jxl", "png_named.JPEG": "png", "bomb.gif": "gif"}
    found = {name: image_type((shared_data / "corner-images" / name).read_bytes()) for name in wanted}
    assert found == wanted


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_tools_read_our_shards(source: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    pack(source, tmp_path / "out", shard_samples=15)
    index = load_index(str(tmp_path / "out"))
    dataset = webdataset.WebDataset(list(index.paths), shardshuffle=False)
    found = [(sample["__key__"], int(sample["cls"]), sample["png"]) for sample in dataset]
    gc.collect()  # webdataset leaves its files open
    assert found == content(tmp_path / "out")
    assert len(found) == 40


def test_shards_that_end_up_empty_are_not_written(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "source", {"a": 6})
    for number in range(4):
        (source / "a" / f"{number:03d}.png").write_bytes(b"no image")
    report = pack(source, tmp_path / "out", shard_samples=1)
    assert report.splits[0].shards == 2
    assert load_index(str(tmp_path / "out")).samples.tolist() == [1, 1]
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2


def test_an_interrupted_pack_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write = pack_module._write_shard
    written: list[str] = []

    def stops_at_the_third(job: pack_module._Job) -> int:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(job.tar)
        return write(job)

    monkeypatch.setattr(pack_module, "_write_shard", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        pack(source, out, shard_samples=10)
    monkeypatch.setattr(pack_module, "_write_shard", write)
    with pytest.raises(UserError, match="holds a pack that did not end; run the same `vitscale data pack` again"):
        load_index(str(out))
    assert "holds an interrupted pack of another source or with other settings" in refused(source, out, seed=1)
    kept = {path: os.stat(path).st_mtime_ns for path in written}
    report = pack(source, out, shard_samples=10)
    assert report.resumed == 2
    assert kept == {path: os.stat(path).st_mtime_ns for path in written}
    pack(source, tmp_path / "whole", shard_samples=10)
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.integration
def test_killed_and_run_again(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "source", {"a": 300, "b": 300})
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "vitscale", "data", "pack", str(source), str(out), "--shard-samples", "2"],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(out.glob("*.tar"))) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "index.json").exists()
    assert pack(source, out, shard_samples=2).resumed >= 5
    pack(source, tmp_path / "whole", shard_samples=2)
    assert files(out) == files(tmp_path / "whole")


def test_sources_that_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert refused(tmp_path / "none", out) == f"the source {tmp_path}/none cannot be read: No such file or directory"
    assert refused(source / "bee", out) == (
        f"no class folders in {source}/bee: it holds 7 files; wanted is {source}/bee/<class>/<image>"
    )
    empty = class_folders(tmp_path / "empty", {"a": 0, "b": 0})
    assert refused(empty, out) == f"no images in {empty}: its 2 class folders are empty"
    splits = class_folders(tmp_path / "splits", {"train": 1, "val": 1})
    assert "holds splits (train, val), not classes; pack each alone" in refused(splits, out)
    assert "lies inside the source" in refused(source, source / "shards")
    texts = class_folders(tmp_path / "texts", {"a": 0})
    (texts / "a" / "x.txt").write_text("text")
    assert not out.exists()
    assert "none of its 1 files is one (a/x.txt: not an image" in refused(texts, out)


def test_settings_that_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "the validation fraction is 1.0; it must be at least 0 and below 1" in refused(source, out, validation=1.0)
    assert "takes none of the 40 images" in refused(source, out, validation=0.001)
    assert "shards of 0 samples" in refused(source, out, shard_samples=0)


def test_outputs_that_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "thesis.tex").touch()
    assert refused(source, tmp_path / "held") == (
        f"{tmp_path}/held is not empty: it holds thesis.tex; pack into a new folder"
    )
    (tmp_path / "file").touch()
    assert refused(source, tmp_path / "file" / "out") == (
        f"the shards cannot be written: {tmp_path}/file/out: Not a directory"
    )
    pack(source, tmp_path / "out")
    assert "is not empty: it holds index.json" in refused(source, tmp_path / "out")


def test_full_disk(source: Path, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    call = "import runpy, sys; sys.argv[1:1] = ['data', 'pack']; runpy.run_module('vitscale', run_name='__main__')"
    out = tmp_path / "out"
    command = [sys.executable, "-c", limit + ignore + call, str(source), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the shards cannot be written" in ended.stderr
    assert "File too large" in ended.stderr
    assert not (out / "index.json").exists()
    assert pack(source, out, shard_samples=40).splits[0].samples == 40


def test_labels_follow_the_numpy_order(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    order = np.random.default_rng([0, 0]).permutation(40)
    assert [int(key.partition("-")[0]) for key, *_ in content(tmp_path / "out")] == order.tolist()
