from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitscale.config.check import check_run
from vitscale.config.load import (
    config_to_dict,
    dump_config,
    load_config,
    model_from_dict,
    model_to_dict,
)
from vitscale.config.schema import DataConfig, Duration, EngineConfig, ModelConfig, OptimConfig, RunConfig

Write = Callable[[str, str], Path]


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.sampled_from(["on", "null", "~", "1e-3", "0x1F", "0o7", "1_0", "010", "true", ".5", " a ",
                     "a: b", "- a", "#", "<<", "="]),
)  # fmt: skip
durations = st.builds(
    Duration, st.one_of(st.integers(1, 10**9), st.floats(1e-3, 1e6)), st.sampled_from(["steps", "epochs", "samples"])
)
configs = st.builds(
    RunConfig,
    name=texts,
    run_dir=texts,
    duration=durations,
    global_batch=st.integers(1, 64).map(lambda n: n * 8),
    data=st.builds(
        DataConfig,
        train=st.one_of(texts, st.lists(texts, min_size=1, max_size=3).map(tuple)),
        mean=st.tuples(*[st.floats(-1, 1)] * 3),
        flip=st.booleans(),
        streams=st.sampled_from([None, 1, 8]),
    ),
    seed=st.integers(0, 2**63 - 1),
    model=st.one_of(
        st.just(ModelConfig()),
        st.builds(
            ModelConfig,
            name=st.sampled_from([None, "B/16", "S/16", "L/16"]),
            image_size=st.sampled_from([224, (32, 64)]),
            num_heads=st.sampled_from([6, 12]),
            dropout=st.floats(0, 1, exclude_max=True),
        ),
    ),
    optim=st.builds(OptimConfig, lr=st.floats(0, exclude_min=True, allow_infinity=False), eps=st.floats(1e-12, 1)),
    engine=st.builds(EngineConfig, micro_batch=st.sampled_from([None, 1, 4]), zero_stage=st.sampled_from([0, 1, 2])),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(config=configs)
def test_a_dumped_run_reads_back_equal(write: Write, config: RunConfig) -> None:
    assert list(check_run(config)) == []
    Path("run.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config("run.yaml") == config
    assert json.loads(json.dumps(config_to_dict(config))) == config_to_dict(config)
    assert model_from_dict(json.loads(json.dumps(model_to_dict(config.model)))) == config.model


def test_a_dumped_run_follows_another_name(write: Write, minimal: str) -> None:
    config = load_config(write("run.yaml", minimal + "model: {name: Ti/16, depth: 2}"))
    write("resolved.yaml", dump_config(config))
    assert "embed_dim" not in dump_config(config)
    assert load_config("resolved.yaml", ["model.name=L/32"]).model == ModelConfig(
        name="L/32", patch_size=32, embed_dim=1024, depth=2, num_heads=16, mlp_dim=4096
    )


def test_config_to_dict_holds_every_number(write: Write, minimal: str) -> None:
    data = config_to_dict(load_config(write("run.yaml", minimal + "model: {name: Ti/16}")))
    assert data["model"]["embed_dim"] == 192
    assert data["duration"] == "3 epochs"
    assert data["data"]["crop_area"] == [0.05, 1.0]
    assert data.keys() == {field.name for field in dataclasses.fields(RunConfig)}


def test_model_from_dict_is_strict() -> None:
    model = ModelConfig(name="Ti/16", patch_size=8, embed_dim=192, depth=1, num_heads=3, mlp_dim=16)
    assert model_from_dict(model_to_dict(model)) == model
    with pytest.raises(
        ValueError, match=r"^model\.depth: found '1'; allowed: whole number >= 1; model\.dept: unknown key; d"
    ):
        model_from_dict({"depth": "1", "dept": 1})
    with pytest.raises(ValueError, match=r"^model\.num_heads: 5 heads do not divide embed_dim 768; allowed: 4 or 6$"):
        model_from_dict({"num_heads": 5})
