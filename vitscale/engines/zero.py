"""Training driven by DeepSpeed: ZeRO 0, 1 and 2 with torch's optimizer, micro-batches and the loss ours.

    stage 0   nothing sharded: DeepSpeed adds up the gradients, the rest is as in `native`
    stage 1   moments, float32 weights and average sharded: each rank owns a range of every flattened group
    stage 2   gradients too

In bfloat16, stages 1 and 2 hold bfloat16 weights for forward and backward and step float32 ones; gradients are
accumulated and reduced in float32. Stage 0 runs under autocast over float32 weights.

What is used of DeepSpeed's insides is named in `_flat_range` and `_refresh`; the engine tests fail if it moves. Other
facts of DeepSpeed 0.19.8 that this file answers: it learns of the CPU by an environment variable at import; it wants
LOCAL_RANK; it prints and logs to stdout; on the CPU it compiles a C++ extension for inference at the first start
unless told that it cannot; its throughput timer waits for the device at every step; from bfloat16 weights it makes
float32 ones of the rounded values; a step whose gradient norm is not finite it leaves out and says so by
`was_step_applied` alone, and at stage 0 it does not look.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitscale.config.schema import EngineConfig, OptimConfig
from vitscale.data.batch import Batch
from vitscale.engines import layout
from vitscale.engines.average import MovingAverage
from vitscale.engines.base import Fragment, Kind, Objective, Read, StepResult
from vitscale.engines.native import clip, step_if, whole_pieces
from vitscale.engines.normalize import telling, total, valid_samples
from vitscale.optim.groups import param_groups
from vitscale.optim.optimizers import build_optimizer, init_state, set_rate, set_step_count, slots
from vitscale.world import World

_LARGEST_BUCKET = 2**26  # elements of gradient reduced at once: 256 MiB in float32


class ZeroEngine:
    """`Engine` over DeepSpeed.

    Args:
        model: The bare model, on the device.
        objective: See `base.Objective`.
        optim: The optimizer, clipping and average.
        engine: Stage and precision.
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
        self._sharded = engine.zero_stage > 0
        self._autocast = engine.precision == "bfloat16" and not self._sharded
        rounds = self._sharded and engine.precision == "bfloat16"
        exact = _exact_weights(model, world) if rounds else {}
        self._optimizer = build_optimizer(param_groups(model, optim), optim, world.device)
        self._deepspeed = _initialize(model, self._optimizer, optim=optim, engine=engine, world=world)
        init_state(self._optimizer, optim)
        if rounds:
            model.register_forward_pre_hook(_cast_inputs)
            self._take_exact(exact)
        self._stepped = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._average = MovingAverage(self._stepped, optim.ema_decay) if optim.ema_decay is not None else None
        self._updates = torch.zeros((), dtype=torch.int64, device=world.device)

    def step(self, batch: Batch, *, rate: float) -> StepResult:
        self.model.train()
        set_rate(self._optimizer, rate)
        batch = batch.to(self._world.device)
        with self._world.waiting("a training step"):
            loss = self._gradients(batch)
            norm, applied = self._apply() if self._sharded else self._apply_replicated()
        self._updates += applied
        if self._average is not None:
            self._average.update(applied)
        return StepResult(loss, norm, ~applied)

    def _gradients(self, batch: Batch) -> Tensor:
        """Let DeepSpeed gather the gradients of all micro-batches on all ranks; the loss of the step."""
        count = valid_samples(batch, self._world)
        # DeepSpeed divides by the number of ranks; that it also would by that of micro-batches is turned off below
        scale = self._world.world_size / count
        loss = torch.zeros((), device=self._world.device)
        micros = batch.split(self._micro_batch)
        # DeepSpeed's forward turns a surrounding autocast off, and does nothing else that stage 0 needs
        model = self._deepspeed if self._sharded else self.model
        for number, micro in enumerate(micros, start=1):
            self._deepspeed.set_gradient_accumulation_boundary(number == len(micros))
            with torch.autocast(self._world.device.type, dtype=torch.bfloat16, enabled=self._autocast):
                micro_loss = self._objective(model, micro)
            self._deepspeed.backward(telling(micro_loss) * scale, scale_wrt_gas=False)
            loss += micro_loss.detach()
        return total(loss / count, self._world)

    def _apply(self) -> tuple[Tensor, Tensor]:
        """Clip and step inside DeepSpeed; the norm, and whether the step was applied. Waits for the device."""
        self._deepspeed.step()
        norm = torch.as_tensor(self._deepspeed.get_global_grad_norm(), dtype=torch.float32, device=self._world.device)
        return norm.detach(), torch.tensor(self._deepspeed.was_step_applied(), device=self._world.device)

    def _apply_replicated(self) -> tuple[Tensor, Tensor]:
        norm = clip(self._stepped, self._optim.clip_norm)
        finite = norm.isfinite()
        step_if(finite, self._optimizer)
        self._deepspeed.zero_grad()
        return norm, finite

    def fragments(self) -> Iterator[Fragment]:
        pieces = self._pieces()
        if not self._sharded:
            pieces = layout.deal(pieces, rank=self._world.rank, world_size=self._world.world_size)
        return layout.fragments(pieces)

    def load(self, read: Read) -> None:
        layout.load(self._pieces(), read)
        self._refresh()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        if self._average is None:
            yield self.model
            return
        self._average.swap()
        self._refresh()
        try:
            yield self.model
        finally:
            self._average.swap()
            self._refresh()

    def state(self) -> dict[str, float]:
        return {"updates": float(self._updates)}

    def load_state(self, state: dict[str, float]) -> None:
        self._updates.fill_(int(state["updates"]))
        set_step_count(self._optimizer, state["updates"])

    def _pieces(self) -> list[layout.Piece]:
        kinds = slots(self._optim)
        if not self._sharded:
            return whole_pieces(self.model, self._optimizer, self._average, kinds)
        assert self._average is None or not self._average.swapped, "the weights are averages now; leave `averaged`"
        pieces = []
        for name, parameter in self.model.named_parameters():
            found = _flat_range(parameter)
            if found is None:
                continue
            group, start, length, flat_start = found
            flat = self._stepped[group]
            whole: dict[Kind, Tensor] = {"param": flat.detach()}
            whole |= {kind: self._optimizer.state[flat][kind] for kind in kinds}
            if self._average is not None:
                whole["ema"] = self._average.values[group]
            tensors = {kind: tensor.narrow(0, flat_start, length) for kind, tensor in whole.items()}
            pieces.append(layout.Piece(name, tuple(parameter.shape), start, tensors))
        return pieces

    def _take_exact(self, exact: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            found = _flat_range(parameter)
            if found is not None:
                group, start, length, flat_start = found
                flat: Tensor = self._optimizer.param_groups[group]["params"][0]
                flat.detach().narrow(0, flat_start, length).copy_(exact[name].view(-1).narrow(0, start, length))

    def _refresh(self) -> None:
        """Make the model's weights on all ranks what the owners' float32 weights say; a collective."""
        if self._sharded:
            with self._world.waiting("gathering the weights"):
                self._deepspeed.optimizer.update_lp_params()


def _flat_range(parameter: nn.Parameter) -> tuple[int, int, int, int] | None:
    """Which part of a parameter this rank owns under ZeRO 1 and 2, and where it lies; None: no part.

    Returns:
        Parameter group, start in the flattened parameter, length, start in this rank's flat tensor of the group.
    """
    mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    address = mapping.lp_fragment_address
    return mapping.param_group_index, address.start, address.numel, mapping.hp_fragment_address.start


def _exact_weights(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Rank 0's weights on every rank, copied before DeepSpeed rounds them."""
    if world.world_size > 1:
        with world.waiting("sharing the initial weights"):
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), 0)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _cast_inputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)


def _initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, optim: OptimConfig, engine: EngineConfig, world: World
) -> Any:
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # torch 2.14 renames what DeepSpeed 0.19.8 calls at every step
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        for handler in deepspeed.utils.logger.handlers:
            handler.setStream(sys.stderr)
        if world.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = deepspeed_config(model, optim=optim, engine=engine)
        deepspeed_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return deepspeed_engine


def deepspeed_config(model: nn.Module, *, optim: OptimConfig, engine: EngineConfig) -> dict[str, Any]:
    """What DeepSpeed is told. Batch sizes are nominal: the boundaries of a step are set by hand."""
    sharded = engine.zero_stage > 0
    numel = sum(parameter.numel() for parameter in model.parameters())
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": engine.zero_stage,
            "reduce_bucket_size": min(numel, _LARGEST_BUCKET),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": (optim.clip_norm or 0.0) if sharded else 0.0,
        "bf16": {"enabled": sharded and engine.precision == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "wall_clock_breakdown": False,
    }
