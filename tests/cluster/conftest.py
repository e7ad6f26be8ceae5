from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.runs import end_started


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    yield
    end_started()
