from __future__ import annotations

import math

import pytest
import torch

from vitscale.models.layers import Attention, DropPath, PatchEmbed


def test_drop_path_keeps_or_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.3).train()
    samples = 20_000
    branch = torch.ones(samples, 2, 3)
    dropped = drop(branch)
    per_sample = dropped.flatten(1)
    assert (per_sample == per_sample[:, :1]).all()
    assert sorted(per_sample[:, 0].unique().tolist()) == pytest.approx([0, 1 / 0.7])
    # The mean of n draws of Bernoulli(0.7) / 0.7 has standard deviation sqrt(0.3 / 0.7 / n); five times that.
    assert dropped.mean().item() == pytest.approx(1, abs=5 * math.sqrt(0.3 / 0.7 / samples))


def test_drop_path_does_nothing_in_evaluation_or_at_rate_zero() -> None:
    branch = torch.randn(4, 2, 3)
    assert DropPath(0.9).eval()(branch) is branch
    assert DropPath(0.0).train()(branch) is branch


def test_drop_path_in_bfloat16_scales_without_a_common_error() -> None:
    torch.manual_seed(0)
    branch = torch.rand(4096, 4, 4, dtype=torch.bfloat16) + 1
    kept = DropPath(0.1).train()(branch)
    mask = kept[:, 0, 0] != 0
    ratio = (kept[mask].double() / branch[mask].double()).mean().item()
    # 1 / 0.9 in bfloat16 is 1.109375, wrong by 1.6e-3; the mean of n rounded products by some 2^-9 / sqrt(3 n) = 4e-6.
    assert ratio == pytest.approx(1 / 0.9, rel=1e-4)


def test_attention_is_the_formula() -> None:
    torch.manual_seed(0)
    attention = Attention(6, num_heads=2).double()
    tokens = torch.randn(1, 5, 6, dtype=torch.double)
    query, key, value = (tokens @ attention.qkv.weight.T + attention.qkv.bias)[0].split(6, dim=1)
    heads = []
    for head in (slice(0, 3), slice(3, 6)):
        weights = (query[:, head] @ key[:, head].T / math.sqrt(3)).softmax(dim=1)
        heads.append(weights @ value[:, head])
    expected = torch.cat(heads, dim=1) @ attention.proj.weight.T + attention.proj.bias
    torch.testing.assert_close(attention(tokens)[0], expected)


def test_patches_are_read_row_by_row() -> None:
    embed = PatchEmbed(in_channels=1, patch_size=2, embed_dim=1)
    with torch.no_grad():
        embed.proj.weight.fill_(0.25)
        embed.proj.bias.zero_()
    image = torch.arange(6.0).reshape(2, 3).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert embed(image[None, None])[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_tensors_of_the_wrong_rank_are_caught_while_testing() -> None:
    with pytest.raises(Exception, match="Type-check error"):
        Attention(6, num_heads=2)(torch.zeros(5, 6))
