from __future__ import annotations

import ast
import inspect
import math
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitscale.config import schema
from vitscale.config.describe import describe_keys, json_schema
from vitscale.config.schema import Duration

units = st.sampled_from(["steps", "epochs", "samples", "percent"])
values = st.floats(min_value=0, max_value=1e15, allow_subnormal=False).filter(lambda x: x == 0 or x > 1e-10)
counts = st.integers(1, 10**9)


@given(st.builds(Duration, st.one_of(st.integers(0, 10**15).map(float), values), units))
def test_duration_text_reads_back(duration: Duration) -> None:
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("300 epochs", Duration(300, "epochs")),
        ("1 epoch", Duration(1, "epochs")),
        ("10_000 steps", Duration(10000, "steps")),
        ("3_000_000 samples", Duration(3000000, "samples")),
        ("2.5percent", Duration(2.5, "percent")),
    ],
)
def test_duration_spellings(text: str, duration: Duration) -> None:
    assert Duration.parse(text) == duration


@pytest.mark.parametrize("text", ["", "300", "epochs", "-1 epochs", "3 epochs 2", "1e3 steps", "5 %", "nan steps"])
def test_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration; write a number and a unit, e\.g\. '300 epochs'"):
        Duration.parse(text)


@given(st.integers(0, 10**6), counts, counts)
def test_whole_epochs_cover_every_sample_with_the_fewest_steps(epochs: int, num_samples: int, batch: int) -> None:
    steps = Duration(epochs, "epochs").steps(num_samples=num_samples, global_batch=batch, total=None)
    assert steps * batch >= epochs * num_samples > (steps - 1) * batch


@given(st.integers(0, 1000), st.integers(0, 3), counts, counts)
def test_decimal_durations_are_exact(digits: int, decimals: int, num_samples: int, batch: int) -> None:
    exact = Fraction(digits, 10**decimals)
    text = f"{digits / 10**decimals:.{decimals}f}"
    epochs, percent = Duration.parse(f"{text} epochs"), Duration.parse(f"{text} percent")
    assert epochs.steps(num_samples=num_samples, global_batch=batch, total=None) == math.ceil(
        exact * num_samples / batch
    )
    assert percent.steps(num_samples=1, global_batch=1, total=num_samples) == math.ceil(exact * num_samples / 100)


def test_units_agree() -> None:
    def steps(text: str) -> int:
        return Duration.parse(text).steps(num_samples=1000, global_batch=100, total=50)

    assert steps("5 epochs") == steps("5000 samples") == steps("50 steps") == steps("100 percent") == 50
    assert steps("1 samples") == 1
    # 7 / 100 * 100 is 7.000000000000001 in floats.
    assert Duration(7, "percent").steps(num_samples=1, global_batch=1, total=100) == 7


def test_percent_needs_a_total() -> None:
    with pytest.raises(ValueError, match="'5 percent' needs a total"):
        Duration(5, "percent").steps(num_samples=1, global_batch=1, total=None)


def sections() -> list[type]:
    classes = [cls for _, cls in inspect.getmembers(schema, inspect.isclass) if cls.__module__ == schema.__name__]
    return [cls for cls in classes if cls is not Duration]


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_every_key_is_documented_where_it_is_defined(cls: type) -> None:
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    described = {key.key.split(".")[-1]: key.doc for key in describe_keys()}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        name = statement.target.id if isinstance(statement, ast.AnnAssign) else ""  # type: ignore[union-attr]
        if name in described:
            assert isinstance(after, ast.Expr), f"{cls.__name__}.{name} has no docstring"
    assert all(described.values())


def test_sections_are_frozen_and_strict() -> None:
    for cls in sections():
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert cls.__pydantic_config__ is schema.STRICT  # type: ignore[attr-defined]


def test_describe_keys() -> None:
    keys = {key.key: key for key in describe_keys()}
    assert len(keys) == len(describe_keys())
    assert keys["optim.lr"][1:3] == ("number > 0", "0.001")
    assert keys["schedule.warmup"].default == "0 steps"
    assert keys["data.train"].default == "null"
    assert keys["data.flip"].default == "true"
    assert keys["data.std"].default == "[0.5, 0.5, 0.5]"
    assert keys["model.image_size"].type == "whole number >= 1 or [whole number >= 1, whole number >= 1]"
    assert keys["engine.zero_stage"].type == "0, 1 or 2"
    assert keys["checkpoint.keep_every"].type == "duration longer than 0, e.g. '300 epochs' or null"
    assert keys["model.num_heads"].doc == "Attention heads in a block; must divide `embed_dim`."


def is_valid(instance: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(json_schema()).is_valid(instance))


def test_json_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize(
    "accepted",
    [
        {},
        {"base": "vit.yaml"},
        {"base": ["vit.yaml", "data.yaml"], "duration": "300 epochs", "schedule": {"warmup": "10_000 steps"}},
        {"model": {"name": "B/16", "image_size": [224, 192]}, "data": {"train": ["a", "b"], "streams": None}},
        {"optim": {"lr": 1, "betas": [0.9, 0.95], "ema_decay": 0.99}, "evaluate": {"every": "2.5 epochs"}},
    ],
)
def test_json_schema_accepts_what_files_may_hold(accepted: dict[str, Any]) -> None:
    assert is_valid(accepted)


@pytest.mark.parametrize(
    "refused",
    [
        {"labels": "x"},
        {"duration": "300 epoks"},
        {"duration": 300},
        {"base": 3},
        {"model": {"pool": "max"}},
        {"model": {"num_head": 3}},
        {"optim": {"lr": 0}},
        {"data": {"train": [1]}},
        {"data": {"crop_area": [0.1]}},
    ],
)
def test_json_schema_refuses_the_rest(refused: dict[str, Any]) -> None:
    assert not is_valid(refused)


def test_json_schema_carries_the_docstrings() -> None:
    full = json_schema()
    assert full["properties"]["global_batch"]["description"].startswith("Samples in one optimizer step")
    assert full["$defs"]["OptimConfig"]["properties"]["lr"]["description"].startswith("Peak learning rate")
    assert full["$defs"]["EvaluateConfig"]["description"] == "Evaluation on `data.validation` during training."
    assert full["properties"]["duration"]["description"] == "How long to train."
