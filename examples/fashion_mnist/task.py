"""A small CNN on Fashion-MNIST, each site with its own skewed part of the images.

The owner of a site says which part is its own, in the site's settings:

    [tasks.fashion-mnist]
    reference = "examples/fashion_mnist/task.py:FashionMnist"
    options = { part = "0", parts = "4", alpha = "0.5" }
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import skerry
from skerry.datasets import fashion_mnist, part_of

SPLIT_SEED = 7  # the same at all sites, so that their parts do not overlap


class FashionMnist(skerry.Task):
    """28 x 28 grey images, 10 classes; 30,330 weights."""

    def model(self) -> nn.Module:
        """Two strided convolutions (28 -> 14 -> 7) and two linear layers."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 16),
            nn.ReLU(),
            nn.Linear(16, 10),
        )

    def data(self, site: skerry.SiteContext) -> skerry.Data:
        """This site's part of the training images, and every n-th test image."""
        images = fashion_mnist(site.data)
        mine = part_of(images.train_y, site.options, SPLIT_SEED)
        # The test images are dealt out evenly: their mean over sites is that of the whole set.
        nth = slice(int(site.options.get("part", 0)), None, int(site.options.get("parts", 1)))
        return skerry.Data(
            train=TensorDataset(
                torch.from_numpy(images.train_x[mine]), torch.from_numpy(images.train_y[mine])
            ),
            test=TensorDataset(
                torch.from_numpy(images.test_x[nth]), torch.from_numpy(images.test_y[nth])
            ),
        )
