"""The forms in which tokens leave the model; the words are mmpretrain's."""

# ruff: noqa: F722  (dimension names in annotations are words, not code)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

OutType: TypeAlias = Literal["raw", "cls_token", "featmap", "avg_featmap"]


def block_indices(out_indices: int | Sequence[int], *, depth: int) -> tuple[int, ...]:
    """The blocks meant, from 0; negative numbers count from the last block, which is -1.

    Raises:
        ValueError: There is no such block.
    """
    wanted = (out_indices,) if isinstance(out_indices, int) else tuple(out_indices)
    for index in wanted:
        if not -depth <= index < depth:
            raise ValueError(f"out_indices: there is no block {index}; allowed: {-depth} to {depth - 1}")
    return tuple(index % depth for index in wanted)


def format_output(
    tokens: Float[Tensor, "batch tokens dim"],
    out_type: OutType,
    *,
    grid: tuple[int, int],
    num_prefix: int,
    has_class_token: bool,
    pooled_norm: Callable[[Tensor], Tensor],
) -> Tensor:
    """Tokens as asked for.

    Args:
        tokens: All tokens, those of the patches last.
        out_type: `raw`: all tokens `[batch, tokens, dim]`; `cls_token`: the class token `[batch, dim]`; `featmap`: the
            patch tokens where they stand, `[batch, dim, rows, columns]`; `avg_featmap`: their mean, through the norm
            that follows pooling, where the model has one, `[batch, dim]`.
        grid: Rows and columns of patches.
        num_prefix: Tokens before those of the patches.
        has_class_token: Whether the first of these is a class token.
        pooled_norm: The norm after pooling.

    Raises:
        ValueError: There is no class token, or patches were dropped, so that there is no map.
    """
    if out_type == "raw":
        return tokens
    if out_type == "cls_token":
        if not has_class_token:
            raise ValueError("out_type: this model has no class token; allowed: raw, featmap or avg_featmap")
        return tokens[:, 0]
    patches = tokens[:, num_prefix:]
    if out_type == "avg_featmap":
        return pooled_norm(patches.mean(dim=1))
    if patches.shape[1] != grid[0] * grid[1]:
        raise ValueError("out_type: patch dropout leaves no map of features in training; call eval() first")
    return patches.transpose(1, 2).reshape(len(patches), -1, *grid)
