"""Transformer blocks: attention and MLP on a residual stream, one after the other or side by side."""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitscale.config.schema import ModelConfig
from vitscale.models.attention import Attention
from vitscale.models.layers import DropPath, LayerScale, Mlp, SwiGLU, make_norm


class Block(nn.Module):
    """x + ls1(attention(norm1(x))), then x + ls2(mlp(norm2(x))).

    Args:
        config: Of the model that the block is part of.
        drop_path: Chance that a sample loses a branch; the two branches drop independently.
    """

    def __init__(self, config: ModelConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        dim = config.embed_dim
        self.norm1 = make_norm(config.norm, dim, eps=config.norm_eps)
        self.attn = make_attention(config)
        self.ls1 = LayerScale(dim, value=config.layer_scale) if config.layer_scale else nn.Identity()
        self.norm2 = make_norm(config.norm, dim, eps=config.norm_eps)
        self.mlp = make_mlp(config)
        self.ls2 = LayerScale(dim, value=config.layer_scale) if config.layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        tokens: Float[Tensor, "batch tokens dim"],
        rotary: Float[Tensor, "2 *batched tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """The residual stream after both branches."""
        tokens = tokens + self.drop_path(self.ls1(self.attn(self.norm1(tokens), rotary)))
        output: Tensor = tokens + self.drop_path(self.ls2(self.mlp(self.norm2(tokens))))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Norms begin as plain normalisation; the rest as its own part says."""
        init_parts(self)


class ParallelBlock(nn.Module):
    """x + ls1(attention(y) + mlp(y)) with y = norm1(x) (ViT-22B, https://arxiv.org/abs/2302.05442).

    Args:
        config: Of the model that the block is part of.
        drop_path: Chance that a sample loses both branches.
    """

    def __init__(self, config: ModelConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = make_norm(config.norm, config.embed_dim, eps=config.norm_eps)
        self.attn = make_attention(config)
        self.mlp = make_mlp(config)
        self.ls1 = LayerScale(config.embed_dim, value=config.layer_scale) if config.layer_scale else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        tokens: Float[Tensor, "batch tokens dim"],
        rotary: Float[Tensor, "2 *batched tokens head_dim"] | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """The residual stream after both branches."""
        normalised = self.norm1(tokens)
        branch = self.attn(normalised, rotary) + self.mlp(normalised)
        output: Tensor = tokens + self.drop_path(self.ls1(branch))
        return output

    @torch.no_grad()
    def init_weights(self) -> None:
        """Norms begin as plain normalisation; the rest as its own part says."""
        init_parts(self)


def make_attention(config: ModelConfig) -> Attention:
    """A block's attention."""
    return Attention(
        config.embed_dim,
        num_heads=config.num_heads,
        qkv_bias=config.qkv_bias,
        qk_norm=config.norm if config.qk_norm else None,
        norm_eps=config.norm_eps,
        qk_scale=config.qk_scale,
        v_shortcut=config.v_shortcut,
        attention_dropout=config.attention_dropout,
        dropout=config.dropout,
    )


def make_mlp(config: ModelConfig) -> Mlp | SwiGLU:
    """A block's MLP."""
    if config.activation == "swiglu":
        return SwiGLU(config.embed_dim, mlp_dim=config.mlp_dim, dropout=config.dropout)
    return Mlp(
        config.embed_dim,
        mlp_dim=config.mlp_dim,
        activation=config.activation,
        dropout=config.dropout,
        num_fcs=config.num_fcs,
    )


def drop_path_rates(config: ModelConfig) -> list[float]:
    """Stochastic depth of each block."""
    if config.drop_path_schedule == "constant":
        return [config.drop_path] * config.depth
    return [config.drop_path * index / max(config.depth - 1, 1) for index in range(config.depth)]


@torch.no_grad()
def init_parts(module: nn.Module) -> None:
    """Let each direct part of `module` that has parameters set them."""
    for part in module.children():
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            part.reset_parameters()
        elif next(part.parameters(), None) is not None:
            part.init_weights()  # type: ignore[operator]
