"""What a person is told when something is wrong, and with which exit code.

Every mistake a user can make is raised as a :class:`UserError`: one or two sentences that say what was
found, where, and what would be right. The command line prints the message without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CRASHED = 70  # EX_SOFTWARE: a rank ended for a reason that a restart may cure
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: "requeue me"


class UserError(Exception):
    """A mistake that a person can mend; the command line prints `message` and no traceback.

    Args:
        message: What was found, where, and what would be right.
        exit_code: 2 for usage and configuration, 1 for a run that failed.
    """

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was probably meant to be, or None when none is close."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or an empty string when no choice is close."""
    match = nearest(word, choices)
    return f"; did you mean {match!r}?" if match else ""
