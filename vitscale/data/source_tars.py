"""Sources that are tars: class tars as ImageNet ships them, and other WebDatasets. Nothing is unpacked to a disk.

    n01440764.tar, n01443537.tar, ...    a tar of images for each class, in a folder
    ILSVRC2012_img_train.tar             one tar of such tars
    a folder with index.json, tars       a WebDataset, to be shuffled and cut anew

One pass over the headers says where each image lies; its bytes are read when its shard is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from vitscale.data.find import INDEX, find_shards, is_folder, merge_classes, tars_in
from vitscale.data.names import find_classes
from vitscale.data.sample import LABEL_FIELDS, BadSample, image_field, label_of
from vitscale.data.scan import spans_of
from vitscale.data.shards import map_shard
from vitscale.data.source import Source, as_source
from vitscale.data.tar import Buffer, Member, TarFault, archive_members, members, split_name
from vitscale.errors import UserError, did_you_mean

Extra = tuple[str, int, int]
"""A further member of a sample: its extension, and where its content lies in the tar."""


def is_class_tars(path: str) -> bool:
    """Whether `path` is a folder of tars without an index, whose members have no labels; or a tar of tars."""
    if os.path.isfile(path):
        return path.endswith(".tar")
    if not os.path.isdir(path) or os.path.exists(os.path.join(path, INDEX)):
        return False
    return bool(tars_in(path))


def scan_class_tars(path: str, classes: Sequence[str] | None) -> Source:
    """Every image of a folder of class tars, or of a tar of them.

    Raises:
        UserError: No such tars, a damaged one, one that is a WebDataset, or a class that is not in the list.
    """
    tars = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in tars_in(path)]
    found: dict[str, list[tuple[str, str, int, int]]] = {}
    for tar in tars:
        try:
            with map_shard(tar) as buffer:
                for name, member in _class_members(tar, buffer, nested=os.path.isfile(path)):
                    found.setdefault(name, []).append((tar, os.path.basename(member.name), member.data, member.size))
        except (TarFault, OSError) as error:
            raise UserError(f"{tar} cannot be read: {error}") from None
    listed = tuple(classes) if classes is not None else tuple(sorted(found))
    label_of_class = {name: label for label, name in enumerate(listed)}
    for name in found:
        if name not in label_of_class:
            raise UserError(f"class tar {name}.tar of {path} is not in the list of {len(listed)} classes"
                            f"{did_you_mean(name, listed)}")  # fmt: skip
    rows = [(label_of_class[name], *row) for name in sorted(found) for row in found[name]]
    if not rows:
        raise UserError(f"no images in {path}: its {len(tars)} tars hold no files")
    return as_source(
        path,
        listed,
        paths=[row[1] for row in rows],
        labels=[row[0] for row in rows],
        sizes=[row[4] for row in rows],
        names=[row[2] for row in rows],
        offsets=[row[3] for row in rows],
    )


def scan_webdataset(spec: str, classes: Sequence[str] | None) -> Source:
    """Every sample of shards that have an index, with all its members.

    Raises:
        UserError: No shards, no index, a damaged shard, a sample without image or label, or classes that the list does
            not have.
    """
    entries = find_shards(spec)
    own = merge_classes(entries)
    places = _relabel(own, classes)
    listed = tuple(classes) if classes is not None else own
    paths: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    names: list[str] = []
    offsets: list[int] = []
    extras: list[tuple[Extra, ...]] = []
    for entry in entries:
        try:
            with map_shard(entry.path) as buffer:
                for span in spans_of(buffer):
                    fields = {
                        field: buffer[at : at + size] if field in LABEL_FIELDS else b""
                        for field, (at, size) in span.fields.items()
                    }
                    try:
                        label = label_of(fields, len(own))
                        image = image_field(fields)
                    except BadSample as bad:
                        raise UserError(
                            f"{entry.path}: {span.key}: {bad}; leave it out of the source, or mend it"
                        ) from None
                    at, size = span.fields[image]
                    paths.append(entry.path)
                    labels.append(label if places is None else places[label])
                    sizes.append(size)
                    names.append(os.path.basename(span.key))
                    offsets.append(at)
                    kept = sorted((f, *where) for f, where in span.fields.items() if f not in (image, "cls"))
                    extras.append(tuple(kept))
        except (TarFault, OSError) as error:
            raise UserError(f"{entry.path} cannot be read: {error}; run `vitscale data verify`") from None
    if not listed:
        listed = tuple(str(label) for label in range(max(labels, default=-1) + 1))
    return as_source(spec, listed, paths, labels, sizes, names=names, offsets=offsets, extras=extras)


def is_webdataset(source: str) -> bool:
    """Whether a source is one with an index: a folder that has one, or tars by range, glob or list."""
    if source.startswith("@") or any(sign in source for sign in "{*["):
        return True
    return is_folder(source) and os.path.exists(os.path.join(source, INDEX))


def _class_members(tar: str, buffer: Buffer, *, nested: bool) -> Iterator[tuple[str, Member]]:
    """(class, image) of each file in a class tar, or in the class tars in a tar."""
    for member in archive_members(buffer):
        base = os.path.basename(member.name)
        if not member.regular or base.startswith("."):
            continue
        if nested:
            if not base.endswith(".tar"):
                raise UserError(f"{tar} holds {member.name}; wanted is a tar of class tars, or a folder of them")
            inner = members(buffer, member.data, member.data + member.size)
            yield from ((base.removesuffix(".tar"), image) for image in inner if image.regular)
            continue
        parts = split_name(member.name)
        if parts and parts[1] in LABEL_FIELDS:
            raise UserError(
                f"{tar} holds labels ({member.name}), as a WebDataset does; run `vitscale data index` on it"
            )
        yield os.path.basename(tar).removesuffix(".tar"), member


def _relabel(own: tuple[str, ...], classes: Sequence[str] | None) -> list[int] | None:
    """For each class of the source its label in the list; None where labels stay as they are."""
    if classes is None or tuple(classes) == own:
        return None
    if not own:
        raise UserError("the source does not say what its classes are called; index it with `--classes` first")
    found = find_classes(list(classes), own, whose="the class list")
    unknown = [name for name, place in zip(own, found, strict=True) if place is None]
    if unknown:
        raise UserError(f"classes of the source that are not in the list: {', '.join(unknown[:3])}")
    return [place for place in found if place is not None]
