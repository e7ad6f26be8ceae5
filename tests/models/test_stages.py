from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.timm_vit import TINY, randomise
from torch import Tensor, nn

from vitscale.models.stages import layer_depth
from vitscale.models.vit import VisionTransformer

ALL_PARTS = replace(
    TINY, num_registers=2, layer_scale=0.1, pre_norm=True, pool="map", final_norm="both", representation_size=5,
    dropout=0.5, attention_dropout=0.5, drop_path=0.5, drop_path_schedule="constant", patch_dropout=0.5,
)  # fmt: skip


def test_every_parameter_has_a_depth() -> None:
    """mmpretrain's rule: 0 for the embedding, block + 1 for the blocks, the number of blocks + 1 for the rest; with the

    registers and the norm before the blocks, which mmpretrain and timm give the head's rate.
    """
    model = VisionTransformer(replace(ALL_PARTS, class_token=True))
    depths = {name: layer_depth(name, depth=3) for name, _ in model.named_parameters()}
    assert {name for name, depth in depths.items() if depth == 0} == {
        "cls_token", "reg_token", "pos_embed", "patch_embed.proj.weight", "norm_pre.weight", "norm_pre.bias",
    }  # fmt: skip
    for block in range(3):
        assert {name for name, depth in depths.items() if depth == block + 1} == {
            name for name in depths if name.startswith(f"blocks.{block}.")
        }
    assert {name.split(".")[0] for name, depth in depths.items() if depth == 4} == {
        "norm", "fc_norm", "attn_pool", "pre_logits", "head",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["blocks.3.norm1.weight", "module.cls_token", "encoder.weight", "normal.weight", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no parameter of a Vision Transformer of 3 blocks"):
        layer_depth(name, depth=3)


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_frozen_stages_get_no_gradient_and_stay_in_evaluation(frozen: int) -> None:
    model = VisionTransformer(replace(ALL_PARTS, frozen_stages=frozen))
    randomise(model)
    images = torch.randn(4, 3, 16, 16)
    outputs: dict[str, list[Tensor]] = {name: [] for name in ("norm_pre", *(f"blocks.{index}" for index in range(3)))}
    for name, seen in outputs.items():
        model.get_submodule(name).register_forward_hook(lambda _module, _inputs, output, seen=seen: seen.append(output))
    model.eval().train()
    model(images).square().sum().backward()
    model(images)
    drawn_anew = [len(first) != len(second) or not torch.equal(first, second) for first, second in outputs.values()]
    assert drawn_anew == [frozen == 0, *(index >= frozen for index in range(3))]

    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    everything = {name for name, _ in model.named_parameters()}
    expected = {name for name in everything if frozen == 0 or layer_depth(name, depth=3) > frozen}
    if frozen == 3:
        expected = {name for name in expected if not name.startswith(("norm.", "fc_norm."))}
    assert trained == expected
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == expected


def test_evaluation_mode_is_still_evaluation_mode() -> None:
    model = VisionTransformer(replace(ALL_PARTS, frozen_stages=1)).eval()
    assert not any(part.training for part in model.modules())
    model.train()
    assert model.blocks[1].training
    assert not any(part.training for part in model.blocks[0].modules())


def test_freezing_survives_building_on_meta() -> None:
    with torch.device("meta"):
        model = VisionTransformer(replace(TINY, frozen_stages=2))
    model.to_empty(device="cpu").init_weights()  # type: ignore[operator]
    assert not model.blocks[0].attn.qkv.weight.requires_grad
    assert model.blocks[2].attn.qkv.weight.requires_grad
    assert isinstance(model.head, nn.Linear)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
