"""The weights of one model for another: at another resolution or patch size, with other classes. Pure functions.

What fits is taken as it is, learned positions are resized to the new grid and patch kernels to the new patches, the
classifier is kept, picked class by class, or begun anew at zero. Anything else that differs is refused, with the name
of every tensor: nothing is left at random in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.models.patch import resize_patch_kernel
from vitscale.models.position import grid_height_width, has_class_token, num_prefix_positions, resize_grid
from vitscale.models.vit import VisionTransformer
from vitscale.weights.names import in_few_words

Head: TypeAlias = Literal["keep", "zero", "map"]
PatchResize: TypeAlias = Literal["pseudo_inverse", "bilinear"]

_HEAD = ("head.weight", "head.bias")
_KERNEL = "patch_embed.proj.weight"
_SHAPES = frozenset(
    ("in_channels", "patch_size", "embed_dim", "depth", "mlp_dim", "num_fcs", "representation_size", "num_registers")
)
"""Fields that the tensors' shapes tell, so that a difference is named with the tensors."""
FREE = frozenset(
    ("name", "image_size", "dynamic_image_size", "num_classes", "pos_embed_resize", "layer_scale", "patch_sizes")
) | frozenset(
    ("patch_dropout", "dropout", "attention_dropout", "drop_path", "drop_path_schedule", "frozen_stages",
     "activation_checkpointing")
)  # fmt: skip
"""Fields that may differ: what this function adapts, and what training alone knows of."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of each tensor.

    Attributes:
        matched: Taken as they were.
        resized: Interpolated.
        mapped: Put together of the rows of known classes.
        new_classes: How many rows of those are zero, their class being unknown to the source.
        reinitialised: Begun anew at zero.
        missing: Those of `reinitialised` that the source did not have at all.
        unexpected: Tensors of the source that the target has no place for; left out.
    """

    matched: tuple[str, ...]
    resized: tuple[str, ...]
    mapped: tuple[str, ...]
    new_classes: int
    reinitialised: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        """One line for a log."""
        parts = [f"{len(self.matched)} tensors as they were"]
        parts += [f"{in_few_words(names)} {what}" for names, what in self._others() if names]
        return ", ".join(parts)

    def _others(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        by_class = f"by class, {self.new_classes} of them unknown and zero" if self.new_classes else "by class"
        return (
            (self.resized, "resized"),
            (self.mapped, by_class),
            (self.reinitialised, "anew at zero"),
            (self.unexpected, "left out"),
        )


class Adapted(NamedTuple):
    """Tensors that fit the target, and what became of each."""

    state: dict[str, Tensor]
    report: LoadReport


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model, in its own order; allocates nothing."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def adapt(
    state: Mapping[str, Tensor],
    source: ModelConfig,
    target: ModelConfig,
    *,
    head: Head,
    classes: Sequence[int | None] | None = None,
    patch_resize: PatchResize = "pseudo_inverse",
) -> Adapted:
    """Make the weights of a model `source` fit a model `target`; dtypes and devices stay as they are.

    Positions are resized in the way that `target.pos_embed_resize` names. Fixed and rotary positions are no tensors:
    the model computes them for its own grid.

    Args:
        state: The weights under vitscale's names.
        source: The model that `state` is of.
        target: The model wanted.
        head: `keep` the classifier, which needs the same classes; begin it anew at `zero`; or `map` it by `classes`.
        classes: With `map`, the class of the source that each class of the target is, None where there is none, whose
            row is zero then; see `match_classes`.
        patch_resize: How the kernel comes to another patch size: FlexiViT's pseudo-inverse (of bicubic resizing with
            antialiasing, timm's default), or resized itself like an image, bilinearly.

    Raises:
        UserError: The two differ in more than image size, patch size and classes, where every tensor that does not fit
            is named; or `target` cannot be built.
    """
    _same_computation(source, target)
    try:
        shapes = expected_shapes(target)
    except ValueError as error:
        raise UserError(f"the model wanted cannot be: {error}") from None
    adapted = dict(state)
    resized = _resize(adapted, source, target, patch_resize)
    fresh = [name for name in _HEAD if name in shapes and head == "zero"]
    mapped: list[str] = []
    if head != "zero" and target.num_classes:
        _has_head(state, source, head)
        if head == "map":
            assert classes is not None, "head: map needs to be told which class is which"
            mapped = [name for name in _HEAD if name in shapes]
            adapted |= {name: _rows(state[name], classes) for name in mapped}
        elif source.num_classes != target.num_classes:
            raise UserError(
                f"head: keep needs the same classes: the weights have {source.num_classes}, the model "
                f"{target.num_classes}; use head: zero to begin the classifier anew"
            )
    like = next(iter(state.values()))
    for name in fresh:
        adapted[name] = torch.zeros(shapes[name], dtype=like.dtype, device=like.device)
    left_out = tuple(name for name in _HEAD if name in state and name not in shapes)
    _fits({name: tensor for name, tensor in adapted.items() if name not in left_out}, shapes)
    return Adapted(
        state={name: adapted[name] for name in shapes},
        report=LoadReport(
            matched=tuple(name for name in shapes if name not in (*resized, *fresh, *mapped)),
            resized=tuple(resized),
            mapped=tuple(mapped),
            new_classes=list(classes or ()).count(None) if mapped else 0,
            reinitialised=tuple(fresh),
            missing=tuple(name for name in fresh if name not in state),
            unexpected=left_out,
        ),
    )


def _resize(adapted: dict[str, Tensor], source: ModelConfig, target: ModelConfig, method: PatchResize) -> list[str]:
    """Bring positions and patch kernel to the target's grid and patches, in place; the names of what changed."""
    resized = []
    if source.patch_size != target.patch_size and _KERNEL in adapted:
        kernel, size = adapted[_KERNEL], target.patch_size
        adapted[_KERNEL] = (
            resize_patch_kernel(kernel, size)
            if method == "pseudo_inverse"
            else resize_patch_kernel(kernel, size, method="interpolate", mode="bilinear")
        )
        resized.append(_KERNEL)
    old, new = grid_height_width(source), grid_height_width(target)
    if old != new and "pos_embed" in adapted:
        prefix = num_prefix_positions(source)
        adapted["pos_embed"] = resize_grid(
            adapted["pos_embed"], old=old, new=new, num_prefix=prefix, mode=target.pos_embed_resize
        )
        resized.append("pos_embed")
    return resized


def _rows(tensor: Tensor, classes: Sequence[int | None]) -> Tensor:
    """The rows of the classes asked for; zero for those that are not there."""
    index = torch.tensor([0 if place is None else place for place in classes], device=tensor.device)
    picked = tensor[index]
    picked[torch.tensor([place is None for place in classes], device=tensor.device)] = 0
    return picked


def misfits(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What keeps `state` from being a model with tensors of these `shapes`: each missing, unexpected, misshapen one."""
    problems = []
    missing = [name for name in shapes if name not in state]
    if missing:
        problems.append(f"missing: {in_few_words(missing)}")
    unexpected = [name for name in state if name not in shapes]
    if unexpected:
        problems.append(f"not in the model: {in_few_words(unexpected)}")
    misshapen: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        if name in state and tuple(state[name].shape) != shape:
            misshapen.setdefault((tuple(state[name].shape), shape), []).append(name)
    for (found, wanted), names in misshapen.items():
        problems.append(f"{in_few_words(names)}: {list(found)} in place of {list(wanted)}")
    return problems


def _fits(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    problems = misfits(state, shapes)
    if problems:
        raise UserError(
            f"the weights are of another model than the one wanted: {'; '.join(problems)}. "
            "Give the model section the dimensions of the weights; only image size, patch size and classes may differ."
        )


def _same_computation(source: ModelConfig, target: ModelConfig) -> None:
    """Refuse a target whose tensors may look the same but that computes something else with them."""
    names = [field.name for field in fields(ModelConfig) if field.name not in _SHAPES | FREE]
    if has_class_token(source) == has_class_token(target):
        names.remove("class_token")  # said or unsaid
    other = [
        f"{name}: {getattr(source, name)} (asked for: {getattr(target, name)})"
        for name in names
        if getattr(source, name) != getattr(target, name)
    ]
    if other:
        raise UserError(f"the weights need {', '.join(other)}; another value changes what the model computes")


def _has_head(state: Mapping[str, Tensor], source: ModelConfig, head: Head) -> None:
    if not source.num_classes or any(name not in state for name in _HEAD):
        raise UserError(f"head: {head} needs weights with a classifier, and these have none; use head: zero")
