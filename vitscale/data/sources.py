"""Which kind of source a user names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vitscale.data.source import Source, scan_folder
from vitscale.data.source_parquet import is_parquet, scan_parquet
from vitscale.data.source_table import is_table, scan_table
from vitscale.data.source_tars import is_class_tars, is_webdataset, scan_class_tars, scan_webdataset
from vitscale.data.storage import is_remote
from vitscale.errors import UserError


def scan_source(source: str, out: str, classes: Sequence[str] | None = None) -> Source:
    """What is to be packed: class folders, a table, parquet files, class tars or shards.

    Args:
        source: Path, or a spec of shards.
        out: Where the shards will go, which must not be inside the source.
        classes: The class list, so that several sets share their labels; None takes what the source has, sorted.

    Raises:
        UserError: No such source, or one with something wrong.
    """
    if is_remote(source):
        raise UserError(f"{source}: pack reads from this machine's disks and mounts; copy or mount the source first")
    if is_table(source):
        return scan_table(source, classes)
    if os.path.realpath(out).startswith(os.path.join(os.path.realpath(source), "")):
        raise UserError(f"{out} lies inside the source {source}, where it would be a class; pack to another place")
    if is_parquet(source):
        return scan_parquet(source, classes)
    if is_webdataset(source):
        return scan_webdataset(source, classes)
    if is_class_tars(source):
        return scan_class_tars(source, classes)
    return scan_folder(source, classes)
