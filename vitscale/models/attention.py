"""Attention of tokens to each other, and of one learned query to all of them (pooling)."""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitscale.models.layers import Activation, Mlp, make_norm
from vitscale.models.rotary import rotate


class Attention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one matrix, in this order.

    Args:
        dim: Width of the tokens that come out.
        num_heads: Must divide `dim`.
        input_dim: Width of the tokens that go in; None: `dim`.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm: Normalise queries and keys in each head, by a norm of this kind.
        norm_eps: Epsilon of those norms.
        qk_scale: Factor of the products of queries and keys; None: 1 / sqrt(head_dim).
        v_shortcut: Add the values, heads side by side, to what comes out (T2T-ViT: where `input_dim` differs from `dim`
            there is nothing else that a residual could add).
        attention_dropout: On the attention weights.
        dropout: After the projection.

    Raises:
        ValueError: The heads do not divide the width.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        input_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: Literal["layernorm", "rmsnorm"] | None = None,
        norm_eps: float = 1e-6,
        qk_scale: float | None = None,
        v_shortcut: bool = False,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide a width of {dim}: num_heads must divide embed_dim")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.v_shortcut = v_shortcut
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(input_dim or dim, 3 * dim, bias=qkv_bias)
        self.q_norm = make_norm(qk_norm, self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = make_norm(qk_norm, self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def forward(
        self,
        tokens: Float[Tensor, "batch tokens input_dim"],
        rotary: Float[Tensor, "2 *batched tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """softmax(q k^T * scale) v in each head, the heads side by side, projected.

        Args:
            tokens: Normalised tokens.
            rotary: Angles of every token, see `rotary_table`.
        """
        query, key, value = self._heads(tokens, rotary)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=self.scale)
        output: Tensor = self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return output + value.transpose(1, 2).flatten(2) if self.v_shortcut else output

    def weights(
        self,
        tokens: Float[Tensor, "batch tokens input_dim"],
        rotary: Float[Tensor, "2 *batched tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch heads tokens tokens"]:
        """softmax(q k^T * scale): how much each token (row) reads of each other (column), without dropout."""
        query, key, _ = self._heads(tokens, rotary)
        return (query @ key.transpose(2, 3) * self.scale).softmax(dim=-1)

    def _heads(self, tokens: Tensor, rotary: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[batch, heads, tokens, head_dim]` each."""
        batch, count, _ = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, count, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = self.q_norm(query), self.k_norm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return query, key, value

    @torch.no_grad()
    def init_weights(self) -> None:
        """Xavier's uniform for each of the four `[dim, dim]` matrices (not for the fused one); biases zero."""
        _xavier_uniform(self.qkv, outputs=self.proj.in_features)
        _xavier_uniform(self.proj, outputs=self.proj.out_features)
        _reset((self.q_norm, self.k_norm))


class AttentionPool(nn.Module):
    """Attention pooling (`MAPHead` of big_vision; timm's `AttentionPoolLatent`): one learned query, then an MLP.

    Args:
        dim: Width of a token.
        num_heads: Must divide `dim`.
        mlp_dim: Width of the MLP's hidden layer.
        activation: Of the MLP.
        norm: Kind of the norm before the MLP.
        norm_eps: Its epsilon.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        mlp_dim: int,
        activation: Activation = "gelu",
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = make_norm(norm, dim, eps=norm_eps)
        self.mlp = Mlp(dim, mlp_dim=mlp_dim, activation=activation)

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch dim"]:
        """With y = attention(latent, tokens), y + mlp(norm(y))."""
        batch, _, dim = tokens.shape
        split = (self.num_heads, dim // self.num_heads)
        query = self.q(self.latent).unflatten(2, split).transpose(1, 2).expand(batch, -1, -1, -1)
        key, value = self.kv(tokens).unflatten(2, (2, *split)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        pooled = self.proj(mixed.transpose(1, 2).flatten(2))
        output: Tensor = pooled + self.mlp(self.norm(pooled))
        return output[:, 0]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Xavier's uniform for the query and each `[dim, dim]` matrix; biases zero."""
        nn.init.xavier_uniform_(self.latent[0])
        for linear in (self.q, self.kv, self.proj):
            _xavier_uniform(linear, outputs=self.proj.out_features)
        _reset((self.norm,))
        self.mlp.init_weights()


def _xavier_uniform(linear: nn.Linear, *, outputs: int) -> None:
    """Xavier's uniform for each `[outputs, inputs]` matrix in a fused one; bias zero."""
    bound = math.sqrt(6 / (linear.in_features + outputs))
    nn.init.uniform_(linear.weight, -bound, bound)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _reset(norms: Iterable[nn.Module]) -> None:
    for norm in norms:
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            norm.reset_parameters()
