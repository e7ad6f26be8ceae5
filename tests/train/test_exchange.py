"""Weights out of runs: opened, exported at another size, judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.packing import pack_folder
from helpers.runs import newest, tensors, write_config, write_shards
from helpers.split_engine import world_of_one
from PIL import Image
from torch import Tensor

from vitscale import load_model
from vitscale.config.load import config_to_dict, load_config
from vitscale.errors import UserError
from vitscale.monitor.report import write_report
from vitscale.train import checkpoint
from vitscale.train.exchange import evaluate_weights, export, open_weights, preprocessing_of
from vitscale.train.loop import train
from vitscale.weights.io import save_model

EVALUATED = {"every": "10 steps", "batch": 7}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder, shards, duration="10 steps", evaluate=EVALUATED)
    with world_of_one() as world:
        train(load_config(config, []), world)
    return folder / "run"


def test_runs_steps_and_files_are_opened(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    export(trained, file)
    saved = tensors(trained)
    for source in (trained, trained / "checkpoints/step_00000010", file):
        weights = open_weights(source)
        assert weights.class_names == ("c0", "c1", "c2")
        for name, tensor in weights.state.items():
            assert torch.equal(tensor, saved[f"ema/{name}"]), name
    earlier = open_weights(trained / "checkpoints/step_00000005")
    assert not torch.equal(earlier.state["head.weight"], saved["ema/head.weight"])


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder without checkpoints; name a run, a step folder or a model file"):
        open_weights(tmp_path)


def test_without_an_average_the_trained_weights_leave(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, duration="5 steps", optim={"ema_decay": None})
    with world_of_one() as world:
        train(load_config(config, []), world)
    weights = open_weights(tmp_path / "run")
    assert torch.equal(weights.state["head.weight"], tensors(tmp_path / "run")["param/head.weight"])
    assert "trained" in weights.source


def test_an_export_at_another_size_computes_what_it_should(trained: Path, tmp_path: Path) -> None:
    """A model at twice the size: all but the positions as before, positions as torch enlarges a 2 x 2 grid."""
    file = tmp_path / "large.safetensors"
    words = export(trained, file, image_size=16)
    assert "step 10, averaged weights" in words
    model = load_model(file)
    saved = tensors(trained)
    grid = saved["ema/pos_embed"][:, 1:].reshape(1, 2, 2, 16).permute(0, 3, 1, 2)
    larger = torch.nn.functional.interpolate(grid, size=(4, 4), mode="bicubic", antialias=True, align_corners=False)
    state = model.state_dict()
    torch.testing.assert_close(state["pos_embed"][:, 1:], larger.permute(0, 2, 3, 1).reshape(1, 16, 16))
    assert torch.equal(state["pos_embed"][:, :1], saved["ema/pos_embed"][:, :1])
    assert torch.equal(state["blocks.1.attn.qkv.weight"], saved["ema/blocks.1.attn.qkv.weight"])
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 3)


def test_an_export_with_a_new_classifier(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "new.safetensors"
    export(trained, file, num_classes=5)
    weights = open_weights(file)
    assert weights.state["head.weight"].shape == (5, 16)
    assert not weights.state["head.weight"].any()
    assert weights.class_names is None


def plain_accuracy(model: torch.nn.Module, images: Path) -> float:
    """Top-1 with Pillow, written out: the shorter side to 8 / 0.875 = 9, the centre, -1 to 1."""
    right, total = 0, 0
    for label, folder in enumerate(sorted(images.iterdir())):
        for path in sorted(folder.iterdir()):
            pixels = np.asarray(Image.open(path).convert("RGB"))
            image: Tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
            resized = torch.nn.functional.interpolate(image, size=(9, 12), mode="bicubic", antialias=True)
            crop = resized[:, :, 0:8, 2:10].float() / 127.5 - 1
            right += int(model(crop).argmax() == label)
            total += 1
    return right / total


def test_top1_is_that_of_a_loop_written_out_and_that_of_training(shards: Path, trained: Path, tmp_path: Path) -> None:
    """The images are of one colour, so that the crop's place does not matter and rounding does not either."""
    result = evaluate_weights(str(trained), (str(shards / "validation"),), image_size=None, batch=8, workers=0)
    assert result.count == 30
    assert result.top1 == newest(trained, 'evaluation_top1_ratio{weights="ema"}')
    assert result.loss == pytest.approx(newest(trained, 'evaluation_loss{weights="ema"}'), rel=1e-5)
    export(trained, tmp_path / "model.safetensors")
    model = load_model(tmp_path / "model.safetensors").eval()
    assert result.top1 == pytest.approx(plain_accuracy(model, shards / "images/validation"))


def test_classes_of_other_names_are_refused(trained: Path, tmp_path: Path) -> None:
    other = write_shards(tmp_path, classes=2)
    (tmp_path / "images/validation/c1").rename(tmp_path / "images/validation/cat")
    pack_folder(str(other / "images/validation"), str(tmp_path / "cats"))
    with pytest.raises(UserError, match=r"the classes of .*run \(3: c0, c1, c2, ...\) are not those of the shards \(2"):
        evaluate_weights(str(trained), (str(tmp_path / "cats"),), image_size=None, batch=8, workers=0)


@pytest.mark.parametrize(
    ("crop", "resize", "share"), [("inception", None, 8 / 9), ("center", 16, 0.5), ("resize", None, 1.0)]
)
def test_exported_preprocessing_is_what_evaluation_does(
    crop: str, resize: int | None, share: float, shards: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, shards, data={"crop": crop, "eval_resize": resize, "mean": [0.1, 0.2, 0.3]})
    preprocessing = preprocessing_of(config_to_dict(load_config(config, [])))
    assert preprocessing.crop_pct == pytest.approx(share)
    assert preprocessing.mean == (0.1, 0.2, 0.3)
    assert preprocessing.interpolation == "bicubic"
    assert preprocessing.crop_mode == ("squash" if crop == "resize" else "center")


@pytest.mark.parametrize("data", [{"crop": "resize"}, {"interpolation": "bilinear"}, {"eval_resize": 8}])
def test_a_model_is_judged_as_it_was_in_training(data: dict[str, object], tmp_path: Path) -> None:
    """On images that each way of preparing them shows differently; from the run, and from its model file."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 16)):
        for label in range(3):
            folder = tmp_path / "images" / split / f"c{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 255, (14, 22, 3), np.uint8)).save(folder / f"{number}.png")
        pack_folder(str(tmp_path / "images" / split), str(tmp_path / split))
    config = write_config(tmp_path, tmp_path, duration="10 steps", evaluate=EVALUATED, data=data)
    with world_of_one() as world:
        train(load_config(config, []), world)
    export(tmp_path / "run", tmp_path / "model.safetensors")
    expected = newest(tmp_path / "run", 'evaluation_loss{weights="ema"}')
    for source in (tmp_path / "run", tmp_path / "model.safetensors"):
        found = evaluate_weights(str(source), (str(tmp_path / "validation"),), image_size=None, batch=8, workers=0)
        assert found.loss == pytest.approx(expected, rel=1e-6)
    # a check of the check: prepared in the usual way, the same images give another loss
    weights = open_weights(tmp_path / "model.safetensors")
    usual = preprocessing_of(config_to_dict(load_config(write_config(tmp_path, tmp_path), [])))
    assert weights.preprocessing != usual
    save_model(tmp_path / "usual.safetensors", weights.state, weights.config, preprocessing=usual, class_names=None)
    source = tmp_path / "usual.safetensors"
    other = evaluate_weights(str(source), (str(tmp_path / "validation"),), image_size=None, batch=8, workers=0)
    assert other.loss != pytest.approx(expected, rel=1e-5)


def test_a_report_shows_the_checkpoint_or_says_why_not(shards: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, shards, duration="5 steps")
    with world_of_one() as world:
        train(load_config(config, []), world)
    run = tmp_path / "run"
    page = write_report(run).read_text()
    assert "averaged weights of step 5" in page
    assert [entry.engine for entry in checkpoint.list_checkpoints(run)] == ["ddp"]
    tensor_file = next((run / "checkpoints/step_00000005").glob("*.safetensors"))
    tensor_file.write_bytes(tensor_file.read_bytes()[:-1])
    page = write_report(run).read_text()
    assert "no checkpoint of this run is whole" in page
    assert "Training loss" in page
