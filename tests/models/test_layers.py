from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.timm_vit import randomise
from timm.layers import PatchDropout as TimmPatchDropout
from timm.layers import RmsNorm
from timm.layers import SwiGLU as TimmSwiGLU

from vitscale.models.layers import DropPath, LayerScale, Mlp, PatchDropout, PreLogits, SwiGLU, make_norm
from vitscale.models.patch import PatchEmbed


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


def test_patches_are_read_row_by_row() -> None:
    embed = PatchEmbed(in_channels=1, patch_size=2, embed_dim=1)
    with torch.no_grad():
        embed.proj.weight.fill_(0.25)
        embed.proj.bias.zero_()
    image = torch.arange(6.0).reshape(2, 3).repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert embed(image[None, None]).tokens[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_fcs", [2, 3, 4])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_an_mlp_has_as_many_layers_as_asked_for(num_fcs: int, activation: str) -> None:
    """mmcv's FFN: `num_fcs` - 1 layers of the hidden width with activation and dropout, then one without activation."""
    mlp = Mlp(6, mlp_dim=10, num_fcs=num_fcs, activation=activation)  # type: ignore[arg-type]
    randomise(mlp)
    state = mlp.state_dict()
    assert sorted(state) == sorted(f"fc{i}.{kind}" for i in range(1, num_fcs + 1) for kind in ("weight", "bias"))
    tokens = torch.randn(2, 3, 6)
    expected = tokens
    for index in range(1, num_fcs + 1):
        expected = expected @ state[f"fc{index}.weight"].T + state[f"fc{index}.bias"]
        if index < num_fcs:
            exact = expected * (1 + torch.erf(expected / math.sqrt(2))) / 2
            cubic = math.sqrt(2 / math.pi) * (expected + 0.044715 * expected**3)
            expected = exact if activation == "gelu" else expected * (1 + torch.tanh(cubic)) / 2
    torch.testing.assert_close(mlp(tokens), expected, rtol=1e-5, atol=1e-5)


def test_dropout_follows_every_layer_of_an_mlp() -> None:
    mlp = Mlp(6, mlp_dim=10, num_fcs=3, dropout=0.4).train()
    randomise(mlp)
    tokens = torch.randn(2, 3, 6)
    torch.manual_seed(1)
    drawn = mlp(tokens)
    torch.manual_seed(1)
    hidden = F.dropout(F.gelu(mlp.get_submodule("fc1")(tokens)), 0.4)
    hidden = F.dropout(F.gelu(mlp.get_submodule("fc2")(hidden)), 0.4)
    assert torch.equal(drawn, F.dropout(mlp.get_submodule("fc3")(hidden), 0.4))


def test_swiglu_is_that_of_separate_layers() -> None:
    """timm's `SwiGLU`, as in DINOv3, has the two halves of the first layer apart: gate, then value."""
    ours, theirs = SwiGLU(6, mlp_dim=10), TimmSwiGLU(6, 10)
    randomise(ours)
    state = ours.state_dict()
    split = {"fc2.weight": state["fc2.weight"], "fc2.bias": state["fc2.bias"]}
    for kind in ("weight", "bias"):
        split[f"fc1_g.{kind}"], split[f"fc1_x.{kind}"] = state[f"fc1.{kind}"].chunk(2)
    theirs.load_state_dict(split, strict=True)
    tokens = torch.randn(2, 3, 6)
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-5, atol=1e-6)


def test_swiglu_begins_with_xaviers_uniform_in_each_matrix() -> None:
    swiglu = SwiGLU(60, mlp_dim=90)
    swiglu.init_weights()
    bound = math.sqrt(6 / 150)
    for weight in (swiglu.fc1.weight[:90], swiglu.fc1.weight[90:], swiglu.fc2.weight):
        assert 0.99 * bound < weight.abs().max().item() <= bound
    assert 0 < swiglu.fc1.bias.abs().max() < 1e-5


def test_norms() -> None:
    tokens = torch.randn(2, 3, 6)
    for eps in (1e-6, 0.1):
        rms = make_norm("rmsnorm", 6, eps=eps)
        expected = tokens / (tokens.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(rms(tokens), expected)
        torch.testing.assert_close(rms(tokens), RmsNorm(6, eps=eps)(tokens))
        assert [name for name, _ in rms.named_parameters()] == ["weight"]
        centred = tokens - tokens.mean(dim=-1, keepdim=True)
        expected = centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        torch.testing.assert_close(make_norm("layernorm", 6, eps=eps)(tokens), expected)


def test_layer_scale_multiplies_channels() -> None:
    scale = LayerScale(3, value=0.25)
    scale.init_weights()
    assert scale(torch.ones(1, 2, 3)).unique().tolist() == [0.25]
    with torch.no_grad():
        scale.gamma.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert scale(torch.ones(1, 1, 3))[0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("rate", "kept"), [(0.25, 12), (0.5, 8), (0.99, 1)])
def test_patch_dropout_draws_like_timm(rate: float, kept: int) -> None:
    tokens = torch.randn(4, 16, 3)
    torch.manual_seed(0)
    indices = PatchDropout(rate).train()(tokens)
    assert indices is not None
    torch.manual_seed(0)
    expected = TimmPatchDropout(rate, num_prefix_tokens=0).train()(tokens)
    assert torch.equal(tokens.take_along_dim(indices[:, :, None], dim=1), expected)
    assert indices.shape == (4, kept)
    assert all(len(set(row)) == kept for row in indices.tolist())
    assert PatchDropout(rate).eval()(tokens) is None
    assert PatchDropout(0.0).train()(tokens) is None


def test_pre_logits_are_a_tanh_layer() -> None:
    layer = PreLogits(6, 4)
    layer.init_weights()
    assert not layer.fc.bias.any()
    features = torch.randn(3, 6)
    torch.testing.assert_close(layer(features), torch.tanh(features @ layer.fc.weight.T))
