from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.config_errors import problems

from vitscale.config.load import (
    load_config,
)

Write = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model={name: Ti/16, num_heads: 5}", "model.num_heads: 5 heads do not divide embed_dim 192; allowed: 4 or 6"),
        ("model.embed_dim=100", "model.embed_dim: 12 heads do not divide embed_dim 100; allowed: 10 or 20"),
        ("model.image_size=200", "model.image_size: patches of 16 do not fill images of 200 x 200 pixels; "
         "allowed: multiples of 16, here 192 or 208"),
        ("model.image_size=[224, 8]", "model.image_size: patches of 16 do not fill images of 224 x 8 pixels; "
         "allowed: multiples of 16, here 224 or 240 and 16"),
        ("model.name=B/15", "model.patch_size: patches of 15 do not fill images of 224 x 224 pixels; "
         "allowed: multiples of 15, here 210 or 225"),
        ("model={image_size: 230, patch_sizes: [16, 23]}", "model.image_size: patches of 16 do not fill images of "
         "230 x 230 pixels; allowed: multiples of 16, here 224 or 240"),
        ("model={patch_sizes: [16, 8], patch_stride: 8}", "model.patch_stride: patches of several sizes lie side by "
         "side; allowed: null"),
        ("model={patch_stride: 8, image_size: 12}", "model.image_size: images of 12 x 12 pixels hold no patch of 16; "
         "allowed: 16 or more"),
        ("model.class_token=false", "model.class_token: pool: cls reads the class token; allowed: true, or pool: gap, "
         "map or none"),
        ("model={pos_embed: sincos, embed_dim: 6, num_heads: 1}", "model.embed_dim: sincos gives a quarter each to "
         "sines and cosines of row and column, and 4 does not divide 6; allowed: 4 or 8"),
        ("model={pos_embed: rotary, num_heads: 128}", "model.num_heads: rotary positions need heads whose width is a "
         "multiple of 4, not 6; allowed: another number of heads"),
        ("model={activation: swiglu, num_fcs: 3}", "model.num_fcs: SwiGLU has two layers; allowed: 2"),
        ("model.frozen_stages=13", "model.frozen_stages: there are 12 blocks, and 13 cannot be frozen; "
         "allowed: 0 to 12"),
        ("model.in_channels=1", "model.in_channels: training images are RGB, not of 1 channels; allowed: 3"),
        ("model.num_classes=0", "model.num_classes: a model without a head cannot be trained; allowed: 1 or more"),
        ("data.eval_resize=200", "data.eval_resize: images whose shorter side is 200 may hold no crop of 224 pixels; "
         "allowed: 224 or more"),
        ("data.crop_ratio=[2, 1]", "data.crop_ratio: 2 is larger than 1; allowed: [smallest, largest]"),
        ("engine.micro_batch=65", "engine.micro_batch: 65 is more than global_batch 64; allowed: 64"),
        ("engine.micro_batch=5", "engine.micro_batch: 5 does not divide global_batch 64; allowed: 4 or 8"),
        ("data.streams=24", "data.streams: 24 does not divide global_batch 64; allowed: 16 or 32"),
        ("evaluate.every=1 epoch", "evaluate.every: there is nothing to evaluate on; set data.validation too"),
        ("duration=5 percent", "duration: '5 percent' of what? allowed: epochs, steps or samples"),
        ("schedule.warmup=4 epochs", "schedule.warmup: '4 epochs' is longer than the run; allowed: up to '3 epochs'"),
        ("schedule.warmup=101 percent", "schedule.warmup: '101 percent' is longer than the run; "
         "allowed: up to '100 percent'"),
        ("checkpoint.keep_every=1500 steps", "checkpoint.keep_every: '1500 steps' is not a multiple of "
         "checkpoint.every '1000 steps', so that few checkpoints would be kept"),
    ],
)  # fmt: skip
def test_conflicts(write: Write, minimal: str, override: str, line: str) -> None:
    assert problems(write("run.yaml", minimal), override) == [f"command line: {line}"]


@pytest.mark.parametrize(
    "override",
    ["schedule.warmup=3 epochs", "schedule.warmup=9999 steps", "checkpoint.keep_every=3000 steps",
     "data.crop_area=[1, 1]", "checkpoint={every: 0.1 epochs, keep_every: 0.3 epochs}",
     "data.eval_resize=224", "engine.micro_batch=64", "model={patch_padding: same, image_size: 200}",
     "model={patch_stride: 12, image_size: [256, 128]}", "model={pool: map, class_token: false}",
     "model={image_size: 240, patch_size: 32, patch_sizes: [8, 30]}"],
)  # fmt: skip
def test_no_conflict(write: Write, minimal: str, override: str) -> None:
    load_config(write("run.yaml", minimal), [override])


def test_a_conflict_is_placed_at_the_key_that_was_written(write: Write, minimal: str) -> None:
    write("run.yaml", minimal + "engine:\n  micro_batch: 48\nmodel:\n  name: H/14\n  image_size: 225\n")
    assert problems("run.yaml") == [
        "run.yaml:8: engine.micro_batch: 48 does not divide global_batch 64; allowed: 32 or 64",
        "run.yaml:11: model.image_size: patches of 14 do not fill images of 225 x 225 pixels; "
        "allowed: multiples of 14, here 224 or 238",
    ]


def test_a_conflict_with_a_key_that_is_itself_wrong_is_left_out(write: Write, minimal: str) -> None:
    write("run.yaml", minimal.replace("64", "x") + "engine: {micro_batch: 48}\ndata2: 1")
    assert problems("run.yaml") == [
        "run.yaml:4: global_batch: found 'x'; allowed: whole number >= 1",
        "run.yaml:8: data2: unknown key; did you mean 'data'?",
    ]
    write("run.yaml", minimal + "model: {name: b/16, image_size: 225, embed_dim: 100}")
    assert len(problems("run.yaml")) == 1


def test_large_numbers_are_no_work(write: Write, minimal: str) -> None:
    path = write("run.yaml", minimal)
    assert problems(path, "global_batch=1000000000000000001", "data.streams=2") == [
        "command line: data.streams: 2 does not divide global_batch 1000000000000000001; "
        "allowed: a divisor of 1000000000000000001"
    ]
