"""timm's Vision Transformer for a vitscale config, and weights that let no part go unnoticed."""

from __future__ import annotations

from functools import partial

import torch
from timm.layers import Mlp, RmsNorm, SwiGLUPacked
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import ParallelScalingBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import nn

from vitscale.config.schema import ModelConfig
from vitscale.models.position import has_class_token, image_height_width

TINY = ModelConfig(image_size=16, patch_size=4, embed_dim=24, depth=3, num_heads=3, mlp_dim=48, num_classes=7)


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
_POOL = {"cls": "token", "gap": "avg", "map": "map", "none": ""}
_FC_NORM = {None: None, "tokens": False, "pooled": True, "none": None}


def timm_vit(config: ModelConfig) -> TimmVisionTransformer:
    """timm's model of the same parts; what timm does not have is refused."""
    assert config.pos_embed == "learned"
    prefix = has_class_token(config) + config.num_registers
    assert config.pos_embed_prefix != "class" or prefix == has_class_token(config)
    swiglu = config.activation == "swiglu"
    norm = nn.LayerNorm if config.norm == "layernorm" else RmsNorm
    return TimmVisionTransformer(
        img_size=image_height_width(config),
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        global_pool=_POOL[config.pool],
        class_token=has_class_token(config),
        reg_tokens=config.num_registers,
        no_embed_class=config.pos_embed_prefix == "none",
        pre_norm=config.pre_norm,
        final_norm=config.final_norm != "none",
        fc_norm=_FC_NORM[config.final_norm],
        dynamic_img_size=config.dynamic_image_size,
        dynamic_img_pad=config.patch_padding == "corner",
        init_values=config.layer_scale,
        qk_norm=config.qk_norm,
        patch_drop_rate=config.patch_dropout,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=(1 + swiglu) * config.mlp_dim / config.embed_dim,
        mlp_layer=SwiGLUPacked if swiglu else Mlp,
        block_fn=ParallelScalingBlock if config.block == "parallel" else TimmBlock,
        qkv_bias=config.qkv_bias,
        pos_drop_rate=config.dropout,
        proj_drop_rate=config.dropout,
        attn_drop_rate=config.attention_dropout,
        drop_path_rate=config.drop_path,
        norm_layer=partial(norm, eps=config.norm_eps),
        act_layer=nn.SiLU if swiglu else partial(nn.GELU, approximate=_APPROXIMATE[config.activation]),
    )


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter normal: norms, biases and the head begin as constants, behind which an error would hide."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
