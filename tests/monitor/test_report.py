from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitscale.config.load import load_config
from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.vit import VisionTransformer
from vitscale.monitor.figures import cosine_similarity, kernel_tiles, principal_kernels, similarity_tiles
from vitscale.monitor.report import write_report
from vitscale.monitor.writers import JsonlWriter
from vitscale.weights.io import save_model

NAME = "</title><script>alert('ü')</script>"
CONFIG = f"""\
name: "{NAME}"
run_dir: runs/try
duration: 7 epochs
global_batch: 8
data: {{train: /data/train}}
model: {{image_size: [8, 12], patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2, mlp_dim: 8, num_classes: 3}}
"""
RUN = {"name": NAME, "model": "16x1", "engine": "deepspeed", "ranks": "2"}


class Page(HTMLParser):
    """What a browser would load, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.images: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br", "link", "path", "use"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("href", "src", "action", "data", "srcset"):
                (self.images if tag == "img" else self.references).append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.words.append(data.strip())


def write_metrics(run_dir: Path, *, begin: int, end: int, every: int = 10) -> None:
    writer = JsonlWriter(run_dir, step=begin, run=RUN)
    for step in range(begin + every, end + 1, every):
        values = {
            "loss": 2.0 * math.exp(-step / 100),
            "grad_norm": math.nan if step == 50 else 1.0,
            "learning_rate": 1e-3 * (1 - step / 500),
            "images_per_second": 400.0 + step % 20,
            "epoch": step / 100,
            'bad_samples_total{reason="image"}': 3.0,
        }
        if step % 100 == 0:
            values['evaluation_top1_ratio{weights="ema"}'] = 0.9
            values['evaluation_top5_ratio{weights="ema"}'] = 0.99
            values['evaluation_loss{weights="ema"}'] = 0.5
        writer.write(step, values, 1_700_000_000.0 + step)
    writer.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


@pytest.fixture
def model(run_dir: Path) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(load_config(run_dir / "config.yaml").model)


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_a_whole_run(run_dir: Path, model: VisionTransformer) -> None:
    write_metrics(run_dir, begin=0, end=260)
    write_metrics(run_dir, begin=200, end=300)
    save_model(run_dir / "model.safetensors", model.state_dict(), model.config, preprocessing=None, class_names=None)
    path = write_report(run_dir)
    page = read(path)
    assert path == run_dir / "report.html"
    assert path.stat().st_size < 5e6
    assert page.open == []
    assert page.tags.count("svg") == 5
    assert len(set(page.ids)) == len(page.ids)
    assert page.tags.count("img") == 2
    text = " ".join(page.words)
    for part in (
        "300 3 epochs, planned: 7 epochs",
        "90.00%",
        "deepspeed 2 ranks",
        "1 from step 200",
        "16 wide, 1 deep",
    ):
        assert part in text, part
    assert "Samples that could not be used: 3 (image 3)" in text
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml", "metrics.jsonl", "model.safetensors", "report.html"
    ]  # fmt: skip


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(run_dir: Path, model: VisionTransformer) -> None:
    write_metrics(run_dir, begin=0, end=300)
    save_model(run_dir / "model.safetensors", model.state_dict(), model.config, preprocessing=None, class_names=None)
    path = write_report(run_dir)
    page = read(path)
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert all(image.startswith("data:image/png;base64,") for image in page.images)
    assert not re.search(r"https?:|url\((?!#)|@import", path.read_text(encoding="utf-8"))
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in path.read_text(encoding="utf-8")


def test_names_are_text(run_dir: Path) -> None:
    write_metrics(run_dir, begin=0, end=30)
    page = read(write_report(run_dir))
    assert page.words.count(NAME) == 1  # the heading; in the title it stands with more
    assert page.words[0] == f"{NAME} · vitscale"


def test_pictures_are_of_the_models_tensors(run_dir: Path, model: VisionTransformer) -> None:
    save_model(run_dir / "model.safetensors", model.state_dict(), model.config, preprocessing=None, class_names=None)
    positions, kernels = read(write_report(run_dir)).images
    grid = model.pos_embed.detach().double().numpy()[0, 1:]  # the class token has no place
    similarity = cosine_similarity(grid, (2, 3))
    between = [similarity.reshape(6, 6)[i, j] for i in range(6) for j in range(6) if i != j]
    assert positions == similarity_tiles(similarity, low=min(between), high=max(between))
    weight = model.state_dict()["patch_embed.proj.weight"].double().numpy()
    assert kernels == kernel_tiles(principal_kernels(weight)[0])
    for uri in (positions, kernels):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))
        assert len(np.unique(pixels.reshape(-1, 4), axis=0)) > 10


def test_a_run_that_has_only_begun_says_what_is_missing(run_dir: Path) -> None:
    text = " ".join(read(write_report(run_dir)).words)
    assert "No metrics are recorded yet." in text
    assert text.count("Not recorded.") == 4
    assert text.count("The run has no checkpoint or model file yet.") == 2
    write_metrics(run_dir, begin=0, end=10)
    assert "Not enough records for a curve: 1." in " ".join(read(write_report(run_dir)).words)


def test_a_run_without_a_readable_config(tmp_path: Path) -> None:
    write_metrics(tmp_path, begin=0, end=30)
    assert "The run has no config.yaml." in read(write_report(tmp_path)).words
    (tmp_path / "config.yaml").write_text("name: old\nno_such_key: 1\n")
    words = read(write_report(tmp_path)).words
    assert any("config.yaml does not fit this version of vitscale" in word for word in words)
    assert any("no_such_key: 1" in word for word in words)


def test_a_model_file_of_something_else_is_passed_over(run_dir: Path) -> None:
    (run_dir / "other.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    assert read(write_report(run_dir)).images == []


def test_no_run_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder; give the folder of a run") as caught:
        write_report(tmp_path / "nowhere")
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match=r"holds neither config.yaml nor metrics.jsonl"):
        write_report(tmp_path)


def test_a_model_without_a_class_token(run_dir: Path) -> None:
    config = ModelConfig(
        image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1, mlp_dim=8, num_classes=0, pool="gap"
    )
    torch.manual_seed(0)
    model = VisionTransformer(config)
    save_model(run_dir / "model.safetensors", model.state_dict(), config, preprocessing=None, class_names=None)
    page = read(write_report(run_dir))
    assert len(page.images) == 2
    assert any("Each of the 2x2 tiles" in word for word in page.words)
