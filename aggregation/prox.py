"""FedProx: a proximal term mu/2 |w - w_start|^2 in every local loss.

Source: Li et al., "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127.
"""

from __future__ import annotations

import torch


def add_pull_(
    gradient: torch.Tensor, weights: torch.Tensor, start: torch.Tensor, mu: float
) -> None:
    """Add mu (w - w_start) to the gradient, in place; all three have the same shape.

    The difference is taken first: late in training w and w_start are close, and mu w - mu w_start
    would lose what matters to rounding.
    """
    gradient.add_(weights - start, alpha=mu)
