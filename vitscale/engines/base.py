"""What the training loop knows of an engine, and what a checkpoint knows of its state.

An engine holds a model, its optimizer and, if asked, its moving average, laid out over the ranks in its own way.
Whatever the way, each rank owns contiguous flat ranges of named float32 tensors; `Fragment` is one such range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor, nn

from vitscale.data.batch import Batch

Kind: TypeAlias = Literal["param", "exp_avg", "exp_avg_sq", "momentum_buffer", "ema"]

Objective: TypeAlias = Callable[[nn.Module, Batch], Tensor]
"""(model, micro-batch on the device) -> the SUM of the losses of the micro-batch's valid samples, a float32 scalar."""

Read: TypeAlias = Callable[[str, Kind, int, int], Tensor]
"""(name, kind, start, length) -> that flat float32 range of the saved tensor, on the host."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step says of itself, the same on every rank; tensors that stay on the device.

    Attributes:
        loss: Mean over the valid samples of the whole global batch, float32 scalar.
        grad_norm: Global L2 norm of the gradients before clipping, float32 scalar.
        skipped: Bool scalar; true when loss or gradients were not finite, so that nothing was changed.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


@dataclass(frozen=True)
class Fragment:
    """A contiguous flat range of one named tensor, owned by this rank.

    Attributes:
        name: The parameter's name in the plain model, without any wrapper's prefix.
        kind: Which tensor of that parameter: the float32 weight, a slot of the optimizer, the average.
        start: Offset of the first value in the flattened whole tensor.
        values: float32 `[length]`; may share memory with the engine.
        shape: Shape of the whole tensor.
    """

    name: str
    kind: Kind
    start: int
    values: Tensor
    shape: tuple[int, ...]


class Engine(Protocol):
    """All that the loop and the checkpoint know."""

    model: nn.Module
    """The model to call under `torch.no_grad` for evaluation; plain names, whatever wraps it for training."""

    def step(self, batch: Batch, *, rate: float) -> StepResult:
        """Micro-batches, backward, clipping, optimizer, average; `rate` is the learning rate of this step."""
        ...

    def fragments(self) -> Iterator[Fragment]:
        """What this rank owns; over all ranks every value of every tensor comes exactly once."""
        ...

    def load(self, read: Read) -> None:
        """Take weights, optimizer slots and average from `read`, each only in the ranges this rank needs."""
        ...

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """The model with the averaged weights (those trained, without an average); undone at exit, also on error."""
        ...

    def state(self) -> dict[str, float]:
        """Scalars that a checkpoint keeps beside the fragments: the optimizer's step count, updates of the average."""
        ...

    def load_state(self, state: dict[str, float]) -> None:
        """Take back what `state` gave."""
        ...
