from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

import vitscale


def test_importing_vitscale_or_its_config_loads_no_torch() -> None:
    code = "import sys, vitscale; vitscale.load_config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there_and_others_are_not() -> None:
    assert callable(vitscale.create_model)
    assert callable(vitscale.load_model)
    assert callable(vitscale.load_config)
    assert set(vitscale.__all__) <= set(dir(vitscale))
    with pytest.raises(AttributeError, match="'vitscale' has no attribute 'create_modle'"):
        vitscale.create_modle  # noqa: B018


def test_the_version_is_that_of_the_installed_package() -> None:
    try:
        installed = version("vitscale")
    except PackageNotFoundError:
        pytest.skip("vitscale is on the path, but not installed")
    assert vitscale.__version__ == installed
