"""Keeps numbers that are not finite out of the model; clips gradients; scales the loss under fp16.

The optimizer must not see a gradient that is not finite, on any rank, and the host must not wait for the device to know.
So a loss that is not finite makes every gradient NaN, which the sum over ranks carries to all; and a flag on the device
then turns every later update into a no-op, until the ranks' next reconciliation finds it out and stops the run.
"""

from collections.abc import Callable

import torch

LOWEST_SCALE = 1.0  # of fp16: below it gradients overflow without being scaled up


class Guard:
    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, clip_norm: float, weight: float, device: torch.device):
        """weight: what a rank's summed loss is multiplied with before its backward (reduction.weight)."""
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.weight = torch.tensor(weight, device=device, dtype=torch.float64 if precision == "fp64" else torch.float32)
        # Beside the parameters, which --offload keeps on the CPU. Once 1, it stays 1.
        parameter = next(parameter for group in optimizer.param_groups for parameter in group["params"])
        self.found_inf = torch.zeros((), device=parameter.device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        # Fused optimizers read the flag themselves; the others have the host look, and wait.
        self.reads_flag = self.scaler is None and all(group.get("fused") for group in optimizer.param_groups)
        if self.reads_flag:
            optimizer.grad_scale, optimizer.found_inf = None, self.found_inf  # type: ignore[attr-defined]

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on: this rank's part of the mean over the global batch."""
        # 0 * loss makes every gradient NaN where the loss is not finite. (The weight as an argument of backward() would be
        # one operation less, and imports sympy: 0.4 s.)
        loss = loss * torch.add(self.weight, loss.detach(), alpha=0)
        return self.scaler.scale(loss) if self.scaler else loss

    def norm(self, gradients: list[torch.Tensor], over_ranks: Callable = lambda norm: norm) -> torch.Tensor:
        """The norm of all gradients, on the device, before they are clipped to --clip-norm. over_ranks: Reduction.norm."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norms = torch._foreach_norm(gradients) if len(gradients) > 1 else [torch.linalg.vector_norm(g) for g in gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else self.found_inf * 0
        norm = over_ranks(norm)
        if self.clip_norm and gradients:
            torch._foreach_mul_(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
        if not self.scaler:
            # 0 if it is finite, else NaN, which counts as true.
            self.found_inf.logical_or_((norm - norm).to(self.found_inf.device))
        return norm

    def step(self) -> None:
        """optimizer.step(), unless a gradient is not finite, now or since the last reconciliation."""
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.reads_flag or not self.found_inf:
            self.optimizer.step()

    def tolerates(self) -> bool:
        """Under fp16 single gradients that overflow are skipped, and the scale is halved; until it is too low to help."""
        return self.scaler is not None and self.scaler.get_scale() >= LOWEST_SCALE

    @property
    def scale(self) -> list | None:
        """The scaler's state, for the snapshot: the scale, and the steps since it last changed."""
        if not self.scaler:
            return None
        state = self.scaler.state_dict()
        return [float(state["scale"]).hex(), state["_growth_tracker"]]

    @scale.setter
    def scale(self, value: list | None) -> None:
        if self.scaler and value:
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state | {"scale": float.fromhex(value[0]), "_growth_tracker": value[1]})
