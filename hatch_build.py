"""Compiles `vitscale/data/jpeg_crop.c` while a wheel is built, where a C compiler and libjpeg-turbo are.

Without them the wheel holds Python alone, and simplejpeg decodes all images. `VITSCALE_NATIVE=1` makes that an error,
`VITSCALE_NATIVE=0` does not try. The library uses nothing of CPython, so one wheel serves every version of it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "vitscale/data/jpeg_crop.c"
LIBRARY = "vitscale/data/_jpeg_crop.so"


class JpegCrop(BuildHookInterface):  # type: ignore[misc]
    """Adds the library to wheels; an editable install finds it beside the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag."""
        wish = os.environ.get("VITSCALE_NATIVE", "")
        if self.target_name != "wheel" or wish == "0":
            return
        problem = compile_library(Path(self.root))
        if problem and wish == "1":
            raise RuntimeError(f"VITSCALE_NATIVE=1, and {SOURCE} cannot be compiled: {problem}")
        if problem:
            self.app.display_warning(f"vitscale is built without its JPEG decoder ({problem}); simplejpeg does it")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        build_data["artifacts"].append(LIBRARY)


def compile_library(root: Path) -> str:
    """Compile the library in its place; why that cannot be, in a line, or nothing."""
    library = root / LIBRARY
    library.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), "-O3", "-shared", "-fPIC"]
    command = [
        *compiler,
        *flags,
        str(root / SOURCE),
        "-o",
        str(library),
        *shlex.split(os.environ.get("LDFLAGS", "")),
        "-ljpeg",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
