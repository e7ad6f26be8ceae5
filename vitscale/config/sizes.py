"""The sizes of Vision Transformers by the names of the papers: `B/16` is size B with patches of 16 x 16 pixels."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions that a name stands for; `mlp_dim` is the width of a block's hidden layer."""

    embed_dim: int
    depth: int
    mlp_dim: int
    num_heads: int


SIZES = {
    # Touvron et al. 2021, "Training data-efficient image transformers", arXiv:2012.12877, table 1;
    # with the MLP's width: Steiner et al. 2021, "How to train your ViT?", arXiv:2106.10270, table 2.
    "Ti": Size(embed_dim=192, depth=12, mlp_dim=768, num_heads=3),
    "S": Size(embed_dim=384, depth=12, mlp_dim=1536, num_heads=6),
    # Dosovitskiy et al. 2021, "An image is worth 16x16 words", arXiv:2010.11929, table 1.
    "B": Size(embed_dim=768, depth=12, mlp_dim=3072, num_heads=12),
    "L": Size(embed_dim=1024, depth=24, mlp_dim=4096, num_heads=16),
    "H": Size(embed_dim=1280, depth=32, mlp_dim=5120, num_heads=16),
}

_NAME = re.compile(r"([A-Za-z]+)/([1-9][0-9]*)")
_OTHER_SPELLING = re.compile(
    r"(?:vit[-_ ]?)?(tiny|ti|small|s|base|b|large|l|huge|h)[-_/ ]*(?:patch|p)?([1-9][0-9]*)(?![0-9])", re.IGNORECASE
)
_LETTERS = {"tiny": "Ti", "ti": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}


def dimensions(name: str) -> dict[str, int]:
    """The fields of a model that `name` sets: patch_size, embed_dim, depth, num_heads, mlp_dim.

    Args:
        name: `SIZE/PATCH`, the size one of `SIZES`, the patch's side in pixels any positive number: `B/16`, `H/14`.

    Raises:
        ValueError: Not of that form or not a known size; the message suggests what was probably meant.
    """
    match = _NAME.fullmatch(name)
    size = SIZES.get(match[1]) if match else None
    if match is None or size is None:
        raise ValueError(
            f"{name!r} is not a known model; allowed: a size of {', '.join(SIZES)}, a slash and the patch size, "
            f"e.g. 'B/16'{_suggestion(name)}"
        )
    return {
        "patch_size": int(match[2]),
        "embed_dim": size.embed_dim,
        "depth": size.depth,
        "num_heads": size.num_heads,
        "mlp_dim": size.mlp_dim,
    }


def _suggestion(name: str) -> str:
    """Knows the spellings of other tools: `vit_base_patch16_224`, `ViT-B/16`, `b16`."""
    match = _OTHER_SPELLING.match(name)
    if not match:
        return ""
    word = match[1].lower()
    return f"; did you mean '{_LETTERS.get(word, word.upper())}/{match[2]}'?"
