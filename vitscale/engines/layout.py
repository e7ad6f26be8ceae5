"""Where an engine's float32 tensors lie: pieces of named parameters, with their optimizer slots and their average.

An engine describes itself as a list of pieces; `fragments` writes them out and `load` reads them in. Nothing here
knows how the pieces came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitscale.engines.base import Fragment, Kind, Read


@dataclass(frozen=True)
class Piece:
    """A contiguous flat range of one parameter, in every kind of tensor that is kept of it.

    Attributes:
        name: The parameter's name in the bare model.
        shape: Its whole shape.
        start: Offset of the range in the flattened parameter.
        tensors: For each kind the float32 values `[length]`, views of the engine's own memory.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensors: dict[Kind, Tensor]

    def __len__(self) -> int:
        return len(self.tensors["param"])


def fragments(pieces: Iterable[Piece]) -> Iterator[Fragment]:
    """Every piece in every kind."""
    for piece in pieces:
        for kind, values in piece.tensors.items():
            yield Fragment(piece.name, kind, piece.start, values.detach(), piece.shape)


@torch.no_grad()
def load(pieces: Iterable[Piece], read: Read) -> None:
    """Fill every piece from `read`, in place."""
    for piece in pieces:
        for kind, values in piece.tensors.items():
            values.copy_(read(piece.name, kind, piece.start, len(piece)))


def deal(pieces: Sequence[Piece], *, rank: int, world_size: int) -> list[Piece]:
    """The pieces that `rank` writes where every rank holds all of them: largest first, each to whom has least."""
    held = [0] * world_size
    mine = []
    for piece in sorted(pieces, key=lambda piece: (-len(piece), piece.name)):
        owner = held.index(min(held))
        held[owner] += len(piece)
        if owner == rank:
            mine.append(piece)
    return mine
