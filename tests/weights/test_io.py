from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.split_engine import file_size_limit
from helpers.timm_vit import TINY, randomise, timm_vit
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.weights.content import Preprocessing
from vitscale.weights.io import load_weights, save_model
from vitscale.weights.load import load_model
from vitscale.weights.timm import timm_config

PREPROCESSING = Preprocessing(mean=(0.5, 0.4, 0.3), std=(0.2, 0.1, 0.3), interpolation="bicubic", crop_pct=0.9)
WIDE = replace(TINY, embed_dim=128, num_heads=2, mlp_dim=32)
"""Heads 64 wide, so that timm's shapes alone tell how many."""


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    model = VisionTransformer(config)
    randomise(model)
    return model.state_dict()


def save(path: Path, config: ModelConfig = TINY) -> dict[str, Tensor]:
    state = weights_of(config)
    save_model(path, state, config, preprocessing=PREPROCESSING, class_names=["cat", "dog"])
    return state


@pytest.mark.parametrize("names", ["vitscale", "timm"])
@pytest.mark.parametrize("config", [TINY, replace(TINY, image_size=(8, 32), pool="gap", activation="gelu_tanh")])
def test_what_is_written_is_read_back_equal(tmp_path: Path, config: ModelConfig, names: str) -> None:
    state = weights_of(config)
    half = {name: tensor.half() for name, tensor in state.items()}
    path = tmp_path / "new" / "model.safetensors"
    save_model(path, half, config, preprocessing=PREPROCESSING, class_names=["cat", "dog"], names=names)
    weights = load_weights(path)
    assert weights.config == config
    assert weights.preprocessing == PREPROCESSING
    assert weights.class_names == ("cat", "dog")
    assert weights.source.startswith("vitscale model file")
    for name, tensor in half.items():
        assert weights.state[name].dtype == torch.float16
        assert torch.equal(weights.state[name], tensor)
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_who_the_umask_lets_read_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "m")
        assert (tmp_path / "m").stat().st_mode & 0o777 == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_wrapped_names_are_written_plain(tmp_path: Path) -> None:
    state = {f"module._orig_mod.{name}": tensor for name, tensor in weights_of(TINY).items()}
    save_model(tmp_path / "m", state, TINY, preprocessing=None, class_names=None)
    weights = load_weights(tmp_path / "m")
    assert (weights.preprocessing, weights.class_names) == (None, None)
    assert set(weights.state) == set(weights_of(TINY))


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_timm_loads_the_timm_file_strictly_and_gives_our_outputs(tmp_path: Path, pool: str) -> None:
    config = replace(TINY, pool=pool)
    state = weights_of(config)
    save_model(tmp_path / "m.safetensors", state, config, preprocessing=None, class_names=None, names="timm")
    theirs = timm_vit(config).eval()
    theirs.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    ours = VisionTransformer(config).eval()
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


def test_a_state_that_is_not_the_model_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing: fc_norm.weight.*not in the model: cls_token"):
        save_model(tmp_path / "m", weights_of(TINY), replace(TINY, pool="gap"), preprocessing=None, class_names=None)
    with pytest.raises(ValueError, match="8 class names for 7 outputs"):
        save_model(tmp_path / "m", weights_of(TINY), TINY, preprocessing=None, class_names=list("abcdefgh"))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = save(path)
    before = path.read_bytes()
    with file_size_limit(8192), pytest.raises(UserError, match="cannot be written"):
        save_model(path, state, TINY, preprocessing=None, class_names=None)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_is_said_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=r"model cannot be written: .*[Dd]irectory"):
        save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


@pytest.mark.parametrize("config", [WIDE, replace(WIDE, pool="gap", qkv_bias=False, num_classes=0, in_channels=1)])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "torch legacy", "state_dict", "deit", "model", "wrapped"])
def test_timm_files_are_recognised_whatever_they_are_called(tmp_path: Path, kind: str, config: ModelConfig) -> None:
    theirs = timm_vit(config).eval()
    randomise(theirs)
    state, path = theirs.state_dict(), tmp_path / "download"
    arguments = argparse.Namespace(lr=0.1)
    contents = {
        "torch": state,
        "state_dict": {"state_dict": state, "epoch": 3, "args": arguments},
        "deit": {"state_dict_ema": state, "state_dict": {"head.bias": torch.zeros(1)}, "optimizer": {"state": {}}},
        "model": {"model": {f"module.{name}": tensor for name, tensor in state.items()}},
        "wrapped": {f"model.blocks._orig_mod.{n[7:]}" if n.startswith("blocks.") else n: t for n, t in state.items()},
    }
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "torch legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(contents[kind], path)
    weights = load_weights(path)
    assert weights.config == config
    assert weights.source.startswith("timm ViT")
    assert "taken as exact GELU, epsilon 1e-06, 2 heads, square" in weights.source
    ours = VisionTransformer(weights.config).eval()
    ours.load_state_dict(weights.state, strict=True)
    images = torch.randn(2, config.in_channels, 16, 16)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


def test_known_sizes_are_told_by_their_dimensions() -> None:
    huge = ModelConfig(
        embed_dim=1280, depth=32, num_heads=16, mlp_dim=5120, patch_size=14, num_classes=0, image_size=14
    )
    with torch.device("meta"):
        shapes = VisionTransformer(huge).state_dict()
    state = {name: torch.zeros(1, dtype=torch.bool).expand(tensor.shape) for name, tensor in shapes.items()}
    config = timm_config(state)
    assert (config.name, config.num_heads) == ("H/14", 16)  # 1280 / 64 would be 20


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blocks.0.attn.bias": (128,), "blocks.1.attn.bias": (128,)}, r"not in the model: blocks.{0..1}.attn.bias"),
        ({"norm.bias": None}, r"missing: norm.bias"),
        ({"blocks.1.mlp.fc2.bias": (3,)}, r"blocks.1.mlp.fc2.bias: \[3\] in place of \[128\]"),
        ({"pos_embed": (1, 14, 128)}, r"positions for 13 or 14 patches, which is no square grid"),
        ({"patch_embed.proj.weight": (128, 3, 4, 8)}, r"patches of 4x8 pixels"),
        (
            {"patch_embed.proj.weight": (0,)},
            r"impossible shapes: patch_embed.proj.weight \[0\].*without being gathered",
        ),
    ],
)
def test_timm_files_that_are_not_ours_are_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], said: str
) -> None:
    state = weights_of(WIDE)
    for name, shape in change.items():
        if shape is None:
            del state[name]
        else:
            state[name] = torch.zeros(shape)
    save_file(state, tmp_path / "m")
    with pytest.raises(UserError, match=said):
        load_weights(tmp_path / "m")


def test_heads_that_cannot_be_told_are_said(tmp_path: Path) -> None:
    save_file(weights_of(TINY), tmp_path / "m")
    with pytest.raises(UserError, match="the number of heads cannot be told: a width of 24"):
        load_weights(tmp_path / "m")


class Reachable:
    """A class that a file of torch.save must not bring to life."""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "pointer of Git LFS.*git lfs pull"),
        (b"\n<!DOCTYPE html><html>404</html>", "looks like a web page"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"hello world", "begins with b'hello wo'"),
        (b"PK\x03\x04 and no more", "cut short"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        load_weights(path)
    assert str(path) in caught.value.message


def test_other_models_are_named_for_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for names, said in (
        (["vit.embeddings.patch_embeddings.projection.weight"], r"needs its config\.json beside it"),
        (["visual.conv1.weight"], "looks like a CLIP model"),
        (["conv.weight", "fc.bias"], "holds 2 tensors such as 'conv.weight', 'fc.bias', which is no ViT known here"),
    ):
        save_file({name: torch.zeros(1) for name in names}, path)
        with pytest.raises(UserError, match=said):
            load_weights(path)
    np.savez(tmp_path / "jax.npz", **{"params/embedding/kernel": np.zeros(1)})
    with pytest.raises(UserError, match=r"which is no ViT of big_vision"):
        load_weights(tmp_path / "jax.npz")


def test_nothing_but_tensors_is_unpickled(tmp_path: Path) -> None:
    torch.save({"model": Reachable()}, tmp_path / "m.pth")
    with pytest.raises(UserError, match="cannot be read as weights alone"):
        load_weights(tmp_path / "m.pth")
    torch.save([1, 2], tmp_path / "m.pth")
    with pytest.raises(UserError, match="holds a list, not a dictionary of tensors"):
        load_weights(tmp_path / "m.pth")


def test_missing_and_damaged_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_weights(tmp_path / "absent")
    with pytest.raises(UserError, match="is a folder"):
        load_weights(tmp_path)
    path = tmp_path / "m"
    save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="looks like safetensors, but cannot be read"):
        load_weights(path)
    torch.save(weights_of(WIDE), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="cut short"):
        load_weights(path)


def with_header(path: Path, **changes: object) -> None:
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["vitscale"])
    save_file(load_file(path), path, {"vitscale": json.dumps({**header, **changes})})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version 2 of the format, and this vitscale reads up to 1"),
        ({"model": {"depht": 3}}, "damaged: ValueError: .*depht: unknown key; did you mean 'depth'"),
        ({"preprocessing": {"mean": [1]}}, "damaged"),
        ({"version": None}, "damaged"),
    ],
)
def test_a_damaged_or_newer_description_is_said(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = tmp_path / "m"
    save(path)
    with_header(path, **changes)
    with pytest.raises(UserError, match=said):
        load_weights(path)


def test_load_model_adapts_size_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    state = save(path)
    images = torch.randn(2, 3, 16, 16)
    reference = VisionTransformer(TINY).eval()
    reference.load_state_dict(state)
    model = load_model(path)
    assert not model.training
    assert torch.equal(model(images), reference(images))
    larger = load_model(path, image_size=(24, 32))
    assert larger(torch.randn(1, 3, 24, 32)).shape == (1, 7)
    assert torch.equal(larger.state_dict()["head.weight"], state["head.weight"])
    assert not load_model(path, num_classes=3)(images).any()
    assert load_model(path, num_classes=0)(images).shape == (2, 24)


def test_load_model_says_what_size_would_fit(tmp_path: Path) -> None:
    save(tmp_path / "m")
    with pytest.raises(UserError, match="patches of 4 pixels do not divide images of 15x15"):
        load_model(tmp_path / "m", image_size=15)
