"""digits: an MLP on 1,797 handwritten digits. Real data, part of the package; conformance checks sites with it.

python train.py --workload digits
"""

import gzip
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddp_core import Workload
from ddp_core.data import Rows, split
from ddp_core.workload import initial_parameters

FILE = Path(__file__).with_name("digits.csv.gz")  # digits.md names its source


class Digits(Workload):
    # A global batch of 96 rows can be split evenly over 1, 2, 4, 8, 12, 16, 24, 32, 48 and 96 ranks.
    defaults = dict(epochs=10, global_batch_size=96, optimizer="sgd", lr=0.1, momentum=0.9)

    def data(self, config):
        """8x8 pixels from 0 to 16, divided by 4, and labels from 0 to 9; every fifth row is held out."""
        text = gzip.decompress(FILE.read_bytes())
        numbers = bytearray(map(int, text.replace(b"\n", b",").strip(b",").split(b",")))
        table = torch.frombuffer(numbers, dtype=torch.uint8).view(-1, 65)
        fingerprint = hashlib.sha256(text).hexdigest()[:12]
        return split(Rows(table[:, :64].float() / 4, table[:, 64].long(), fingerprint=fingerprint))

    def model(self, config):
        # tanh, not ReLU: at ReLU's kink a rounding error becomes a jump in the losses, which conformance compares.
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
        return initial_parameters(net, config.seed)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], reduction="sum")  # a sum over rows, never a mean

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).sum()}
