"""What tensors are called: without the names that wrappers add, and many of them in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from vitscale.errors import UserError

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path parts added by DataParallel, DDP and DeepSpeed; torch.compile; FSDP; activation checkpointing."""

_AVERAGES = frozenset({"ema", "ema_model", "model_ema"})
"""First parts of the names of averaged weights that a trainer keeps beside the others."""

_COUNTERS = frozenset({"n_averaged", "num_updates", "steps"})
"""What averaging wrappers count in a tensor of their own."""

_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")


def plain_name(name: str) -> str:
    """`name` without what wrappers add, wherever they stand, and without a leading `model.` of a trainer's class."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "model":
        parts = parts[1:]
    return ".".join(parts)


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` under plain names; where it holds averaged weights beside others, the averaged ones alone.

    Raises:
        UserError: Two tensors have the same plain name.
    """
    averaged = {short: name for name in state if (short := _averaged_name(name))}
    names = averaged or {name: name for name in state}
    plain: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for inner, name in names.items():
        tensor, short = state[name], plain_name(inner)
        if short in _COUNTERS and tensor.ndim == 0:
            continue
        if short in plain:
            raise UserError(f"{origin[short]!r} and {name!r} both are {short!r} once the wrappers' names are taken off")
        plain[short], origin[short] = tensor, name
    return plain


def _averaged_name(name: str) -> str:
    """`name` without the part that says that it is an average, and empty where it does not say so."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:]) if parts[0] in _AVERAGES else ""


def in_few_words(names: Iterable[str]) -> str:
    """Every name, those that differ in the number of the block only as one: `blocks.{0..11}.ls1.gamma`."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = _BLOCK.search(name)
        pattern = _BLOCK.sub("{}", name, count=1) if found else name
        numbers.setdefault(pattern, []).extend([int(found[0])] if found else [])
    return ", ".join(
        pattern.replace("{}", _ranges(sorted(found)), 1) if found else pattern for pattern, found in numbers.items()
    )


def _ranges(numbers: list[int]) -> str:
    """`3`, `{0..11}`, `{0,2..4}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
