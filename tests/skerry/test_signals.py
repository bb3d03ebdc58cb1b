"""Ends that come from outside."""

from __future__ import annotations

import os
import signal

import pytest

from skerry.signals import terminated_as_interrupted


def test_sigterm_ends_a_block_as_ctrl_c_does_and_only_there():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
