"""Packing from tables, class tars and other shards; smaller images; parts of an array."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command_line import run_main
from helpers.packing import pack_folder
from helpers.tars import class_folders, image_bytes, make_tar
from PIL import Image

from vitscale.data.index import index_shards
from vitscale.data.shards import RawSample, load_index, read_samples

COUNTS = {"ant": 20, "bee": 7, "cat": 13}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "source", COUNTS)


def samples(folder: Path) -> list[RawSample]:
    index = load_index(str(folder))
    return [s for shard, count in enumerate(index.samples) for s in read_samples(index, shard, 0, int(count))]


def contents(folder: Path) -> list[tuple[int, bytes]]:
    """(label, image) of all samples, sorted."""
    return sorted(
        (int(s.fields["cls"]), next(v for k, v in s.fields.items() if k in ("jpg", "png"))) for s in samples(folder)
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def pack(source: object, out: Path, *options: object) -> Any:
    return run_main("data", "pack", source, out, *options)


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> list[tuple[int, bytes]]:
    pack_folder(str(source), str(tmp_path / "plain"), progress=False)
    return contents(tmp_path / "plain")


def class_tars(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for of_class in sorted(source.iterdir()):
        make_tar(
            folder / f"{of_class.name}.tar", [(path.name, path.read_bytes()) for path in sorted(of_class.iterdir())]
        )
    return folder


# ------------------------------------------------------------------------------------------------ tars
def test_class_tars_and_a_tar_of_them(source: Path, tmp_path: Path, expected: list[tuple[int, bytes]]) -> None:
    tars = class_tars(source, tmp_path / "tars")
    assert pack(tars, tmp_path / "a").code == 0
    make_tar(tmp_path / "all.tar", [(f"train/{tar.name}", tar.read_bytes()) for tar in sorted(tars.iterdir())])
    assert pack(tmp_path / "all.tar", tmp_path / "b").code == 0
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert contents(folder) == expected
        assert load_index(str(folder)).classes == ("ant", "bee", "cat")
        assert run_main("data", "verify", folder).code == 0
    assert [s.key for s in samples(tmp_path / "a")] == [s.key for s in samples(tmp_path / "b")]
    (tmp_path / "classes.txt").write_text("cat\nbee\nant\nfly\n")
    done = pack(tars, tmp_path / "c", "--classes", tmp_path / "classes.txt")
    assert "classes without an image: fly" in done.err
    assert contents(tmp_path / "c") == sorted((2 - label, image) for label, image in expected)


def test_class_tars_that_are_not(source: Path, tmp_path: Path) -> None:
    tars = class_tars(source, tmp_path / "tars")
    make_tar(tmp_path / "tars" / "dog.tar", [("1.jpg", image_bytes(1)), ("1.cls", b"3")])
    assert "holds labels (1.cls), as a WebDataset does; run `vitscale data index`" in pack(tars, tmp_path / "out").err
    os.truncate(tmp_path / "tars" / "dog.tar", 700)
    assert "dog.tar cannot be read" in pack(tars, tmp_path / "out").err
    make_tar(tmp_path / "mixed.tar", [("a.jpg", image_bytes(1))])
    assert "holds a.jpg; wanted is a tar of class tars" in pack(tmp_path / "mixed.tar", tmp_path / "out").err
    (tmp_path / "tars" / "dog.tar").unlink()
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    done = pack(tars, tmp_path / "out", "--classes", tmp_path / "classes.txt")
    assert "cat.tar" in done.err
    assert "is not in the list of 2 classes" in done.err
    assert not (tmp_path / "out").exists()


def test_other_shards_are_shuffled_and_cut_anew_with_all_their_members(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    rows = [(f"{n:03d}", n % 3) for n in range(30)]
    for shard in range(3):
        members = []
        for key, label in rows[shard * 10 : shard * 10 + 10]:
            members += [(f"x/{key}.jpg", image_bytes(int(key))), (f"x/{key}.cls", str(label).encode()),
                        (f"x/{key}.json", json.dumps({"caption": key}).encode())]  # fmt: skip
        make_tar(there / f"{shard}.tar", members)
    index_shards(str(there), classes=["a", "b", "c"], progress=False)
    assert pack(there, tmp_path / "out", "--shard-samples", 8, "--seed", 5).code == 0
    found = samples(tmp_path / "out")
    assert load_index(str(tmp_path / "out")).samples.tolist() == [7, 8, 7, 8]
    captions = [json.loads(s.fields["json"])["caption"] for s in found]
    assert captions != sorted(captions)
    for sample, caption in zip(found, captions, strict=True):
        assert sample.fields["png"] == image_bytes(int(caption))
        assert int(sample.fields["cls"]) == int(caption) % 3
        assert sample.key.endswith(caption)
    (tmp_path / "classes.txt").write_text("c\nb\na\n")
    pack(f"{there}/{{0..1}}.tar", tmp_path / "two", "--classes", tmp_path / "classes.txt")
    assert sorted(int(s.fields["cls"]) for s in samples(tmp_path / "two")) == sorted(
        2 - label for _, label in rows[:20]
    )
    make_tar(there / "9.tar", [("y.jpg", image_bytes(1))])
    index_shards(str(there), progress=False)
    assert "9.tar: y: no label among its fields jpg" in pack(there, tmp_path / "bad").err


# ------------------------------------------------------------------------------------------------ tables
def rows_of(source: Path) -> list[tuple[str, str]]:
    return [(f"source/{path.parent.name}/{path.name}", path.parent.name) for path in sorted(source.glob("*/*"))]


def test_tables_of_names_and_numbers(source: Path, tmp_path: Path, expected: list[tuple[int, bytes]]) -> None:
    rows = rows_of(source)
    numbers = {"ant": 0, "bee": 1, "cat": 2}
    (tmp_path / "names.csv").write_text("label,path\n" + "".join(f"{name},{path}\n" for path, name in rows))
    (tmp_path / "numbers.tsv").write_text(
        "path\tlabel\n" + "".join(f"{path}\t{numbers[name]}\n" for path, name in rows)
    )
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"path": p, "label": n}) + "\n" for p, n in rows))
    for name in ("names.csv", "numbers.tsv", "lines.jsonl"):
        out = tmp_path / f"out-{name}"
        assert pack(tmp_path / name, out).code == 0
        assert contents(out) == expected
    assert load_index(str(tmp_path / "out-names.csv")).classes == ("ant", "bee", "cat")
    assert load_index(str(tmp_path / "out-numbers.tsv")).classes == ("0", "1", "2")


def test_several_labels_each(source: Path, tmp_path: Path) -> None:
    rows = rows_of(source)
    text = "".join(f"{path},{name};bee\n" if name != "bee" else f"{path},bee\n" for path, name in rows)
    (tmp_path / "many.csv").write_text("path,label\n" + text)
    assert pack(tmp_path / "many.csv", tmp_path / "out").code == 0
    found = [json.loads(s.fields["json"])["labels"] for s in samples(tmp_path / "out")]
    assert sorted(map(tuple, found)) == sorted([(0, 1)] * 20 + [(1,)] * 7 + [(2, 1)] * 13)
    assert "cls" not in samples(tmp_path / "out")[0].fields


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "file,label\na,1\n", "t.csv:1 has no column path; wanted are path and label"),
        ("t.csv", "path,label\n", "t.csv has no rows"),
        (
            "t.csv",
            "path,label\nsource/ant/nothing.jpg,1\n",
            "t.csv:2: source/ant/nothing.jpg cannot be read: No such file",
        ),
        ("t.csv", "path,label\n{ant},\n", "has no label; a label is a class's number or name"),
        ("t.csv", "path,label\n,1\n", "t.csv:2 names no file"),
        ("t.jsonl", '{"path": "x"}\n', 't.jsonl:1 is not {"path": ..., "label": ...}'),
        ("t.jsonl", "nonsense\n", 't.jsonl:1 is not {"path": ..., "label": ...}'),
        ("t.jsonl", '{"path": "{ant}", "label": 1.5}\n', "has no label"),
    ],
)
def test_rows_that_cannot_be_are_named(source: Path, tmp_path: Path, name: str, text: str, said: str) -> None:
    first = rows_of(source)[0][0]
    (tmp_path / name).write_text(text.replace("{ant}", first))
    done = pack(tmp_path / name, tmp_path / "out")
    assert done.code == 1
    assert said in done.err
    assert not (tmp_path / "out").exists()


def test_labels_that_are_not_in_the_list(source: Path, tmp_path: Path) -> None:
    first = rows_of(source)[0][0]
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    for label, said in (
        ("bees", "t.csv:2: 'bees' is not in the list of 2 classes; did you mean 'bee'?"),
        ("2", "label 2 out of range"),
    ):
        (tmp_path / "t.csv").write_text(f"path,label\n{first},{label}\n")
        assert said in pack(tmp_path / "t.csv", tmp_path / "out", "--classes", tmp_path / "classes.txt").err


def test_parquet_as_hugging_face_writes_it(source: Path, tmp_path: Path, expected: list[tuple[int, bytes]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {"ant": 0, "bee": 1, "cat": 2}
    rows = [{"image": {"bytes": (tmp_path / path).read_bytes(), "path": path}, "label": numbers[name]}
            for path, name in rows_of(source)]  # fmt: skip
    features = {"info": {"features": {"label": {"names": ["ant", "bee", "cat"], "_type": "ClassLabel"}}}}
    folder = tmp_path / "parquet"
    folder.mkdir()
    for number, part in enumerate((rows[:25], rows[25:])):
        table = pa.Table.from_pylist(part).replace_schema_metadata({"huggingface": json.dumps(features)})
        pq.write_table(table, folder / f"train-{number}.parquet", row_group_size=4)
    assert pack(folder, tmp_path / "out", "--shard-samples", 9).code == 0
    assert contents(tmp_path / "out") == expected
    assert load_index(str(tmp_path / "out")).classes == ("ant", "bee", "cat")
    again = pack(folder, tmp_path / "again", "--shard-samples", 9, "--processes", 2)
    assert again.code == 0, again.err
    assert files(tmp_path / "out") == files(tmp_path / "again")
    labels = [int(s.fields["cls"]) for s in samples(tmp_path / "out")]
    assert labels != sorted(labels)
    pq.write_table(pa.table({"picture": [b"x"], "label": [1]}), tmp_path / "other.parquet")
    assert "has no column image, but picture, label" in pack(tmp_path / "other.parquet", tmp_path / "no").err
    (tmp_path / "text.parquet").write_text("text")
    assert "cannot be read as parquet" in pack(tmp_path / "text.parquet", tmp_path / "no").err
    pq.write_table(pa.table({"image": [b"x"], "label": ["cat"]}), tmp_path / "names.parquet")
    wrong = pack(tmp_path / "names.parquet", tmp_path / "no")
    assert "row 0 has the label 'cat'; wanted is the number of a class" in wrong.err


# ------------------------------------------------------------------------------------------------ smaller images
def test_large_images_are_made_smaller_and_the_others_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "a"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    large = Image.fromarray(random.integers(0, 255, (9, 6, 3), np.uint8)).resize((400, 600), Image.Resampling.BICUBIC)
    large.save(folder / "large.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    large.save(folder / "turned.jpg", exif=exif, quality=95)
    large.resize((60, 90)).save(folder / "small.jpg")
    (folder / "broken.jpg").write_bytes((folder / "turned.jpg").read_bytes()[:5000])
    done = pack(tmp_path / "source", tmp_path / "out", "--max-side", 100, "--quality", 80)
    assert "1 file skipped" in done.err
    assert "cannot be decoded: truncated" in (tmp_path / "out" / "skipped.jsonl").read_text()
    found = {s.key.split("-")[1]: s.fields["jpg"] for s in samples(tmp_path / "out")}
    assert found["small"] == (folder / "small.jpg").read_bytes()
    for name, size in (("large", (67, 100)), ("turned", (100, 67))):
        image = Image.open(io.BytesIO(found[name]))
        assert (image.size, image.format) == (size, "JPEG")
    wanted = np.asarray(large.resize((67, 100), Image.Resampling.LANCZOS), float)
    assert np.abs(np.asarray(Image.open(io.BytesIO(found["large"])), float) - wanted).mean() < 8
    again = pack(tmp_path / "source", tmp_path / "other", "--max-side", 100, "--quality", 80, "--processes", 2)
    assert again.code == 0
    assert files(tmp_path / "out") == files(tmp_path / "other")


# ------------------------------------------------------------------------------------------------ arrays
def test_parts_of_an_array_make_the_same_set(source: Path, tmp_path: Path) -> None:
    options = ("--shard-samples", 6, "--validation", 0.2, "--seed", 3)
    assert pack(source, tmp_path / "whole", *options).code == 0
    for part in (2, 0, 1):
        assert not list((tmp_path / "out").rglob("index.json"))
        done = pack(source, tmp_path / "out", *options, "--array", f"{part}/3")
        assert done.code == 0, done.err
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert "is not empty: it holds" in pack(source, tmp_path / "out", *options, "--array", "0/3").err


@pytest.mark.integration
def test_parts_at_one_time(source: Path, tmp_path: Path) -> None:
    pack_folder(str(source), str(tmp_path / "whole"), shard_samples=4, progress=False)
    command = [
        sys.executable,
        "-m",
        "vitscale",
        "data",
        "pack",
        str(source),
        str(tmp_path / "out"),
        "--shard-samples",
        "4",
    ]
    parts = [
        subprocess.Popen([*command, "--array", f"{part}/4"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for part in range(4)
    ]
    ended = [part.communicate(timeout=120) for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0, 0], ended
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sum("the part that ends last makes the index" in out for out, _ in ended) == 3


def test_what_a_last_part_left_undone_a_plain_call_ends(source: Path, tmp_path: Path) -> None:
    pack_folder(str(source), str(tmp_path / "whole"), shard_samples=10, progress=False)
    pack(source, tmp_path / "out", "--shard-samples", 10, "--array", "0/2")
    (tmp_path / "out" / ".vitscale-pack" / "finishing").mkdir()  # as if it had been killed there
    assert pack(source, tmp_path / "out", "--shard-samples", 10, "--array", "1/2").code == 0
    assert not (tmp_path / "out" / "index.json").exists()
    assert pack(source, tmp_path / "out", "--shard-samples", 10).code == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("array", ["3/3", "x/2", "1", "-1/2"])
def test_parts_that_are_not(source: Path, tmp_path: Path, array: str) -> None:
    done = pack(source, tmp_path / "out", f"--array={array}")
    assert done.code == 2
    assert "a part is I/N with I from 0 to N - 1" in done.err
