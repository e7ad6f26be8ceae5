"""How the tensors of one model are called and laid out in another tool's file: read in both directions.

A format writes down one `Entry` for each of vitscale's tensors. From it follow the file's names and shapes, so that
what is missing there, too much, or of another shape is named as the file names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.weights.adapt import expected_shapes, misfits
from vitscale.weights.names import in_few_words


class Entry(NamedTuple):
    """One of vitscale's tensors in another tool's file.

    Attributes:
        names: The tensors there that it is made of.
        split: It -> those, in the order of `names`; works on the meta device too.
        join: Those -> it.
    """

    names: tuple[str, ...]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[tuple[Tensor, ...]], Tensor]


Table = Mapping[str, Entry]


def same(name: str) -> Entry:
    """The same tensor under another name."""
    return Entry((name,), lambda ours: (ours,), lambda theirs: theirs[0])


def stacked(*names: str) -> Entry:
    """Equal parts of the rows, e.g. queries, keys and values."""
    return Entry(names, lambda ours: tuple(ours.chunk(len(names))), lambda theirs: torch.cat(theirs))


def linear(ours: str, theirs: str) -> dict[str, Entry]:
    """A layer's weight and bias, or a norm's."""
    return {f"{ours}.{tensor}": same(f"{theirs}.{tensor}") for tensor in ("weight", "bias")}


def no_key_bias(query: str, value: str) -> Entry:
    """Biases of queries and values, where keys have none: theirs is zero."""

    def join(theirs: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([theirs[0], torch.zeros_like(theirs[0]), theirs[1]])

    return Entry((query, value), lambda ours: ours.chunk(3)[::2], join)


def of_model(table: Table, config: ModelConfig, *, whose: str) -> Table:
    """The entries for the tensors that a model of `config` has, out of those for all that the tool's models may have.

    Raises:
        UserError: The model has tensors that the tool (`whose`) has no place for, each named.
    """
    names = expected_shapes(config)
    homeless = [name for name in names if name not in table]
    if homeless:
        raise UserError(f"{whose} has no place for {in_few_words(homeless)}")
    return {name: table[name] for name in names}


def to_theirs(state: Mapping[str, Tensor], table: Table) -> dict[str, Tensor]:
    """Vitscale's tensors under the file's names, each with memory of its own, on the host."""
    return {
        theirs: tensor.detach().cpu().contiguous().clone()
        for name, entry in table.items()
        for theirs, tensor in zip(entry.names, entry.split(state[name]), strict=True)
    }


def to_ours(tensors: Mapping[str, Tensor], table: Table, config: ModelConfig) -> dict[str, Tensor]:
    """The file's tensors under vitscale's names, in the model's order.

    Raises:
        UserError: Tensors are missing in the file, unknown, or of another shape; each is named as there.
    """
    shapes = expected_shapes(config)
    problems = misfits(tensors, their_shapes(table, config))
    if problems:
        raise UserError(f"the tensors are not those of the model that they look like: {'; '.join(problems)}")
    return {name: table[name].join(tuple(tensors[theirs] for theirs in table[name].names)) for name in shapes}


def their_shapes(table: Table, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors in the file."""
    shapes = expected_shapes(config)
    return {
        theirs: tuple(part.shape)
        for name, shape in shapes.items()
        for theirs, part in zip(table[name].names, table[name].split(torch.empty(shape, device="meta")), strict=True)
    }
