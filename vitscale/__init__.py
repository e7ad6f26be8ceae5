"""Pretrain Vision Transformers on image sets too large for one machine.

The public names are loaded when they are first used, so that `import vitscale` is quick and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitscale.config.load import load_config
    from vitscale.models.create import create_model
    from vitscale.weights.load import load_model

    __version__: str

__all__ = ["__version__", "create_model", "load_config", "load_model"]

_HOMES = {
    "create_model": "vitscale.models.create",
    "load_config": "vitscale.config.load",
    "load_model": "vitscale.weights.load",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("vitscale")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
