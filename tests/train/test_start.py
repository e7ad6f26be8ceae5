"""Where a run's weights come from, and which checkpoints a config may go on from."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers.runs import tensors, write_config, write_shards
from helpers.split_engine import world_of_one

from vitscale.config.load import load_config
from vitscale.data.shards import load_index
from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.train.exchange import export
from vitscale.train.loop import train
from vitscale.train.start import Start, find_start


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps."""
    folder = tmp_path_factory.mktemp("trained")
    with world_of_one() as world:
        train(load_config(write_config(folder, shards, duration="10 steps"), []), world)
    return folder / "run"


def begin(config: Path, *overrides: str) -> Start:
    loaded = load_config(config, overrides)
    with world_of_one() as world:
        return find_start(loaded, data_digest=load_index(loaded.data.train).digest, world=world)


def test_one_rule_says_where_weights_come_from(shards: Path, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    export(trained, file)
    resume, weights = f"init.resume={trained}", f"init.weights={file}"
    new = write_config(tmp_path, shards)

    random = begin(new)
    assert (random.checkpoint, random.weights, random.step, random.totals) == (None, None, 0, {})
    assert random.words == "random weights, seed 0"

    given = begin(new, weights)
    assert (given.checkpoint, given.step) == (None, 0)
    assert given.weights is not None
    assert given.words == f"weights of {file} (a vitscale model file)" or str(file) in given.words

    other = begin(new, weights, resume)
    assert (other.step, other.weights) == (10, None)
    assert "step 10 of another run" in other.words
    assert other.totals["step_total"] == 10

    own = write_config(trained.parent, shards, duration="10 steps")
    assert begin(own, "init.resume=/nowhere", "init.weights=/nowhere").words.startswith("step 10 of this run")


def test_a_source_that_is_not_there(shards: Path, tmp_path: Path) -> None:
    new = write_config(tmp_path, shards)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"init\.resume: .*empty holds no checkpoint; name a run that has one"):
        begin(new, f"init.resume={tmp_path}/empty")
    with pytest.raises(UserError, match=r"nothing\.safetensors"):
        begin(new, f"init.weights={tmp_path}/nothing.safetensors")


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("model.embed_dim=32", "model.embed_dim: 16 there, 32 here"),
        ("model.qk_norm=true", "model.qk_norm: False there, True here"),
        ("model.pool=gap", "model.pool: cls there, gap here"),
        ("seed=1", "seed: 0 there, 1 here"),
        ("global_batch=16", "global_batch: 8 there, 16 here"),
        ("optim.kind=sgd", "optim.kind: adamw there, sgd here"),
        ("data.shuffle_window=2", "data.shuffle_window: 4 there, 2 here"),
    ],
)
def test_another_model_or_order_is_refused_side_by_side(
    override: str, difference: str, shards: Path, trained: Path
) -> None:
    config = write_config(trained.parent, shards, duration="10 steps")
    with pytest.raises(UserError) as caught:
        begin(config, override)
    lines = caught.value.message.splitlines()
    assert lines[0].endswith("step_00000010 cannot be resumed by this config:")
    assert f"  {difference}" in lines
    assert lines[-1].startswith("Set them back, or give the changed run a run_dir of its own")


def test_other_shards_are_refused_or_allowed(
    shards: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_config(trained.parent, shards, duration="10 steps")
    more = write_shards(tmp_path, images=33)
    with pytest.raises(UserError, match=r"data\.train: shards \w+ there, \w+ here"):
        begin(config, f"data.train={more}/train")
    with caplog.at_level(logging.WARNING):
        assert begin(config, f"data.train={more}/train", "data.allow_changed_index=true").step == 10
    assert "from step 10 on the order is that of the new set" in caplog.text


def test_what_only_moves_the_curves_is_said(shards: Path, trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = write_config(trained.parent, shards, duration="10 steps")
    with caplog.at_level(logging.WARNING):
        start = begin(config, "duration=20 steps", "optim.lr=1e-3", "model.drop_path=0", "model.frozen_stages=1")
    assert start.step == 10
    assert [record.getMessage() for record in caplog.records] == [
        "changed since the checkpoint: duration was 10 steps, now 20 steps",
        "changed since the checkpoint: optim.lr was 0.01, now 0.001",
        "changed since the checkpoint: model.drop_path was 0.1, now 0.0",
    ]


def test_weights_fill_a_model_of_another_size_and_classes(shards: Path, trained: Path, tmp_path: Path) -> None:
    loaded = load_config(
        write_config(tmp_path, shards),
        [f"init.weights={trained}", "model.image_size=16", "model.num_classes=7", "init.head=zero"],
    )
    start = begin(tmp_path / "run.yaml", f"init.weights={trained}")
    model = VisionTransformer(loaded.model)
    start.fill(model, loaded, classes=())
    state, saved = model.state_dict(), tensors(trained)
    assert torch.equal(state["blocks.0.mlp.fc1.weight"], saved["ema/blocks.0.mlp.fc1.weight"])
    assert state["pos_embed"].shape == (1, 17, 16)
    assert state["head.weight"].shape == (7, 16)
    assert not state["head.weight"].any()


def test_a_classifier_is_picked_class_by_class(shards: Path, trained: Path, tmp_path: Path) -> None:
    """The classes of the shards are called 0, 1 and 2; here the data has others, in another order."""
    config = load_config(
        write_config(tmp_path, shards), [f"init.weights={trained}", "model.num_classes=4", "init.head=map"]
    )
    start = begin(tmp_path / "run.yaml", f"init.weights={trained}")
    assert start.weights is not None
    names = start.weights.class_names
    assert names is not None
    model = VisionTransformer(config.model)
    start.fill(model, config, classes=(names[2], "another", names[0]))
    head = tensors(trained)["ema/head.weight"]
    expected = torch.stack([head[2], torch.zeros(16), head[0], torch.zeros(16)])
    assert torch.equal(model.state_dict()["head.weight"], expected)
    with pytest.raises(UserError, match=r"init.head: map: none of the 1 classes wanted"):
        start.fill(model, config, classes=("another",))
    with pytest.raises(UserError, match=r"init.head: map: the data does not say what its classes are called"):
        start.fill(model, config, classes=())
