"""Training driven by torch: one process alone, or DistributedDataParallel over several.

Every rank holds all weights, moments and averages, in float32; forward and backward run under autocast for bfloat16.
Nothing here waits for the device: whether a step is applied is decided by the fused optimizer, on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitscale.config.schema import EngineConfig, OptimConfig
from vitscale.data.batch import Batch
from vitscale.engines import layout
from vitscale.engines.average import MovingAverage
from vitscale.engines.base import Fragment, Kind, Objective, Read, StepResult
from vitscale.engines.normalize import telling, total, valid_samples
from vitscale.optim.groups import param_groups
from vitscale.optim.optimizers import build_optimizer, init_state, set_rate, set_step_count, slots
from vitscale.world import World


class NativeEngine:
    """`Engine` over torch's own data parallelism.

    Args:
        model: The bare model, on the device.
        objective: See `base.Objective`.
        optim: The optimizer, clipping and average.
        engine: The precision.
        world: The ranks.
        micro_batch: Samples a rank takes through the model at once; divides its share of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        optim: OptimConfig,
        engine: EngineConfig,
        world: World,
        micro_batch: int,
    ) -> None:
        self.model = model
        self._objective = objective
        self._optim = optim
        self._world = world
        self._micro_batch = micro_batch
        self._bfloat16 = engine.precision == "bfloat16"
        self._wrapped = _wrap(model, world)
        self._optimizer = build_optimizer(param_groups(model, optim), optim, world.device)
        init_state(self._optimizer, optim)
        self._parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._average = MovingAverage(self._parameters, optim.ema_decay) if optim.ema_decay is not None else None
        self._updates = torch.zeros((), dtype=torch.int64, device=world.device)

    def step(self, batch: Batch, *, rate: float) -> StepResult:
        self.model.train()
        set_rate(self._optimizer, rate)
        batch = batch.to(self._world.device)
        with self._world.waiting("a training step"):
            loss = self._gradients(batch)
            norm = clip(self._parameters, self._optim.clip_norm)
            finite = norm.isfinite()
            step_if(finite, self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        self._updates += finite
        if self._average is not None:
            self._average.update(finite)
        return StepResult(loss, norm, ~finite)

    def _gradients(self, batch: Batch) -> Tensor:
        """Fill the gradients of all micro-batches on all ranks; the loss of the step."""
        count = valid_samples(batch, self._world)
        # DistributedDataParallel divides by the number of ranks
        scale = self._world.world_size / count
        loss = torch.zeros((), device=self._world.device)
        micros = batch.split(self._micro_batch)
        for number, micro in enumerate(micros, start=1):
            with self._without_reduction(number < len(micros)):
                with torch.autocast(self._world.device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
                    micro_loss = self._objective(self._wrapped, micro)
                (telling(micro_loss) * scale).backward()  # type: ignore[no-untyped-call]
            loss += micro_loss.detach()
        return total(loss / count, self._world)

    def _without_reduction(self, more: bool) -> contextlib.AbstractContextManager[None]:
        if more and isinstance(self._wrapped, DistributedDataParallel):
            return self._wrapped.no_sync()
        return contextlib.nullcontext()

    def fragments(self) -> Iterator[Fragment]:
        pieces = whole_pieces(self.model, self._optimizer, self._average, slots(self._optim))
        return layout.fragments(layout.deal(pieces, rank=self._world.rank, world_size=self._world.world_size))

    def load(self, read: Read) -> None:
        layout.load(whole_pieces(self.model, self._optimizer, self._average, slots(self._optim)), read)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        if self._average is None:
            yield self.model
            return
        self._average.swap()
        try:
            yield self.model
        finally:
            self._average.swap()

    def state(self) -> dict[str, float]:
        return {"updates": float(self._updates)}

    def load_state(self, state: dict[str, float]) -> None:
        self._updates.fill_(int(state["updates"]))
        set_step_count(self._optimizer, state["updates"])


def clip(parameters: list[nn.Parameter], limit: float | None) -> Tensor:
    """Scale the gradients down to the global L2 norm `limit`; the norm that they had, a float32 scalar."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step where `finite`, a bool scalar on the device, is true; else the fused kernel leaves everything as it is."""
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
    optimizer.step()


def whole_pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: MovingAverage | None, kinds: tuple[Kind, ...]
) -> list[layout.Piece]:
    """Every parameter as one piece, where each rank holds all of them whole."""
    assert average is None or not average.swapped, "the weights are averages now; leave `averaged` first"
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pieces = []
    for number, parameter in enumerate(parameters):
        tensors: dict[Kind, Tensor] = {"param": parameter.detach().view(-1)}
        tensors |= {kind: optimizer.state[parameter][kind].view(-1) for kind in kinds}
        if average is not None:
            tensors["ema"] = average.values[number].view(-1)
        pieces.append(layout.Piece(names[parameter], tuple(parameter.shape), 0, tensors))
    return pieces


def _wrap(model: nn.Module, world: World) -> nn.Module:
    if world.world_size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
