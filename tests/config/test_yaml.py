from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.config_errors import problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.config.load import (
    load_config,
)
from vitscale.errors import UserError

Write = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "run.yaml:1: the file is empty; allowed: a mapping of keys, e.g. 'name: my-run'"),
        ("# only a comment\n", "run.yaml:1: the file is empty; allowed: a mapping of keys, e.g. 'name: my-run'"),
        ("\n- a\n- b\n", "run.yaml:2: found ['a', 'b']; allowed: a mapping of keys, e.g. 'name: my-run'"),
        ("text", "run.yaml:1: found 'text'; allowed: a mapping of keys, e.g. 'name: my-run'"),
        ("a: 1\nb:\n\tc: 2\n", "run.yaml:3: found a tab; YAML is indented with spaces"),
        ("a: 1\n---\na: 2\n", "run.yaml:2: found a second document (---); allowed: one"),
        ("a: 1\nb: c: d\n", "run.yaml:2: cannot be read as YAML: mapping values are not allowed here; put quotes "
         "around text that holds one of : # { [ & * !"),
        ("a: &x 1\nb: *x\n", "run.yaml:2: found the alias *x; write the value out, or share it through 'base:'"),
        ("a: &x [*x]\n", "run.yaml:1: found the alias *x; write the value out, or share it through 'base:'"),
        ("\na: !!python/object/apply:os.system ['id']\n", "run.yaml:2: found the tag "
         "tag:yaml.org,2002:python/object/apply:os.system; allowed: plain values, text in quotes"),
        ("a: !!str 3\n", "run.yaml:1: found the tag tag:yaml.org,2002:str; allowed: plain values, text in quotes"),
        ("a: 1\nb: '\x01'\n", "run.yaml:2: holds a control character; a config is plain text"),
        ('name: "\\ud800"', "run.yaml:1: found half a character (a lone surrogate); write the whole one"),
        ('name: "\\Uffffffff"', "run.yaml:1: holds an escape (\\U...) that is no character"),
        ('name: "\\U00110000"', "run.yaml:1: holds an escape (\\U...) that is no character"),
        ("a: " + "[" * 5000, "run.yaml:1: is nested too deeply to be a config"),
    ],
)  # fmt: skip
def test_unreadable_files(write: Write, text: str, line: str) -> None:
    assert problems(write("run.yaml", text)) == [line]


def test_duplicate_merge_and_odd_keys(write: Write, minimal: str) -> None:
    write("run.yaml", minimal + "optim:\n  lr: 1\n  eps: 1\n  lr: 2\nname: b\n<<: {seed: 1}\n[a]: 1\n")
    assert problems("run.yaml") == [
        "run.yaml:10: optim.lr: stands here twice, first in line 8; take one of them out",
        "run.yaml:11: name: stands here twice, first in line 1; take one of them out",
        "run.yaml:12: merge keys (<<) are not read; put what is shared into a file named by 'base:'",
        "run.yaml:13: a key is a list or a mapping; put quotes around text that starts with { or [",
    ]


def test_files_that_are_none(write: Write, minimal: str) -> None:
    write("pretrain.yaml", minimal)
    write("folder/a.yaml", "").parent.joinpath("b.yaml").touch()
    write("bytes.yaml", "").write_bytes(b"\x93NUMPY\xff\xfe")
    assert problems("pretrian.yaml") == ["pretrian.yaml: no such file; did you mean 'pretrain.yaml'?"]
    assert problems("no\0name/x") == ["no\0name/x: no such file"]
    assert problems("folder/c/x") == ["folder/c/x: no such file"]
    assert problems("folder") == ["folder: is a folder; name a file in it: a.yaml, b.yaml"]
    assert problems("bytes.yaml") == ["bytes.yaml: is not text in UTF-8; a config is a YAML file"]
    assert problems("folder/a.yaml") == [
        "folder/a.yaml:1: the file is empty; allowed: a mapping of keys, e.g. 'name: my-run'"
    ]


def test_a_file_that_fails_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").symlink_to("/proc/self/mem")  # exists, and reading its first page is an error, also for root
    assert problems("run.yaml") == ["run.yaml: cannot be read: Input/output error"]


lines = st.lists(
    st.sampled_from(["name: a", "base: b.yaml", "data:", "  train: x", " x: [", "- 1", "seed: 1e3",
                     "model: {name: B/16}", "optim: {lr: -1", "}",
                     "'", "a: *b", "<<: 1", "? x", "duration: 3 epochs", "...", "%TAG", "\t"]),
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(text=st.one_of(st.text(max_size=40), lines.map("\n".join)), override=st.text(max_size=12).map("seed={}".format))
def test_whatever_is_written_ends_in_a_config_or_in_sentences(write: Write, text: str, override: str) -> None:
    try:
        Path("run.yaml").write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        return
    for overrides in ([], [override], [text]):
        with pytest.raises(UserError):  # neither `lines` nor a short text holds all the keys a run needs
            load_config("run.yaml", overrides)
