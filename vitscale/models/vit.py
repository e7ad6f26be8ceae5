"""The Vision Transformer (https://arxiv.org/abs/2010.11929): patches -> tokens -> blocks -> pooled -> logits.

    images [batch, channels, height, width]
      patch_embed            a linear map of each patch              [batch, rows * columns, dim]
      cls_token, pos_embed   a token of its own, learned positions   [batch, tokens, dim]
      blocks                 attention and MLP, `depth` times
      norm, pool, fc_norm    the class token, or the mean of the patches, normalised   [batch, dim]
      head                   the classifier                          [batch, classes]

Parameters bear timm's names, and equal weights give timm's outputs. The model is plain torch: how it is spread over
devices, compiled or recomputed is done to `blocks` from outside, so that `activation_checkpointing` has no effect here.
"""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitscale.config.schema import ModelConfig
from vitscale.models.layers import Block, PatchEmbed
from vitscale.models.position import grid_height_width, image_height_width, num_prefix_tokens


class VisionTransformer(nn.Module):
    """A Vision Transformer with initialised weights, on the default device of the caller.

    With `pool: cls` the classifier reads a class token; with `gap` there is none, and it reads the mean of the patch
    tokens, normalised after the mean (timm's `fc_norm`).

    Args:
        config: All that the model is.

    Raises:
        ValueError: Heads that do not divide the width, patches that do not divide the image.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        rows, columns = grid_height_width(config)
        dim, prefix = config.embed_dim, num_prefix_tokens(config)
        device = torch.get_default_device()
        with torch.device("meta"):  # so that `init_weights` alone draws random numbers, wherever the model is built
            self.patch_embed = PatchEmbed(in_channels=config.in_channels, patch_size=config.patch_size, embed_dim=dim)
            self.cls_token = nn.Parameter(torch.empty(1, prefix, dim)) if prefix else None
            self.pos_embed = nn.Parameter(torch.empty(1, prefix + rows * columns, dim))
            self.pos_drop = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(
                Block(
                    dim,
                    num_heads=config.num_heads,
                    mlp_dim=config.mlp_dim,
                    qkv_bias=config.qkv_bias,
                    activation=config.activation,
                    norm_eps=config.norm_eps,
                    dropout=config.dropout,
                    attention_dropout=config.attention_dropout,
                    drop_path=config.drop_path * index / max(config.depth - 1, 1),
                )
                for index in range(config.depth)
            )
            norm_first = config.pool == "cls"
            self.norm = nn.LayerNorm(dim, eps=config.norm_eps) if norm_first else nn.Identity()
            self.fc_norm = nn.Identity() if norm_first else nn.LayerNorm(dim, eps=config.norm_eps)
            self.head = nn.Linear(dim, config.num_classes) if config.num_classes else nn.Identity()
        self.to_empty(device=device)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set every parameter, after `to_empty` too; `torch.manual_seed` of the caller decides the numbers.

        Positions are normal with standard deviation 1 / sqrt(dim), the class token and the head zero.
        """
        self.patch_embed.init_weights()
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        nn.init.normal_(self.pos_embed, std=1 / math.sqrt(self.config.embed_dim))
        for block in self.blocks:
            assert isinstance(block, Block)
            block.init_weights()
        for norm in (self.norm, self.fc_norm):
            if isinstance(norm, nn.LayerNorm):
                norm.reset_parameters()
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Logits; without a head (`num_classes: 0`) what the head would have read, `[batch, dim]`.

        Args:
            images: Normalised pixels, of the size and channels that the config says.

        Raises:
            ValueError: Images of another shape.
        """
        logits: Tensor = self.head(self.pool(self.forward_features(images)))
        return logits

    def forward_features(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """All tokens after the final norm, the class token first; under `pool: gap` that norm follows the pooling."""
        self._check(images)
        tokens: Tensor = self.patch_embed(images)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = self.pos_drop(tokens + self.pos_embed)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        return tokens

    def pool(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch dim"]:
        """What the classifier reads of the tokens of `forward_features`."""
        pooled: Tensor = tokens[:, 0] if self.config.pool == "cls" else self.fc_norm(tokens.mean(dim=1))
        return pooled

    def _check(self, images: Tensor) -> None:
        height, width = image_height_width(self.config)
        if images.ndim != 4 or images.shape[1:] != (self.config.in_channels, height, width):
            raise ValueError(
                f"images of shape {list(images.shape)}: this model takes [batch, {self.config.in_channels}, "
                f"{height}, {width}]"
            )
