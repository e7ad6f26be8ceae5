"""Folders that transformers wrote: outputs of the vitscale model equal to those of transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.timm_vit import randomise
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
)

from vitscale import load_model
from vitscale.errors import UserError
from vitscale.weights.io import load_weights

SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4,
    "num_labels": 5,
}  # fmt: skip
VIT = SIZES | {"intermediate_size": 40}


def saved(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    randomise(model)
    model.eval().save_pretrained(folder)
    return model


def images(size: int = 16) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "model",
    [
        lambda: ViTForImageClassification(ViTConfig(**VIT)),
        lambda: ViTForImageClassification(ViTConfig(**VIT, hidden_act="gelu_new", qkv_bias=False, layer_norm_eps=1e-3)),
        lambda: DeiTForImageClassification(DeiTConfig(**VIT)),
        lambda: Dinov2ForImageClassification(Dinov2Config(**SIZES)),
        lambda: Dinov2ForImageClassification(Dinov2Config(**SIZES, use_swiglu_ffn=True)),
        lambda: Dinov2WithRegistersForImageClassification(Dinov2WithRegistersConfig(**SIZES, num_register_tokens=3)),
    ],
    ids=["vit", "vit tanh, no bias, epsilon", "deit", "dinov2", "dinov2 swiglu", "dinov2 registers"],
)
def test_classifiers_compute_what_transformers_does(model: Any, tmp_path: Path) -> None:
    theirs = saved(model(), tmp_path)
    ours = load_model(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(images()), theirs(images()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    [lambda: ViTModel(ViTConfig(**VIT)), lambda: Dinov2Model(Dinov2Config(**SIZES))],
    ids=["vit", "dinov2"],
)
def test_backbones_give_the_same_features(model: Any, tmp_path: Path) -> None:
    theirs = saved(model(), tmp_path)
    weights = load_weights(tmp_path)
    assert weights.config.num_classes == 0
    assert set(weights.left_out) <= {"pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token"}
    assert weights.left_out
    with torch.no_grad():
        ours = load_model(tmp_path).forward_features(images())
        torch.testing.assert_close(ours, theirs(images()).last_hidden_state, rtol=1e-5, atol=1e-5)


DINOV3: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 4},
        {"query_bias": False, "value_bias": False, "num_register_tokens": 4},
        {"key_bias": True, "layer_norm_eps": 1e-3, "num_register_tokens": 4},
    ],
    ids=str,
)
@torch.no_grad()
def test_dinov3_gives_the_same_features_at_any_size(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = saved(DINOv3ViTModel(DINOv3ViTConfig(**DINOV3, **options)), tmp_path)
    for size in (16, 24):
        ours = load_model(tmp_path, image_size=size)
        expected = theirs(images(size)).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images(size)), expected, rtol=1e-4, atol=1e-5)
    assert load_weights(tmp_path).source.startswith("Hugging Face DINOv3")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rope_theta": 10.0}, r"rope_theta 10.0; vitscale's have 100"),
        ({"use_gated_mlp": True}, "hidden_act 'gelu' in a gated MLP"),
        ({"query_bias": False}, "biases of queries without those of values"),
    ],
)
def test_another_dinov3_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(DINOv3ViTModel(DINOv3ViTConfig(**DINOV3, **options)), tmp_path)
    with pytest.raises(UserError, match=said):
        load_weights(tmp_path)


def test_another_resolution_is_reached_as_transformers_does(tmp_path: Path) -> None:
    theirs = saved(ViTForImageClassification(ViTConfig(**VIT)), tmp_path)
    ours = load_model(tmp_path, image_size=28)
    with torch.no_grad():
        expected = theirs(images(28), interpolate_pos_encoding=True).logits
        torch.testing.assert_close(ours(images(28)), expected, rtol=1e-5, atol=1e-5)


def test_what_stands_beside_the_tensors_is_read(tmp_path: Path) -> None:
    labels = {number: f"n0000000{number} thing" for number in range(5)}
    saved(ViTForImageClassification(ViTConfig(**VIT, id2label=labels)), tmp_path)
    ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    weights = load_weights(tmp_path)
    assert weights.class_names == tuple(labels.values())
    assert weights.preprocessing is not None
    assert weights.preprocessing.mean == (0.1, 0.2, 0.3)
    assert (weights.preprocessing.interpolation, weights.preprocessing.crop_mode) == ("bilinear", "squash")
    assert weights.source == "Hugging Face ViT, 24 wide, 2 blocks, 3 heads at 16x16 with 5 classes"
    assert load_weights(tmp_path / "model.safetensors").config == weights.config


def test_weights_in_several_files_are_one_model(tmp_path: Path) -> None:
    theirs = saved(ViTForImageClassification(ViTConfig(**VIT)), tmp_path)
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    whole, parts = load_weights(tmp_path), load_weights(tmp_path / "parts")
    assert parts.config == whole.config
    assert all(torch.equal(parts.state[name], tensor) for name, tensor in whole.state.items())


def test_mistakes_are_named(tmp_path: Path) -> None:
    saved(ViTForImageClassification(ViTConfig(**VIT)), tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, description = load_file(file), json.loads(config.read_text())

    bad = dict(tensors)
    bad["vit.extra.weight"] = bad.pop("vit.encoder.layer.1.output.dense.bias")
    bad["vit.embeddings.cls_token"] = torch.zeros(1, 1, 23)
    save_file(bad, file, {"format": "pt"})
    with pytest.raises(UserError) as caught:
        load_weights(tmp_path)
    assert "missing: encoder.layer.1.output.dense.bias" in caught.value.message
    assert "not in the model: extra.weight" in caught.value.message
    assert "embeddings.cls_token: [1, 1, 23] in place of [1, 1, 24]" in caught.value.message

    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(description | {"model_type": "beit"}))
    with pytest.raises(UserError, match="a Hugging Face model of type 'beit'; vit, deit, dinov2"):
        load_weights(tmp_path)
    config.write_text(json.dumps(description | {"hidden_act": "relu"}))
    with pytest.raises(UserError, match="hidden_act 'relu'; vitscale's ViTs have gelu"):
        load_weights(tmp_path)
    config.unlink()
    with pytest.raises(UserError, match=r"needs its config\.json beside it"):
        load_weights(file)


def test_a_deit_of_two_classifiers_is_refused(tmp_path: Path) -> None:
    saved(DeiTForImageClassificationWithTeacher(DeiTConfig(**VIT)), tmp_path)
    with pytest.raises(UserError, match="averages two classifiers"):
        load_weights(tmp_path)
