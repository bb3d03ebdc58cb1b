"""The fold process from its first instant on: `python -m coordinator.fold_process`.

It ends with the coordinator, whatever it is doing, also while it imports torch, which may take
seconds: so nothing here imports torch, and `fold` is loaded last.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies; its files are whole at any instant.

    Without such a service (not Linux) the closed pipe is noticed between two requests.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def main() -> int:
    """Answer requests until the coordinator ends."""
    end_with_parent()
    code: int = importlib.import_module("coordinator.fold").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
