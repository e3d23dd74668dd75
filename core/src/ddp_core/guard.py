"""Keeps numbers that are not finite out of the model; clips gradients; scales the loss under fp16.

The optimizer must not use a gradient that is not finite, on any rank, and the host should not wait for the device to check.
So a loss that is not finite makes every gradient NaN, and the sum over ranks carries NaN to all ranks. A flag on the device
then turns every later update into a no-op, until the next reconciliation detects it and stops the run.
"""

from collections.abc import Callable

import torch


class Guard:
    def __init__(self, optimizer: torch.optim.Optimizer, precision: str, clip_norm: float, weight: float, device: torch.device):
        """weight: the factor of a rank's summed loss before its backward (Reduction.weight)."""
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.weight = torch.tensor(weight, device=device, dtype=torch.float64 if precision == "fp64" else torch.float32)
        # On the device of the parameters, which --offload keeps on the CPU. Once 1, it stays 1.
        parameter = next(parameter for group in optimizer.param_groups for parameter in group["params"])
        self.found_inf = torch.zeros((), device=parameter.device)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        # Fused optimizers read the flag on the device; for others the host reads it, and waits.
        self.reads_flag = self.scaler is None and all(group.get("fused") for group in optimizer.param_groups)
        if self.reads_flag:
            optimizer.grad_scale, optimizer.found_inf = None, self.found_inf  # type: ignore[attr-defined]

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on: this rank's part of the mean over the global batch."""
        # Adding 0 * loss to the weight makes every gradient NaN if the loss is not finite. (Passing the weight to backward()
        # would save an operation, but imports sympy: 0.4 s.)
        loss = loss * torch.add(self.weight, loss.detach(), alpha=0)
        return self.scaler.scale(loss) if self.scaler else loss

    def norm(self, gradients: list[torch.Tensor], over_ranks: Callable = lambda norm: norm) -> torch.Tensor:
        """Clip the gradients to --clip-norm, and return their norm before that, on the device. over_ranks: Reduction.norm."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norms = torch._foreach_norm(gradients) if len(gradients) > 1 else [torch.linalg.vector_norm(g) for g in gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else self.found_inf * 0
        norm = over_ranks(norm)
        if self.clip_norm and gradients:
            torch._foreach_mul_(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device))
        if not self.scaler:
            # norm - norm is 0 if norm is finite, else NaN, which counts as true.
            self.found_inf.logical_or_((norm - norm).to(self.found_inf.device))
        return norm

    def step(self) -> None:
        """optimizer.step(), unless a gradient is not finite, now or in a step since the last reconciliation."""
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.reads_flag or not self.found_inf:
            self.optimizer.step()

    def tolerates(self) -> bool:
        """True under fp16, which skips a step whose gradients overflow, and halves the scale of the loss. Below 1 even unscaled
        gradients overflow.
        """
        return self.scaler is not None and self.scaler.get_scale() >= 1

    @property
    def scale(self) -> list | None:
        """The fp16 scaler's state for the snapshot: the scale, and the steps since it last changed."""
        if not self.scaler:
            return None
        state = self.scaler.state_dict()
        return [float(state["scale"]).hex(), state["_growth_tracker"]]

    @scale.setter
    def scale(self, value: list | None) -> None:
        if self.scaler and value:
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state | {"scale": float.fromhex(value[0]), "_growth_tracker": value[1]})
