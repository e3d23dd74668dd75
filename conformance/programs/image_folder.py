"""A classifier of image files, with a Dataset like torchvision's ImageFolder and transforms like torchvision's.

python train.py --workload conformance/programs/image_folder.py --workers 2
"""

from pathlib import Path

import numpy as np
import torch
from ddp_core import Workload
from PIL import Image
from torch import nn
from torch.utils.data import Dataset


class ImageFolder(Dataset):
    """Rows (image, class) from the files root/class/name.png. The transforms are applied in order."""

    def __init__(self, root, *transforms):
        self.files = sorted(root.glob("*/*.png"))  # sorted: the listing order differs between file systems
        self.classes = sorted({file.parent.name for file in self.files})
        self.transforms = transforms

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB")
        for transform in self.transforms:
            image = transform(image)
        return image, self.classes.index(self.files[index].parent.name)


def random_turn(image):
    return image.rotate(90 * int(torch.randint(4, ())))


def to_tensor(image):
    """A [3, height, width] tensor, values from -1 to 1."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1


class Shapes(Workload):
    defaults = dict(epochs=3, global_batch_size=12, optimizer="adamw", lr=3e-3)

    def flags(self, add):
        add("--data-dir", type=Path, default=Path(__file__).with_name("shapes"), remembered=False, help="of train/ and val/")

    def data(self, config):
        return ImageFolder(config.data_dir / "train", random_turn, to_tensor), ImageFolder(config.data_dir / "val", to_tensor)

    def model(self, config):
        layers = [nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 32, 3), nn.GELU(), nn.AvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(800, 3))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum")

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).sum()}
