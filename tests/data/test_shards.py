"""Finding shards, reading samples of them, and every sentence that says why neither is possible."""

from __future__ import annotations

import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from helpers.tars import image_bytes, labelled, make_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.data import shards as shards_module
from vitscale.data import storage as storage_module
from vitscale.data.index import index_shards
from vitscale.data.shards import ShardError, load_index, read_samples
from vitscale.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three indexed shards of 4, 2 and 3 samples."""
    folder = tmp_path / "set"
    folder.mkdir()
    first = 0
    for number, count in enumerate((4, 2, 3)):
        make_tar(folder / f"train-{number:03d}.tar", labelled(range(first, first + count)))
        first += count
    index_shards(str(folder), classes=("a", "b", "c"), progress=False)
    return folder


def message(spec: str | tuple[str, ...]) -> str:
    with pytest.raises(UserError) as error:
        load_index(spec)
    return error.value.message


def test_folder(folder: Path) -> None:
    index = load_index(str(folder))
    assert index.names == ("train-000.tar", "train-001.tar", "train-002.tar")
    assert index.samples.tolist() == [4, 2, 3]
    assert index.num_samples == 9
    assert index.classes == ("a", "b", "c")
    assert index.bytes.tolist() == [os.path.getsize(path) for path in index.paths]
    assert pickle.loads(pickle.dumps(index)).digest == index.digest


@pytest.mark.parametrize(
    ("spec", "samples"),
    [
        ("train-{000..002}.tar", [4, 2, 3]),
        ("train-00[12].tar", [2, 3]),
        ("train-{002,000}.tar", [3, 4]),
        ("*.tar", [4, 2, 3]),
    ],
)
def test_brace_ranges_and_globs(folder: Path, spec: str, samples: list[int]) -> None:
    assert load_index(f"{folder}/{spec}").samples.tolist() == samples


def test_relative_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_index("train-001.tar").samples.tolist() == [2]
    assert load_index(".").samples.tolist() == [4, 2, 3]


def test_several_specs_follow_each_other(folder: Path) -> None:
    whole = load_index(str(folder))
    turned = load_index((f"{folder}/train-002.tar", f"{folder}/train-000.tar", f"{folder}/train-001.tar"))
    assert turned.samples.tolist() == [3, 4, 2]
    assert turned.digest != whole.digest
    assert load_index(tuple(whole.paths)).digest == whole.digest


def test_digest_stays_when_the_set_moves(folder: Path) -> None:
    before = load_index(str(folder)).digest
    moved = folder.rename(folder.parent / "moved")
    assert load_index(str(moved)).digest == before


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_range_is_what_was_written(tmp_path: Path, format: int) -> None:
    deep = "folder/" * 16 + "bild-ü"
    files = [(f"{deep}{n}.{field}", f"{n} {field}".encode() * (n * 97)) for n in range(6) for field in ("CLS", "jpg")]
    make_tar(tmp_path / "x.tar", files, format=format)
    index_shards(str(tmp_path), progress=False)
    index = load_index(str(tmp_path))
    wanted = [(f"{deep}{n}", {"cls": files[2 * n][1], "jpg": files[2 * n + 1][1]}) for n in range(6)]
    for start in range(7):
        for stop in range(start, 7):
            assert [(s.key, s.fields) for s in read_samples(index, 0, start, stop)] == wanted[start:stop]


@settings(max_examples=25)
@given(data=st.data())
def test_random_samples_come_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    keys = data.draw(st.lists(st.from_regex(r"[A-Za-z0-9_é/-]{1,110}", fullmatch=True), min_size=1, unique=True))
    keys = [f"k{number}/{key.replace('//', '/').strip('/')}x" for number, key in enumerate(keys)]
    fields = st.dictionaries(st.sampled_from(["jpg", "cls", "json", "a.b.txt"]), st.binary(max_size=1500), min_size=1)
    samples = [(key, data.draw(fields)) for key in keys]
    folder = tmp_path_factory.mktemp("random")
    format = data.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    make_tar(
        folder / "x.tar",
        [(f"{key}.{name}", content) for key, found in samples for name, content in found.items()],
        format=format,
    )
    assert index_shards(str(folder), progress=False).problems == ()
    index = load_index(str(folder))
    start = data.draw(st.integers(0, len(samples)))
    stop = data.draw(st.integers(start, len(samples)))
    assert [(s.key, s.fields) for s in read_samples(index, 0, start, stop)] == samples[start:stop]


def test_one_read_of_only_the_range(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = load_index(str(folder))
    ranges: list[tuple[int, int]] = []

    class Watched:
        def __init__(self, path: str) -> None:
            self.file = open(path, "rb")  # noqa: SIM115
            self.fileno, self.seek = self.file.fileno, self.file.seek

        def read(self, count: int) -> bytes:
            ranges.append((self.file.tell(), count))
            return self.file.read(count)

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    monkeypatch.setattr(shards_module, "open_shard", Watched)
    read_samples(index, 0, 1, 3)
    offsets = np.fromfile(index.sidecars[0], "<i8")
    assert ranges == [(offsets[1], offsets[3] - offsets[1])]


def test_a_passing_fault_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = load_index(str(folder))
    opened = shards_module.open_shard
    left = [2]

    def fails_twice(path: str) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return opened(path)

    monkeypatch.setattr(shards_module, "open_shard", fails_twice)
    monkeypatch.setattr(storage_module, "BACK_OFF", 0.001)
    assert len(read_samples(index, 1, 0, 2)) == 2
    left[0] = 3
    with pytest.raises(ShardError, match=r"train-001.tar: .*Input/output error.* \(3 tries\)") as error:
        read_samples(index, 1, 0, 2)
    assert error.value.shard == "train-001.tar"
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_shard_that_changes_later_is_an_error_of_that_shard(folder: Path) -> None:
    index = load_index(str(folder))
    with open(index.paths[0], "ab") as file:
        file.write(b"more")
    with pytest.raises(ShardError, match=r"train-000.tar: 10,244 bytes, but 10,240 when the index was loaded"):
        read_samples(index, 0, 0, 1)
    os.remove(index.paths[1])
    with pytest.raises(ShardError, match=r"train-001.tar: .*No such file"):
        read_samples(index, 1, 0, 1)


def test_a_damaged_sample_leaves_its_neighbours_alone(folder: Path) -> None:
    index = load_index(str(folder))
    offsets = np.fromfile(index.sidecars[0], "<i8")
    with open(index.paths[0], "r+b") as file:
        file.seek(offsets[1] + 3)
        file.write(b"\xff\xff")
    found = read_samples(index, 0, 0, 4)
    assert [sample.key for sample in found] == ["s000", "", "s002", "s003"]
    assert found[1].fault == "damaged tar: a header whose checksum is wrong"
    assert found[1].fields == {}


def test_wrong_sidecars(folder: Path) -> None:
    index = load_index(str(folder))
    offsets = np.fromfile(index.sidecars[0], "<i8")
    shards_module.load_offsets.cache_clear()
    offsets[:-1].tofile(index.sidecars[0])
    with pytest.raises(ShardError, match=r"train-000.idx has 32 bytes instead of 40"):
        read_samples(index, 0, 0, 1)
    offsets[::-1].tofile(index.sidecars[0])
    with pytest.raises(ShardError, match="does not list rising offsets"):
        read_samples(index, 0, 0, 1)
    os.remove(index.sidecars[0])
    with pytest.raises(ShardError, match=r"train-000.tar: .*No such file.*train-000.idx"):
        read_samples(index, 0, 0, 1)


def test_a_range_outside_the_shard_is_a_fault_of_the_caller(folder: Path) -> None:
    with pytest.raises(IndexError, match="holds 4"):
        read_samples(load_index(str(folder)), 0, 2, 5)


def test_nothing_found(folder: Path) -> None:
    assert message(f"{folder}/trian-000.tar") == (
        f"no shards found for '{folder}/trian-000.tar': {folder} holds index.json, train-000.idx, train-000.tar, "
        "train-001.idx, train-001.tar and 2 more; did you mean 'train-000.tar'?"
    )
    assert f"{folder.parent} holds set; did you mean 'set'?" in message(f"{folder.parent}/sett/x.tar")
    assert "1 of the 4 shards of" in message(f"{folder}/train-{{000..003}}.tar")
    assert message(f"{folder}/train-{{000..003}}.tar").endswith(f"do not exist: {folder}/train-003.tar")


def test_no_index(folder: Path, tmp_path: Path) -> None:
    os.remove(folder / "index.json")
    wanted = f"no index.json in {folder}, where 3 tars lie; make it with `vitscale data index {folder}`"
    assert message(str(folder)) == wanted
    assert message(f"{folder}/train-000.tar") == wanted
    (tmp_path / "empty").mkdir()
    assert message(f"{tmp_path}/empty") == f"no shards found in {tmp_path}/empty: {tmp_path}/empty holds nothing"


def test_size_differs_from_the_index(folder: Path) -> None:
    with open(folder / "train-001.tar", "r+b") as file:
        file.truncate(1000)
    os.remove(folder / "train-002.tar")
    text = message(str(folder))
    assert f"{folder}/train-001.tar has 1,000 bytes, the index says 10,240" in text
    assert f"{folder}/train-002.tar should have 10,240 bytes and cannot be read (No such file or directory)" in text
    assert f"`vitscale data verify {folder}`" in text
    assert f"`vitscale data index {folder}`" in text


def test_a_tar_that_is_not_in_the_index(folder: Path) -> None:
    make_tar(folder / "train-003.tar", labelled([9]))
    remedy = f"run `vitscale data index {folder}`"
    assert message(str(folder)) == f"{folder}/index.json does not list train-003.tar; {remedy}"
    assert message(f"{folder}/train-003.tar") == f"{folder}/train-003.tar is not in {folder}/index.json; {remedy}"


def test_named_twice(folder: Path) -> None:
    assert "train-000.tar is named twice" in message((str(folder), f"{folder}/train-000.tar"))


def test_class_lists_that_differ(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    make_tar(other / "x.tar", labelled(range(2)))
    index_shards(str(other), progress=False)
    assert load_index((str(folder), str(other))).classes == ("a", "b", "c")
    index_shards(str(other), classes=("a", "c", "b"), progress=False)
    text = message((str(folder), str(other)))
    assert "have different class lists (label 1 is 'b' in one and 'c' in the other)" in text
    index_shards(str(other), classes=("a", "b"), progress=False)
    assert "(3 and 2 classes)" in message((str(folder), str(other)))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("{", "is not valid JSON"),
        ("[]", 'is not an index of shards: "format" is not "vitscale-index"'),
        ({"version": 2}, "has version 2; this vitscale reads version 1"),
        ({"shards": None}, '"shards" is not a list'),
        ({"classes": [1]}, '"classes" is not a list of names'),
        ({"shards": [{"name": "a.tar"}]}, "shard 0 lacks 'samples'"),
        (
            {"shards": [{"name": "a.tar", "samples": -1, "bytes": 0, "sha256": ""}]},
            "shard 0 is not a name, two counts and a checksum",
        ),
        ({"shards": []}, "its index lists none"),
    ],
)
def test_broken_index(tmp_path: Path, content: object, wanted: str) -> None:
    sound = {"format": "vitscale-index", "version": 1, "classes": [], "shards": []}
    text = json.dumps({**sound, **content}) if isinstance(content, dict) else str(content)
    (tmp_path / "index.json").write_text(text)
    assert wanted in message(str(tmp_path))
    assert str(tmp_path) in message(str(tmp_path))


def test_commands_and_far_places_are_refused() -> None:
    assert "runs a command; set data.allow_pipe: true if you trust where it comes from" in message("pipe:cat x.tar")
    assert "nowhere:// is no place that shards can be read from" in message("nowhere://bucket/{000..002}.tar")
    assert "a brace is not closed" in message("x-{000..002.tar")


def test_sample_without_image_is_read_as_it_is(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", [("a.cls", b"1"), ("b.png", image_bytes(1)), ("README", b"hello"), ("b.cls", b"2")])
    index_shards(str(tmp_path), progress=False)
    found = read_samples(load_index(str(tmp_path)), 0, 0, 2)
    assert [(sample.key, sorted(sample.fields)) for sample in found] == [("a", ["cls"]), ("b", ["cls", "png"])]
