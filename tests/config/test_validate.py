from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.config_errors import problems

from vitscale.config.load import dump_config, load_config
from vitscale.config.schema import ModelConfig

Write = Callable[[str, str], Path]


def test_everything_is_said_at_once(write: Write) -> None:
    write(
        "run.yaml",
        """\
        name: 007
        duratoin: 3 epochs
        duration: 300 epoks
        lr: 3
        optim.lr: 3
        data:
          flip: on
          crop: inceptoin
          crop_area: [0.5, 0.1]
          crop_ratio: [1, 2, 3]
          train: []
          mean: [1, 2]
          streams: 7
        model:
          name: vit_base_patch16_224
          image_size: 220.5
          qkv_bias: "true"
        engine:
          zero_stage: 4
          micro_batch: 0
        schedule: {warmup: 2}
        checkpoint: {every: 0 steps}
        evaluate:
        loss: [softmax]
        """,
    )
    assert problems("run.yaml", "seed=1.5") == [
        "run.yaml:1: name: found 007; allowed: non-empty text; put quotes around it to make it text",
        "run.yaml:1: run_dir: missing, and it has no default; allowed: non-empty text",
        "run.yaml:1: global_batch: missing, and it has no default; allowed: whole number >= 1",
        "run.yaml:2: duratoin: unknown key; did you mean 'duration'?",
        "run.yaml:3: duration: '300 epoks' is not a duration; write a number and a unit, e.g. '300 epochs', "
        "'10_000 steps', '3_000_000 samples' or '5 percent'",
        "run.yaml:4: lr: unknown key; did you mean 'optim.lr'?",
        "run.yaml:5: optim.lr: unknown key; in a file write 'lr' into the section 'optim'",
        "run.yaml:7: data.flip: found 'on'; allowed: true or false; on is plain text in YAML 1.2",
        "run.yaml:8: data.crop: found 'inceptoin'; allowed: inception, center or resize; did you mean 'inception'?",
        "run.yaml:9: data.crop_area: 0.5 is larger than 0.1; allowed: [smallest, largest]",
        "run.yaml:10: data.crop_ratio: found [1, 2, 3]; allowed: [number > 0, number > 0]",
        "run.yaml:11: data.train: found []; allowed: non-empty text or non-empty list of non-empty text or null",
        "run.yaml:12: data.mean: found [1, 2]; allowed: [number, number, number]",
        "run.yaml:15: model.name: 'vit_base_patch16_224' is not a known model; allowed: a size of Ti, S, B, L, H, "
        "So400m, g, G, e, 22B, a slash and the patch size, e.g. 'B/16'; or with DeiT3-, DINOv2-, DINOv2reg-, DINOv3- "
        "before it; did you mean 'B/16'?",
        "run.yaml:16: model.image_size: found 220.5; "
        "allowed: whole number >= 1 or [whole number >= 1, whole number >= 1]",
        "run.yaml:17: model.qkv_bias: found 'true'; allowed: true or false",
        "run.yaml:19: engine.zero_stage: found 4; allowed: 0, 1 or 2",
        "run.yaml:20: engine.micro_batch: found 0; allowed: whole number >= 1 or null",
        "run.yaml:21: schedule.warmup: found 2; allowed: duration, e.g. '300 epochs'",
        "run.yaml:22: checkpoint.every: '0 steps' is no time at all; write a duration longer than 0",
        "run.yaml:23: evaluate: found nothing; allowed: a section with keys among every, batch, ema",
        "run.yaml:24: loss: found ['softmax']; allowed: a section with keys among kind, label_smoothing",
        "command line: seed: found 1.5; allowed: whole number >= 0 and < 9223372036854775808",
    ]  # fmt: skip


def test_missing_keys_of_missing_and_of_present_sections(write: Write, minimal: str) -> None:
    write("run.yaml", "name: a\nrun_dir: b\nduration: 1 epoch\nglobal_batch: 1\n")
    train = "data.train: no shards to train on; allowed: one set in data.train, or several in data.mixture"
    assert problems("run.yaml") == [f"run.yaml:1: {train}"]
    assert problems("run.yaml", "data.workers=1") == [f"command line: {train}"]
    write("run.yaml", "name: a\nrun_dir: b\nduration: 1 epoch\nglobal_batch: 1\ndata:\n  workers: 1\n")
    assert problems("run.yaml") == [f"run.yaml:5: {train}"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("optim: {lr: .nan}", "run.yaml:7: optim.lr: found .nan; allowed: number > 0"),
        ("optim: {lr: 1e999}", "run.yaml:7: optim.lr: found 1e999; allowed: number > 0"),
        ("optim: {lr: true}", "run.yaml:7: optim.lr: found true; allowed: number > 0"),
        ("optim: {ema_decay: 1}", "run.yaml:7: optim.ema_decay: found 1; allowed: number > 0 and < 1 or null"),
        ("model: {dropout: 1}", "run.yaml:7: model.dropout: found 1; allowed: number >= 0 and < 1"),
        ("model: {foo: 1}", "run.yaml:7: model.foo: unknown key; allowed: " + ", ".join(
            field.name for field in dataclasses.fields(ModelConfig))),
        ("data2: {}", "run.yaml:7: data2: unknown key; did you mean 'data'?"),
        ("bases: x", "run.yaml:7: bases: unknown key; did you mean 'base'?"),
        ("kind: adamw", "run.yaml:7: kind: unknown key; did you mean 'loss.kind' or 'optim.kind' or 'schedule.kind' "
         "or 'engine.kind'?"),
        ("seed: yes", "run.yaml:7: seed: found 'yes'; allowed: whole number >= 0 and < 9223372036854775808"),
        ("seed: true", "run.yaml:7: seed: found true; allowed: whole number >= 0 and < 9223372036854775808"),
    ],
)  # fmt: skip
def test_single_keys(write: Write, minimal: str, text: str, line: str) -> None:
    assert problems(write("run.yaml", minimal + text)) == [line]


def test_sources_of_a_mixture_are_checked_one_by_one(write: Write) -> None:
    head = "name: a\nrun_dir: b\nduration: 1 epoch\nglobal_batch: 4\ndata:\n"
    for lines, said in (
        ("  mixture: [{name: a, shards: x, weigh: 2}]", "mixture[0].weigh: unknown key; did you mean 'weight'?"),
        ("  mixture: [{name: a, shards: x, weight: 0}]", "mixture[0].weight: found 0; allowed: number > 0"),
        ("  mixture:\n  - {name: a, shards: x}\n  - text", "mixture[1]: found 'text'; allowed: a section with keys "
         "among name, shards, weight, class_map"),
        ("  mixture: [{name: a, shards: x}, {name: a, shards: y}]", "mixture: two sources are called 'a'; each needs a "
         "name of its own"),
        ("  train: x\n  mixture: [{name: a, shards: x}]", "train: both are given; allowed: one set in data.train, or "
         "several in data.mixture"),
        ("  streams: 2\n  mixture: [{name: a, shards: x}]", "streams: each source of a mixture has its own streams; "
         "allowed: null"),
    ):  # fmt: skip
        (found,) = problems(write("run.yaml", f"{head}{lines}\n"))
        assert found.partition(": data.")[2] == said
        assert found.startswith("run.yaml:")
    missing = "  mixture: [{name: a}]\n"
    (found,) = problems(write("run.yaml", head + missing))
    assert "data.mixture[0].shards: missing, and it has no default; allowed: non-empty text" in found


def test_a_mixture_is_dumped_as_it_is_read(write: Write) -> None:
    head = "name: a\nrun_dir: b\nduration: 1 epoch\nglobal_batch: 4\ndata:\n"
    path = write("run.yaml", head + "  mixture: [{name: a, shards: x, weight: 2}, {name: b, shards: [y, z]}]\n")
    config = load_config(path)
    assert [source.weight for source in config.data.mixture] == [2.0, 1.0]
    again = write("again.yaml", dump_config(config))
    assert load_config(again) == config
