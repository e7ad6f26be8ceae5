from __future__ import annotations

import pytest
import torch

from vitscale.errors import UserError
from vitscale.weights.names import in_few_words, plain_name, unwrapped


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.attn.qkv.weight",
        "module.blocks.0.attn.qkv.weight",
        "_orig_mod.module.blocks.0.attn.qkv.weight",
        "module._orig_mod.blocks.0.attn.qkv.weight",
        "blocks.0._orig_mod._checkpoint_wrapped_module.attn.qkv.weight",
        "_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.attn.qkv.weight",
        "model.blocks.0.attn.qkv.weight",
        "module.model._orig_mod.model.blocks.0.attn.qkv.weight",
    ],
)
def test_wrappers_are_seen_through_in_any_nesting(name: str) -> None:
    assert plain_name(name) == "blocks.0.attn.qkv.weight"


def test_names_that_become_equal_are_refused() -> None:
    with pytest.raises(UserError, match=r"'module.head.bias' and 'head.bias' both are 'head.bias'"):
        unwrapped({"module.head.bias": torch.zeros(1), "head.bias": torch.zeros(1)})


def test_many_names_in_few_words() -> None:
    names = [f"blocks.{index}.ls1.gamma" for index in (0, 1, 2, 5)] + ["head.bias", "blocks.3.norm1.bias"]
    assert in_few_words(names) == "blocks.{0..2,5}.ls1.gamma, head.bias, blocks.3.norm1.bias"
