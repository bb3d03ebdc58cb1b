"""Named instants at which a test kills the process, as `kill -9` would.

`SKERRY_CRASH_AT=name` kills at the first passage, `name:n` at the n-th. Without the variable a
passage costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from typing import Final

VARIABLE: Final = "SKERRY_CRASH_AT"

NAMES: Final = (
    "upload_half_stored",
    "upload_stored_before_screen",
    "screened_before_persist",
    "persisted_before_ack",
    "round_closed_before_fold",
    "folded_before_persist",
    "version_persisted_before_announce",
    "checkpoint_before_persist",
    "fold_before_version_file",
    "fold_after_version_file",
    "fold_during_checkpoint",
    "fold_after_checkpoint",
)

_passages: dict[str, int] = {}


def reach(name: str) -> None:
    """Die here by SIGKILL when the environment says so."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    at, _, nth = wanted.partition(":")
    if at != name:
        return
    _passages[name] = _passages.get(name, 0) + 1
    if _passages[name] == int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
