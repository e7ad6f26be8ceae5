from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.timm_vit import TINY, randomise, timm_vit
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.models.position import has_class_token, num_prefix_tokens
from vitscale.models.vit import VisionTransformer

MODELS: dict[str, dict[str, Any]] = {
    "cls": {},
    "gap": {"pool": "gap"},
    "gap with both norms": {"pool": "gap", "class_token": True, "final_norm": "both"},
    "no last norm": {"final_norm": "none"},
    "registers, not square": {"num_registers": 2, "image_size": (8, 20)},
}


def model_and_images(**changes: Any) -> tuple[VisionTransformer, Tensor]:
    config = replace(TINY, **changes)
    model = VisionTransformer(config).eval()
    randomise(model)
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return model, torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def outputs_as_mmpretrain_documents(
    model: VisionTransformer, images: Tensor, out_indices: list[int], out_type: str
) -> list[Tensor]:
    """mmpretrain's ViT: the last block's output, and no other's, goes through the final norm, where there is one; then

    `raw` (B, L, C), `cls_token` (B, C), `featmap` (B, C, H, W) of the patch tokens, `avg_featmap` (B, C) the mean of
    those through a second norm.
    """
    hooked: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: hooked.append(output))
    model(images)
    rows, columns = images.shape[2] // 4, images.shape[3] // 4
    extra = len(hooked[0][0]) - rows * columns
    outputs = []
    for index in sorted(index % len(hooked) for index in out_indices):
        tokens = model.norm(hooked[index]) if index == len(hooked) - 1 else hooked[index]
        if out_type == "raw":
            outputs.append(tokens)
        elif out_type == "cls_token":
            outputs.append(tokens[:, 0])
        elif out_type == "featmap":
            outputs.append(
                torch.stack([tokens[:, extra + i] for i in range(rows * columns)], 2).view(2, -1, rows, columns)
            )
        else:
            outputs.append(model.fc_norm(tokens[:, extra:].mean(1)))
    return outputs


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("out_indices", [[-1], [0], [0, 2], [2, -3], [0, 1, 2]])
@pytest.mark.parametrize("out_type", ["raw", "cls_token", "featmap", "avg_featmap"])
def test_outputs_are_mmpretrains(changes: dict[str, Any], out_indices: list[int], out_type: str) -> None:
    model, images = model_and_images(**changes)
    if out_type == "cls_token" and not has_class_token(model.config):
        with pytest.raises(ValueError, match="this model has no class token; allowed: raw, featmap or avg_featmap"):
            model.forward_features(images, out_indices, out_type=out_type)  # type: ignore[call-overload]
        return
    ours = model.forward_features(images, out_indices, out_type=out_type)  # type: ignore[call-overload]
    expected = outputs_as_mmpretrain_documents(model, images, out_indices, out_type)
    assert len(ours) == len(expected) == len(set(i % 3 for i in out_indices))
    for output, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalised", [True, False])
def test_all_or_none_of_the_outputs_are_normalised_as_timm_does(normalised: bool) -> None:
    model, images = model_and_images(num_registers=2)
    theirs = timm_vit(model.config).eval()
    theirs.load_state_dict(model.state_dict())
    expected = theirs.get_intermediate_layers(images, n=[0, 2], reshape=True, norm=normalised)
    ours = model.forward_features(images, [0, 2], out_type="featmap", norm="all" if normalised else "none")
    for output, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


def test_one_index_is_the_last_block_as_a_whole() -> None:
    model, images = model_and_images()
    (last,) = model.forward_features(images, -1)
    assert torch.equal(last, model.forward_features(images))


def test_blocks_after_the_last_one_wanted_are_not_run() -> None:
    model, images = model_and_images()
    model.blocks[1].register_forward_hook(lambda *_: pytest.fail("block 1 was run"))
    model.forward_features(images, 0)


@pytest.mark.parametrize("index", [3, -4])
def test_blocks_that_are_not_there_are_refused(index: int) -> None:
    model, images = model_and_images()
    with pytest.raises(ValueError, match=f"there is no block {index}; allowed: -3 to 2"):
        model.forward_features(images, [0, index])


def test_dropped_patches_leave_no_map() -> None:
    model, images = model_and_images(patch_dropout=0.5)
    assert model.forward_features(images, -1, out_type="featmap")[0].shape == (2, 24, 4, 4)
    model.train()
    assert model.forward_features(images, -1)[0].shape == (2, 1 + 8, 24)
    with pytest.raises(ValueError, match="patch dropout leaves no map"):
        model.forward_features(images, -1, out_type="featmap")


@pytest.mark.parametrize("changes", [{}, {"num_registers": 2}, {"pos_embed": "rotary"}, {"block": "parallel"},
                                     {"qk_norm": True, "qk_scale": 0.5}], ids=str)  # fmt: skip
def test_attention_maps_are_what_attention_multiplies_the_values_with(changes: dict[str, Any]) -> None:
    model, images = model_and_images(**changes)
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda _module, inputs_, output: inputs.extend((inputs_[0], output)))
    model(images)
    maps = model.get_attention_maps(images)
    count = num_prefix_tokens(model.config) + 16
    assert [tuple(attention.shape) for attention in maps] == [(2, 3, count, count)] * 3
    for block, attention, before, after in zip(model.blocks, maps, inputs[::2], inputs[1::2], strict=False):
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3, count))
        values = block.attn.qkv(before).reshape(2, count, 3, 3, 8)[:, :, 2].transpose(1, 2)
        expected = block.attn.proj((attention @ values).transpose(1, 2).flatten(2))
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


def test_the_class_token_and_the_mean_side_by_side() -> None:
    model, images = model_and_images(pool="cls_gap")
    tokens = model.forward_features(images)
    expected = model.head(torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=1))
    assert torch.equal(model(images), expected)
    assert model.head.in_features == 2 * 24


def test_without_pooling_every_token_is_classified() -> None:
    model, images = model_and_images(pool="none", class_token=True)
    logits = model(images)
    assert logits.shape == (2, 17, 7)
    assert torch.equal(logits, model.head(model.forward_features(images)))


def test_pre_logits_stand_between_pooling_and_head() -> None:
    model, images = model_and_images(representation_size=5)
    pooled = model.forward_features(images)[:, 0]
    expected = model.head(torch.tanh(pooled @ model.pre_logits.fc.weight.T + model.pre_logits.fc.bias))
    torch.testing.assert_close(model(images), expected)
    assert {"pre_logits.fc.weight", "pre_logits.fc.bias"} < set(model.state_dict())


def test_both_norms_are_applied() -> None:
    model, images = model_and_images(pool="gap", final_norm="both")
    tokens = model.forward_features(images)
    assert torch.equal(model(images), model.head(model.fc_norm(tokens.mean(dim=1))))
    assert {"norm.weight", "fc_norm.weight"} < set(model.state_dict())


def test_a_config_without_the_token_it_pools_is_refused() -> None:
    with pytest.raises(ValueError, match="pool: cls reads the class token, and class_token is false"):
        VisionTransformer(ModelConfig(class_token=False, depth=1))
