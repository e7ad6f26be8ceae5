from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vitscale.config.tree import COMMAND_LINE, Place, merge, place_of, placed, plain


def trees(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Configs of one schema: `s*` are always sections, `v*` never."""
    leaves: st.SearchStrategy[dict[str, Any]] = st.dictionaries(st.sampled_from(["v1", "v2", "v3"]), values, max_size=3)
    deep: st.SearchStrategy[dict[str, Any]] = st.builds(lambda low, high: {**low, "s1": high}, leaves, leaves)
    return st.one_of(leaves, deep, st.builds(lambda low, high: {**low, "s1": {**high, "s2": low}}, leaves, leaves))


values = st.one_of(st.none(), st.integers(), st.lists(st.integers(), max_size=2))


def merged(low: dict[str, Any], high: dict[str, Any]) -> Any:
    return plain(merge(placed(low, Place("low", 1)), placed(high, Place("high", 1))))


@given(trees(values), trees(values), trees(values))
def test_merge_is_associative_and_keeps_every_key(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    assert merged(a, merged(b, c)) == merged(merged(a, b), c)
    assert merged(a, {}) == merged({}, a) == merged(a, a) == a
    assert merged(a, b).keys() == a.keys() | b.keys()


def test_merge() -> None:
    low = {"m": {"a": 1, "deep": {"x": 1}}, "list": [1, 2], "both": 1, "to_map": 1}
    high = {"m": {"b": 2, "deep": {"y": 2}}, "list": [3], "both": None, "to_map": {"k": 1}}
    assert merged(low, high) == {
        "m": {"a": 1, "b": 2, "deep": {"x": 1, "y": 2}}, "list": [3], "both": None, "to_map": {"k": 1}
    }  # fmt: skip


def test_merge_keeps_places() -> None:
    tree = merge(placed({"m": {"a": 1, "b": 1}}, Place("low", 1)), placed({"m": {"b": 2}}, Place("high", 7)))
    assert (place_of(tree, ("m", "a")), place_of(tree, ("m", "b"))) == (Place("low", 1), Place("high", 7))
    assert place_of(tree, ("m", "nothing")) == Place("high", 7)
    over = merge(tree, placed({"m": {"b": 3, "c": 4}}, COMMAND_LINE))
    assert [str(place_of(over, ("m", key))) for key in "abcd"] == ["low:1", "command line", "command line", "high:7"]
