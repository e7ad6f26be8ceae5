"""Arrays of big_vision and vision_transformer; what their code computes with them is written out here in NumPy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vitscale import load_model
from vitscale.errors import UserError
from vitscale.weights.io import load_weights

DIM, DEPTH, HEADS, MLP, PATCH, SIDE, CLASSES = 24, 3, 4, 40, 4, 3, 5
Arrays = dict[str, NDArray[np.float32]]
Floats = NDArray[np.float64]


def arrays(
    *, cls: bool = True, mapped: bool = False, row: bool = False, pre_logits: int | None = None, fixed: bool = False
) -> Arrays:
    """Random parameters under the names of big_vision's `models/vit.py`."""
    random = np.random.default_rng(0)
    made: Arrays = {}

    def add(name: str, *shape: int) -> None:
        made[name] = (random.normal(size=shape) * 0.3 + (name.endswith("scale"))).astype(np.float32)

    def norm(name: str) -> None:
        add(f"{name}/scale", DIM)
        add(f"{name}/bias", DIM)

    def dense(name: str, before: int, after: int) -> None:
        add(f"{name}/kernel", before, after)
        add(f"{name}/bias", after)

    def attention(name: str) -> None:
        for part in ("query", "key", "value"):
            add(f"{name}/{part}/kernel", DIM, HEADS, DIM // HEADS)
            add(f"{name}/{part}/bias", HEADS, DIM // HEADS)
        add(f"{name}/out/kernel", HEADS, DIM // HEADS, DIM)
        add(f"{name}/out/bias", DIM)

    def mlp(name: str) -> None:
        dense(f"{name}/Dense_0", DIM, MLP)
        dense(f"{name}/Dense_1", MLP, DIM)

    add("embedding/kernel", PATCH, PATCH, 3, DIM)
    add("embedding/bias", DIM)
    if not fixed:
        add("pos_embedding", 1, SIDE * SIDE + row, DIM)
    if cls:
        add("cls", 1, 1, DIM)
    for block in range(DEPTH):
        path = f"Transformer/encoderblock_{block}"
        norm(f"{path}/LayerNorm_0")
        attention(f"{path}/MultiHeadDotProductAttention_0")
        norm(f"{path}/LayerNorm_1")
        mlp(f"{path}/MlpBlock_0")
    norm("Transformer/encoder_norm")
    if mapped:
        add("MAPHead_0/probe", 1, 1, DIM)
        attention("MAPHead_0/MultiHeadDotProductAttention_0")
        norm("MAPHead_0/LayerNorm_0")
        mlp("MAPHead_0/MlpBlock_0")
    if pre_logits:
        dense("pre_logits", DIM, pre_logits)
    dense("head", pre_logits or DIM, CLASSES)
    return made


def sincos() -> Floats:
    """big_vision's `posemb_sincos_2d`."""
    y, x = np.mgrid[:SIDE, :SIDE]
    omega = 1.0 / (10_000.0 ** (np.arange(DIM // 4) / (DIM // 4 - 1)))
    y, x = np.einsum("m,d->md", y.flatten(), omega), np.einsum("m,d->md", x.flatten(), omega)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None]


def logits(p: Arrays, images: Floats) -> Floats:
    """big_vision's `models/vit.py`, images `[batch, height, width, 3]`."""

    def dense(name: str, x: Floats) -> Floats:
        return x @ p[f"{name}/kernel"].astype(float) + p[f"{name}/bias"]

    def norm(name: str, x: Floats) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}/scale"] + p[f"{name}/bias"]

    def attention(name: str, of: Floats, to: Floats) -> Floats:
        def project(part: str, x: Floats) -> Floats:
            kernel, bias = p[f"{name}/{part}/kernel"].astype(float), p[f"{name}/{part}/bias"]
            return np.einsum("btd,dhk->bthk", x, kernel) + bias

        scores = np.einsum("bqhk,bthk->bhqt", project("query", of), project("key", to)) / math.sqrt(DIM // HEADS)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("bhqt,bthk->bqhk", shares, project("value", to))
        return np.einsum("bqhk,hkd->bqd", mixed, p[f"{name}/out/kernel"].astype(float)) + p[f"{name}/out/bias"]

    def mlp(name: str, x: Floats) -> Floats:
        x = dense(f"{name}/Dense_0", x)
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return dense(f"{name}/Dense_1", x)

    batch = len(images)
    patches = images.reshape(batch, SIDE, PATCH, SIDE, PATCH, 3).transpose(0, 1, 3, 2, 4, 5)
    x = np.einsum("bmnijc,ijcd->bmnd", patches, p["embedding/kernel"].astype(float)).reshape(batch, SIDE * SIDE, DIM)
    x = x + p["embedding/bias"]
    positions = p["pos_embedding"].astype(float) if "pos_embedding" in p else sincos()
    with_row = positions.shape[1] > SIDE * SIDE
    x = x if with_row else x + positions
    if "cls" in p:
        x = np.concatenate([np.tile(p["cls"].astype(float), (batch, 1, 1)), x], axis=1)
    x = x + positions if with_row else x
    for block in range(DEPTH):
        path = f"Transformer/encoderblock_{block}"
        y = norm(f"{path}/LayerNorm_0", x)
        x = x + attention(f"{path}/MultiHeadDotProductAttention_0", y, y)
        x = x + mlp(f"{path}/MlpBlock_0", norm(f"{path}/LayerNorm_1", x))
    x = norm("Transformer/encoder_norm", x)
    if "MAPHead_0/probe" in p:
        probe = np.tile(p["MAPHead_0/probe"].astype(float), (batch, 1, 1))
        x = attention("MAPHead_0/MultiHeadDotProductAttention_0", probe, x)
        x = (x + mlp("MAPHead_0/MlpBlock_0", norm("MAPHead_0/LayerNorm_0", x)))[:, 0]
    else:
        x = x[:, 0] if "cls" in p else x.mean(1)
    if "pre_logits/kernel" in p:
        x = np.tanh(dense("pre_logits", x))
    return dense("head", x)


KINDS = {
    "cls": {"cls": True},
    "cls with a position": {"cls": True, "row": True},
    "gap": {"cls": False},
    "map": {"cls": False, "mapped": True},
    "pre-logits": {"cls": True, "row": True, "pre_logits": 6},
    "fixed positions": {"cls": False, "fixed": True},
    "fixed positions beside a class token": {"cls": True, "fixed": True},
}


def check(path: Path, expected: Arrays) -> None:
    images = np.random.default_rng(1).normal(size=(2, SIDE * PATCH, SIDE * PATCH, 3))
    model = load_model(path, image_size=SIDE * PATCH).double()
    with torch.no_grad():
        found = model(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(found, logits(expected, images), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_big_vision(kind: str, tmp_path: Path) -> None:
    made = arrays(**KINDS[kind])
    np.savez(tmp_path / "model.npz", **made)
    check(tmp_path / "model.npz", made)


@pytest.mark.parametrize("kind", KINDS)
def test_scanned_blocks_and_a_trainers_prefixes(kind: str, tmp_path: Path) -> None:
    made = arrays(**KINDS[kind])
    scanned: Arrays = {"params/" + name: array for name, array in made.items() if "encoderblock_" not in name}
    for name in made:
        if name.startswith("Transformer/encoderblock_0/"):
            rest = name.removeprefix("Transformer/encoderblock_0/")
            blocks = [made[f"Transformer/encoderblock_{block}/{rest}"] for block in range(DEPTH)]
            scanned[f"params/Transformer/encoderblock/{rest}"] = np.stack(blocks)
    np.savez(tmp_path / "model.npz", **scanned, **{"opt/0/mu/cls": np.zeros(3)})
    check(tmp_path / "model.npz", made)


def test_names_of_vision_transformer(tmp_path: Path) -> None:
    made = arrays(cls=True, row=True, pre_logits=6)
    old: Arrays = {}
    for name, array in made.items():
        for now, before in (
            ("MultiHeadDotProductAttention_0", "MultiHeadDotProductAttention_1"),
            ("LayerNorm_1", "LayerNorm_2"),
            ("MlpBlock_0", "MlpBlock_3"),
            ("pos_embedding", "Transformer/posembed_input/pos_embedding"),
        ):
            name = name.replace(now, before)
        old[name] = array
    np.savez(tmp_path / "model.npz", **old)
    check(tmp_path / "model.npz", made)


def test_mistakes_are_named(tmp_path: Path) -> None:
    made = arrays()
    del made["Transformer/encoderblock_1/LayerNorm_1/bias"]
    made["extra"] = np.zeros(2, np.float32)
    np.savez(tmp_path / "bad.npz", **made)
    with pytest.raises(UserError) as caught:
        load_weights(tmp_path / "bad.npz")
    assert "missing: Transformer/encoderblock_1/LayerNorm_1/bias" in caught.value.message
    assert "not in the model: extra" in caught.value.message
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    with pytest.raises(UserError, match="which is no ViT of big_vision"):
        load_weights(tmp_path / "other.npz")
    np.savez(tmp_path / "objects.npz", weights=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="cannot be read as numbers alone"):
        load_weights(tmp_path / "objects.npz")
