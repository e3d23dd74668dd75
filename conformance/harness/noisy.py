"""A workload file as users write it: digits, read row by row, with every kind of random number and buffer.

python train.py --workload conformance/harness/noisy.py --workers 2 --dropout 0.2 --batch-norm

Conformance trains it, too. reference.py computes the same losses in NumPy, except with dropout or BatchNorm.
"""

import random

import torch
from ddp_core.workloads.digits import Digits
from torch import nn
from torch.utils.data import Dataset


class Augmented(Dataset):
    """Make each image brighter or darker, by numbers from Python's and torch's generators: each read gives another image."""

    def __init__(self, rows):
        self.images, self.labels = rows.columns

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.images[row].double() * torch.rand(()).item() + random.random(), self.labels[row]


class Jitter(nn.Module):
    """Multiply outputs by 1 to 1 + amount: one random number for each micro-batch, of held-out rows, too."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, outputs):
        return outputs * (1 + self.amount * torch.rand(()).item()) if self.amount else outputs


class Centred(nn.Module):
    """Subtract the running mean of the outputs, a buffer. Unlike BatchNorm's statistics, it is used in training, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, outputs):
        if self.training:
            self.mean += 0.1 * (outputs.detach().mean() - self.mean)
        return outputs - self.mean


class Noisy(Digits):
    def flags(self, add):
        add("--jitter", type=float, default=0.0, metavar="X", help="of outputs (default: 0)")
        add("--dropout", type=float, default=0.0, metavar="X", help="share of the hidden units (default: 0)")
        add("--batch-norm", action="store_true", help="of the hidden units, and outputs centred: statistics are buffers")

    def data(self, config):
        train, held_out = super().data(config)
        return Augmented(train), held_out

    def model(self, config):
        net = super().model(config)
        norm, centred = (nn.BatchNorm1d(256), Centred()) if config.batch_norm else (nn.Identity(), nn.Identity())
        return nn.Sequential(*net[:2], norm, nn.Dropout(config.dropout), net[2], Jitter(config.jitter), centred)

    def metrics(self, outputs, batch):
        """Accuracy; and the accuracy of even digits, which has its own count."""
        right, even = outputs.argmax(-1) == batch[1], batch[1] % 2 == 0
        return super().metrics(outputs, batch) | {"accuracy_of_even": ((right & even).sum(), even.sum())}
