from __future__ import annotations

import pytest

from vitscale.config.load import model_from_dict
from vitscale.config.sizes import FAMILIES, SIZES, dimensions


def num_parameters(patch_size: int, embed_dim: int, depth: int, mlp_dim: int, *, image_size: int = 224) -> int:
    """Parameters of a ViT with a class token, learned positions and 1000 classes."""
    tokens = (image_size // patch_size) ** 2 + 1
    attention = 4 * embed_dim * (embed_dim + 1)
    mlp = (embed_dim + 1) * mlp_dim + (mlp_dim + 1) * embed_dim
    norms = 2 * 2 * embed_dim
    patches = (3 * patch_size**2 + 1) * embed_dim
    return (
        patches + (tokens + 1) * embed_dim + depth * (attention + mlp + norms) + 2 * embed_dim + (embed_dim + 1) * 1000
    )


# Millions of parameters as the papers print them: DeiT's table 1, ViT's table 1 (B, L, H).
@pytest.mark.parametrize(
    ("name", "millions", "tolerance"),
    [("Ti/16", 5.7, 0.1), ("S/16", 22, 0.1), ("B/16", 86, 1), ("L/16", 307, 3), ("H/14", 632, 3)],
)
def test_sizes_have_the_papers_number_of_parameters(name: str, millions: float, tolerance: float) -> None:
    fields = dimensions(name)
    count = num_parameters(fields["patch_size"], fields["embed_dim"], fields["depth"], fields["mlp_dim"])
    assert count / 1e6 == pytest.approx(millions, abs=tolerance)


def test_heads_are_64_wide_but_for_the_largest() -> None:
    widths = {name: size.embed_dim / size.num_heads for name, size in SIZES.items()}
    assert widths == {"Ti": 64, "S": 64, "B": 64, "L": 64, "H": 80, "So400m": 72, "g": 88, "G": 104, "e": 112,
                      "22B": 128}  # fmt: skip


def test_a_family_sets_its_parts_too() -> None:
    assert dimensions("DINOv2reg-g/14") == {
        "patch_size": 14, "embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_dim": 4096, "activation": "swiglu",
        "layer_scale": 1e-5, "num_registers": 4, "pos_embed_prefix": "class",
    }  # fmt: skip
    assert dimensions("DINOv3-H+/16")["pos_embed"] == "rotary"
    assert dimensions("DeiT3-B/16")["drop_path_schedule"] == "constant"
    assert dimensions("22B/14")["block"] == "parallel"


@pytest.mark.parametrize(
    "name", ["22B/14", *(f"{family}-{size}/16" for family in FAMILIES for size in FAMILIES[family])]
)
def test_every_name_is_a_model(name: str) -> None:
    model_from_dict({"name": name, "image_size": 112, **dimensions(name)})


def test_any_patch_size() -> None:
    assert dimensions("B/32") == {"patch_size": 32, "embed_dim": 768, "depth": 12, "num_heads": 12, "mlp_dim": 3072}
    assert dimensions("Ti/7")["patch_size"] == 7


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("b/16", "B/16"),
        ("TI/16", "Ti/16"),
        ("B16", "B/16"),
        ("ViT-L/14", "L/14"),
        ("vit_base_patch16_224", "B/16"),
        ("vit_tiny_patch16_224.augreg_in21k", "Ti/16"),
        ("Huge/14", "H/14"),
        ("vit_giant_patch14_224", "g/14"),
        ("vit_gigantic_patch14_224", "G/14"),
        ("so400m/14", "So400m/14"),
        ("22b/14", "22B/14"),
        ("dinov2-G/14", "DINOv2-g/14"),
        ("DINOV3-s+/16", "DINOv3-S+/16"),
    ],
)
def test_spellings_of_other_tools_are_recognised(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=r"is not a known model; allowed: a size of Ti, S, B, L, H") as caught:
        dimensions(name)
    assert str(caught.value).endswith(f"; did you mean '{meant}'?")
    dimensions(meant)


@pytest.mark.parametrize(
    "name", ["X/16", "B", "", "B/0", "B/-1", "B/16/2", "g-opt/14", "DINOv2-H/14", "DeiT3-B", " B/16", "B/16\n", "B/1_6"]
)
def test_others_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a known model"):
        dimensions(name)
