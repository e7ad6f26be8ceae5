"""Where a run's weights come from.

One rule, here and nowhere else: this run's own newest checkpoint, else the newest of the run named in `init.resume`,
else the weights named in `init.weights`, else random. The first two bring optimizer, average and position along; they
must be of the same model, data order and optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitscale.config.load import config_to_dict
from vitscale.config.schema import RunConfig
from vitscale.data.names import match_classes
from vitscale.errors import UserError
from vitscale.train import checkpoint
from vitscale.train.checkpoint import Checkpoint
from vitscale.train.exchange import open_weights
from vitscale.weights.adapt import adapt
from vitscale.weights.content import Weights
from vitscale.world import World

log = logging.getLogger(__name__)

_SAME = ("seed", "global_batch", "model", "data.streams", "data.shuffle_window", "optim.kind")
"""Keys and sections that must not change between a checkpoint and the run that goes on from it."""

_FREE = {
    "model.name",
    "model.activation_checkpointing",
    "model.attention_dropout",
    "model.drop_path",
    "model.drop_path_schedule",
    "model.dropout",
    "model.frozen_stages",
    "model.patch_dropout",
}
"""Keys of those sections that may: the weights mean the same with any value."""

_TOLD = ("duration", "schedule", "optim", "loss", "data.crop", "data.crop_area", "data.crop_ratio", "data.flip",
         "model.attention_dropout", "model.drop_path", "model.dropout", "model.patch_dropout")  # fmt: skip
"""Keys and sections whose change is allowed but said, since it moves the curves."""


@dataclass(frozen=True)
class Start:
    """What a run begins from; both None for random weights.

    Attributes:
        checkpoint: A whole training state to go on from.
        weights: A model alone, as a start for fine-tuning.
        words: The same in words, for the log.
    """

    checkpoint: Checkpoint | None
    weights: Weights | None
    words: str

    @property
    def step(self) -> int:
        """Steps already done."""
        return int(self.checkpoint.state["step"]) if self.checkpoint else 0

    @property
    def totals(self) -> dict[str, float]:
        """What the run's counters stand at."""
        return dict(self.checkpoint.state["totals"]) if self.checkpoint else {}

    def fill(self, model: nn.Module, config: RunConfig, *, classes: Sequence[str]) -> None:
        """Put `weights`, if there are any, into a bare model of `config`, adapted to its image size and classes.

        Args:
            model: To be filled.
            config: Of the run.
            classes: Names of the classes of the training set.
        """
        if self.weights is None:
            return
        state, report = adapt(
            self.weights.state,
            self.weights.config,
            config.model,
            head=config.init.head,
            classes=self._class_map(config, classes) if config.init.head == "map" else None,
            patch_resize=config.init.patch_resize,
        )
        model.load_state_dict(state)
        log.info("%s: %s", config.init.weights, report)

    def _class_map(self, config: RunConfig, classes: Sequence[str]) -> tuple[int | None, ...]:
        """The class of the weights that each output of the model is; None for outputs that no class has."""
        assert self.weights is not None
        try:
            found = match_classes(self.weights.class_names or (), classes)
        except UserError as error:
            raise UserError(f"init.head: map: {error.message}") from None
        return (*found, *[None] * (config.model.num_classes - len(found)))


def find_start(config: RunConfig, *, data_digest: str, world: World) -> Start:
    """Apply the rule.

    Raises:
        UserError: The checkpoint is of another model, seed, batch or data; or a named source cannot be read.
    """
    own = checkpoint.latest(config.run_dir, world)
    if own is not None:
        return _resume(own, config, data_digest, words=f"step {{step}} of this run ({own})")
    if config.init.resume:
        other = checkpoint.latest(config.init.resume, world)
        if other is None:
            raise UserError(f"init.resume: {config.init.resume} holds no checkpoint; name a run that has one")
        return _resume(other, config, data_digest, words=f"step {{step}} of another run ({other})")
    if config.init.weights:
        weights = open_weights(config.init.weights)
        return Start(checkpoint=None, weights=weights, words=f"weights of {config.init.weights} ({weights.source})")
    return Start(checkpoint=None, weights=None, words=f"random weights, seed {config.seed}")


def _resume(path: Path, config: RunConfig, data_digest: str, *, words: str) -> Start:
    saved = checkpoint.read(path)
    now, then = config_to_dict(config), saved.state["config"]
    changed = [
        f"{key}: {_get(then, key)} there, {_get(now, key)} here"
        for key in _differences(_SAME, now, then)
        if key not in _FREE
    ]
    if saved.state["data_digest"] != data_digest:
        shards = f"data.train: shards {saved.state['data_digest']} there, {data_digest} here"
        if config.data.allow_changed_index:
            log.warning("%s; from step %d on the order is that of the new set", shards, saved.state["step"])
        else:
            changed.append(f"{shards} (data.allow_changed_index: true goes on with these)")
    if changed:
        raise UserError(
            f"{path} cannot be resumed by this config:\n  " + "\n  ".join(changed) + "\n"
            "Set them back, or give the changed run a run_dir of its own (and init.weights to begin from this one)."
        )
    for key in _differences(_TOLD, now, then):
        log.warning("changed since the checkpoint: %s was %s, now %s", key, _get(then, key), _get(now, key))
    return Start(checkpoint=saved, weights=None, words=words.format(step=saved.state["step"]))


def _differences(keys: tuple[str, ...], now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """The keys, and those in the sections, whose values differ."""
    found: list[str] = []
    for key in keys:
        old, new = _get(then, key), _get(now, key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(tuple(f"{key}.{name}" for name in {**new, **old}), now, then)
        elif old != new:
            found.append(key)
    return found


def _get(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
