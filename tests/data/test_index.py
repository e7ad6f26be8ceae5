"""Indexing shards that other tools made."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.tars import image_bytes, labelled, make_tar

from vitscale.data.index import index_shards
from vitscale.data.shards import load_index, read_samples
from vitscale.errors import UserError


def keys_in(folder: Path, shard: int = 0) -> list[tuple[str, list[str]]]:
    index = load_index(str(folder))
    return [(s.key, sorted(s.fields)) for s in read_samples(index, shard, 0, int(index.samples[shard]))]


def test_index_and_sidecar(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", labelled(range(3)))
    report = index_shards(str(path), progress=False)
    assert (report.folders, report.shards, report.samples, report.problems) == ((str(tmp_path),), 1, 3, ())
    assert json.loads((tmp_path / "index.json").read_text()) == {
        "format": "vitscale-index",
        "version": 1,
        "classes": [],
        "shards": [
            {"name": "x.tar", "samples": 3, "bytes": 10240, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        ],
    }
    assert np.fromfile(tmp_path / "x.idx", "<i8").tolist() == [0, 2048, 4096, 6144]


def test_keys_with_folders_dots_and_capitals(tmp_path: Path) -> None:
    files = [
        ("d.1/img.v1.0.JPG", b"1"),
        ("d.1/img.Cls", b"2"),
        ("./b.PNG", b"3"),
        ("__meta__/x.json", b"{}"),
        ("c", b""),
    ]
    make_tar(tmp_path / "x.tar", files)
    assert index_shards(str(tmp_path), progress=False).problems == ()
    assert keys_in(tmp_path) == [("d.1/img", ["cls", "v1.0.jpg"]), ("./b", ["png"])]


def test_groups_end_with_the_shard(tmp_path: Path) -> None:
    for number in range(2):
        make_tar(tmp_path / f"{number}.tar", [("000.png", image_bytes(number)), ("000.cls", b"0")])
    report = index_shards(str(tmp_path), progress=False)
    assert (report.samples, report.problems) == (2, ())
    assert keys_in(tmp_path, 1) == [("000", ["cls", "png"])]


def test_gnu_tar_of_a_folder(tmp_path: Path) -> None:
    source = tmp_path / "source" / "a"
    source.mkdir(parents=True)
    for number in range(3):
        (source / f"{number}.png").write_bytes(image_bytes(number))
        (source / f"{number}.cls").write_text(f"{number}\n")
    (tmp_path / "set").mkdir()
    subprocess.run(["tar", "--sort=name", "-cf", "../set/x.tar", "a"], cwd=tmp_path / "source", check=True)
    index_shards(str(tmp_path / "set"), progress=False)
    assert keys_in(tmp_path / "set") == [(f"a/{number}", ["cls", "png"]) for number in range(3)]


def test_odd_samples_are_reported(tmp_path: Path) -> None:
    files = [*labelled(range(2)), ("s001.cls", b"1"), *labelled([0]), *labelled([1])]
    path = make_tar(tmp_path / "x.tar", files)
    make_tar(tmp_path / "y.tar", [])
    report = index_shards(str(tmp_path), progress=False)
    assert [str(problem) for problem in report.problems] == [
        f"{path}: s001: two members .cls; the first one counts",
        f"{path}: s000: comes again later in the shard, and so do 1 more keys; "
        "members of a sample must follow each other",
        f"{tmp_path}/y.tar: no samples",
    ]
    assert load_index(str(tmp_path)).samples.tolist() == [4, 0]


def test_cut_shards_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "a.tar", labelled(range(3))).read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[: 2048 + 100])
    (tmp_path / "c.tar").write_bytes(whole[:2048])
    (tmp_path / "d.tar").write_bytes(b"")
    with pytest.raises(UserError) as error:
        index_shards(str(tmp_path), progress=False)
    assert error.value.message == (
        "3 of 4 shards cannot be indexed: "
        f"{tmp_path}/b.tar: a header of 100 instead of 512 bytes at byte 2,048; "
        f"{tmp_path}/c.tar: the archive is cut off: it ends without the zeros that close a tar, at byte 2,048; "
        f"{tmp_path}/d.tar: the archive is cut off: it ends without the zeros that close a tar, at byte 0"
    )
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "b.tar", "c.tar", "d.tar"]


@pytest.mark.integration
def test_several_processes_make_the_same_index(tmp_path: Path) -> None:
    for number in range(3):
        make_tar(tmp_path / f"{number}.tar", labelled(range(number + 1)))
    index_shards(str(tmp_path), progress=False)
    alone = (tmp_path / "index.json").read_bytes()
    index_shards(str(tmp_path), processes=2, progress=False)
    assert (tmp_path / "index.json").read_bytes() == alone


def test_two_sets_in_one_folder_share_the_index(tmp_path: Path) -> None:
    make_tar(tmp_path / "train-0.tar", labelled(range(3)))
    make_tar(tmp_path / "val-0.tar", labelled(range(2)))
    index_shards(f"{tmp_path}/train-*.tar", classes=("a", "b", "c"), progress=False)
    index_shards(f"{tmp_path}/val-*.tar", progress=False)
    assert load_index(f"{tmp_path}/train-*.tar").samples.tolist() == [3]
    index = load_index(f"{tmp_path}/val-*.tar")
    assert (index.samples.tolist(), index.classes) == ([2], ("a", "b", "c"))
    os.remove(tmp_path / "train-0.tar")
    index_shards(f"{tmp_path}/val-*.tar", progress=False)
    assert load_index(str(tmp_path)).names == ("val-0.tar",)


def test_index_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    make_tar(tmp_path / "set" / "x.tar", labelled(range(3)))
    index_shards(str(tmp_path / "set"), classes=("a", "b", "c"), progress=False)
    report = index_shards(str(tmp_path / "set"), str(tmp_path / "index"), progress=False)
    assert report.folders == (str(tmp_path / "index"),)
    assert keys_in(tmp_path / "index") == keys_in(tmp_path / "set")
    assert load_index(str(tmp_path / "index")).classes == ("a", "b", "c")
    assert load_index(str(tmp_path / "index")).digest == load_index(str(tmp_path / "set")).digest


def test_shards_of_one_name_need_an_index_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_tar(tmp_path / name / "x.tar", labelled(range(2)))
    with pytest.raises(UserError, match=r"a/x.tar and .*b/x.tar have one name and cannot share the index"):
        index_shards((f"{tmp_path}/a", f"{tmp_path}/b"), str(tmp_path / "out"), progress=False)
    assert len(index_shards((f"{tmp_path}/a", f"{tmp_path}/b"), progress=False).folders) == 2


def test_sidecars_of_dali_are_left_alone(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", labelled(range(2)))
    (tmp_path / "x.idx").write_text("v1.2 2\n")
    with pytest.raises(UserError, match=r"x.idx is an index of DALI's wds2idx; `--out` puts ours into another folder"):
        index_shards(str(tmp_path), progress=False)
    assert (tmp_path / "x.idx").read_text() == "v1.2 2\n"


def test_no_place_to_write(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", labelled(range(2)))
    with pytest.raises(UserError, match=r"the index cannot be written to .*x.tar/inside: Not a directory; `--out`"):
        index_shards(str(tmp_path), str(tmp_path / "x.tar" / "inside"), progress=False)


def test_nothing_to_index(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match=r"no shards found for .*: .* holds notes.txt"):
        index_shards(str(tmp_path), progress=False)


def test_processes_must_be_positive(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", labelled(range(2)))
    with pytest.raises(UserError, match="processes is 0; it must be 1 or more"):
        index_shards(str(tmp_path), processes=0, progress=False)
