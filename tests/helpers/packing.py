"""A source of any kind into shards, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitscale.data.pack import PackReport, pack_source
from vitscale.data.sources import scan_source


def pack_folder(source: str, out: str, *, classes: Sequence[str] | None = None, **options: Any) -> PackReport:
    """What `vitscale data pack` does."""
    report = pack_source(scan_source(source, out, classes), out, **options)
    assert report is not None
    return report
