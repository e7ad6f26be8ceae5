"""Step -> learning rate, and is it time: pure functions."""

from __future__ import annotations

import math
from typing import Literal


def rate(step: int, *, total: int, warmup: int, kind: Literal["cosine", "linear", "constant"], final: float) -> float:
    """The learning rate of a step, as a factor of the peak.

    With t = (step - warmup) / (total - warmup):

        step < warmup:  (step + 1) / warmup          the first step has 1 / warmup, the last of warm-up has 1
        cosine:         final + (1 - final) * (1 + cos(pi * t)) / 2
        linear:         1 - (1 - final) * t
        constant:       1

    so that the decay starts at 1 and would be at `final` in the step after the last. Beyond `total` it stays there.

    Args:
        step: Number of the step, counted from 0.
        total: Steps of the whole run.
        warmup: Steps of the linear rise; 0 for none.
        kind: Shape of the decay.
        final: The factor that the decay ends at.
    """
    if step < warmup:
        return (step + 1) / warmup
    t = min((step - warmup) / max(total - warmup, 1), 1.0)
    if kind == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * t)) / 2
    if kind == "linear":
        return 1 - (1 - final) * t
    return 1.0


def is_time(step: int, *, every: int, total: int) -> bool:
    """Whether something that happens every `every` steps, and at the end, happens now.

    Once `every` steps, but not within a quarter of that distance before the end, where the end's own turn comes
    (big_vision's `itstime`).

    Args:
        step: Steps done so far, counted from 1.
        every: Distance in steps.
        total: Steps of the whole run; always a turn.
    """
    if step == total:
        return True
    return step % every == 0 and not 0 < total - step < every / 4
