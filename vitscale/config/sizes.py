"""The sizes of Vision Transformers by the names of the papers: `B/16` is size B with patches of 16 x 16 pixels.

A family before the size, as in `DINOv2-g/14`, sets more than dimensions: the parts in which its models differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = int | float | str | bool


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions that a name stands for; `mlp_dim` is the width of a block's hidden layer.

    `fields` are other fields of the model that it sets.
    """

    embed_dim: int
    depth: int
    mlp_dim: int
    num_heads: int
    fields: Mapping[str, Value] = field(default_factory=dict)


SIZES = {
    # Touvron et al. 2021, "Training data-efficient image transformers", arXiv:2012.12877, table 1;
    # with the MLP's width: Steiner et al. 2021, "How to train your ViT?", arXiv:2106.10270, table 2.
    "Ti": Size(embed_dim=192, depth=12, mlp_dim=768, num_heads=3),
    "S": Size(embed_dim=384, depth=12, mlp_dim=1536, num_heads=6),
    # Dosovitskiy et al. 2021, "An image is worth 16x16 words", arXiv:2010.11929, table 1.
    "B": Size(embed_dim=768, depth=12, mlp_dim=3072, num_heads=12),
    "L": Size(embed_dim=1024, depth=24, mlp_dim=4096, num_heads=16),
    "H": Size(embed_dim=1280, depth=32, mlp_dim=5120, num_heads=16),
    # Alabdulmohsin et al. 2023, "Getting ViT in shape", arXiv:2305.13035; dimensions as in big_vision.
    "So400m": Size(embed_dim=1152, depth=27, mlp_dim=4304, num_heads=16),
    # Zhai et al. 2022, "Scaling Vision Transformers", arXiv:2106.04560, table 2.
    "g": Size(embed_dim=1408, depth=40, mlp_dim=6144, num_heads=16),
    "G": Size(embed_dim=1664, depth=48, mlp_dim=8192, num_heads=16),
    # Chen et al. 2022, "PaLI", arXiv:2209.06794.
    "e": Size(embed_dim=1792, depth=56, mlp_dim=15360, num_heads=16),
    # Dehghani et al. 2023, "Scaling Vision Transformers to 22 billion parameters", arXiv:2302.05442, table 1; section 2
    # for the parts: norms "without bias and centering" are RMSNorm.
    "22B": Size(
        embed_dim=6144,
        depth=48,
        mlp_dim=24576,
        num_heads=48,
        fields={"block": "parallel", "qk_norm": True, "qkv_bias": False, "norm": "rmsnorm", "pool": "map"},
    ),
}


def _with(sizes: Mapping[str, Size], fields: Mapping[str, Value]) -> dict[str, Size]:
    return {
        name: Size(
            embed_dim=size.embed_dim,
            depth=size.depth,
            mlp_dim=size.mlp_dim,
            num_heads=size.num_heads,
            fields={**size.fields, **fields},
        )
        for name, size in sizes.items()
    }


_SWIGLU = {"activation": "swiglu"}
_SBL = {name: SIZES[name] for name in ("S", "B", "L")}
_DINOV2 = {**_SBL, "g": Size(embed_dim=1536, depth=40, mlp_dim=4096, num_heads=24, fields=_SWIGLU)}
_DINOV3 = {
    **_SBL,
    "S+": Size(embed_dim=384, depth=12, mlp_dim=1536, num_heads=6, fields=_SWIGLU),
    "H+": Size(embed_dim=1280, depth=32, mlp_dim=5120, num_heads=20, fields=_SWIGLU),
    "7B": Size(embed_dim=4096, depth=40, mlp_dim=8192, num_heads=32, fields={**_SWIGLU, "qkv_bias": False}),
}

FAMILIES = {
    # Touvron et al. 2022, "DeiT III", arXiv:2204.07118.
    "DeiT3": _with(
        {**_SBL, "H": SIZES["H"]},
        {
            "layer_scale": 1e-4,
            "pos_embed_prefix": "none",
            "drop_path_schedule": "constant",
            "pos_embed_resize": "bicubic",
        },
    ),
    # Oquab et al. 2023, "DINOv2", arXiv:2304.07193.
    "DINOv2": _with(_DINOV2, {"layer_scale": 1e-5, "pos_embed_resize": "bicubic_offset"}),
    # Darcet et al. 2023, "Vision Transformers need registers", arXiv:2309.16588.
    "DINOv2reg": _with(_DINOV2, {"layer_scale": 1e-5, "num_registers": 4, "pos_embed_prefix": "class"}),
    # Siméoni et al. 2025, "DINOv3", arXiv:2508.10104.
    "DINOv3": _with(_DINOV3, {"layer_scale": 1e-5, "num_registers": 4, "pos_embed": "rotary", "norm_eps": 1e-5}),
}
"""Sizes by family; what all of a family's models have in common is among the fields of each."""

_NAME = re.compile(r"(?:([A-Za-z0-9]+)-)?([A-Za-z0-9+]+)/([1-9][0-9]*)")
_OTHER_SPELLING = re.compile(
    r"(?:vit[-_ ]?)?(tiny|ti|small|so400m|s|base|b|large|l|huge|h|gigantic|giant|22b)[-_/ ]*(?:patch|p)?"
    r"([1-9][0-9]*)(?![0-9])",
    re.IGNORECASE,
)
_LETTERS = {"tiny": "Ti", "ti": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H", "giant": "g",
            "gigantic": "G", "so400m": "So400m"}  # fmt: skip


def dimensions(name: str) -> dict[str, Value]:
    """The fields of a model that `name` sets: patch_size, embed_dim, depth, num_heads, mlp_dim, and its family's own.

    Args:
        name: `SIZE/PATCH`, the size one of `SIZES`, the patch's side in pixels any positive number: `B/16`, `H/14`; or
            `FAMILY-SIZE/PATCH` with one of `FAMILIES`: `DINOv2-g/14`.

    Raises:
        ValueError: Not of that form or not a known size; the message suggests what was probably meant.
    """
    match = _NAME.fullmatch(name)
    sizes: Mapping[str, Size] = (FAMILIES.get(match[1], {}) if match[1] else SIZES) if match else {}
    size = sizes.get(match[2]) if match else None
    if match is None or size is None:
        family = match[1] if match and match[1] in FAMILIES else None
        example = f"'{family}-B/16'" if family else "'B/16'"
        others = "" if family else f"; or with {', '.join(f'{name}-' for name in FAMILIES)} before it"
        raise ValueError(
            f"{name!r} is not a known model; allowed: a size of {', '.join(sizes or SIZES)}, a slash and the patch "
            f"size, e.g. {example}{others}{_suggestion(name)}"
        )
    return {
        "patch_size": int(match[3]),
        "embed_dim": size.embed_dim,
        "depth": size.depth,
        "num_heads": size.num_heads,
        "mlp_dim": size.mlp_dim,
        **size.fields,
    }


def _suggestion(name: str) -> str:
    """Knows the spellings of other tools, `vit_base_patch16_224`, `ViT-B/16`, `b16`, and other cases of letters."""
    size, slash, patch = name.partition("/")
    known = [*SIZES, *(f"{family}-{size}" for family, sizes in FAMILIES.items() for size in sizes)]
    same = [other for other in known if other.lower() == size.lower()]
    if len(same) == 1 and slash and patch.isdecimal():
        return f"; did you mean '{same[0]}/{patch}'?"
    match = _OTHER_SPELLING.match(name)
    if not match:
        return ""
    word = match[1].lower()
    return f"; did you mean '{_LETTERS.get(word, word.upper())}/{match[2]}'?"
