from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers.timm_vit import randomise
from timm.layers import AttentionPoolLatent, RmsNorm
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn

from vitscale.models.attention import Attention, AttentionPool


def attention_by_hand(attention: Attention, tokens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output before the shortcut, and the values with their heads side by side; one sample, loops over heads."""
    dim = attention.proj.in_features
    qkv = tokens @ attention.qkv.weight.T + attention.qkv.bias
    query, key, value = qkv.split(dim, dim=1)
    width = dim // attention.num_heads
    mixed = []
    for head in range(attention.num_heads):
        part = slice(head * width, (head + 1) * width)
        weights = (query[:, part] @ key[:, part].T * scale).softmax(dim=1)
        mixed.append(weights @ value[:, part])
    return torch.cat(mixed, dim=1) @ attention.proj.weight.T + attention.proj.bias, value


def test_attention_is_the_formula() -> None:
    attention = Attention(6, num_heads=2).double()
    randomise(attention)
    tokens = torch.randn(1, 5, 6, dtype=torch.double)
    expected, _ = attention_by_hand(attention, tokens[0], 1 / math.sqrt(3))
    torch.testing.assert_close(attention(tokens)[0], expected)


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_qk_scale_is_the_factor_that_is_used(scale: float) -> None:
    attention = Attention(6, num_heads=2, qk_scale=scale).double()
    randomise(attention)
    tokens = torch.randn(1, 5, 6, dtype=torch.double)
    expected, _ = attention_by_hand(attention, tokens[0], scale)
    torch.testing.assert_close(attention(tokens)[0], expected)
    torch.testing.assert_close(attention.weights(tokens).sum(dim=-1), torch.ones(1, 2, 5, dtype=torch.double))


@pytest.mark.parametrize("num_heads", [1, 3])
def test_v_shortcut_adds_the_values_of_all_heads(num_heads: int) -> None:
    attention = Attention(6, num_heads=num_heads, v_shortcut=True).double()
    randomise(attention)
    tokens = torch.randn(1, 5, 6, dtype=torch.double)
    expected, value = attention_by_hand(attention, tokens[0], 1 / math.sqrt(6 / num_heads))
    torch.testing.assert_close(attention(tokens)[0], expected + value)


def test_tokens_of_another_width_come_in() -> None:
    """T2T-ViT's first attention: from the 147 values of a 7x7 patch to 64, where a residual could not be added."""
    attention = Attention(64, num_heads=1, input_dim=147, v_shortcut=True).double()
    attention.init_weights()
    bound = math.sqrt(6 / (147 + 64))
    assert 0.99 * bound < attention.qkv.weight.abs().max().item() <= bound
    randomise(attention)
    tokens = torch.randn(1, 5, 147, dtype=torch.double)
    expected, value = attention_by_hand(attention, tokens[0], 1 / 8)
    torch.testing.assert_close(attention(tokens)[0], expected + value)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_normalised_queries_and_keys_are_timms(norm: str) -> None:
    ours = Attention(24, num_heads=3, qk_norm=norm, norm_eps=1e-6, qkv_bias=False)  # type: ignore[arg-type]
    theirs = TimmAttention(24, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm if norm == "layernorm" else RmsNorm)
    randomise(ours)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    tokens = torch.randn(2, 5, 24)
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-4)  # eps of LayerNorm is 1e-5 in timm


def test_dropout_falls_on_the_weights_and_on_the_projection() -> None:
    """Each by itself changes training, not evaluation; on the weights it keeps the mean, and zeroes no whole output."""
    tokens = torch.randn(1, 6, 8)
    for dropout, zeroed in ({"attention_dropout": 0.5}, False), ({"dropout": 0.5}, True):
        attention = Attention(8, num_heads=2, **dropout)  # type: ignore[arg-type]
        randomise(attention)
        plain = attention.eval()(tokens)
        assert torch.equal(plain, attention(tokens))
        drawn = torch.stack([attention.train()(tokens) for _ in range(1000)])
        assert bool((drawn == 0).any()) is zeroed
        # Of n draws; outputs are of size one, and dropout at a half at most doubles them.
        assert (drawn.mean(dim=0) - plain).abs().max() < 5 * drawn.std(dim=0).max() / math.sqrt(1000)


def test_attention_pooling_is_timms() -> None:
    ours = AttentionPool(24, num_heads=3, mlp_dim=48)
    theirs = AttentionPoolLatent(24, num_heads=3, mlp_ratio=2, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    randomise(ours)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randn(2, 7, 24)
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-5, atol=1e-5)
    assert torch.allclose(ours(tokens[:, torch.randperm(7)]), ours(tokens), atol=1e-5)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="5 heads do not divide a width of 24"):
        Attention(24, num_heads=5)


def test_tensors_of_the_wrong_rank_are_caught_while_testing() -> None:
    with pytest.raises(Exception, match="Type-check error"):
        Attention(6, num_heads=2)(torch.zeros(5, 6))
