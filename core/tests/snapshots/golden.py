"""What a snapshot of format 2 may hold beside the built-in workloads' parts: buffers, groups, own flags, tied and idle weights.

Never to be changed: format2-own.safetensors is a run of it.
"""

import torch
import torch.nn.functional as F
from ddp_core import Workload
from torch import nn


def table(count: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(first, first + count, dtype=torch.float64).unsqueeze(1)
    inputs = torch.sin(place * (1 + torch.arange(4, dtype=torch.float64)) * 1.7)
    return inputs, inputs.sum(1, keepdim=True).tanh()


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.square, self.idle = nn.Linear(width, width), nn.Linear(2, 2)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.square.weight

    def forward(self, inputs):
        hidden = torch.tanh(self.square(torch.tanh(self.norm(self.first(inputs)))))
        return self.last(torch.tanh(self.tied(hidden)))


class Golden(Workload):
    defaults = dict(global_batch_size=16, precision="fp64", clip_norm=0.5)
    unused_parameters = True

    def flags(self, add):
        add("--width", type=int, default=3)

    def data(self, config):
        return table(160, 0), table(21, 160)

    def model(self, config):
        net = Net(config.width)
        net.first.bias.requires_grad_(False)
        return net

    def loss(self, outputs, batch):
        return {"square": F.mse_loss(outputs, batch[1], reduction="sum"), "size": 0.01 * outputs.square().sum()}

    def optimizer(self, model, config):
        last = {id(parameter) for parameter in model.last.parameters()}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in last]
        groups = [{"params": others, "lr": 0.01}, {"params": model.last.parameters(), "lr": 0.02, "weight_decay": 0.01}]
        return torch.optim.NAdam(groups)

    def schedule(self, step, total_steps, config):
        return 1 / (1 + 0.1 * step)
