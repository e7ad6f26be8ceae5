"""The Vision Transformer (https://arxiv.org/abs/2010.11929): patches -> tokens -> blocks -> pooled -> logits.

    images [batch, channels, height, width]
      patch_embed            a linear map of each patch                     [batch, rows * columns, dim]
      cls_token, reg_token   tokens of their own                            [batch, tokens, dim]
      pos_embed              learned positions; or fixed ones, or rotary ones inside attention
      norm_pre               (CLIP) a norm before the blocks
      blocks                 attention and MLP, `depth` times
      norm, pool, fc_norm    class token, mean of the patches, attention pooling; normalised   [batch, dim]
      pre_logits, head       (ImageNet-21k) a tanh layer; the classifier    [batch, classes]

Parameters bear timm's names, and equal weights give timm's outputs. The model is plain torch: how it is spread over
devices, compiled or recomputed is done to `blocks` from outside, so that `activation_checkpointing` has no effect here.
"""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitscale.config.schema import ModelConfig
from vitscale.models.attention import AttentionPool
from vitscale.models.block import Block, ParallelBlock, drop_path_rates, init_parts
from vitscale.models.layers import PatchDropout, PreLogits, make_norm
from vitscale.models.outputs import OutType, block_indices, format_output
from vitscale.models.patch import PatchEmbed
from vitscale.models.position import (
    grid_height_width,
    has_class_token,
    image_height_width,
    num_prefix_positions,
    num_prefix_tokens,
    patch_grid,
    resize_grid,
    sincos,
)
from vitscale.models.rotary import rotary_table
from vitscale.models.stages import evaluate_frozen, freeze


class _Embedded(NamedTuple):
    """What the first block is given: tokens, the angles of rotary positions if any; and the grid the patches are of."""

    tokens: Tensor
    rotary: tuple[Tensor, ...]
    grid: tuple[int, int]


class VisionTransformer(nn.Module):
    """A Vision Transformer with initialised weights, on the default device of the caller.

    Args:
        config: All that the model is.

    Raises:
        ValueError: Heads that do not divide the width, patches that do not divide the image, no class token to pool.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # so that `init_weights` alone draws random numbers, wherever the model is built
            self._build_embedding(config)
            make_block = ParallelBlock if config.block == "parallel" else Block
            self.blocks = nn.ModuleList(make_block(config, drop_path=rate) for rate in drop_path_rates(config))
            self._build_head(config)
        self.to_empty(device=device)
        self.init_weights()
        freeze(self, depth=config.depth, frozen_stages=config.frozen_stages)

    def _build_embedding(self, config: ModelConfig) -> None:
        dim, (rows, columns) = config.embed_dim, grid_height_width(config)
        self.patch_embed = PatchEmbed(
            in_channels=config.in_channels,
            patch_size=config.patch_size,
            embed_dim=dim,
            stride=config.patch_stride,
            padding=config.patch_padding,
            bias=not config.pre_norm,
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if has_class_token(config) else None
        self.reg_token = nn.Parameter(torch.empty(1, config.num_registers, dim)) if config.num_registers else None
        learned = num_prefix_positions(config) + rows * columns
        self.pos_embed = nn.Parameter(torch.empty(1, learned, dim)) if config.pos_embed == "learned" else None
        self.pos_drop = nn.Dropout(config.dropout)
        self.patch_drop = PatchDropout(config.patch_dropout)
        self.norm_pre = make_norm(config.norm, dim, eps=config.norm_eps) if config.pre_norm else nn.Identity()

    def _build_head(self, config: ModelConfig) -> None:
        dim = config.embed_dim
        if config.pool in ("cls", "cls_gap") and not has_class_token(config):
            raise ValueError(f"pool: {config.pool} reads the class token, and class_token is false")
        where = config.final_norm or ("pooled" if config.pool == "gap" else "tokens")
        pooled = 2 * dim if config.pool == "cls_gap" else dim
        self.norm = make_norm(config.norm, dim, eps=config.norm_eps) if where in ("tokens", "both") else nn.Identity()
        self.attn_pool = (
            AttentionPool(
                dim,
                num_heads=config.num_heads,
                mlp_dim=config.mlp_dim,
                activation="gelu_tanh" if config.activation == "gelu_tanh" else "gelu",
                norm=config.norm,
                norm_eps=config.norm_eps,
            )
            if config.pool == "map"
            else None
        )
        after_pool = where in ("pooled", "both")
        self.fc_norm = make_norm(config.norm, pooled, eps=config.norm_eps) if after_pool else nn.Identity()
        size = config.representation_size
        self.pre_logits = PreLogits(pooled, size) if size else nn.Identity()
        self.head = nn.Linear(size or pooled, config.num_classes) if config.num_classes else nn.Identity()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set every parameter, after `to_empty` too; `torch.manual_seed` of the caller decides the numbers.

        Positions are normal with standard deviation 1 / sqrt(dim), registers with 1e-6, the class token and the head
        zero.
        """
        self.patch_embed.init_weights()
        if self.cls_token is not None:
            nn.init.zeros_(self.cls_token)
        if self.reg_token is not None:
            nn.init.normal_(self.reg_token, std=1e-6)
        if self.pos_embed is not None:
            nn.init.normal_(self.pos_embed, std=1 / math.sqrt(self.config.embed_dim))
        init_parts(self.blocks)
        for norm in (self.norm_pre, self.norm, self.fc_norm):
            if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
                norm.reset_parameters()
        if self.attn_pool is not None:
            self.attn_pool.init_weights()
        if isinstance(self.pre_logits, PreLogits):
            self.pre_logits.init_weights()
        if isinstance(self.head, nn.Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> VisionTransformer:
        """Training mode for all but the frozen parts."""
        super().train(mode)
        evaluate_frozen(self, depth=self.config.depth, frozen_stages=self.config.frozen_stages)
        return self

    def forward(
        self, images: Float[Tensor, "batch channels height width"], *, patch_size: int | None = None
    ) -> Float[Tensor, "batch *tokens classes"]:
        """Logits; without a head (`num_classes: 0`) what the head would have read, `[batch, dim]`.

        With `pool: none` these are of every token, `[batch, tokens, classes]`.

        Args:
            images: Normalised pixels, of the size and channels that the config says.
            patch_size: FlexiViT: side of the patches to take; None: the model's own.

        Raises:
            ValueError: Images or patches of another size.
        """
        features = self.forward_features(images, patch_size=patch_size)
        logits: Tensor = self.head(self.pre_logits(self.pool(features)))
        return logits

    @overload
    def forward_features(self, images: Tensor, *, patch_size: int | None = None) -> Tensor: ...

    @overload
    def forward_features(
        self,
        images: Tensor,
        out_indices: int | Sequence[int],
        *,
        out_type: OutType = "raw",
        norm: Literal["last", "all", "none"] = "last",
        patch_size: int | None = None,
    ) -> tuple[Tensor, ...]: ...

    def forward_features(
        self,
        images: Float[Tensor, "batch channels height width"],
        out_indices: int | Sequence[int] | None = None,
        *,
        out_type: OutType = "raw",
        norm: Literal["last", "all", "none"] = "last",
        patch_size: int | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """All tokens after the final norm, those before the patches first; or the outputs of chosen blocks.

        Where the final norm follows the pooling (`pool: gap`), tokens are not normalised here.

        Args:
            images: Normalised pixels.
            out_indices: Blocks whose outputs are wanted, from 0, -1 being the last; in their order in the model.
            out_type: Their form, see `format_output`.
            norm: Which of them go through the final norm: the last block's (mmpretrain), all (DINOv2), or none.
            patch_size: FlexiViT: side of the patches to take; None: the model's own.

        Raises:
            ValueError: Images or patches of another size, no such block, or an output that this model does not have.
        """
        if out_indices is None:
            tokens: Tensor = self.norm(self._run(images, patch_size, (self.config.depth - 1,))[0][0])
            return tokens
        outputs, grid = self._run(images, patch_size, block_indices(out_indices, depth=self.config.depth))
        wanted = sorted(set(block_indices(out_indices, depth=self.config.depth)))
        normalised = {"last": {self.config.depth - 1}, "all": set(wanted), "none": set()}[norm]
        return tuple(
            format_output(
                self.norm(output) if index in normalised else output,
                out_type,
                grid=grid,
                num_prefix=num_prefix_tokens(self.config),
                has_class_token=self.cls_token is not None,
                pooled_norm=self.fc_norm if self.config.pool == "gap" else nn.Identity(),
            )
            for index, output in zip(wanted, outputs, strict=True)
        )

    def get_attention_maps(
        self, images: Float[Tensor, "batch channels height width"], *, patch_size: int | None = None
    ) -> tuple[Float[Tensor, "batch heads tokens tokens"], ...]:
        """What each token (row) reads of each other (column), in every block and head; rows add up to 1.

        Args:
            images: Normalised pixels.
            patch_size: FlexiViT: side of the patches to take; None: the model's own.
        """
        tokens, rotary, _ = self._embed(images, patch_size)
        maps = []
        for block in self.blocks:
            assert isinstance(block, Block | ParallelBlock)
            maps.append(block.attn.weights(block.norm1(tokens), *rotary))
            tokens = block(tokens, *rotary)
        return tuple(maps)

    def pool(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch *tokens pooled"]:
        """What the classifier reads of the tokens of `forward_features`."""
        patches = tokens[:, num_prefix_tokens(self.config) :]
        if self.config.pool == "cls":
            pooled = tokens[:, 0]
        elif self.config.pool == "gap":
            pooled = patches.mean(dim=1)
        elif self.config.pool == "cls_gap":
            pooled = torch.cat([tokens[:, 0], patches.mean(dim=1)], dim=1)
        elif self.attn_pool is not None:
            pooled = self.attn_pool(patches)
        else:
            pooled = tokens
        normalised: Tensor = self.fc_norm(pooled)
        return normalised

    def _run(
        self, images: Tensor, patch_size: int | None, wanted: Sequence[int]
    ) -> tuple[list[Tensor], tuple[int, int]]:
        """Outputs of the wanted blocks, in the model's order, without the final norm; and the grid of patches."""
        tokens, rotary, grid = self._embed(images, patch_size)
        outputs = []
        for index, block in enumerate(self.blocks[: max(wanted) + 1]):
            tokens = block(tokens, *rotary)
            if index in wanted:
                outputs.append(tokens)
        return outputs, grid

    def _embed(self, images: Tensor, patch_size: int | None) -> _Embedded:
        """Tokens with positions, what dropout leaves of them."""
        self._check(images, patch_size)
        patches, grid = self.patch_embed(images, patch_size)
        patches, prefix = self._add_positions(patches, grid)
        kept = self.patch_drop(patches)
        if kept is not None:
            patches = patches.take_along_dim(kept[:, :, None], dim=1)
        tokens = patches if prefix is None else torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)
        tokens = self.norm_pre(self.pos_drop(tokens))
        return _Embedded(tokens, self._rotary(grid, kept, images.device), grid)

    def _add_positions(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """The patch tokens, and those before them, where they have positions with these added."""
        config = self.config
        extra: list[Tensor] = [token for token in (self.cls_token, self.reg_token) if token is not None]
        prefix = torch.cat(extra, dim=1) if extra else None
        if config.pos_embed == "sincos" or config.pos_embed == "sincos_mae":
            patches = patches + sincos(grid, config.embed_dim, style=config.pos_embed, device=patches.device)
        if self.pos_embed is None:
            return patches, prefix
        covered = num_prefix_positions(config)
        positions = resize_grid(
            self.pos_embed,
            old=grid_height_width(config),
            new=grid,
            num_prefix=covered,
            mode=config.pos_embed_resize,
        )
        if prefix is not None:
            prefix = torch.cat([prefix[:, :covered] + positions[:, :covered], prefix[:, covered:]], dim=1)
        return patches + positions[:, covered:], prefix

    def _rotary(self, grid: tuple[int, int], kept: Tensor | None, device: torch.device) -> tuple[Tensor, ...]:
        """The angles of all tokens, or nothing; of the patches that each sample kept."""
        config = self.config
        if config.pos_embed != "rotary":
            return ()
        prefix = num_prefix_tokens(config)
        table = rotary_table(grid, config.embed_dim // config.num_heads, num_prefix=prefix, device=device)
        if kept is None:
            return (table,)
        first = torch.arange(prefix, device=device).expand(kept.shape[0], -1)
        return (table[:, torch.cat([first, kept + prefix], dim=1)],)

    def _check(self, images: Tensor, patch_size: int | None) -> None:
        config = self.config
        height, width = image_height_width(config)
        allowed = f"[batch, {config.in_channels}, {height}, {width}]"
        if config.dynamic_image_size:
            allowed = f"[batch, {config.in_channels}, height, width]"
        fits = images.ndim == 4 and images.shape[1] == config.in_channels
        if not fits or not (config.dynamic_image_size or images.shape[2:] == (height, width)):
            raise ValueError(f"images of shape {list(images.shape)}: this model takes {allowed}")
        if patch_size not in (None, config.patch_size, *config.patch_sizes):
            sizes = sorted({config.patch_size, *config.patch_sizes})
            raise ValueError(f"patches of {patch_size} pixels: this model takes {', '.join(map(str, sizes))}")
        patch_grid(config, (images.shape[2], images.shape[3]), patch_size=patch_size)
