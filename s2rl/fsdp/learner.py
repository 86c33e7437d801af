"""One rank of the policy learner: everything that the trainer can ask of it, as plain synchronous methods.

It knows nothing of Ray. All ranks are asked the same thing at the same time, from the thread that owns the device,
because nearly every method takes part in collectives; the methods' docstrings say where a rank differs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from s2rl.config.schema import AlgorithmConfig, Device, Dtype, LearnerConfig, ModelConfig
from s2rl.data.tokenizer import tokenizer_facts
from s2rl.device import (
    claim,
    device_spec,
    keep_host_memory,
    limit_kernel_caches,
    resident_memory_mb,
    return_host_memory,
    seed_all,
)
from s2rl.errors import RunError, SyncError
from s2rl.fsdp.checkpoint import LearnerCheckpoint
from s2rl.fsdp.collate import ForwardInputs
from s2rl.fsdp.export import export_manifest, export_tensors
from s2rl.fsdp.model import ShardedPolicy, build_policy, forget_forward_order
from s2rl.fsdp.optimizer import PolicyOptimizer
from s2rl.fsdp.scoring import score_sequences
from s2rl.fsdp.update import BatchUpdate
from s2rl.sync import SyncGroup, WeightSender
from s2rl.types import (
    FloatArray,
    ImageArray,
    PublishReport,
    RankBatch,
    RowLayout,
    StepResult,
    SyncGroupSpec,
    TensorSpec,
    TokenizerFacts,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Started:
    """What exists once the model is loaded."""

    policy: ShardedPolicy
    update: BatchUpdate
    checkpoint: LearnerCheckpoint
    device: torch.device


class Learner:
    """One rank. Construction is free; `start` joins the process group and loads the model."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        banned_token_ids: Sequence[int] = (),
        rollout_dtype: Dtype,
        total_steps: int,
        seed: int,
        device: Device,
        rank: int,
        world_size: int,
        master_host: str,
        master_port: int,
        timeout_s: float = 1800.0,
    ) -> None:
        """`temperature` is the one rollouts are sampled with, without the ids `banned_token_ids`; `rollout_dtype` is
        the type that their engine computes in.

        `total_steps` counts optimizer steps over the whole run, for the learning-rate schedule. `master_host` and
        `master_port` are where rank 0 listens. No collective waits longer than `timeout_s`.
        """
        self._model = model
        self._learner = learner
        self._algorithm = algorithm
        self._temperature = temperature
        self._banned = tuple(banned_token_ids)
        self._rollout_dtype = rollout_dtype
        self._total_steps = total_steps
        self._seed = seed
        self._device_name = device
        self._rank = rank
        self._world_size = world_size
        self._master = f"tcp://{master_host}:{master_port}"
        self._timeout = timedelta(seconds=timeout_s)
        self._version = 0
        self._state: _Started | None = None
        self._manifest: list[TensorSpec] = []
        self._sync_group: SyncGroup | None = None
        self._sender: WeightSender | None = None

    def start(self) -> TokenizerFacts:
        """Join the other ranks and load the sharded policy; its version is 0."""
        torch.set_num_threads(self._learner.threads)
        if self._device_name == "cpu":
            limit_kernel_caches()
            keep_host_memory()
        device = claim(self._device_name)
        # Ranks draw different numbers, as they work on different data.
        seed_all(self._seed + self._rank, device=self._device_name)
        dist.init_process_group(
            device_spec(self._device_name).process_group,
            init_method=self._master,
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        mesh = init_device_mesh(device.type, (self._world_size,))
        policy = build_policy(self._model, self._learner, device=device, mesh=mesh)
        optimizer = PolicyOptimizer(policy.parameters, config=self._learner.optimizer, total_steps=self._total_steps)
        reference = None
        if self._algorithm.kl.coefficient > 0:
            reference = build_policy(self._model, self._learner, device=device, mesh=mesh, trainable=False)
        self._state = _Started(
            policy=policy,
            update=BatchUpdate(
                policy=policy,
                optimizer=optimizer,
                algorithm=self._algorithm,
                temperature=self._temperature,
                banned_token_ids=self._banned,
                world_size=self._world_size,
                reference_logprobs=None
                if reference is None
                else _Reference(reference, self._temperature, self._banned, device=device).logprobs,
                device=device,
            ),
            checkpoint=LearnerCheckpoint(
                policy=policy,
                optimizer=optimizer,
                device=self._device_name,
                group=dist.new_group(backend="gloo", timeout=self._timeout),
            ),
            device=device,
        )
        self._manifest = export_manifest(policy, rollout_dtype=self._rollout_dtype)
        return tokenizer_facts(self._model, vocab_size=policy.vocab_size)

    def layout(self) -> RowLayout:
        """How samples are to be laid out for `train`; the same on every rank."""
        return self._started().policy.layout

    def manifest(self) -> list[TensorSpec]:
        """The tensors of a publication, sorted by name; the same on every rank."""
        self._started()
        return list(self._manifest)

    def join_sync(self, spec: SyncGroupSpec) -> None:
        """Enter the weight-sync group. Rank 0 alone does; on the others nothing happens."""
        state = self._started()
        if self._rank == 0:
            self._close_sync()
            self._sync_group = SyncGroup(spec, device=str(state.device))
            self._sender = WeightSender(self._sync_group, self._manifest)

    def publish(self, version: int) -> PublishReport:
        """Stream the weights. Rank 0 sends and reports; the others take part in gathering and report nothing sent."""
        state = self._started()
        if version != self._version:
            raise RunError(f"asked to publish version {version}, but the learner is at version {self._version}")
        tensors = export_tensors(state.policy, self._manifest, device=state.device)
        with torch.no_grad():
            if self._rank != 0:
                for _ in tensors:
                    pass
                return PublishReport(version=version, num_bytes=0, seconds=0.0, fingerprints={})
            if self._sender is None:
                raise RunError("asked to publish before rank 0 joined the sync group")
            try:
                return self._sender.send(tensors, version)
            except SyncError:
                # The other ranks are inside the gathering of the rest: leave none of them waiting for this one.
                for _ in tensors:
                    pass
                raise

    def train(self, batch: RankBatch) -> StepResult:
        """One batch: `updates_per_batch` optimizer steps, each of which makes a new version, skipped or not."""
        state = self._started()
        if batch.version != self._version:
            raise RunError(f"batch is for version {batch.version}, but the learner is at version {self._version}")
        sums, num_skipped = state.update.run(batch)
        self._version += self._algorithm.updates_per_batch
        sums.maximum("memory/learner_rss_mb", resident_memory_mb())
        metrics = sums.reduce()
        metrics["optim/skipped_steps"] = float(num_skipped)
        return StepResult(version=self._version, metrics=metrics, num_skipped_steps=num_skipped)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        images: Sequence[Sequence[ImageArray]] | None = None,
        as_sampled: bool = False,
    ) -> list[FloatArray]:
        """Log-probability of each token given those before it: entry i of a result belongs to token i + 1.

        `images[i]` are those of sequence i. `as_sampled` leaves out the ids that are never sampled. The work is dealt
        over the ranks, and all of them return all results.
        """
        state = self._started()
        return score_sequences(
            state.policy,
            sequences,
            temperature=temperature,
            max_tokens=self._learner.max_tokens_per_micro_batch,
            device=state.device,
            images=images,
            banned_token_ids=self._banned if as_sampled else (),
        )

    def save(self, path: Path) -> None:
        """Copy the state to host memory and write it to `path` in the background."""
        self._started().checkpoint.save(path, version=self._version)

    def save_done(self) -> None:
        """Wait for the last `save`. Raises CheckpointError when it failed on any rank."""
        self._started().checkpoint.wait()
        return_host_memory()  # the copy was as large as the whole state

    def load(self, path: Path) -> int:
        """Restore what `save` wrote, on any number of ranks; returns the version."""
        self._version = self._started().checkpoint.load(path)
        return self._version

    def memory(self) -> float:
        """Resident host memory of this process, in MiB."""
        return resident_memory_mb()

    def close(self) -> None:
        """Leave all groups. May be called at any time, also when `start` failed half-way; waits for no other rank."""
        self._close_sync()
        self._state = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close_sync(self) -> None:
        self._sender = None
        group, self._sync_group = self._sync_group, None
        if group is not None:
            group.close()

    def _started(self) -> _Started:
        if self._state is None:
            raise RunError("the learner was asked to work before start() or after close()")
        return self._state


class _Reference:
    """The frozen initial policy."""

    def __init__(
        self, policy: ShardedPolicy, temperature: float, banned: Sequence[int], *, device: torch.device
    ) -> None:
        self._policy = policy
        self._temperature = temperature
        self._banned_K = torch.tensor(banned, dtype=torch.int64, device=device) if banned else None

    @torch.no_grad()
    def logprobs(self, inputs: ForwardInputs) -> Tensor:
        """Log-probabilities [N] of the completion tokens."""
        logprobs, _ = self._policy.module.logprobs(inputs, temperature=self._temperature, banned_K=self._banned_K)
        # Its units never see a backward pass, which is what frees them and their bookkeeping for the policy.
        self._policy.reshard()
        forget_forward_order(self._policy.module)
        return logprobs
