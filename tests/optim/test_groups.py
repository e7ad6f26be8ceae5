from __future__ import annotations

import torch
from helpers.tiny import tiny
from torch import nn

from vitscale.config.schema import OptimConfig
from vitscale.optim.groups import decays, param_groups


def test_matrices_decay_and_nothing_else() -> None:
    model = tiny()
    decayed, undecayed = param_groups(model, OptimConfig(weight_decay=0.3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[p] for p in decayed["params"]] == [
        "patch.weight",
        "blocks.0.qkv.weight",
        "blocks.0.mlp.0.weight",
        "blocks.0.mlp.3.weight",
        "blocks.1.qkv.weight",
        "blocks.1.mlp.0.weight",
        "blocks.1.mlp.3.weight",
        "head.weight",
    ]
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    both = decayed["params"] + undecayed["params"]
    assert len(both) == len(set(both)) == len(names)


def test_tokens_never_decay_whatever_their_shape() -> None:
    for name in ("cls_token", "reg_token", "mask_token", "register_tokens", "pos_embed", "encoder.pos_embed"):
        assert not decays(name, torch.zeros(1, 4, 8))
    assert decays("blocks.0.attn.qkv.weight", torch.zeros(3, 3))
    assert not decays("blocks.0.norm1.weight", torch.zeros(3))


def test_shared_parameter_comes_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    groups = param_groups(model, OptimConfig())
    assert [len(group["params"]) for group in groups] == [1, 2]


def test_no_empty_group() -> None:
    assert len(param_groups(nn.LayerNorm(3), OptimConfig())) == 1
