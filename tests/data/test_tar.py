"""The tar reader against Python's `tarfile`, and against archives that are cut or damaged."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from helpers.tars import labelled, make_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from vitscale.data.tar import BLOCK, TarFault, archive_members, members, split_name

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
parts = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=20
)
names = st.lists(parts.filter(lambda part: part not in (".", "..")), min_size=1, max_size=12).map("/".join)


def archive(files: list[tuple[str, bytes]], format: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


@given(files=st.lists(st.tuples(names, st.binary(max_size=1200)), max_size=6), format=st.sampled_from(FORMATS[1:]))
@settings(max_examples=100)
def test_reads_what_tarfile_wrote(files: list[tuple[str, bytes]], format: int) -> None:
    content = archive(files, format)
    found = [(m.name, content[m.data : m.data + m.size]) for m in archive_members(content)]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        wanted = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    assert [(name.rstrip("/"), data) for name, data in found] == [(name.rstrip("/"), data) for name, data in wanted]


def test_ustar_prefix_makes_names_of_up_to_255_characters() -> None:
    name = "/".join(["folder" * 5] * 6) + "/image.jpg"
    assert 100 < len(name) < 255
    assert [m.name for m in archive_members(archive([(name, b"x")], tarfile.USTAR_FORMAT))] == [name]


def test_gnu_tar_with_folders_and_links(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "1.jpg").write_bytes(b"one")
    (folder / "a" / "2.jpg").symlink_to("1.jpg")
    for format in ("gnu", "ustar", "pax", "v7"):
        subprocess.run(["tar", f"--format={format}", "--sort=name", "-cf", "set.tar", "set"], cwd=tmp_path, check=True)
        found = list(archive_members((tmp_path / "set.tar").read_bytes()))
        assert [(m.name.rstrip("/"), m.size, m.regular) for m in found] == [
            ("set", 0, False),
            ("set/a", 0, False),
            ("set/a/1.jpg", 3, True),
            ("set/a/2.jpg", 0, False),
        ], format


def test_size_in_base_256() -> None:
    content = bytearray(archive([("a.jpg", b"12345")], tarfile.GNU_FORMAT))
    content[124:136] = b"\x80" + (5).to_bytes(11, "big")
    content[148:156] = b"        "
    content[148:156] = b"%06o\0 " % sum(content[:BLOCK])
    assert [m.size for m in archive_members(bytes(content))] == [5]


@pytest.mark.parametrize("format", FORMATS)
def test_every_cut_is_noticed(format: int) -> None:
    name = "long/" * 30 + "x.jpg"
    content = archive([("a.jpg", b"1" * 700), (name, b"2" * 10), ("c.cls", b"3")], format)
    closed = max(m.end for m in archive_members(content)) + BLOCK
    for cut in range(0, closed, 13):
        with pytest.raises(TarFault):
            list(archive_members(content[:cut]))
    assert len(list(archive_members(content[:closed]))) == 3


def test_cut_inside_a_header_names_the_place() -> None:
    content = archive([("a.jpg", b"1" * 700), ("b.jpg", b"2")], tarfile.USTAR_FORMAT)
    with pytest.raises(TarFault, match="a header of 100 instead of 512 bytes at byte 1,536"):
        list(archive_members(content[: 1536 + 100]))


def test_cut_between_two_members_names_the_place() -> None:
    content = archive([("a.jpg", b"1" * 700), ("b.jpg", b"2")], tarfile.USTAR_FORMAT)
    with pytest.raises(TarFault, match=r"cut off: it ends without the zeros that close a tar, at byte 1,536"):
        list(archive_members(content[:1536]))


@given(place=st.integers(0, BLOCK - 1), value=st.integers(0, 255))
def test_a_changed_byte_of_a_header_is_noticed(place: int, value: int) -> None:
    content = bytearray(archive([("a.jpg", b"1")], tarfile.USTAR_FORMAT))
    before = content[place]
    content[place] = value
    try:
        found = list(archive_members(bytes(content)))
    except TarFault:
        assert value != before
    else:  # the checksum may be padded in several ways
        assert value == before or 148 <= place < 156
        assert [m.name for m in found] == ["a.jpg"]


def test_compressed_and_joined_archives_are_refused() -> None:
    content = archive([("a.jpg", b"1")], tarfile.USTAR_FORMAT)
    with pytest.raises(TarFault, match="a gzip archive; shards are plain tars"):
        list(archive_members(gzip.compress(content)))
    with pytest.raises(TarFault, match="closed but more follows"):
        list(archive_members(content + content))
    with pytest.raises(TarFault, match=r"checksum is wrong|not one of a tar"):
        list(archive_members(b"no tar at all" * 200))


def test_fragment_needs_no_closing_zeros(tmp_path: Path) -> None:
    content = make_tar(tmp_path / "a.tar", labelled(range(4))).read_bytes()
    every = list(members(content))
    inner = list(members(content, every[2].start, every[6].start))
    assert inner == every[2:6]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.jpg", ("a", "jpg")),
        ("dir/a.JPEG", ("dir/a", "jpeg")),
        ("img.v1.0.jpg", ("img", "v1.0.jpg")),
        ("dir.with.dots/a.cls", ("dir.with.dots/a", "cls")),
        ("./a.jpg", ("./a", "jpg")),
        ("README", None),
        ("dir/.hidden", None),
        ("__notes__", None),
        ("__notes__/a.jpg", None),
    ],
)
def test_split_name(name: str, wanted: tuple[str, str] | None) -> None:
    assert split_name(name) == wanted
