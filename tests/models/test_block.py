from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.timm_vit import TINY, randomise
from timm.layers import RmsNorm
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from vitscale.config.schema import ModelConfig
from vitscale.models.block import ParallelBlock
from vitscale.models.create import create_model
from vitscale.models.vit import VisionTransformer

PARALLEL = replace(TINY, block="parallel", qk_norm=True, qkv_bias=False, norm="rmsnorm", pool="map")


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm fuses what comes in: the MLP's first layer, then queries, keys and values."""
    names = {
        "norm1.weight": "in_norm.weight", "norm1.bias": "in_norm.bias", "attn.q_norm.weight": "q_norm.weight",
        "attn.k_norm.weight": "k_norm.weight", "attn.proj.weight": "attn_out_proj.weight", "ls1.gamma": "ls.gamma",
        "attn.proj.bias": "attn_out_proj.bias", "mlp.fc2.weight": "mlp_out_proj.weight",
        "mlp.fc2.bias": "mlp_out_proj.bias", "attn.q_norm.bias": "q_norm.bias", "attn.k_norm.bias": "k_norm.bias",
    }  # fmt: skip
    fused = {names[name]: tensor for name, tensor in state.items() if name in names}
    fused["in_proj.weight"] = torch.cat([state["mlp.fc1.weight"], state["attn.qkv.weight"]])
    if "attn.qkv.bias" in state:
        fused["in_proj.bias"] = torch.cat([state["mlp.fc1.bias"], state["attn.qkv.bias"]])
    else:
        fused["mlp_bias"] = state["mlp.fc1.bias"]
    return fused


@pytest.mark.parametrize(
    "config",
    [PARALLEL, replace(PARALLEL, norm="layernorm", qkv_bias=True), replace(PARALLEL, layer_scale=0.1, qk_norm=False)],
)
def test_a_parallel_block_is_timms(config: ModelConfig) -> None:
    ours = ParallelBlock(config)
    theirs = ParallelScalingBlock(
        24, 3, mlp_ratio=2, qkv_bias=config.qkv_bias, qk_norm=config.qk_norm, init_values=config.layer_scale,
        norm_layer=partial(RmsNorm if config.norm == "rmsnorm" else nn.LayerNorm, eps=config.norm_eps),
    )  # fmt: skip
    randomise(ours)
    theirs.load_state_dict(to_timm(ours.state_dict()), strict=True)
    tokens = torch.randn(2, 5, 24)
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-5)


def test_22b_has_the_parts_of_its_paper() -> None:
    with torch.device("meta"):
        model = create_model("22B/14", depth=1)
    block = model.blocks[0]
    assert isinstance(block, ParallelBlock)
    names = {name for name, _ in block.named_parameters()}
    assert names == {
        "norm1.weight", "attn.qkv.weight", "attn.q_norm.weight", "attn.k_norm.weight", "attn.proj.weight",
        "attn.proj.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias",
    }  # fmt: skip
    assert block.attn.q_norm.weight.shape == (128,)
    assert model.attn_pool is not None


def test_both_branches_of_a_parallel_block_drop_together() -> None:
    config = replace(PARALLEL, drop_path=0.5, drop_path_schedule="constant", depth=1)
    block = VisionTransformer(config).train().blocks[0]
    randomise(block)
    tokens = torch.randn(400, 5, 24)
    branch = block(tokens) - tokens
    whole = block.eval()(tokens) - tokens
    dropped = branch.flatten(1).abs().amax(dim=1) < 1e-6
    assert 100 < int(dropped.sum()) < 300
    torch.testing.assert_close(branch[~dropped], 2 * whole[~dropped], rtol=1e-3, atol=1e-4)
