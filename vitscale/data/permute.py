"""Permutations that are computed, not stored: where does place `x` of `n` go, for whole arrays of places at once.

A generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): `x` is written as a
pair (left, right) of a grid of at least `n` cells, each half is moved by a keyed hash of the other, and a result
outside of `n` is sent through again until it is inside. No table, no state, the same on every machine and version.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ROUND_KEYS = tuple(np.uint64(_GOLDEN * (2 * i + 1) & _MASK) for i in range(8))
_FIRST = np.uint64(0xBF58476D1CE4E5B9)  # the multipliers of SplitMix64's finaliser
_SECOND = np.uint64(0x94D049BB133111EB)
_NARROWEST = 5  # on a smaller grid the few permutations that rounds can reach are visibly not equally likely
_HALF = np.uint64(32)
_SPREAD = np.uint64(29)


def derive(key: int, number: int) -> int:
    """A key of 64 bits for the part `number` of what `key` stands for; SplitMix64's finaliser over both."""
    mixed = (key ^ (number * _GOLDEN & _MASK)) + _GOLDEN & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


def derive_each(key: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`derive(key, number)` of each number, none of them negative."""
    mixed: NDArray[np.uint64] = (numbers.astype(np.uint64) * np.uint64(_GOLDEN)) ^ np.uint64(key)
    mixed += np.uint64(_GOLDEN)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def permute(places: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where each place goes under the permutation of its own size and key.

    Args:
        places: int64 `[n]`, each in `[0, size)`.
        sizes: int64 `[n]`, each in `[1, 2**62]`.
        keys: uint64 `[n]`; one key and size give one permutation.
    """
    width = np.maximum(np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.int64), _NARROWEST)
    height = np.maximum(-(-sizes // width), _NARROWEST)
    moved = _encrypt(places, width, height, keys)
    outside = np.flatnonzero(moved >= sizes)
    while len(outside):
        moved[outside] = _encrypt(moved[outside], width[outside], height[outside], keys[outside])
        outside = outside[moved[outside] >= sizes[outside]]
    return moved


def _encrypt(
    places: NDArray[np.int64], width: NDArray[np.int64], height: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """One pass over a grid of `width * height` cells."""
    left, right = np.divmod(places, height)
    for i in range(0, len(_ROUND_KEYS), 2):
        left += _hash(right, keys, _ROUND_KEYS[i], width)
        left -= width * (left >= width)
        right += _hash(left, keys, _ROUND_KEYS[i + 1], height)
        right -= height * (right >= height)
    moved: NDArray[np.int64] = left * height + right
    return moved


def _hash(
    values: NDArray[np.int64], keys: NDArray[np.uint64], round_key: np.uint64, bound: NDArray[np.int64]
) -> NDArray[np.int64]:
    """A number in `[0, bound)` for each value; `bound` fits 32 bits."""
    mixed = values.astype(np.uint64) + keys * round_key
    mixed ^= mixed >> _HALF
    mixed *= _FIRST
    mixed ^= mixed >> _SPREAD
    mixed *= _SECOND
    mixed >>= _HALF
    mixed *= bound.astype(np.uint64)
    mixed >>= _HALF
    return mixed.astype(np.int64)
