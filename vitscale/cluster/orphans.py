"""No rank outlives its launcher, not even one that was killed with SIGKILL and could end nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_parent() -> None:
    """Let the system send SIGTERM to this rank, which then saves and ends, when the torchrun that started it dies.

    Does nothing where no torchrun did, and where the system is not Linux.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
