"""big_vision's and vision_transformer's ViTs (`.npz`): arrays of JAX under names that are paths -> a vitscale model.

Read are class token, mean (`gap`) and attention pooling (`map`), with pre-logits or without; blocks one by one or
scanned into one array; positions as parameters of the model or, as in old files, of `Transformer/posembed_input`, with
a row for the class token or without; fixed positions where there are none. Both tools use GELU's tanh approximation
and a LayerNorm epsilon of 1e-6, and apply the last norm to all tokens. No files here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vitscale.config.schema import ModelConfig
from vitscale.errors import UserError
from vitscale.weights.content import Known, Preprocessing, Weights, describe, told_grid
from vitscale.weights.names import in_few_words
from vitscale.weights.table import Entry, Table, of_model, same, to_ours, to_theirs

_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/")
_SCANNED = "Transformer/encoderblock/"
_OPTIMIZER = ("opt/", "opt_state/", "step")
_NOTHING = Known()
_OLD = {
    "MultiHeadDotProductAttention_1/": "MultiHeadDotProductAttention_0/",
    "LayerNorm_2/": "LayerNorm_1/",
    "MlpBlock_3/": "MlpBlock_0/",
    "Transformer/posembed_input/pos_embedding": "pos_embedding",
}
"""Names of vision_transformer and of old files, and what big_vision calls the same."""

_PREPROCESSING = Preprocessing(
    mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), interpolation="bilinear", crop_pct=1.0, crop_mode="squash"
)
"""`value_range(-1, 1)` after a resize of the whole image, as in both tools' transfer and evaluation configs."""


def from_bigvision(arrays: Mapping[str, Tensor], known: Known = _NOTHING) -> Weights:
    """The model.

    Args:
        arrays: By their names in the file.
        known: What the user says of the model: its image size, where it is not square.

    Raises:
        UserError: These are not the arrays of such a ViT; each that is missing or too much is named.
    """
    tensors = _plain(arrays)
    if "embedding/kernel" not in tensors or not any(_BLOCK.match(name) for name in tensors):
        raise UserError(f"holds arrays such as {in_few_words(list(arrays)[:3])}, which is no ViT of big_vision")
    config, heads = _config(tensors, known)
    return Weights(
        state=to_ours(tensors, _table(config, heads), config),
        config=config,
        preprocessing=_PREPROCESSING,
        class_names=None,
        source=f"big_vision ViT, {describe(config)}, {_positions(config)}",
    )


def _positions(config: ModelConfig) -> str:
    return "with fixed positions" if config.pos_embed == "sincos" else "its grid of positions taken as square"


def to_bigvision(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The arrays under big_vision's names, blocks one by one."""
    return to_theirs(state, _table(config, config.num_heads))


def _plain(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's arrays under big_vision's present names, a block at a time."""
    plain: dict[str, Tensor] = {}
    for name, tensor in arrays.items():
        if name.startswith(_OPTIMIZER):
            continue
        short = name.removeprefix("params/").removeprefix("img/")
        if short.startswith(_SCANNED):
            for block, part in enumerate(tensor):
                plain[f"Transformer/encoderblock_{block}/{short.removeprefix(_SCANNED)}"] = part
            continue
        plain[short] = tensor
    old = any("MultiHeadDotProductAttention_1/" in name for name in plain)
    names = _OLD if old else {"Transformer/posembed_input/pos_embedding": "pos_embedding"}
    for before, now in names.items():
        plain = {name.replace(before, now): tensor for name, tensor in plain.items()}
    return plain


def _config(tensors: Mapping[str, Tensor], known: Known) -> tuple[ModelConfig, int]:
    """The model, and the number of heads of its attention."""
    patch, patch_width, in_channels, embed_dim = tensors["embedding/kernel"].shape
    if patch != patch_width:
        raise UserError(f"patches of {patch}x{patch_width} pixels; vitscale's are square")
    blocks = {int(found[1]) for name in tensors if (found := _BLOCK.match(name))}
    first = f"Transformer/encoderblock_{min(blocks)}/"
    needed = (
        f"{first}MultiHeadDotProductAttention_0/query/kernel",
        f"{first}MlpBlock_0/Dense_0/kernel",
    )
    absent = [name for name in needed if name not in tensors]
    if absent:
        raise UserError(f"a big_vision ViT without {', '.join(absent)}")
    heads = tensors[needed[0]].shape[1]
    has_class_token, mapped = "cls" in tensors, "MAPHead_0/probe" in tensors
    fixed = "pos_embedding" not in tensors
    size, prefix = (known.image_size or _usual_size(patch), "all") if fixed else _grid(tensors, patch, known)
    config = ModelConfig(
        image_size=size,
        in_channels=in_channels,
        patch_size=patch,
        embed_dim=embed_dim,
        depth=len(blocks),
        num_heads=heads,
        mlp_dim=tensors[needed[1]].shape[1],
        num_classes=tensors["head/kernel"].shape[1] if "head/kernel" in tensors else 0,
        representation_size=tensors["pre_logits/kernel"].shape[1] if "pre_logits/kernel" in tensors else None,
        pool="map" if mapped else "cls" if has_class_token else "gap",
        class_token=has_class_token,
        pos_embed="sincos" if fixed else "learned",
        pos_embed_prefix=prefix,  # type: ignore[arg-type]
        pos_embed_resize="corner_aligned",
        final_norm="tokens",
        activation="gelu_tanh",
        norm_eps=1e-6,
    )
    return config, heads


def _usual_size(patch: int) -> int:
    """224 pixels, or 14 patches: with fixed positions any other gives the same arrays."""
    return 224 if 224 % patch == 0 else 14 * patch


def _grid(tensors: Mapping[str, Tensor], patch: int, known: Known) -> tuple[int | tuple[int, int], str]:
    """Image size, and whether the class token has a row among the positions, `all`, or not, `none`."""
    count = tensors["pos_embedding"].shape[1]
    return told_grid(known, patch, {"none": count, "all": count - 1} if "cls" in tensors else {"none": count})


def _table(config: ModelConfig, heads: int) -> Table:
    table: dict[str, Entry] = {
        "patch_embed.proj.weight": _entry(
            "embedding/kernel", lambda w: w.permute(2, 3, 1, 0), lambda k: k.permute(3, 2, 0, 1)
        ),
        "patch_embed.proj.bias": same("embedding/bias"),
        "pos_embed": same("pos_embedding"),
        **_norm("norm", "Transformer/encoder_norm"),
        "cls_token": same("cls"),
        **_linear("pre_logits.fc", "pre_logits"),
        **_linear("head", "head"),
    }
    for block in range(config.depth):
        ours, theirs = f"blocks.{block}.", f"Transformer/encoderblock_{block}/"
        attention = f"{theirs}MultiHeadDotProductAttention_0/"
        table |= _norm(f"{ours}norm1", f"{theirs}LayerNorm_0") | _norm(f"{ours}norm2", f"{theirs}LayerNorm_1")
        table |= _heads(f"{ours}attn.qkv", [f"{attention}{part}" for part in ("query", "key", "value")], heads)
        table |= _out(f"{ours}attn.proj", f"{attention}out", heads) | _mlp(f"{ours}mlp", f"{theirs}MlpBlock_0")
    if config.pool == "map":
        attention = "MAPHead_0/MultiHeadDotProductAttention_0/"
        table["attn_pool.latent"] = same("MAPHead_0/probe")
        table |= _heads("attn_pool.q", [f"{attention}query"], heads)
        table |= _heads("attn_pool.kv", [f"{attention}key", f"{attention}value"], heads)
        table |= _out("attn_pool.proj", f"{attention}out", heads)
        table |= _norm("attn_pool.norm", "MAPHead_0/LayerNorm_0") | _mlp("attn_pool.mlp", "MAPHead_0/MlpBlock_0")
    return of_model(table, config, whose="big_vision's ViT")


def _entry(name: str, split: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor]) -> Entry:
    return Entry((name,), lambda ours: (split(ours),), lambda theirs: join(theirs[0]).contiguous())


def _linear(ours: str, theirs: str) -> dict[str, Entry]:
    """A Dense layer: its kernel is [in, out]."""
    kernel = _entry(f"{theirs}/kernel", lambda weight: weight.T, lambda kernel: kernel.T)
    return {f"{ours}.weight": kernel, f"{ours}.bias": same(f"{theirs}/bias")}


def _norm(ours: str, theirs: str) -> dict[str, Entry]:
    return {f"{ours}.weight": same(f"{theirs}/scale"), f"{ours}.bias": same(f"{theirs}/bias")}


def _mlp(ours: str, theirs: str) -> dict[str, Entry]:
    return _linear(f"{ours}.fc1", f"{theirs}/Dense_0") | _linear(f"{ours}.fc2", f"{theirs}/Dense_1")


def _heads(ours: str, theirs: list[str], heads: int) -> dict[str, Entry]:
    """Projections to heads, kernels [in, heads, head width], stacked into one weight."""
    kernels = Entry(
        tuple(f"{name}/kernel" for name in theirs),
        lambda weight: tuple(_split(part.T, 1, heads) for part in weight.chunk(len(theirs))),
        lambda parts: torch.cat([part.flatten(1).T for part in parts]),
    )
    biases = Entry(
        tuple(f"{name}/bias" for name in theirs),
        lambda bias: tuple(_split(part, 0, heads) for part in bias.chunk(len(theirs))),
        lambda parts: torch.cat([part.flatten() for part in parts]),
    )
    return {f"{ours}.weight": kernels, f"{ours}.bias": biases}


def _out(ours: str, theirs: str, heads: int) -> dict[str, Entry]:
    """The projection back, kernel [heads, head width, out]."""
    kernel = _entry(
        f"{theirs}/kernel", lambda weight: _split(weight.T, 0, heads), lambda kernel: kernel.flatten(0, 1).T
    )
    return {f"{ours}.weight": kernel, f"{ours}.bias": same(f"{theirs}/bias")}


def _split(tensor: Tensor, axis: int, heads: int) -> Tensor:
    """One axis as two: heads, and the width of a head."""
    shape = tensor.shape
    return tensor.reshape(*shape[:axis], heads, shape[axis] // heads, *shape[axis + 1 :])
