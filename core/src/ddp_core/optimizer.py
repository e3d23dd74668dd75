"""SGD with momentum and AdamW: torch's own functions, on one flat tensor.

The classes in torch.optim import torch._dynamo at the first step (1.9 s of CPU a rank); the functions do not. Their
`found_inf` makes an update a no-op on the device, so that the host need not wait to hear that all is well.
"""

import math

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ddp_core.config import TrainConfig


class Optimizer:
    """state: name to flat tensor, laid out like the parameters: with `steps`, all that a resumed run needs.

    Once a gradient was not finite, `found_inf` stays 1 and no later step changes a number.
    """

    def __init__(self, config: TrainConfig, values: torch.Tensor, grads: torch.Tensor):
        self.config, self.values, self.grads = config, values, grads
        names = ("momentum",) if config.optimizer == "sgd" else ("mean", "square")
        self.state = {name: torch.zeros_like(values) for name in names}
        self.steps = torch.zeros((), device=values.device)  # for AdamW's bias correction
        self.found_inf = torch.zeros((), device=values.device)

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Update `values`, unless a gradient is not finite. Returns the gradients' norm, on the device."""
        norm = torch.linalg.vector_norm(self.grads)
        self.found_inf.logical_or_(norm - norm)  # 0 if it is finite, else NaN, which counts as true
        lists = [[self.values], [self.grads], *([flat] for flat in self.state.values())]
        common = dict(lr=lr, weight_decay=self.config.weight_decay, maximize=False, fused=True, found_inf=self.found_inf)
        if self.config.optimizer == "sgd":
            sgd(*lists, momentum=self.config.momentum, dampening=0.0, nesterov=False, **common)
        else:
            betas = dict(beta1=self.config.momentum, beta2=0.95, eps=1e-8, amsgrad=False)
            adamw(*lists, [], [self.steps], **betas, **common)
        return norm


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Of a step counted from 0: linear warm-up, then constant, or a cosine that would reach 0 after the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
