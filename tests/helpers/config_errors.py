"""What loading a config complains about."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitscale.config.load import load_config
from vitscale.errors import EXIT_USAGE, UserError


def problems(path: str | Path, *overrides: str) -> list[str]:
    """The lines of the message that loading ends with."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value.message.split("\n")
