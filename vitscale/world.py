"""This process among the others: rank, device, the signal to stop, and waits that say who is missing.

`World.start` finds its place from what torchrun or `srun` put into the environment, or is a world of one. It opens
torch.distributed (gloo for host tensors, nccl beside it on GPUs) and a second gloo group, `control`, over which
ranks agree without touching the device. Every wait ends: after `timeout` seconds, or at once when a peer's connection
breaks, each rank posts that it still waits into the store and names those that did not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from vitscale.errors import EXIT_CRASHED, EXIT_USAGE, UserError

Reduction = Literal["sum", "max", "min"]

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_GRACE = 3.0  # seconds for the other ranks to notice that something is wrong and to say that they are alive
_CLOSED = ("connection closed", "connection reset", "connection refused", "broken pipe")
_LOST = (*_CLOSED, "timed out", "timeout", "socket", "gloo", "nccl", "process group", "wait for", "barrier")


@dataclass
class World:
    """One rank's view of all ranks.

    Attributes:
        rank: Place among all processes.
        local_rank: Place among the processes of this node.
        world_size: Number of processes.
        local_world_size: Number of processes on this node.
        device: Where this rank computes.
        timeout: Seconds after which a wait for other ranks is given up.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    timeout: float
    _store: Store
    _control: dist.ProcessGroup
    _signal: int | None = None
    _asked: tuple[Tensor, dist.Work] | None = None
    _previous_handlers: dict[int, object] = field(default_factory=dict)

    @classmethod
    def start(cls, *, timeout: float = 600.0, device: torch.device | None = None) -> World:
        """Join the other ranks.

        Args:
            timeout: Seconds to wait for the others, here and in every later wait.
            device: Where to compute; the GPU of this local rank if there is one, else the CPU.

        Raises:
            UserError: The environment is incomplete, there are fewer GPUs than ranks, or a rank did not arrive.
        """
        rank, world_size, local_rank, local_world_size = _place()
        device = device or _device(local_rank, local_world_size)
        store = _meet(rank, world_size, timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        limit = timedelta(seconds=timeout)
        try:
            dist.init_process_group(
                backend, store=PrefixStore("group", store), rank=rank, world_size=world_size, timeout=limit
            )
            control = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise UserError(
                f"rank {rank} of {world_size} could not connect to the other ranks: {str(error).splitlines()[0]}",
                exit_code=EXIT_CRASHED,
            ) from error
        assert isinstance(control, dist.ProcessGroup), "every rank is in the group"
        world = cls(rank, local_rank, world_size, local_world_size, device, timeout, store, control)
        world._listen()
        return world

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def stop_requested(self, step: int) -> bool:
        """Whether all ranks stop after `step`; the same answer on every rank at the same step.

        Each call starts the agreement that the next call reads, so that no rank waits for another in the hot path;
        a signal therefore takes effect one step later.
        """
        asked = self._asked
        flag = torch.tensor([self._signal or 0], dtype=torch.int32)
        with self.waiting(f"step {step}"):
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
            self._asked = (flag, work)
            if asked is None:
                return False
            asked[1].wait()
        return bool(asked[0].item())

    def barrier(self, what: str) -> None:
        """Wait until every rank is here; `what` names the place for the error."""
        with self.waiting(what):
            dist.monitored_barrier(self._control, timeout=timedelta(seconds=self.timeout), wait_all_ranks=True)

    def all_reduce(self, tensor: Tensor, reduction: Reduction, *, what: str) -> Tensor:
        """The sum, maximum or minimum of `tensor` over all ranks, as a new tensor on the same device."""
        result = tensor.detach().clone()
        op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[reduction]
        with self.waiting(what):
            dist.all_reduce(result, op=op, group=self._control if result.device.type == "cpu" else None)
        return result

    def agree(self, ok: bool, *, what: str) -> bool:
        """Whether `ok` is true on every rank."""
        return bool(self.all_reduce(torch.tensor([int(ok)]), "min", what=what).item())

    def gather_text(self, text: str, *, what: str) -> list[str]:
        """Every rank's `text`, in rank order, on every rank."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        length = torch.tensor([len(text.encode())])
        longest = int(self.all_reduce(torch.tensor([len(data)]), "max", what=what).item())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        with self.waiting(what):
            dist.all_gather(lengths, length, group=self._control)
            dist.all_gather(parts, padded, group=self._control)
        return [bytes(part[: int(size)].numpy().tobytes()).decode() for part, size in zip(parts, lengths, strict=True)]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Turn a broken or timed-out collective inside into a UserError that names the ranks that are missing."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in _LOST):
                raise
            raise UserError(self._explain(what, error), exit_code=EXIT_CRASHED) from error

    def end(self) -> None:
        """Leave the other ranks; give the signals back."""
        if self._asked is not None:
            with contextlib.suppress(RuntimeError):
                self._asked[1].wait()
            self._asked = None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        dist.destroy_process_group()

    def _listen(self) -> None:
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._previous_handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number

    def _explain(self, what: str, error: RuntimeError) -> str:
        missing = _missing(self._store, "waiting", self.rank, range(self.world_size), _GRACE)
        reason = str(error).splitlines()[0][:200]
        if missing is None:
            return f"rank {self.rank}: lost rank 0, or the store that ranks meet at, during {what} ({reason})"
        if not missing:
            return f"rank {self.rank}: communication failed during {what} although every rank is alive ({reason})"
        names = ", ".join(str(rank) for rank in missing)
        who, log = ("ranks", "their logs say") if len(missing) > 1 else ("rank", "its log says")
        ended = any(word in reason.lower() for word in _CLOSED)
        how = "ended" if ended else f"did not answer for {self.timeout:g} s"
        return f"rank {self.rank}: {who} {names} {how} during {what}; {log} more"


def _place() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) from torchrun's variables, else srun's, else a world of one."""
    env = os.environ
    if "RANK" in env:
        names: Sequence[str] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        # the step's own variables: the job's count may be larger than the step that runs this process
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return 0, 1, 0, 1
    absent = [name for name in names if name not in env]
    if absent:
        raise UserError(
            f"{names[0]} is set but {', '.join(absent)} is not; start several processes with "
            "`vitscale launch` or torchrun, which set all of them",
            exit_code=EXIT_USAGE,
        )
    rank, world_size, local_rank = (int(env[name]) for name in names[:3])
    return rank, world_size, local_rank, int(env[names[3]].split("(")[0].split(",")[0])


def _device(local_rank: int, local_world_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"{local_world_size} ranks on this node but {count} visible GPU{'s' * (count != 1)}; start one rank a GPU",
            exit_code=EXIT_USAGE,
        )
    return torch.device("cuda", local_rank)


def _meet(rank: int, world_size: int, timeout: float) -> Store:
    """The store that all ranks share, once all of them have arrived."""
    if world_size == 1:
        return HashStore()
    try:
        store: Store = next(iter(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout))))[0]
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} of {world_size} could not reach the store at {address} (MASTER_ADDR:MASTER_PORT): "
            f"{str(error).splitlines()[0]}",
            exit_code=EXIT_CRASHED,
        ) from error
    missing = _missing(store, "arrived", rank, range(world_size), timeout)
    if missing is None or missing:
        names = "rank 0" if missing is None else "rank " + ", ".join(map(str, missing))
        raise UserError(
            f"rank {rank} of {world_size} waited {timeout:g} s at the start; {names} did not arrive",
            exit_code=EXIT_CRASHED,
        )
    return store


def _missing(store: Store, key: str, rank: int, ranks: Sequence[int], patience: float) -> list[int] | None:
    """Post `key` for `rank`, then the ranks that have not posted it after `patience` seconds; None: no store."""
    end = time.monotonic() + patience
    try:
        store.set(f"{key}/{rank}", "1")
        while True:
            absent = [other for other in ranks if not store.check([f"{key}/{other}"])]
            if not absent or time.monotonic() > end:
                return absent
            time.sleep(0.05)
    except RuntimeError:
        return None
