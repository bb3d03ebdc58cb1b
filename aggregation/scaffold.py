"""SCAFFOLD, option II: control variates that cancel the drift between sites.

The server keeps c, each site its own c_i, both as long as the parameters and zero at the start.
Local step:      y <- y - lr (g + c - c_i)
After K steps:   c_i' = c_i - c - delta / (K lr), with delta = y - x; the site sends dc = c_i' - c_i
At the server:   x <- x + server lr * mean(delta);  c <- c + (1/N) sum of dc over the cohort, where
                 N counts all active sites, those that were not drawn included

Source: Karimireddy et al., "SCAFFOLD", arXiv 1910.06378, algorithm 1.
"""

from __future__ import annotations

import torch


def correct_(gradient: torch.Tensor, server: torch.Tensor, site: torch.Tensor) -> None:
    """Add c - c_i to the gradient, in place."""
    gradient.add_(server - site)


def control_change(
    delta: torch.Tensor, server: torch.Tensor, *, steps: int, lr: float
) -> torch.Tensor:
    """The change of a control variate, c_i' - c_i = -c - delta / (K lr); c_i cancels out.

    Raises:
        ValueError: without a step or a learning rate there is no gradient to estimate.
    """
    if steps <= 0 or lr <= 0.0:
        raise ValueError(f"SCAFFOLD needs at least one step at a positive rate: {steps}, {lr}.")
    return delta.mul(-1.0 / (steps * lr)).sub_(server)


def server_change_(server: torch.Tensor, total: torch.Tensor, *, sites: int) -> None:
    """Add 1/N of `total`, the sum of dc over the cohort, to c in place."""
    server.add_(total, alpha=1.0 / sites)
