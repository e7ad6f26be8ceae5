"""Shards that lie elsewhere: a web server that fails in every way, a server of S3, commands; the cache of a node."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.http_shards import Fault, Server, serving
from helpers.tars import labelled, make_tar

from vitscale.config.schema import DataConfig
from vitscale.data import cache, storage
from vitscale.data.index import index_shards
from vitscale.data.loader import EvalLoader, TrainLoader
from vitscale.data.shards import ShardError, load_index, read_samples
from vitscale.data.storage import Access
from vitscale.data.verify import verify_shards
from vitscale.errors import UserError

SIZES = (7, 30, 1, 22)
CLASSES = 3


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BACK_OFF", 0.002)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    first = 0
    for number, count in enumerate(SIZES):
        make_tar(folder / f"train-{number:03d}.tar", labelled(range(first, first + count), classes=CLASSES))
        first += count
    index_shards(str(folder), progress=False)
    return folder


@pytest.fixture
def server(shards: Path) -> Iterator[Server]:
    with serving(shards) as found:
        yield found


def batches(spec: str, run_dir: Path, steps: int = 8, **changed: Any) -> tuple[list[str], dict[str, int]]:
    """Hashes of a training loader's batches, and its bad samples by reason."""
    config = replace(DataConfig(train=spec, workers=2, read_timeout=1.0), **changed)
    loader = TrainLoader(
        config, image_size=(12, 16), num_classes=CLASSES, global_batch=12, seed=5, rank=0, world_size=1, start_step=0,
        run_dir=run_dir,
    )  # fmt: skip
    hashes = []
    try:
        for _ in range(steps):
            batch = next(loader)
            parts = (batch.images, batch.labels, batch.valid, batch.ids)
            hashes.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
    finally:
        loader.close()
    return hashes, dict(loader.bad)


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["503", "reset", "slow", "short"])
def test_a_web_server_that_fails_for_a_while_gives_the_same_batches(
    server: Server, shards: Path, tmp_path: Path, fault: Fault
) -> None:
    expected, _ = batches(str(shards), tmp_path)
    server.faults = {"train-001.tar": [fault, fault], "train-003.idx": [fault]}
    if fault != "short":  # of JSON, which does not say how long it is
        server.faults["index.json"] = [fault]
    found, bad = batches(server.url, tmp_path)
    assert (found, bad) == (expected, {})
    assert not any(server.faults.values())


@pytest.mark.integration
def test_only_ranges_are_fetched_and_the_index_once(server: Server, tmp_path: Path) -> None:
    index = load_index(server.url)
    server.asked.clear()
    read_samples(index, 1, 3, 5)
    read_samples(index, 1, 9, 11)
    assert server.asked == {"train-001.idx": 1, "train-001.tar": 2}
    config = DataConfig(train=server.url, validation=server.url, workers=1)
    loader = EvalLoader(config, image_size=12, num_classes=CLASSES, batch=16, rank=0, world_size=1)
    assert sum(int(batch.valid.sum()) for batch in loader) == sum(SIZES)
    loader.close()


def test_what_will_not_pass_is_said_at_once(server: Server, shards: Path) -> None:
    index = load_index(server.url)
    server.faults = {"train-001.tar": ["403"]}
    with pytest.raises(ShardError, match=r"train-001\.tar: 403"):
        read_samples(index, 1, 0, 2)
    server.asked.clear()
    server.faults = {"train-001.tar": ["whole"]}
    with pytest.raises(ShardError, match=r"must serve ranges, or give data\.cache_dir"):
        read_samples(index, 1, 0, 2)
    assert server.asked["train-001.tar"] == 1
    (shards / "train-000.tar").unlink()
    with pytest.raises(ShardError, match=r"train-000\.tar"):
        read_samples(index, 0, 0, 2)


def test_a_server_that_stays_down_is_given_up_after_all_tries(server: Server) -> None:
    index = load_index(server.url)
    server.faults = {"train-002.tar": ["503"] * 100}
    with pytest.raises(ShardError, match=r"train-002\.tar: 503.*\(6 tries\)"):
        read_samples(index, 2, 0, 1)


def test_another_shard_than_the_index_says_is_refused(server: Server, shards: Path) -> None:
    index = load_index(server.url)
    with open(shards / "train-001.tar", "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ShardError, match=r"bytes there, but the index says"):
        read_samples(index, 1, 0, 2)


def test_ranges_lists_and_file_urls(server: Server, shards: Path, tmp_path: Path) -> None:
    names = load_index(f"{server.url}/train-{{001..003}}.tar").names
    assert names == ("train-001.tar", "train-002.tar", "train-003.tar")
    (tmp_path / "list.txt").write_text(f"# two of them\n{server.url}/train-002.tar\n\n{shards}/train-000.tar\n")
    assert load_index(f"@{tmp_path}/list.txt").names == ("train-002.tar", "train-000.tar")
    assert load_index(f"file://{shards}").names == load_index(str(shards)).names
    with pytest.raises(UserError, match="a web server does not say what it holds"):
        load_index(f"{server.url}/train-*.tar")
    with pytest.raises(UserError, match=r"no index\.json in http.*--out FOLDER"):
        load_index(f"{server.url}/elsewhere")
    (tmp_path / "list.txt").write_text("@other\n")
    with pytest.raises(UserError, match="names another list"):
        load_index(f"@{tmp_path}/list.txt")


def test_an_index_here_of_shards_elsewhere(server: Server, shards: Path, tmp_path: Path) -> None:
    expected, _ = batches(str(shards), tmp_path)
    with pytest.raises(UserError, match="is not on this machine: `--out` names the folder for its index"):
        index_shards(f"{server.url}/train-{{000..003}}.tar", progress=False)
    report = index_shards(f"{server.url}/train-{{000..003}}.tar", str(tmp_path / "here"), progress=False)
    assert report.samples == sum(SIZES)
    assert verify_shards(str(tmp_path / "here"), progress=False).sound
    assert batches(str(tmp_path / "here"), tmp_path)[0] == expected


# ------------------------------------------------------------------------------------------------ S3
@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    there = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    there.start()
    host, port = there.get_host_and_port()
    yield f"http://{host}:{port}"
    there.stop()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # botocore's own
def test_shards_in_a_bucket(s3_endpoint: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="images")
    for file in shards.iterdir():
        client.upload_file(str(file), "images", f"some/set/{file.name}")
    storage._filesystem.cache_clear()
    expected, _ = batches(str(shards), tmp_path)
    for spec in (
        "s3://images/some/set",
        "s3://images/some/set/train-*.tar",
        "s3://images/some/set/train-{000..003}.tar",
    ):
        assert batches(spec, tmp_path) == (expected, {})
    assert batches("s3://images/some/set", tmp_path, cache_dir=str(tmp_path / "cache")) == (expected, {})
    with pytest.raises(UserError, match=r"no index\.json in s3://images/other"):
        load_index("s3://images/other")
    client.upload_file(str(shards / "train-000.tar"), "images", "some/set/train-009.tar")
    with pytest.raises(UserError, match=r"index\.json does not list train-009\.tar"):
        load_index("s3://images/some/set")


def test_missing_credentials_are_not_waited_for() -> None:
    from botocore.exceptions import NoCredentialsError

    tries = []

    def read() -> bytes:
        tries.append(1)
        raise NoCredentialsError

    with pytest.raises(OSError, match=r"^Unable to locate credentials$"):
        storage.with_retries("s3://lab/set/index.json", read)
    assert len(tries) == 1


# ------------------------------------------------------------------------------------------------ commands
def test_commands_run_only_where_that_is_allowed_and_never_in_a_shell(shards: Path, tmp_path: Path) -> None:
    expected, _ = batches(str(shards), tmp_path)
    commands = [f"pipe:cat '{shards}/train-{number:03d}.tar'" for number in range(len(SIZES))]
    (tmp_path / "commands.txt").write_text("\n".join(commands))
    index_shards(f"@{tmp_path}/commands.txt", str(tmp_path / "here"), progress=False)
    with pytest.raises(UserError, match=r"names commands to run \(pipe:\); set data.allow_pipe: true"):
        load_index(str(tmp_path / "here"))
    allowed = {"allow_pipe": True, "cache_dir": str(tmp_path / "cache")}
    assert batches(str(tmp_path / "here"), tmp_path, **allowed) == (expected, {})
    _, bad = batches(str(tmp_path / "here"), tmp_path, steps=1, allow_pipe=True)
    assert set(bad) == {"unreadable_shard"}
    with pytest.raises(UserError, match=r"cannot be indexed: .*No such file"):
        index_shards(f"pipe:cat {shards}/train-000.tar; touch {tmp_path}/owned", str(tmp_path / "no"), progress=False)
    assert not (tmp_path / "owned").exists()


# ------------------------------------------------------------------------------------------------ the cache
def test_a_shard_is_fetched_once_whatever_is_read_of_it(server: Server, shards: Path, tmp_path: Path) -> None:
    expected, _ = batches(str(shards), tmp_path, steps=20)
    server.faults = {"train-001.tar": ["reset", "short"]}
    found, bad = batches(server.url, tmp_path, steps=20, cache_dir=str(tmp_path / "cache"))
    assert (found, bad) == (expected, {})
    fetched = {name: count for name, count in server.asked.items() if name.endswith(".tar")}
    assert fetched == {"train-000.tar": 1, "train-001.tar": 3, "train-002.tar": 1, "train-003.tar": 1}
    assert not list((tmp_path / "cache").glob("*.tmp"))


def _read_all(url: str, folder: str, ready: Any) -> list[str]:
    ready.wait()
    index = load_index(url, Access(cache_dir=folder, cache_bytes=10**9))
    return [sample.key for shard in range(len(SIZES)) for sample in read_samples(index, shard, 0, SIZES[shard])]


@pytest.mark.integration
def test_processes_that_want_one_shard_at_one_time_fetch_it_once(server: Server, tmp_path: Path) -> None:
    server.faults = {".tar": ["slow"]}
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(3) as pool:
        ready = manager.Barrier(3)
        results = pool.starmap(_read_all, [(server.url, str(tmp_path / "cache"), ready)] * 3)
    assert results[0] == results[1] == results[2]
    assert {name: count for name, count in server.asked.items() if name.endswith(".tar")} == {
        f"train-{number:03d}.tar": 1 for number in range(len(SIZES))
    }


def test_the_least_used_shards_make_room(server: Server, shards: Path, tmp_path: Path) -> None:
    sizes = [os.path.getsize(shards / f"train-{number:03d}.tar") for number in range(len(SIZES))]
    folder = tmp_path / "cache"
    index = load_index(server.url, Access(cache_dir=str(folder), cache_bytes=sizes[0] + sizes[1] + 1))

    def held() -> set[str]:
        return {path.name.split("-", 1)[1] for path in folder.glob("*.tar")}

    assert sizes[0] + sizes[2] + sizes[3] <= index.access.cache_bytes
    for shard in (0, 2, 3):
        read_samples(index, shard, 0, 1)
        time.sleep(0.02)
    assert held() == {"train-000.tar", "train-002.tar", "train-003.tar"}
    read_samples(index, 0, 0, 1)  # used again, so that the others go first
    time.sleep(0.02)
    read_samples(index, 1, 0, 1)
    assert held() == {"train-000.tar", "train-001.tar"}
    assert sum(path.stat().st_size for path in folder.glob("*.tar")) <= index.access.cache_bytes


def test_a_damaged_copy_is_made_again_and_a_wrong_shard_never_kept(
    server: Server, shards: Path, tmp_path: Path
) -> None:
    access = Access(cache_dir=str(tmp_path / "cache"), cache_bytes=10**9)
    index = load_index(server.url, access)
    read_samples(index, 1, 0, 1)
    (copy,) = (tmp_path / "cache").glob("*.tar")
    copy.write_bytes(copy.read_bytes()[:100])
    assert len(read_samples(index, 1, 0, 2)) == 2
    content = bytearray((shards / "train-003.tar").read_bytes())
    content[600] ^= 1
    (shards / "train-003.tar").write_bytes(content)
    with pytest.raises(ShardError, match=r"its sha256 begins with .* that in the index with"):
        read_samples(index, 3, 0, 1)
    assert len(list((tmp_path / "cache").glob("*.tar"))) == 1


def test_without_room_shards_are_read_from_where_they_lie(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache._told.clear()
    (tmp_path / "file").write_text("in the way")
    for access in (
        Access(cache_dir=str(tmp_path / "cache"), cache_bytes=100),
        Access(cache_dir=str(tmp_path / "file" / "cache"), cache_bytes=10**9),
    ):
        index = load_index(server.url, access)
        assert len(read_samples(index, 1, 0, 2)) == len(read_samples(index, 1, 2, 4)) == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "is larger than the cache" in told[0]
    assert "cannot be used" in told[1]


def test_what_a_killed_process_left_is_taken_away(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for name, age in (("old.tmp", 7200), ("new.tmp", 0)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)
    read_samples(load_index(server.url, Access(cache_dir=str(folder), cache_bytes=10**9)), 0, 0, 1)
    assert [path.name for path in folder.glob("*.tmp")] == ["new.tmp"]


def test_the_index_is_json_that_others_may_write(shards: Path, tmp_path: Path) -> None:
    """Names in it may be URLs: an index of shards in several places."""
    with serving(shards) as server:
        content = json.loads((shards / "index.json").read_text())
        content["shards"][1]["name"] = f"{server.url}/train-001.tar"
        there = tmp_path / "mixed"
        shutil.copytree(shards, there)
        (there / "train-001.tar").unlink()
        (there / "index.json").write_text(json.dumps(content))
        assert batches(str(there), tmp_path) == batches(str(shards), tmp_path)
