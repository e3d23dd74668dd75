"""A small diffusion model of bright spots. It learns to predict the noise in an image, at every noise level.

python train.py --workload conformance/programs/diffusion.py
"""

import torch
from ddp_core import Workload
from torch import nn

LEVELS = 1000  # noise levels


def make_spots(count, seed):
    """A tuple of one tensor, [count, 1, 16, 16]: a round spot at a random place in each image, values from -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    center_y, center_x = 4 + 8 * torch.rand(2, count, 1, 1, 1, generator=generator)
    return (2 * torch.exp(-((y - center_y) ** 2 + (x - center_x) ** 2) / 8) - 1,)


class Denoiser(nn.Module):
    """A residual block between two convolutions. The noise level scales and shifts the block's input."""

    def __init__(self, width):
        super().__init__()
        self.level = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.first, self.last = nn.Conv2d(1, width, 5, padding=2), nn.Conv2d(width, 1, 5, padding=2)
        self.norm = nn.GroupNorm(4, width)
        self.block = nn.Sequential(nn.SiLU(), nn.Conv2d(width, width, 3, padding=2, dilation=2), nn.SiLU())

    def forward(self, images, level):
        """Predict the noise in [n, 1, 16, 16] images at [n, 1] levels in [0, 1). Returns [n, 1, 16, 16]."""
        waves = torch.cat([torch.cos(level * frequency) for frequency in (1, 2, 4, 8)], dim=1)
        scale, shift = self.level(waves)[..., None, None].chunk(2, dim=1)
        hidden = self.first(images)
        return self.last(hidden + self.block(self.norm(hidden) * (1 + scale) + shift))


class Diffusion(Workload):
    defaults = dict(epochs=3, global_batch_size=48, optimizer="adamw", lr=3e-3, clip_norm=1.0)

    def data(self, config):
        return make_spots(768, seed=1), make_spots(192, seed=2)

    def model(self, config):
        return Denoiser(width=16)

    def forward(self, model, batch):
        (images,) = batch
        level = torch.randint(LEVELS, (len(images), 1), device=images.device).to(images.dtype) / LEVELS
        noise = torch.randn_like(images)
        angle = level[..., None, None] * torch.pi / 2  # a cosine schedule: from the image to pure noise
        return model(torch.cos(angle) * images + torch.sin(angle) * noise, level), noise

    def loss(self, outputs, batch):
        predicted, noise = outputs
        return nn.functional.mse_loss(predicted, noise, reduction="sum") / noise[0].numel()
