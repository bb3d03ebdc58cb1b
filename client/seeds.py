"""Global random generators: the user's code draws from them, so the worker has to set them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch on every device, numpy and Python."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same for the CPU, without noting a call stack for devices that are not there
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  user code may use numpy's global generator
    random.seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A block with generators of its own; outside of it nothing was drawn."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        seed_everything(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
