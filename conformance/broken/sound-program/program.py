"""Which of three waves is in the noise? A sound program, of the kind that people write; ../programs.toml breaks it.

python train.py --workload conformance/broken/sound-program/program.py
"""

import random
from pathlib import Path

import torch
from ddp_core import Workload
from torch import nn
from torch.utils.data import Dataset

KINDS = Path(__file__).with_name("kinds")  # a file for each kind, with its frequency


class Waves(Dataset):
    """Rows (wave [32], kind); each wave is turned over or not, and given fresh noise, whenever it is read."""

    def __init__(self, waves, kinds, noise):
        self.waves, self.kinds, self.noise = waves, kinds, noise

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        wave = self.waves[index]
        if random.random() < 0.5:
            wave = -wave
        return wave + self.noise * torch.randn(32), self.kinds[index]


class Recognize(Workload):
    defaults = dict(epochs=4, global_batch_size=24, optimizer="adamw", lr=0.003, weight_decay=0.01, clip_norm=1.0)

    def data(self, config):
        files = sorted(KINDS.glob("*.txt"))
        frequencies = torch.tensor([float(file.read_text()) for file in files])
        generator = torch.Generator().manual_seed(1)
        kinds = torch.randint(3, (312,), generator=generator)
        phases = torch.rand(312, 1, generator=generator)
        waves = torch.sin(2 * torch.pi * (frequencies[kinds, None] * torch.linspace(0, 1, 32) + phases))
        return Waves(waves[:240], kinds[:240], 0.5), Waves(waves[240:], kinds[240:], 0.0)

    def model(self, config):
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3))

    def forward(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum")

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(-1) == batch[1]).sum()}

    def schedule(self, step, total_steps, config):
        return min(1.0, (step + 1) / 10)
