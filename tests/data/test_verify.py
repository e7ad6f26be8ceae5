"""What `verify_shards` finds wrong, and that it finds nothing wrong with sound shards."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.packing import pack_folder
from helpers.tars import class_folders, image_bytes, labelled, make_tar
from PIL import Image

from vitscale.data.index import index_shards
from vitscale.data.shards import load_offsets
from vitscale.data.verify import verify_shards
from vitscale.errors import UserError


def problems(folder: Path, **options: int) -> list[str]:
    load_offsets.cache_clear()
    return [str(problem) for problem in verify_shards(str(folder), progress=False, **options).problems]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    source = class_folders(tmp_path / "source", {"a": 8, "b": 4})
    pack_folder(str(source), str(tmp_path / "out"), shard_samples=6, progress=False)
    return tmp_path / "out"


def foreign(tmp_path: Path, members: list[tuple[str, bytes]], classes: tuple[str, ...] = ()) -> Path:
    make_tar(tmp_path / "x.tar", members)
    index_shards(str(tmp_path), classes=classes, progress=False)
    return tmp_path


def test_sound_shards(packed: Path) -> None:
    report = verify_shards(str(packed), progress=False)
    assert report.sound
    assert (report.shards, report.samples, report.problems) == (2, 12, ())


@pytest.mark.integration
def test_several_processes_find_the_same(packed: Path) -> None:
    os.remove(packed / "shard-00000.tar")
    assert problems(packed, processes=2) == problems(packed)


def test_real_images(shared_data: Path, tmp_path: Path) -> None:
    pack_folder(str(shared_data / "cifar10-mini" / "test"), str(tmp_path / "out"), progress=False)
    assert problems(tmp_path / "out") == []


def test_changed_pixels_show_in_the_checksum(packed: Path) -> None:
    with open(packed / "shard-00001.tar", "r+b") as file:
        file.seek(512)
        file.write(b"9")
    found = problems(packed)
    assert found[0].startswith("shard-00001.tar: its sha256 begins with ")
    assert "label 9 out of range, there are 2 classes" in found[1]
    assert len(found) == 2


def test_cut_shard(packed: Path) -> None:
    size = os.path.getsize(packed / "shard-00000.tar")
    with open(packed / "shard-00000.tar", "r+b") as file:
        file.truncate(4096 + 77)
    assert problems(packed) == [
        f"shard-00000.tar: 4,173 bytes, the index says {size:,}",
        "shard-00000.tar: a header of 77 instead of 512 bytes at byte 4,096; 1 samples before it can be read",
    ]


def test_missing_shard_and_missing_sidecar(packed: Path) -> None:
    os.remove(packed / "shard-00000.tar")
    os.remove(packed / "shard-00001.idx")
    found = problems(packed)
    assert found[0] == f"shard-00000.tar: {packed}/shard-00000.tar cannot be read: No such file or directory"
    assert "No such file or directory" in found[1]
    assert "shard-00001.idx" in found[1]
    assert len(found) == 2


def test_sidecar_of_another_shard(packed: Path) -> None:
    offsets = np.fromfile(packed / "shard-00000.idx", "<i8")
    offsets[2] += 512
    offsets.tofile(packed / "shard-00000.idx")
    assert problems(packed) == [
        f"shard-00000.tar: {packed}/shard-00000.idx does not fit the tar; run `vitscale data index` again"
    ]


def test_wrong_count_in_the_index(packed: Path) -> None:
    index = json.loads((packed / "index.json").read_text())
    index["shards"][0]["samples"] = 5
    (packed / "index.json").write_text(json.dumps(index))
    found = problems(packed)
    assert found[0] == "shard-00000.tar: 6 samples, the index says 5"
    assert "has 56 bytes instead of 48" in found[1]


def test_labels(tmp_path: Path) -> None:
    image = image_bytes(0)
    members = [
        *[("a.png", image), ("a.cls", b"2\n")],
        *[("b.png", image), ("b.cls", b"3")],
        *[("c.png", image), ("c.cls", b"cat")],
        *[("d.png", image), ("d.txt", b"a cat")],
        *[("e.png", image), ("e.json", b'{"label": 1}')],
        *[("f.png", image), ("f.json", b'{"caption": 1}')],
        *[("g.png", image), ("g.cls", b"-1")],
        *[("h.png", image), ("h.json", b"{")],
    ]
    wanted = [
        "x.tar: c: .cls is not an integer: b'cat'",
        "x.tar: d: no label among its fields png, txt",
        'x.tar: f: .json has no integer "label"',
        "x.tar: g: label -1 out of range",
        "x.tar: h: .json is not valid JSON",
    ]
    assert problems(foreign(tmp_path, members)) == wanted
    wanted.insert(0, "x.tar: b: label 3 out of range, there are 3 classes")
    wanted[4] += ", there are 3 classes"
    assert problems(foreign(tmp_path, members, classes=("ant", "bee", "cat"))) == wanted


def test_images(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "JPEG")
    members = [
        *[("a.cls", b"0"), ("a.jpg", file.getvalue()[: len(file.getvalue()) // 2])],
        *[("b.cls", b"0"), ("b.jpg", b"no image")],
        *[("c.cls", b"0"), ("c.jpg", b"")],
        *[("d.cls", b"0")],
        *[("e.cls", b"0"), ("e.jpg", image_bytes(1))],
    ]
    found = problems(foreign(tmp_path, members))
    assert found[0].startswith("x.tar: a: .jpg cannot be decoded: truncated: image file is truncated")
    assert found[1:] == [
        "x.tar: b: .jpg cannot be decoded: not_an_image: 8 bytes that begin with b'no image'",
        "x.tar: c: .jpg cannot be decoded: empty: 0 bytes",
        "x.tar: d: no image among its fields cls",
    ]


def test_broken_images_of_the_corner_set(shared_data: Path, tmp_path: Path) -> None:
    names = ("truncated_baseline.jpg", "broken_stream.png", "zero_byte.jpg", "gray16.png", "cmyk_adobe0.jpg")
    members = []
    for name in names:
        members.append((f"{name.split('.')[0]}.cls", b"0"))
        members.append((name, (shared_data / "corner-images" / name).read_bytes()))
    found = problems(foreign(tmp_path, members))
    assert [problem.split(": ")[1] for problem in found] == ["truncated_baseline", "broken_stream", "zero_byte"]


def test_keys_that_come_again(tmp_path: Path) -> None:
    folder = foreign(tmp_path, [*labelled(range(2)), *labelled([0])])
    assert problems(folder) == [
        "x.tar: s000: comes again later in the shard; members of a sample must follow each other"
    ]


def test_without_an_index(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", labelled(range(2)))
    with pytest.raises(UserError, match="make it with `vitscale data index"):
        verify_shards(str(tmp_path), progress=False)
