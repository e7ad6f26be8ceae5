"""The parts of a Vision Transformer, each usable alone, with the names of their parameters as in timm.

Every part has `init_weights`, which sets all of its parameters and relies on nothing that was there before, so that
a model may be built on the meta device and filled later. The rules are those of big_vision's `models/vit.py`
(https://github.com/google-research/big_vision), the authors' own code of the ViT paper.
"""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["gelu", "gelu_tanh"]

_TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a unit normal cut at two standard deviations, as jax's `lecun_normal` corrects for."""


class PatchEmbed(nn.Module):
    """Square patches, side by side, each mapped to a token: a linear layer, computed as a convolution."""

    def __init__(self, *, in_channels: int, patch_size: int, embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch patches dim"]:
        """Tokens row by row, from the top left; `patches` is height / patch_size times width / patch_size."""
        maps: Tensor = self.proj(images)
        return maps.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def init_weights(self) -> None:
        """LeCun's normal, truncated, for the linear layer this is: its fan-in is a whole patch; bias zero."""
        fan_in = self.proj.weight[0].numel()
        std = math.sqrt(1 / fan_in) / _TRUNCATED_STD
        nn.init.trunc_normal_(self.proj.weight, std=std, a=-2 * std, b=2 * std)
        if self.proj.bias is not None:
            nn.init.zeros_(self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one matrix, in this order."""

    def __init__(
        self, dim: int, *, num_heads: int, qkv_bias: bool = True, attention_dropout: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide a width of {dim}: num_heads must divide embed_dim")
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """softmax(q k^T / sqrt(head_dim)) v in each head, the heads side by side, projected."""
        batch, count, dim = tokens.shape
        qkv: Tensor = self.qkv(tokens)
        query, key, value = qkv.reshape(batch, count, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.attention_dropout if self.training else 0.0
        )
        output: Tensor = self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Xavier's uniform for each of the four `[dim, dim]` matrices (not for the fused one); biases zero."""
        bound = math.sqrt(6 / (self.proj.in_features + self.proj.out_features))
        for linear in (self.qkv, self.proj):
            nn.init.uniform_(linear.weight, -bound, bound)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class Mlp(nn.Module):
    """Two linear layers with GELU between: exact, or the tanh approximation of JAX code."""

    def __init__(self, dim: int, *, mlp_dim: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.act = nn.GELU(approximate="tanh" if activation == "gelu_tanh" else "none")
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_dim, dim)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """Each token by itself."""
        hidden = self.drop1(self.act(self.fc1(tokens)))
        output: Tensor = self.drop2(self.fc2(hidden))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Xavier's uniform; biases normal with standard deviation 1e-6."""
        for linear in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)


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
        kept = branch.new_empty(len(branch), 1, 1).bernoulli_(keep)
        return branch * kept / keep  # in this order: 1 / keep in bfloat16 is off by up to 0.2 %, for all alike

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        return f"rate={self.rate:.3g}"


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        mlp_dim: int,
        qkv_bias: bool = True,
        activation: Activation = "gelu",
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(
            dim, num_heads=num_heads, qkv_bias=qkv_bias, attention_dropout=attention_dropout, dropout=dropout
        )
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, mlp_dim=mlp_dim, activation=activation, dropout=dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """The two branches drop their samples independently."""
        tokens = tokens + self.drop_path(self.attn(self.norm1(tokens)))
        output: Tensor = tokens + self.drop_path(self.mlp(self.norm2(tokens)))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Norms begin as plain normalisation; the rest as its own part says."""
        self.norm1.reset_parameters()
        self.attn.init_weights()
        self.norm2.reset_parameters()
        self.mlp.init_weights()
