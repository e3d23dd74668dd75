"""noisy: the digits once more, read row by row, with all that can be drawn and kept. Conformance trains it, too.

python train.py --workload conformance/harness/noisy.py --workers 2 --dropout 0.2 --batch-norm

A workload file as users have one. reference.py arrives at its losses in NumPy, but not with dropout or BatchNorm.
"""

import random

import torch
from ddp_core.workloads.digits import Digits
from torch import nn
from torch.utils.data import Dataset


class Augmented(Dataset):
    """Each image brighter or darker, by numbers from Python's and torch's generators: another time it is another image."""

    def __init__(self, rows):
        self.images, self.labels = rows.columns

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.images[row].double() * torch.rand(()).item() + random.random(), self.labels[row]


class Jitter(nn.Module):
    """Outputs times 1 to 1 + amount: one number for each micro-batch, of held-out rows, too."""

    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, outputs):
        return outputs * (1 + self.amount * torch.rand(()).item()) if self.amount else outputs


class Centred(nn.Module):
    """Outputs minus their mean so far, a buffer: unlike BatchNorm's statistics it counts in training, too."""

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
        """Accuracy; and that of the even digits, which has a count of its own."""
        right, even = outputs.argmax(-1) == batch[1], batch[1] % 2 == 0
        return super().metrics(outputs, batch) | {"accuracy_of_even": ((right & even).sum(), even.sum())}
