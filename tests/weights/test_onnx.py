"""Models as ONNX, run by onnxruntime."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from helpers.timm_vit import TINY, randomise

from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.weights import onnx
from vitscale.weights.content import Preprocessing
from vitscale.weights.export import export_model

PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other parts": {"pool": "map", "activation": "swiglu", "qk_norm": True, "layer_scale": 0.1, "num_registers": 2},
    "rotary": {"pos_embed": "rotary", "num_registers": 2, "image_size": (8, 20)},
    "parallel": {"block": "parallel", "norm": "rmsnorm", "pool": "gap"},
}


def model_of(change: dict[str, Any]) -> VisionTransformer:
    model = VisionTransformer(replace(TINY, **change)).eval()
    randomise(model)
    return model


@pytest.mark.parametrize("part", PARTS)
def test_onnxruntime_computes_the_same_for_any_batch(part: str, tmp_path: Path) -> None:
    model, file = model_of(PARTS[part]), tmp_path / "m.onnx"
    said = Preprocessing(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), interpolation="bicubic", crop_pct=0.9)
    names = [f"c{number}" for number in range(7)]
    export_model(file, model.state_dict(), model.config, format="onnx", preprocessing=said, class_names=names)
    session = onnxruntime.InferenceSession(str(file))
    size = model.config.image_size
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, *((size, size) if isinstance(size, int) else size))
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=1e-5, atol=1e-5)
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["class_names"]) == names
    assert json.loads(told["preprocessing"])["crop_pct"] == 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_model_too_large_for_one_file_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "_LARGEST", 1000)
    model, folder = model_of({}), tmp_path / "m"
    export_model(folder, model.state_dict(), model.config, format="onnx", preprocessing=None, class_names=None)
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "model.onnx.data"}
    images = torch.randn(2, 3, 16, 16)
    (logits,) = onnxruntime.InferenceSession(str(folder / "model.onnx")).run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=1e-5, atol=1e-5)


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported, model = onnx._exported, model_of({})

    def of_another_model(model: VisionTransformer, images: torch.Tensor) -> Any:
        return exported(model_of({"qk_scale": 0.1}), images)

    monkeypatch.setattr(onnx, "_exported", of_another_model)
    with pytest.raises(UserError, match=r"does not compute what the model does: outputs up to .* differ by"):
        export_model(
            tmp_path / "m", model.state_dict(), model.config, format="onnx", preprocessing=None, class_names=None
        )
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = model_of({})
    with pytest.raises(UserError, match=r"ONNX needs the package onnxruntime: pip install 'vitscale\[onnx\]'"):
        export_model(
            tmp_path / "m", model.state_dict(), model.config, format="onnx", preprocessing=None, class_names=None
        )
