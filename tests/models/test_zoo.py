from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.timm_vit import TINY
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitscale.config.load import model_from_dict
from vitscale.config.schema import ModelConfig
from vitscale.config.sizes import dimensions
from vitscale.models.vit import VisionTransformer
from vitscale.models.zoo import NAMES, count_flops, count_parameters, list_models


def named(name: str, **changes: Any) -> ModelConfig:
    return model_from_dict({"name": name, **dimensions(name), **changes})


# Millions of parameters as printed, and the model that they are of.
# Ti, S: Touvron et al. 2021 (arXiv:2012.12877), table 1, with a classifier of 1000; the decimals of Ti are cut off.
# B, L, H: Dosovitskiy et al. 2021 (arXiv:2010.11929), table 1; its L is 1 % above what its own dimensions give.
# g, G and the small ones of no classifier: Zhai et al. 2022 (arXiv:2106.04560), table 2.
# e: Chen et al. 2022 (arXiv:2209.06794), "3.9B", with attention pooling and the classifier of JFT-3B (some 30k labels).
# So400m: Alabdulmohsin et al. 2023 (arXiv:2305.13035), "428M", with attention pooling.
# 22B: Dehghani et al. 2023 (arXiv:2302.05442), table 1, "21743": the matrices of the blocks.
# DeiT III: Touvron et al. 2022 (arXiv:2204.07118), table 1. DINOv2-g: Oquab et al. 2023, "1.1B". DINOv3: Siméoni et al.
# 2025 (arXiv:2508.10104), tables of its family: 21, 29, 86, 300, 840 and 6716 million.
PAPERS: list[tuple[str, float, float, dict[str, Any]]] = [
    ("Ti/16", 5.7, 0.05, {}),
    ("S/16", 22, 0.1, {}),
    ("B/16", 86.6, 0.05, {}),
    ("L/16", 304.3, 0.1, {}),
    ("H/14", 632, 0.1, {}),
    ("Ti/16", 5.5, 0.05, {"pool": "gap", "num_classes": 0}),
    ("S/16", 22, 0.5, {"pool": "gap", "num_classes": 0}),
    ("B/32", 87, 0.6, {"pool": "gap", "num_classes": 0}),
    ("B/16", 86, 0.5, {"pool": "gap", "num_classes": 0}),
    ("L/16", 303, 0.5, {"pool": "gap", "num_classes": 0}),
    ("g/14", 1011, 0.5, {"pool": "gap", "num_classes": 0}),
    ("G/14", 1843, 0.5, {"pool": "gap", "num_classes": 0}),
    ("e/14", 3926, 1, {"pool": "map", "num_classes": 29593}),
    ("So400m/14", 428, 0.5, {"pool": "map", "num_classes": 0}),
    ("22B/14", 21743, 8, {"pool": "gap", "num_classes": 0}),
    ("DeiT3-S/16", 22.0, 0.1, {}),
    ("DeiT3-B/16", 86.6, 0.1, {}),
    ("DeiT3-L/16", 304.4, 0.1, {}),
    ("DeiT3-H/14", 632.1, 0.1, {}),
    ("DINOv2-g/14", 1100, 50, {"num_classes": 0, "image_size": 518}),
    ("DINOv3-S/16", 21, 1, {"num_classes": 0}),
    ("DINOv3-S+/16", 29, 0.5, {"num_classes": 0}),
    ("DINOv3-B/16", 86, 0.5, {"num_classes": 0}),
    ("DINOv3-L/16", 300, 5, {"num_classes": 0}),
    ("DINOv3-H+/16", 840, 2, {"num_classes": 0}),
    ("DINOv3-7B/16", 6716, 1, {"num_classes": 0}),
]


@pytest.mark.parametrize(("name", "millions", "tolerance", "changes"), PAPERS)
def test_parameters_are_the_papers(name: str, millions: float, tolerance: float, changes: dict[str, Any]) -> None:
    assert count_parameters(named(name, **changes)) / 1e6 == pytest.approx(millions, abs=tolerance)


# GFLOPs of Zhai et al. 2022 (arXiv:2106.04560), table 2, at 224 and 384 pixels, and of Alabdulmohsin et al. 2023 at
# 224 (SoViT). They count more than matrix products, so that ours are below, by one percent at most (Ti: two). DeiT
# III's table 1 counts a multiply-add as one.
@pytest.mark.parametrize(
    ("name", "image_size", "gflops", "tolerance"),
    [
        ("Ti/16", 224, 2.5, 0.02),
        ("S/16", 224, 9.2, 0.01),
        ("S/16", 384, 31.2, 0.01),
        ("B/16", 224, 35.1, 0.01),
        ("B/16", 384, 111.3, 0.01),
        ("L/16", 224, 122.9, 0.005),
        ("L/16", 384, 382.8, 0.005),
        ("g/14", 224, 533.1, 0.005),
        ("g/14", 378, 1596.4, 0.01),  # 384 pixels in the paper hold 27 patches of 14
        ("G/14", 224, 965.3, 0.005),
        ("G/14", 378, 2859.9, 0.01),
        ("So400m/14", 224, 221, 0.01),
        ("DeiT3-S/16", 224, 2 * 4.6, 0.01),
        ("DeiT3-B/16", 224, 2 * 17.5, 0.01),
        ("DeiT3-L/16", 224, 2 * 61.6, 0.01),
        ("DeiT3-H/14", 224, 2 * 167.4, 0.01),
    ],
)
def test_flops_are_the_papers(name: str, image_size: int, gflops: float, tolerance: float) -> None:
    pool = {} if name.startswith("DeiT3") else {"pool": "gap"}
    flops = count_flops(named(name, image_size=image_size, num_classes=1000 if name.startswith("DeiT3") else 0, **pool))
    assert flops / 1e9 == pytest.approx(gflops, rel=tolerance)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"pool": "gap", "image_size": (8, 20), "num_classes": 0},
    {"pool": "map", "num_registers": 3},
    {"pool": "cls_gap", "activation": "swiglu"},
    {"pool": "none", "representation_size": 5},
    {"block": "parallel", "qk_norm": True, "pos_embed": "rotary"},
    {"num_fcs": 4, "patch_padding": "same", "patch_stride": 3, "v_shortcut": True},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_flops_are_those_that_torch_counts(changes: dict[str, Any]) -> None:
    config = replace(TINY, **changes)
    model = VisionTransformer(config).eval()
    size = config.image_size
    images = torch.zeros(1, 3, *((size, size) if isinstance(size, int) else size))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    assert count_flops(config) == counter.get_total_flops()


def test_every_model_of_the_papers_is_listed() -> None:
    table = list_models()
    assert [row.name for row in table] == list(NAMES)
    rows = {row.name: row for row in table}
    # timm's own documentation: 86.57 M parameters and 17.58 GMACs for vit_base_patch16_224
    assert rows["B/16"].parameters == 86_567_656
    assert rows["B/16"].flops / 2e9 == pytest.approx(17.58, abs=0.02)
    assert rows["B/16"].image_size == 224
    assert rows["22B/14"].parameters > 21.7e9
