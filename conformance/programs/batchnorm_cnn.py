"""A CNN with BatchNorm on augmented images. It recognizes which of four wave patterns is in the noise.

python train.py --workload conformance/programs/batchnorm_cnn.py --workers 2
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from ddp_core import Workload
from torch import nn
from torch.utils.data import Dataset


def make_images(count, seed):
    """[count, 1, 16, 16] waves with random phases, and [count] labels: each wave's vector."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])[labels]
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle = torch.einsum("nc,cyx->nyx", vectors, torch.stack([y, x])) * (torch.pi / 4)
    waves = torch.cos(angle + 2 * torch.pi * torch.rand(count, 1, 1, generator=generator))
    return (waves + 1.5 * torch.randn(count, 16, 16, generator=generator)).unsqueeze(1), labels


class Augmented(Dataset):
    """Each read of a row flips it at random, shifts it, and adds new noise."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = image.roll(np.random.randint(-3, 4, size=2).tolist(), dims=(-2, -1))
        return image + 0.2 * torch.randn_like(image), self.labels[index]


class WaveImages(Workload):
    defaults = dict(epochs=3, global_batch_size=48, optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)

    def data(self, config):
        return Augmented(*make_images(720, seed=1)), make_images(192, seed=2)  # held-out images are not augmented

    def model(self, config):
        def block(inputs, outputs):  # no bias in the convolution: BatchNorm has one
            return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*block(1, 16), *block(16, 32), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 4))

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], reduction="sum")

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).sum()}
