"""Models written for other tools: loaded there strictly, with the outputs that they have here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.timm_vit import TINY, randomise
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

from vitscale import load_model
from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.weights.content import Preprocessing
from vitscale.weights.export import Format, export_model
from vitscale.weights.io import load_weights

TOKENS = replace(TINY, image_size=16, final_norm="tokens")
WIDE = replace(TOKENS, embed_dim=128, num_heads=2)  # heads of 64, which mmpretrain's files are taken to have
JAX = replace(TOKENS, activation="gelu_tanh")
DINOV2 = replace(TOKENS, pool="cls_gap", layer_scale=0.1)


def model_of(config: ModelConfig) -> VisionTransformer:
    model = VisionTransformer(config).eval()
    randomise(model)
    return model


def write(path: Path, model: VisionTransformer, format: Format, **more: Any) -> Path:
    more = {"preprocessing": None, "class_names": None} | more
    export_model(path, model.state_dict(), model.config, format=format, **more)
    return path


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------ Hugging Face
@pytest.mark.parametrize(
    "config",
    [
        TOKENS,
        replace(TOKENS, activation="gelu_tanh", qkv_bias=False, norm_eps=1e-3),
        replace(TOKENS, num_registers=1),
        DINOV2,
        replace(DINOV2, activation="swiglu", mlp_dim=64),
        replace(DINOV2, num_registers=3, pos_embed_prefix="class"),
    ],
    ids=["vit", "vit tanh, no bias, epsilon", "deit", "dinov2", "dinov2 swiglu", "dinov2 registers"],
)
def test_transformers_loads_every_tensor_and_computes_the_same(config: ModelConfig, tmp_path: Path) -> None:
    ours = model_of(config)
    folder = write(tmp_path / "model", ours, "huggingface", class_names=[f"c{number}" for number in range(7)])
    theirs, loading = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    assert theirs.config.id2label == {number: f"c{number}" for number in range(7)}
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(images()).logits, ours(images()), rtol=1e-5, atol=1e-5)


def test_a_backbone_for_transformers(tmp_path: Path) -> None:
    ours = model_of(replace(TOKENS, num_classes=0))
    theirs, loading = AutoModel.from_pretrained(
        write(tmp_path / "model", ours, "huggingface"), output_loading_info=True
    )
    assert {name.split(".")[0] for name in loading["missing_keys"]} <= {"pooler"}
    assert not loading["unexpected_keys"]
    with torch.no_grad():
        found = theirs.eval()(images()).last_hidden_state
        torch.testing.assert_close(found, ours.forward_features(images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [{}, {"activation": "swiglu"}, {"qkv_bias": False}], ids=str)
def test_a_dinov3_for_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    config = replace(
        TINY, image_size=16, num_classes=0, pos_embed="rotary", num_registers=4, layer_scale=0.1, norm_eps=1e-5
    )
    ours = model_of(replace(config, **change))
    folder = write(tmp_path / "model", ours, "huggingface")
    theirs, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    with torch.no_grad():
        found = theirs.eval()(images()).last_hidden_state
        torch.testing.assert_close(found, ours.forward_features(images()), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="no DINOv3 with a classifier; export with --num-classes 0"):
        write(tmp_path / "other", model_of(replace(config, num_classes=3)), "huggingface")


@pytest.mark.parametrize("mode", ["center", "squash"])
def test_the_image_processor_prepares_as_evaluation_does(mode: str, tmp_path: Path) -> None:
    said = Preprocessing(
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.6, 0.7),
        interpolation="bilinear",
        crop_pct=0.8 if mode == "center" else 1.0,
        crop_mode=mode,  # type: ignore[arg-type]
    )
    folder = write(tmp_path / "model", model_of(TOKENS), "huggingface", preprocessing=said)
    processor = AutoImageProcessor.from_pretrained(folder)
    random = np.random.default_rng(0)
    picture = random.integers(0, 255, (40, 60, 3), np.uint8)
    found = processor(picture, return_tensors="pt")["pixel_values"][0]
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None]
    size = (20, 30) if mode == "center" else (16, 16)
    resized = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True)[0]
    if mode == "center":
        resized = resized[:, 2:18, 7:23]
    expected = (resized / 255 - torch.tensor(said.mean)[:, None, None]) / torch.tensor(said.std)[:, None, None]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)  # a level or two of 255, by rounding
    assert load_weights(folder).preprocessing == said


# ------------------------------------------------------------------------------------------------ files of tensors
@pytest.mark.parametrize(
    ("config", "format", "name"),
    [
        (WIDE, "mmpretrain", "m.pth"),
        (replace(WIDE, representation_size=6, layer_scale=0.1), "mmpretrain", "m.pth"),
        (JAX, "bigvision", "m.npz"),
        (replace(JAX, pos_embed_prefix="none", representation_size=6), "bigvision", "m.npz"),
        (replace(JAX, pool="gap"), "bigvision", "m.npz"),
        (replace(JAX, pool="map"), "bigvision", "m.npz"),
        (replace(JAX, pos_embed="sincos"), "bigvision", "m.npz"),
    ],
)
def test_what_is_written_is_read_as_the_same_model(
    config: ModelConfig, format: Format, name: str, tmp_path: Path
) -> None:
    """The readers are compared with what the tools compute, in the tests beside this one."""
    ours = model_of(config)
    again = load_model(write(tmp_path / name, ours, format), image_size=16)
    with torch.no_grad():
        torch.testing.assert_close(again(images()), ours(images()), rtol=1e-6, atol=1e-6)


def test_names_and_shapes_of_mmpretrain(tmp_path: Path) -> None:
    config = replace(WIDE, depth=1)
    state = torch.load(write(tmp_path / "m.pth", model_of(config), "mmpretrain"), weights_only=True)["state_dict"]
    block = "backbone.layers.0."
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "backbone.cls_token": (1, 1, 128), "backbone.pos_embed": (1, 17, 128),
        "backbone.patch_embed.projection.weight": (128, 3, 4, 4), "backbone.patch_embed.projection.bias": (128,),
        f"{block}ln1.weight": (128,), f"{block}ln1.bias": (128,),
        f"{block}attn.qkv.weight": (384, 128), f"{block}attn.qkv.bias": (384,),
        f"{block}attn.proj.weight": (128, 128), f"{block}attn.proj.bias": (128,),
        f"{block}ln2.weight": (128,), f"{block}ln2.bias": (128,),
        f"{block}ffn.layers.0.0.weight": (config.mlp_dim, 128), f"{block}ffn.layers.0.0.bias": (config.mlp_dim,),
        f"{block}ffn.layers.1.weight": (128, config.mlp_dim), f"{block}ffn.layers.1.bias": (128,),
        "backbone.ln1.weight": (128,), "backbone.ln1.bias": (128,),
        "head.layers.head.weight": (7, 128), "head.layers.head.bias": (7,),
    }  # fmt: skip


def test_names_and_shapes_of_big_vision(tmp_path: Path) -> None:
    config = replace(JAX, depth=1)
    with np.load(write(tmp_path / "m.npz", model_of(config), "bigvision"), allow_pickle=False) as arrays:
        found = {name: arrays[name].shape for name in arrays.files}
    block, attention = "Transformer/encoderblock_0/", "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/"
    assert found == {
        "embedding/kernel": (4, 4, 3, 24), "embedding/bias": (24,), "cls": (1, 1, 24), "pos_embedding": (1, 17, 24),
        **{f"{attention}{part}/kernel": (24, 3, 8) for part in ("query", "key", "value")},
        **{f"{attention}{part}/bias": (3, 8) for part in ("query", "key", "value")},
        f"{attention}out/kernel": (3, 8, 24), f"{attention}out/bias": (24,),
        **{f"{block}LayerNorm_{number}/{part}": (24,) for number in (0, 1) for part in ("scale", "bias")},
        f"{block}MlpBlock_0/Dense_0/kernel": (24, config.mlp_dim), f"{block}MlpBlock_0/Dense_0/bias": (config.mlp_dim,),
        f"{block}MlpBlock_0/Dense_1/kernel": (config.mlp_dim, 24), f"{block}MlpBlock_0/Dense_1/bias": (24,),
        "Transformer/encoder_norm/scale": (24,), "Transformer/encoder_norm/bias": (24,),
        "head/kernel": (24, 7), "head/bias": (7,),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what cannot be said
@pytest.mark.parametrize(
    ("config", "format", "said"),
    [
        (TOKENS, "bigvision", r"big_vision has no such model.*activation: gelu \(there: gelu_tanh\)"),
        (replace(JAX, norm_eps=1e-5), "bigvision", r"norm_eps: 1e-05 \(there: 1e-06\)"),
        (replace(JAX, layer_scale=0.1), "bigvision", r"no place for blocks.{0..2}.ls1.gamma"),
        (replace(JAX, pool="gap", final_norm="pooled"), "bigvision", "no place for fc_norm.weight"),
        (replace(TOKENS, qk_norm=True), "huggingface", "no place for blocks.{0..2}.attn.q_norm"),
        (replace(TOKENS, qk_scale=0.3), "huggingface", r"qk_scale: 0.3 \(there: None\)"),
        (replace(WIDE, v_shortcut=True), "mmpretrain", r"v_shortcut: True \(there: False\)"),
        (replace(WIDE, num_heads=4), "mmpretrain", r"num_heads: 4 \(there: 2\)"),
        (replace(WIDE, image_size=(8, 32)), "mmpretrain", r"image_size: \(8, 32\) \(there: 16\)"),
        (replace(DINOV2, activation="swiglu", mlp_dim=42), "huggingface", "no MLP 42 wide in a model 24 wide"),
    ],
)
def test_what_a_format_cannot_say_is_refused(config: ModelConfig, format: Format, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        write(tmp_path / "model", model_of(config), format)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "model", model_of(TOKENS), "huggingface")
    with pytest.raises(UserError, match="exists, and this format is a folder of its own; name a new one"):
        write(tmp_path / "model", model_of(TOKENS), "huggingface")
