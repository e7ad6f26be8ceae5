"""What all tests share. The shapes in the annotations of tensors are checked while tests run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

_SHAPED = ("attention", "block", "layers", "outputs", "patch", "position", "rotary", "vit")
settings.register_profile("vitscale", deadline=None)  # how long an example takes decides nothing
settings.load_profile("vitscale")
install_import_hook([f"vitscale.models.{name}" for name in _SHAPED], "beartype.beartype")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real images and weights: `VITSCALE_TEST_DATA`, else a `shared/data` beside the checkout."""
    named = os.environ.get("VITSCALE_TEST_DATA")
    candidates = [Path(named)] if named else [folder / "shared" / "data" for folder in Path(__file__).parents]
    found = next((folder for folder in candidates if folder.is_dir()), None)
    if found is None:
        pytest.skip("real images and weights: set VITSCALE_TEST_DATA, or put them into shared/data beside the checkout")
    return found
