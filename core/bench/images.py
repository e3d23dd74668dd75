"""images: rows that are read one by one, with some work for each. loader.py measures the rows a second.

python train.py --workload core/bench/images.py --workers 2
"""

import torch
import torch.nn.functional as F
from ddp_core import Workload
from ddp_core.workload import initial_parameters
from torch import nn
from torch.utils.data import Dataset

SIZE, MARGIN, CLASSES = 32, 8, 10


class Images(Dataset):
    """Random crops of random pixels, flipped half the time, with noise: about 0.1 ms a row, without files to wait for."""

    fingerprint = "images-1"

    def __init__(self, count: int):
        numbers = torch.Generator().manual_seed(1)
        side = SIZE + MARGIN
        self.pixels = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=numbers)
        self.labels = torch.randint(CLASSES, (count,), generator=numbers)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        top, left = torch.randint(MARGIN + 1, (2,)).tolist()
        image = self.pixels[row, :, top : top + SIZE, left : left + SIZE].float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.05 * torch.randn(image.shape), self.labels[row]


class AugmentedImages(Workload):
    defaults = dict(epochs=1, global_batch_size=64, optimizer="sgd", lr=0.01, momentum=0.9)

    def flags(self, add):
        add("--rows", type=int, default=4096, help="training rows (default: %(default)s)")

    def data(self, config):
        return Images(config.rows), None

    def model(self, config):
        return initial_parameters(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES)), config.seed)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1], reduction="sum")
