"""Computed permutations: each a bijection, and all about equally likely."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.data.permute import derive, derive_each, permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_each_place_is_met_once(size: int, key: int) -> None:
    places = np.arange(size)
    moved = permute(places, np.full(size, size), np.full(size, key, np.uint64))
    np.testing.assert_array_equal(np.sort(moved), places)


def test_sizes_and_keys_are_each_place_s_own() -> None:
    sizes = np.repeat([1, 2, 7, 1000], 4)
    places = np.minimum(np.tile([0, 1, 5, 999], 4), sizes - 1)
    keys = derive_each(3, np.arange(16))
    together = permute(places, sizes, keys)
    alone = [permute(places[i : i + 1], sizes[i : i + 1], keys[i : i + 1])[0] for i in range(16)]
    np.testing.assert_array_equal(together, alone)


def test_a_place_far_beyond_32_bits() -> None:
    size = 3 * 2**40
    places = np.arange(size - 1000, size)
    moved = permute(places, np.full(1000, size), np.full(1000, 5, np.uint64))
    assert len(np.unique(moved)) == 1000
    assert 0 <= moved.min() < moved.max() < size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 10, 17, 40])
def test_every_pair_of_places_goes_everywhere(size: int) -> None:
    """Chi-square of where two places go together, over 40,000 keys; its mean is 1 a degree of freedom."""
    trials = 40_000
    keys = derive_each(derive(11, size), np.arange(trials))
    first, last = (permute(np.full(trials, place), np.full(trials, size), keys) for place in (0, size - 1))
    counts = np.bincount(first * size + last, minlength=size * size).reshape(size, size)
    assert not counts.diagonal().any()
    counts = counts[~np.eye(size, dtype=bool)]
    expected = trials / len(counts)
    freedom = max(1, len(counts) - 1)
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_derive_is_the_same_for_one_number_and_for_many() -> None:
    numbers = np.array([0, 1, 2**40, 2**62])
    assert derive_each(77, numbers).tolist() == [derive(77, int(number)) for number in numbers]
    assert len({derive(key, number) for key in range(50) for number in range(50)}) == 2500
