"""AdamW over sharded float32 masters, its schedule, and the step that is taken only when the gradient is finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from s2rl.algo.schedule import learning_rate
from s2rl.config.schema import OptimizerConfig
from s2rl.fsdp.model import local_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of one optimizer step; the same on every rank."""

    lr: float
    grad_norm: float
    """Norm over all ranks before clipping; not finite when the step was skipped."""
    skipped: bool


class PolicyOptimizer:
    """AdamW for the parameters of one policy.

    The learning rate is a function of `step`, which is handed in: skipped steps count, so all ranks, the schedule and
    the weight version agree on it without talking.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, config: OptimizerConfig, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._parameters = parameters
        # Gains and biases are not decayed: there is no reason to pull a norm's gain to 0.
        decayed = [p for p in parameters.values() if p.ndim > 1]
        plain = [p for p in parameters.values() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        # AdamW makes its state at the first step; making it here lets a checkpoint be written and read before that.
        for parameter in parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=local_shard(parameter).device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def state(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's own tensors by parameter name, not copies: loading writes into them."""
        return {name: dict(self._adamw.state[parameter]) for name, parameter in self._parameters.items()}

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`."""
        config = self._config
        return learning_rate(
            step,
            peak=config.lr,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=self._total_steps,
            min_lr_ratio=config.min_lr_ratio,
        )

    def step(self, step: int) -> StepOutcome:
        """Clip and apply the gradients as optimizer step number `step`, and clear them (collective)."""
        lr = self.lr(step)
        gradients = [local_shard(p.grad) for p in self._parameters.values() if p.grad is not None]
        norm = _global_norm(gradients)
        finite = math.isfinite(norm)
        if finite and gradients:
            if norm > self._config.max_grad_norm:
                torch._foreach_mul_(gradients, self._config.max_grad_norm / norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return StepOutcome(lr=lr, grad_norm=norm, skipped=not finite)


def _global_norm(gradients: list[Tensor]) -> float:
    """Euclidean norm of all ranks' gradients together, summed over parameters in float64.

    The sum crosses the ranks as a CPU tensor: float64 is not available on every device.
    """
    squares = torch.zeros((), dtype=torch.float64)
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients))
        squares += norms.to(device="cpu", dtype=torch.float64).square().sum()
    dist.all_reduce(squares)
    return math.sqrt(squares.item())  # math.sqrt passes NaN and infinity on
