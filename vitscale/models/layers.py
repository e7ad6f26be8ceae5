"""Small parts of a Vision Transformer, each usable alone, with the names of their parameters as in timm.

Every part has `init_weights`, which sets all of its parameters and relies on nothing that was there before, so that
a model may be built on the meta device and filled later. The rules are those of big_vision's `models/vit.py`
(https://github.com/google-research/big_vision), the authors' own code of the ViT paper.
"""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh"]
Norm: TypeAlias = nn.LayerNorm | nn.RMSNorm

_TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut at two standard deviations, as jax's `lecun_normal` corrects for."""


def lecun_normal_(weight: Tensor) -> None:
    """LeCun's normal, truncated: standard deviation 1 / sqrt(all inputs of one output)."""
    std = math.sqrt(1 / weight[0].numel()) / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def make_norm(kind: Literal["layernorm", "rmsnorm"], dim: int, *, eps: float) -> Norm:
    """A norm over the last dimension; `reset_parameters` makes it plain normalisation."""
    return nn.LayerNorm(dim, eps=eps) if kind == "layernorm" else nn.RMSNorm(dim, eps=eps)


class Mlp(nn.Module):
    """Linear layers with GELU between, exact or in the tanh approximation of JAX code; named fc1, fc2 and so on."""

    def __init__(
        self, dim: int, *, mlp_dim: int, activation: Activation = "gelu", dropout: float = 0.0, num_fcs: int = 2
    ) -> None:
        super().__init__()
        widths = [dim] + [mlp_dim] * (num_fcs - 1) + [dim]
        self.names = [f"fc{index}" for index in range(1, num_fcs + 1)]
        for name, before, after in zip(self.names, widths, widths[1:], strict=False):
            self.add_module(name, nn.Linear(before, after))
        self.act = nn.GELU(approximate="tanh" if activation == "gelu_tanh" else "none")
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Each token by itself; dropout after every layer."""
        for name in self.names[:-1]:
            tokens = self.drop(self.act(self.get_submodule(name)(tokens)))
        output: Tensor = self.drop(self.get_submodule(self.names[-1])(tokens))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Xavier's uniform; biases normal with standard deviation 1e-6."""
        for name in self.names:
            linear = self.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)


class SwiGLU(nn.Module):
    """silu(a) * b between two linear layers, a and b being the halves of the first layer's output (DINOv2's `w12`).

    Args:
        dim: Width of a token.
        mlp_dim: Width of a and of b.
        dropout: After the product and after the second layer.
    """

    def __init__(self, dim: int, *, mlp_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Each token by itself."""
        gate, value = self.fc1(tokens).chunk(2, dim=-1)
        output: Tensor = self.drop(self.fc2(self.drop(F.silu(gate) * value)))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Xavier's uniform for each of the three `[mlp_dim, dim]` matrices; biases as in `Mlp`."""
        bound = math.sqrt(6 / (self.fc2.in_features + self.fc2.out_features))
        for linear in (self.fc1, self.fc2):
            nn.init.uniform_(linear.weight, -bound, bound)
            nn.init.normal_(linear.bias, std=1e-6)


class LayerScale(nn.Module):
    """A learned factor a channel (CaiT, https://arxiv.org/abs/2103.17239).

    Args:
        dim: Width of a token.
        value: Of every factor in the beginning.
    """

    def __init__(self, dim: int, *, value: float) -> None:
        super().__init__()
        self.value = value
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Channel by channel."""
        return tokens * self.gamma

    @torch.no_grad()
    def init_weights(self) -> None:
        """All factors equal."""
        nn.init.constant_(self.gamma, self.value)


class DropPath(nn.Module):
    """Stochastic depth (https://arxiv.org/abs/1603.09382): a residual branch is left out for some of the samples.

    The others are scaled so that the expectation stays. The choice is drawn from the device's generator, whose state
    activation checkpointing restores, so that a recomputed forward makes the same one.

    Args:
        rate: Probability that a sample loses the branch, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop path rate {rate} is not in [0, 1)")
        self.rate = rate

    def forward(self, branch: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """`branch` / (1 - rate), or zero, sample by sample; unchanged in evaluation."""
        if not self.training or self.rate == 0:
            return branch
        keep = 1 - self.rate
        kept = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(keep)
        return branch * kept / keep  # in this order: 1 / keep in bfloat16 is off by up to 0.2 %, for all alike

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        return f"rate={self.rate:.3g}"


class PatchDropout(nn.Module):
    """A random part of each sample's patches is taken out in training (https://arxiv.org/abs/2208.07220).

    Args:
        rate: Share of the patches that goes, in [0, 1); at least one stays.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Float[Tensor, "batch patches dim"]) -> Tensor | None:
        """Which patches of each sample stay, `[batch, kept]`; None where all do."""
        if not self.training or self.rate == 0:
            return None
        batch, count, _ = tokens.shape
        kept = max(1, int(count * (1 - self.rate)))
        return torch.randn(batch, count, device=tokens.device).argsort(dim=1)[:, :kept]


class PreLogits(nn.Sequential):
    """A linear layer with tanh before the classifier, as the ViT paper has it for pre-training."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, size)
        self.act = nn.Tanh()

    @torch.no_grad()
    def init_weights(self) -> None:
        """LeCun's normal, truncated; bias zero."""
        lecun_normal_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)
