from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vitscale.world import World


@pytest.fixture
def world() -> Iterator[World]:
    """A world of one rank."""
    world = World.start(timeout=30, device=torch.device("cpu"))
    yield world
    world.end()
