from __future__ import annotations

import pytest

from vitscale.data.names import match_classes
from vitscale.errors import UserError


def test_wordnet_ids_are_what_counts_where_there_are_some() -> None:
    source = ["n00004475", "n01440764 tench, Tinca tinca", "n01443537", "n02085620_Chihuahua"]
    assert match_classes(source, ["n02085620", "n01440764", "n99999999", "n01443537 goldfish"]) == (3, 1, None, 2)


def test_words_are_compared_without_their_spelling() -> None:
    assert match_classes(["great white_shark", "Tench"], ["tench", "Great-White shark"]) == (1, 0)


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ([], ["a"], "the weights do not say what their classes are called; import them with --classes"),
        (["a"], [], "the data does not say what its classes are called"),
        (["a", "b"], ["c", "d"], r"none of the 2 classes wanted \('c', ...\) is among the 2 of the weights"),
        (["crane", "Crane"], ["crane"], "classes 0 and 1 of the weights both are 'crane'"),
        (["n01440764 a", "b"], ["b", "n01440764", "n01440764 x"], "classes 1 and 2 of the classes wanted both"),
    ],
)
def test_what_cannot_be_told_is_said(source: list[str], target: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        match_classes(source, target)
