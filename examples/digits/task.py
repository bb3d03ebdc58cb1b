"""An MLP 64-64-10 on scikit-learn's digits: small enough to try things out in seconds.

Site options: `part`, `parts` and `alpha`, as in `examples/fashion_mnist`.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import skerry
from skerry.datasets import digits, part_of

SPLIT_SEED = 7  # the same at all sites, so that their parts do not overlap


class Digits(skerry.Task):
    """8 x 8 grey images, 10 classes; 4,810 weights."""

    def model(self) -> nn.Module:
        """One hidden layer."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, site: skerry.SiteContext) -> skerry.Data:
        """This site's part of the training images, and every n-th test image."""
        images = digits()
        mine = part_of(images.train_y, site.options, SPLIT_SEED)
        nth = slice(int(site.options.get("part", 0)), None, int(site.options.get("parts", 1)))
        return skerry.Data(
            train=TensorDataset(
                torch.from_numpy(images.train_x[mine]), torch.from_numpy(images.train_y[mine])
            ),
            test=TensorDataset(
                torch.from_numpy(images.test_x[nth]), torch.from_numpy(images.test_y[nth])
            ),
        )
