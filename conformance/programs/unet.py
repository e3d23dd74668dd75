"""A small U-Net that finds discs in noise. Its loss is the sum of cross-entropy and Dice.

python train.py --workload conformance/programs/unet.py --width 16
"""

import torch
from ddp_core import Workload
from torch import nn


def make_scenes(count, seed):
    """[count, 1, 32, 32] noisy images, and masks of the same shape: 1 inside any of three discs, else 0."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    center_y, center_x, size = torch.rand(3, count, 3, 1, 1, generator=generator)
    masks = ((y - 32 * center_y) ** 2 + (x - 32 * center_x) ** 2 < (2 + 4 * size) ** 2).any(1, keepdim=True).float()
    return masks + 0.6 * torch.randn(masks.shape, generator=generator), masks


def block(inputs, outputs):  # GroupNorm, not BatchNorm: the losses are equal at every world size
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fine, self.coarse, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up_coarse, self.up_fine = (nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in (2 * width, width))
        self.join_coarse, self.join_fine = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images):
        fine = self.fine(images)
        coarse = self.coarse(nn.functional.max_pool2d(fine, 2))
        up = self.up_coarse(self.bottom(nn.functional.max_pool2d(coarse, 2)))
        up = self.up_fine(self.join_coarse(torch.cat([coarse, up], dim=1)))
        return self.head(self.join_fine(torch.cat([fine, up], dim=1)))


class Segmentation(Workload):
    defaults = dict(epochs=3, global_batch_size=24, optimizer="adamw", lr=3e-3)

    def flags(self, add):
        add("--width", type=int, default=8, help="channels at full resolution (default: %(default)s)")

    def data(self, config):
        return make_scenes(384, seed=1), make_scenes(96, seed=2)

    def model(self, config):
        return UNet(config.width)

    def loss(self, outputs, batch):
        pixels, masks, inside = (1, 2, 3), batch[1], outputs.sigmoid()
        dice = 1 - (2 * (inside * masks).sum(pixels) + 1) / (inside.sum(pixels) + masks.sum(pixels) + 1)
        cross_entropy = nn.functional.binary_cross_entropy_with_logits(outputs, masks, reduction="sum") / masks[0].numel()
        return {"cross_entropy": cross_entropy, "dice": dice.sum()}

    def metrics(self, outputs, batch):
        inside, masks = outputs > 0, batch[1] > 0
        return {"iou": ((inside & masks).sum(), (inside | masks).sum())}  # a sum and its divisor
