"""Checkpoints of mmpretrain, by the names and shapes that its `VisionTransformer` and its head have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitscale import load_model
from vitscale.errors import UserError
from vitscale.weights.io import load_weights

DIM, DEPTH, HEADS, MLP, PATCH, SIDE, CLASSES = 128, 2, 2, 48, 4, 3, 5


def checkpoint(*, pre_logits: int | None = None, layer_scale: bool = False) -> dict[str, Tensor]:
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
    if pre_logits:
        shapes |= {"head.layers.pre_logits.weight": (pre_logits, DIM), "head.layers.pre_logits.bias": (pre_logits,)}
    for layer in range(DEPTH):
        path = f"backbone.layers.{layer}."
        shapes |= {f"{path}{norm}.{tensor}": (DIM,) for norm in ("ln1", "ln2") for tensor in ("weight", "bias")}
        shapes |= {f"{path}attn.qkv.weight": (3 * DIM, DIM), f"{path}attn.qkv.bias": (3 * DIM,)}
        shapes |= {f"{path}attn.proj.weight": (DIM, DIM), f"{path}attn.proj.bias": (DIM,)}
        shapes |= {f"{path}ffn.layers.0.0.weight": (MLP, DIM), f"{path}ffn.layers.0.0.bias": (MLP,)}
        shapes |= {f"{path}ffn.layers.1.weight": (DIM, MLP), f"{path}ffn.layers.1.bias": (DIM,)}
        if layer_scale:
            shapes |= {f"{path}attn.gamma1.weight": (DIM,), f"{path}ffn.gamma2.weight": (DIM,)}
    return {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}


def logits(p: dict[str, Tensor], images: Tensor) -> Tensor:
    """What mmpretrain's code computes: its `forward` with out_type `cls_token`, then the head."""
    b = {name.removeprefix("backbone."): tensor for name, tensor in p.items()}
    x = F.conv2d(images, b["patch_embed.projection.weight"], b["patch_embed.projection.bias"], stride=PATCH)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([b["cls_token"].expand(len(x), -1, -1), x], dim=1) + b["pos_embed"]

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (DIM,), b[f"{name}.weight"], b[f"{name}.bias"], eps=1e-6)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, b[f"{name}.weight"], b[f"{name}.bias"])

    for layer in range(DEPTH):
        path = f"layers.{layer}."
        qkv = linear(f"{path}attn.qkv", norm(f"{path}ln1", x)).reshape(len(x), -1, 3, HEADS, DIM // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        shares = (query @ key.transpose(-2, -1) * (DIM // HEADS) ** -0.5).softmax(dim=-1)
        update = linear(f"{path}attn.proj", (shares @ value).transpose(1, 2).flatten(2))
        x = x + update * b.get(f"{path}attn.gamma1.weight", torch.ones(DIM))
        hidden = F.gelu(linear(f"{path}ffn.layers.0.0", norm(f"{path}ln2", x)))
        x = x + linear(f"{path}ffn.layers.1", hidden) * b.get(f"{path}ffn.gamma2.weight", torch.ones(DIM))
    x = norm("ln1", x)[:, 0]
    if "head.layers.pre_logits.weight" in b:
        x = linear("head.layers.pre_logits", x).tanh()
    return linear("head.layers.head", x)


@pytest.mark.parametrize("pre_logits", [None, 6])
@pytest.mark.parametrize("layer_scale", [False, True])
def test_a_checkpoint_computes_what_mmpretrain_does(pre_logits: int | None, layer_scale: bool, tmp_path: Path) -> None:
    state = checkpoint(pre_logits=pre_logits, layer_scale=layer_scale)
    torch.save({"meta": {"epoch": 3}, "state_dict": state}, tmp_path / "epoch_3.pth")
    images = torch.randn(2, 3, SIDE * PATCH, SIDE * PATCH)
    with torch.no_grad():
        found = load_model(tmp_path / "epoch_3.pth")(images)
    torch.testing.assert_close(found, logits(state, images), rtol=1e-5, atol=1e-5)


def test_a_backbone_alone_and_what_stands_beside_it(tmp_path: Path) -> None:
    state = {n.removeprefix("backbone."): t for n, t in checkpoint().items() if n.startswith("backbone.")}
    torch.save(state | {"data_preprocessor.mean": torch.zeros(3)}, tmp_path / "backbone.pth")
    weights = load_weights(tmp_path / "backbone.pth")
    assert weights.config.num_classes == 0
    assert weights.config.pos_embed_resize == "bicubic"
    assert weights.source == "mmpretrain ViT, 128 wide, 2 blocks, 2 heads at 12x12 with 0 classes, its grid of " \
        "positions taken as square"  # fmt: skip


def test_mmpretrains_small_has_eight_heads(tmp_path: Path) -> None:
    """Its arch `small` is 768 wide with 8 layers; S/16 is 384 wide with 12."""
    from vitscale.weights.mmpretrain import _heads

    assert _heads(768, 8, 2304) == 8
    assert _heads(384, 12, 1536) == 6
    with pytest.raises(UserError, match="heads cannot be told"):
        _heads(100, 3, 200)


def test_mistakes_are_named(tmp_path: Path) -> None:
    state = checkpoint()
    state["backbone.layers.0.attn.relative"] = state.pop("backbone.layers.1.ln2.bias")
    torch.save(state, tmp_path / "bad.pth")
    with pytest.raises(UserError, match=r"missing: layers.1.ln2.bias; not in the model: layers.0.attn.relative"):
        load_weights(tmp_path / "bad.pth")
