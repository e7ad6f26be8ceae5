"""timm's Vision Transformer for a vitscale config, and weights that let no part go unnoticed."""

from __future__ import annotations

from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from vitscale.config.schema import ModelConfig
from vitscale.models.position import image_height_width

TINY = ModelConfig(image_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3, mlp_dim=48, num_classes=7)


def timm_vit(config: ModelConfig) -> TimmVisionTransformer:
    return TimmVisionTransformer(
        img_size=image_height_width(config),
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        global_pool="token" if config.pool == "cls" else "avg",
        class_token=config.pool == "cls",
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_dim / config.embed_dim,
        qkv_bias=config.qkv_bias,
        pos_drop_rate=config.dropout,
        proj_drop_rate=config.dropout,
        attn_drop_rate=config.attention_dropout,
        drop_path_rate=config.drop_path,
        norm_layer=partial(nn.LayerNorm, eps=config.norm_eps),
        act_layer=partial(nn.GELU, approximate="tanh" if config.activation == "gelu_tanh" else "none"),
    )


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter normal: norms, biases and the head begin as constants, behind which an error would hide."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
