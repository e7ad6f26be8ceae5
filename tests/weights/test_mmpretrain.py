"""Checkpoints of mmpretrain, by the names and shapes that its `VisionTransformer` and its head have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitscale import load_model
from vitscale.errors import UserError
from vitscale.weights.content import Known
from vitscale.weights.export import export_model
from vitscale.weights.io import load_weights
from vitscale.weights.mmpretrain import _config

DIM, DEPTH, HEADS, MLP, PATCH, SIDE, CLASSES = 128, 2, 2, 48, 4, 3, 5


def checkpoint(
    *,
    pre_logits: int | None = None,
    layer_scale: bool = False,
    swiglu: bool = False,
    pre_norm: bool = False,
    mean: bool = False,
    class_token: bool = True,
    num_fcs: int = 2,
) -> dict[str, Tensor]:
    """Random parameters of `backbones/vision_transformer.py` and `heads/vision_transformer_head.py`."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.cls_token": (1, 1, DIM),
        "backbone.pos_embed": (1, 1 + SIDE * SIDE, DIM),
        "backbone.patch_embed.projection.weight": (DIM, 3, PATCH, PATCH),
        "backbone.patch_embed.projection.bias": (DIM,),
        "backbone.ln1.weight": (DIM,),
        "backbone.ln1.bias": (DIM,),
        "head.layers.head.weight": (CLASSES, pre_logits or DIM),
        "head.layers.head.bias": (CLASSES,),
    }
    if not class_token:
        del shapes["backbone.cls_token"]
        shapes["backbone.pos_embed"] = (1, SIDE * SIDE, DIM)
    if pre_norm:
        del shapes["backbone.patch_embed.projection.bias"]
        shapes |= {"backbone.pre_norm.weight": (DIM,), "backbone.pre_norm.bias": (DIM,)}
    if mean:  # out_type `avg_featmap`, with the linear head
        shapes |= {"backbone.ln2.weight": (DIM,), "backbone.ln2.bias": (DIM,)}
        shapes |= {f"head.fc.{part}": shapes.pop(f"head.layers.head.{part}") for part in ("weight", "bias")}
    if pre_logits:
        shapes |= {"head.layers.pre_logits.weight": (pre_logits, DIM), "head.layers.pre_logits.bias": (pre_logits,)}
    for layer in range(DEPTH):
        path = f"backbone.layers.{layer}."
        shapes |= {f"{path}{norm}.{tensor}": (DIM,) for norm in ("ln1", "ln2") for tensor in ("weight", "bias")}
        shapes |= {f"{path}attn.qkv.weight": (3 * DIM, DIM), f"{path}attn.qkv.bias": (3 * DIM,)}
        shapes |= {f"{path}attn.proj.weight": (DIM, DIM), f"{path}attn.proj.bias": (DIM,)}
        if swiglu:
            shapes |= {f"{path}ffn.w12.weight": (2 * MLP, DIM), f"{path}ffn.w12.bias": (2 * MLP,)}
            shapes |= {f"{path}ffn.w3.weight": (DIM, MLP), f"{path}ffn.w3.bias": (DIM,)}
        else:
            widths = [DIM, *[MLP] * (num_fcs - 1), DIM]
            for number, (before, after) in enumerate(itertools.pairwise(widths)):
                name = f"{path}ffn.layers.{number}" + (".0" if number < num_fcs - 1 else "")
                shapes |= {f"{name}.weight": (after, before), f"{name}.bias": (after,)}
        if layer_scale:
            shapes |= {f"{path}attn.gamma1.weight": (DIM,), f"{path}ffn.gamma2.weight": (DIM,)}
    return {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def logits(p: dict[str, Tensor], images: Tensor) -> Tensor:
    """What mmpretrain's code computes: its `forward` with out_type `cls_token` or `avg_featmap`, then the head."""
    b = {name.removeprefix("backbone."): tensor for name, tensor in p.items()}
    x = F.conv2d(images, b["patch_embed.projection.weight"], b.get("patch_embed.projection.bias"), stride=PATCH)
    x = x.flatten(2).transpose(1, 2)
    if "cls_token" in b:
        x = torch.cat([b["cls_token"].expand(len(x), -1, -1), x], dim=1)
    x = x + b["pos_embed"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), b[f"{name}.weight"], b[f"{name}.bias"], eps=1e-6)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, b[f"{name}.weight"], b[f"{name}.bias"])

    def ffn(path: str, x: Tensor) -> Tensor:
        if f"{path}w12.weight" in b:
            gate, value = linear(f"{path}w12", x).chunk(2, dim=-1)
            return linear(f"{path}w3", F.silu(gate) * value)
        inner = [name for name in b if name.startswith(f"{path}layers.") and name.endswith(".0.weight")]
        for name in inner:
            x = F.gelu(linear(name.removesuffix(".weight"), x))
        return linear(f"{path}layers.{len(inner)}", x)

    if "pre_norm.weight" in b:
        x = norm("pre_norm", x)
    for layer in range(DEPTH):
        path = f"layers.{layer}."
        qkv = linear(f"{path}attn.qkv", norm(f"{path}ln1", x)).reshape(len(x), -1, 3, HEADS, DIM // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        shares = (query @ key.transpose(-2, -1) * (DIM // HEADS) ** -0.5).softmax(dim=-1)
        update = linear(f"{path}attn.proj", (shares @ value).transpose(1, 2).flatten(2))
        x = x + update * b.get(f"{path}attn.gamma1.weight", torch.ones(DIM))
        x = x + ffn(f"{path}ffn.", norm(f"{path}ln2", x)) * b.get(f"{path}ffn.gamma2.weight", torch.ones(DIM))
    x = norm("ln1", x)
    if "head.fc.weight" in b:
        return linear("head.fc", norm("ln2", x[:, "cls_token" in b :].mean(dim=1)))
    x = x[:, 0]
    if "head.layers.pre_logits.weight" in b:
        x = linear("head.layers.pre_logits", x).tanh()
    return linear("head.layers.head", x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer_scale": True},
        {"pre_logits": 6},
        {"swiglu": True, "layer_scale": True},
        {"pre_norm": True},
        {"mean": True},
        {"mean": True, "class_token": False},
        {"num_fcs": 3},
    ],
    ids=str,
)
def test_a_checkpoint_computes_what_mmpretrain_does(options: dict[str, Any], tmp_path: Path) -> None:
    state = checkpoint(**options)
    torch.save({"meta": {"epoch": 3}, "state_dict": state}, tmp_path / "epoch_3.pth")
    images = torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH)
    with torch.no_grad():
        model = load_model(tmp_path / "epoch_3.pth")
        torch.testing.assert_close(model(images), logits(state, images), rtol=1e-5, atol=1e-5)
    export_model(
        tmp_path / "again.pth", model.state_dict(), model.config, format="mmpretrain", preprocessing=None,
        class_names=None,
    )  # fmt: skip
    again = torch.load(tmp_path / "again.pth", weights_only=True)["state_dict"]
    assert set(again) == set(state)
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_a_backbone_alone_and_what_stands_beside_it(tmp_path: Path) -> None:
    state = {n.removeprefix("backbone."): t for n, t in checkpoint().items() if n.startswith("backbone.")}
    torch.save(state | {"data_preprocessor.mean": torch.zeros(3)}, tmp_path / "backbone.pth")
    weights = load_weights(tmp_path / "backbone.pth")
    assert weights.config.num_classes == 0
    assert weights.config.pos_embed_resize == "bicubic"
    assert weights.source == "mmpretrain ViT, 128 wide, 2 blocks, 2 heads at 12x12 with 0 classes, its grid of " \
        "positions taken as square"  # fmt: skip


def test_mmpretrains_small_has_eight_heads() -> None:
    """Its arch `small` is 768 wide with 8 layers; S/16 is 384 wide with 12."""
    small = {"pos_embed": torch.zeros(1, 197, 768), "cls_token": torch.zeros(1, 1, 768)}
    small |= {"patch_embed.projection.weight": torch.zeros(768, 3, 16, 16)}
    small |= {f"layers.{layer}.ffn.layers.0.0.weight": torch.zeros(2304, 768) for layer in range(8)}
    assert _config(small, Known()).num_heads == 8


def test_mistakes_are_named(tmp_path: Path) -> None:
    state = checkpoint()
    state["backbone.layers.0.attn.relative"] = state.pop("backbone.layers.1.ln2.bias")
    torch.save(state, tmp_path / "bad.pth")
    with pytest.raises(UserError, match=r"missing: layers.1.ln2.bias; not in the model: layers.0.attn.relative"):
        load_weights(tmp_path / "bad.pth")
