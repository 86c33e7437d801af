"""One batch on one rank: forward, loss and backward of every micro-batch, and the optimizer steps between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from s2rl.algo.kl import clamp_log_ratio, k3, kl_divergence
from s2rl.algo.losses import LossInputs, LossSettings, importance_weights, policy_loss, token_weights
from s2rl.config.schema import AlgorithmConfig
from s2rl.device import synchronize
from s2rl.fsdp.collate import ForwardInputs, TokenData, collate_samples
from s2rl.fsdp.metrics import MetricSums
from s2rl.fsdp.model import ShardedPolicy
from s2rl.fsdp.optimizer import PolicyOptimizer
from s2rl.types import RankBatch


@dataclass(slots=True, kw_only=True, eq=False)
class _PreparedMicro:
    """A micro-batch on the device, with what its first forward leaves for later updates on the same batch."""

    inputs: ForwardInputs
    tokens: TokenData
    weights: Tensor  # [N], sums to the share of this micro-batch in the mean over the whole batch
    learner_logprobs: Tensor | None = None  # [N], at the start of the batch
    reference_logprobs: Tensor | None = None  # [N]


class BatchUpdate:
    """Trains a policy on batches. Collective: every rank calls `run` with as many micro-batches."""

    def __init__(
        self,
        *,
        policy: ShardedPolicy,
        optimizer: PolicyOptimizer,
        algorithm: AlgorithmConfig,
        temperature: float,
        banned_token_ids: Sequence[int],
        world_size: int,
        device: torch.device,
        reference_logprobs: Callable[[ForwardInputs], Tensor] | None,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._temperature = temperature
        self._banned_K = torch.tensor(banned_token_ids, dtype=torch.int64, device=device) if banned_token_ids else None
        self._world_size = world_size
        self._device = device
        self._reference_logprobs = reference_logprobs
        self._loss = policy_loss(algorithm.loss)
        self._settings = LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            old_policy=algorithm.old_policy,
            importance_cap=algorithm.importance_cap,
        )

    def run(self, batch: RankBatch) -> tuple[MetricSums, int]:
        """`updates_per_batch` optimizer steps from `batch.version` on; metrics and the number of skipped steps."""
        metrics = MetricSums()
        micros = [self._prepare(batch, index) for index in range(len(batch.micro_batches))]
        samples = [sample for micro in batch.micro_batches for sample in micro.samples]
        metrics.total("batch/loss_tokens", float(sum(len(s.logprobs) for s in samples)))
        num_skipped, lr = 0, 0.0
        for update in range(self._algorithm.updates_per_batch):
            started = time.perf_counter()
            for index, micro in enumerate(micros):
                self._policy.gather(last=index == len(micros) - 1)
                self._forward_backward(micro, metrics, batch_version=batch.version, first=update == 0)
            synchronize(self._device.type)  # type: ignore[arg-type]
            computed = time.perf_counter()
            outcome = self._optimizer.step(batch.version + update)
            num_skipped += outcome.skipped
            lr = outcome.lr
            metrics.maximum("optim/grad_norm", outcome.grad_norm)
            metrics.maximum("time/forward_backward_s", computed - started)
            metrics.maximum("time/optimizer_s", time.perf_counter() - computed)
        metrics.maximum("optim/lr", lr)
        return metrics, num_skipped

    def _prepare(self, batch: RankBatch, index: int) -> _PreparedMicro:
        rows = batch.micro_batches[index].rows
        inputs, tokens = collate_samples(
            rows, packed=self._policy.layout.packed, device=self._device, vision=self._policy.vision
        )
        weights = token_weights(
            tokens.sample_lengths,
            aggregation=self._algorithm.aggregation,
            num_loss_tokens=batch.num_loss_tokens,
            num_samples=batch.num_samples,
        )
        return _PreparedMicro(inputs=inputs, tokens=tokens, weights=weights)

    def _forward_backward(self, micro: _PreparedMicro, metrics: MetricSums, *, batch_version: int, first: bool) -> None:
        if self._reference_logprobs is not None and micro.reference_logprobs is None:
            micro.reference_logprobs = self._reference_logprobs(micro.inputs)
        logprobs, entropy = self._policy.module.logprobs(
            micro.inputs, temperature=self._temperature, banned_K=self._banned_K
        )
        if micro.learner_logprobs is None:  # no step has been taken on this batch yet
            micro.learner_logprobs = logprobs.detach()
        loss = self._total_loss(micro, logprobs, metrics)
        # FSDP averages gradients over ranks, while the weights make the loss a sum over them.
        (loss * self._world_size).backward()
        metrics.mean("policy/entropy", entropy)
        if first:
            _compare_with_rollout(micro, metrics, batch_version=batch_version, cap=self._settings.importance_cap)

    def _total_loss(self, micro: _PreparedMicro, logprobs: Tensor, metrics: MetricSums) -> Tensor:
        """This micro-batch's share of the loss, a scalar."""
        assert micro.learner_logprobs is not None
        updates = self._algorithm.updates_per_batch
        policy = self._loss(
            LossInputs(
                logprobs=logprobs,
                learner_logprobs=micro.learner_logprobs,
                rollout_logprobs=micro.tokens.rollout_logprobs,
                advantages=micro.tokens.advantages,
            ),
            settings=self._settings,
        )
        loss = (policy.loss * micro.weights).sum()
        metrics.total("loss/policy", loss / updates)
        metrics.mean("policy/ratio_mean", policy.ratio)
        metrics.mean("policy/clip_fraction", policy.clipped)
        kl = self._algorithm.kl
        if micro.reference_logprobs is not None:
            divergence = kl_divergence(logprobs, micro.reference_logprobs, estimator=kl.estimator)
            penalty = (divergence * micro.weights).sum()
            penalty = kl.coefficient * penalty
            metrics.total("loss/kl", penalty / updates)
            loss = loss + penalty
        metrics.total("loss/total", loss / updates)
        return loss


def _compare_with_rollout(micro: _PreparedMicro, metrics: MetricSums, *, batch_version: int, cap: float | None) -> None:
    """How far the learner is from what sampled the tokens, before the first step on them."""
    learner, rollout = micro.learner_logprobs, micro.tokens.rollout_logprobs
    assert learner is not None
    difference = (learner - rollout).abs()
    metrics.mean("policy/logprob_diff_mean", difference)
    metrics.maximum("policy/logprob_diff_max", difference)
    metrics.mean("policy/logprob_diff_mean_fresh", difference[micro.tokens.versions == batch_version])
    # k3 of KL(rollout || learner): the samples are the rollout policy's.
    metrics.mean("policy/kl_rollout", k3(clamp_log_ratio(rollout - learner)))
    weights = importance_weights(learner, rollout)
    metrics.maximum("policy/importance_max", weights)
    metrics.mean("policy/importance_mean", weights if cap is None else weights.clamp(max=cap))
    if cap is not None:
        metrics.mean("policy/importance_capped_fraction", weights > cap)
