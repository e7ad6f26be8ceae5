"""A real ViT-Ti/16 and a hundred real ImageNet images, against timm on the same pixels."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers.command_line import run_main
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from vitscale import load_model
from vitscale.config.schema import DataConfig
from vitscale.data.augment import normalize
from vitscale.data.loader import EvalLoader
from vitscale.weights.io import load_weights

FILE = "vit_ti16_timm_fp16.safetensors"
IMAGES = 100


@pytest.fixture(scope="module")
def shards(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images, each of a class of its own, under the labels that they have in ImageNet-1k."""
    folder = tmp_path_factory.mktemp("imagenet100") / "shards"
    classes = folder.with_name("classes.txt")
    there = sorted(path.name for path in (shared_data / "imagenet100").iterdir())
    names = [there[label // 10] if label % 10 == 0 else f"class {label}" for label in range(1000)]
    classes.write_text("\n".join(names))
    packed = run_main("data", "pack", shared_data / "imagenet100", folder, "--classes", classes)
    assert packed.code == 0, packed.err
    return folder


def pixels(shards: Path, image_size: int) -> tuple[Tensor, Tensor]:
    """What evaluation shows a model: normalised images `[100, 3, size, size]` and their labels."""
    config = DataConfig(train=str(shards), validation=str(shards), workers=2)
    loader = EvalLoader(config, image_size=image_size, num_classes=1000, batch=IMAGES, rank=0, world_size=1)
    with closing(loader):
        (batch,) = loader
    assert batch.valid.all()
    return normalize(batch.images, mean=config.mean, std=config.std), batch.labels


def timms(shared_data: Path, image_size: int) -> torch.nn.Module:
    state = load_file(shared_data / FILE)
    grid = image_size // 16
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], [grid, grid], [14, 14])
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=image_size).eval()
    theirs.load_state_dict(state)
    return theirs


def evaluate(model: Path, shards: Path, *options: object) -> dict[str, Any]:
    out = model.with_suffix(".json")
    done = run_main("eval", model, "--data", shards, "--json", out, *options)
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.slow
@torch.no_grad()
def test_imported_evaluated_exported_at_384_and_evaluated_again(
    shared_data: Path, shards: Path, tmp_path: Path
) -> None:
    imported, larger = tmp_path / "ti16.safetensors", tmp_path / "ti16_384.safetensors"
    assert run_main("import", shared_data / FILE, imported, "--classes", shards.with_name("classes.txt")).code == 0
    assert run_main("export", imported, larger, "--resolution", 384).code == 0
    for file, image_size, count, least in ((imported, 224, IMAGES, 0.80), (larger, 384, 20, 0.75)):
        images, labels = pixels(shards, image_size)
        expected = timms(shared_data, image_size)(images)
        logits = load_model(file)(images[:count])
        # Logits of up to 20 in float32: 1e-5 of that, of which twelve blocks use a tenth.
        torch.testing.assert_close(logits, expected[:count], rtol=1e-5, atol=2e-4)
        assert torch.equal(logits.argmax(dim=1), expected[:count].argmax(dim=1))  # image by image
        result = evaluate(file, shards)
        top1 = (expected.argmax(dim=1) == labels).float().mean()
        top5 = (expected.topk(5).indices == labels[:, None]).any(dim=1).float().mean()
        assert (result["count"], result["unreadable"]) == (IMAGES, 0)
        assert result["top1"] == pytest.approx(float(top1))
        assert result["top5"] == pytest.approx(float(top5))
        assert top1 > least


@torch.no_grad()
def test_the_classifier_of_ten_classes_is_ten_rows_of_it(shared_data: Path, shards: Path, tmp_path: Path) -> None:
    imported, chosen = tmp_path / "ti16.safetensors", tmp_path / "ten.safetensors"
    names = (shards.with_name("classes.txt")).read_text().split("\n")
    (tmp_path / "ten.txt").write_text("\n".join([*names[90::-10], "n00000000 not of ImageNet"]))
    run_main("import", shared_data / FILE, imported, "--classes", shards.with_name("classes.txt"))
    done = run_main("export", imported, chosen, "--classes", tmp_path / "ten.txt")
    assert "head.weight, head.bias by class, 1 of them unknown and zero" in done.out
    images, _ = pixels(shards, 224)
    all_of_them, ten = load_model(imported)(images[:8]), load_model(chosen)(images[:8])
    torch.testing.assert_close(ten[:, :10], all_of_them[:, list(range(90, -1, -10))], rtol=1e-5, atol=1e-4)
    assert not ten[:, 10].any()
    assert load_weights(chosen).class_names == (*names[90::-10], "n00000000 not of ImageNet")


def test_the_file_is_recognised(shared_data: Path) -> None:
    weights = load_weights(shared_data / FILE)
    assert weights.source == (
        "timm ViT (safetensors), Ti/16 at 224x224 with 1000 classes, taken as exact GELU, epsilon 1e-06, 3 heads, "
        "square"
    )
    assert weights.config.num_heads == 3
