"""`s2rl eval`: a held-out file on a saved checkpoint, with real engines.

A training checkpoint is evaluated as it was trained: one learner process restores the shards and publishes them to the
rollout workers through the same proven weight sync that training uses. A plain model folder goes straight into
the engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from s2rl.ckpt import CheckpointInfo, find_checkpoint, verify
from s2rl.cluster import Cluster
from s2rl.config import RunConfig, check_files, check_machine, load_config
from s2rl.errors import ConfigError
from s2rl.rewards.pool import GradingPool
from s2rl.trainer.evaluation import EvalResult, Evaluation
from s2rl.trainer.parts import LearnerHandle, WorkerHandle
from s2rl.trainer.placement import RayPlacement
from s2rl.trainer.pool import RolloutPool, close_quietly
from s2rl.trainer.sampling import eval_sampling
from s2rl.trainer.trainer import read_eval_prompts, weight_sync
from s2rl.trainer.waiting import Progress
from s2rl.types import UNKNOWN_VERSION, Encoded, Rollout


def run_evaluation(
    *,
    ckpt: Path,
    data: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    out: Path | None = None,
) -> dict[str, float]:
    """Evaluate `ckpt` (checkpoint, run folder or model folder) on the rows of `data`.

    What is not given comes from the evaluation settings of the checkpoint's run, or of `config`. Writes every
    completion to `out`. Raises `UserError` for what the user can mend.
    """
    checkpoint = find_checkpoint(ckpt)
    if checkpoint is not None:
        verify(checkpoint)
    run = _configured(ckpt, checkpoint, config, overrides, data=data, limit=limit)
    changes = {"samples": samples, "temperature": temperature, "max_new_tokens": max_new_tokens}
    sampling = run.eval.sampling.model_copy(update={k: v for k, v in changes.items() if v is not None})
    run = run.model_copy(update={"eval": run.eval.model_copy(update={"sampling": sampling})})
    if checkpoint is None:
        run = run.model_copy(update={"model": run.model.model_copy(update={"path": ckpt.absolute()})})
    check_files(run)
    check_machine(run)
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}; make it first")
    prompts = read_eval_prompts(run)
    cluster = Cluster(run.cluster, name=f"eval-{run.name}", log_dir=None)
    try:
        cluster.start()
        placement = RayPlacement(cluster, run)
        placement.check()
        result, rollouts = asyncio.run(_evaluate(run, placement, prompts, checkpoint))
    finally:
        cluster.stop()
    if out is not None:
        _write(out, prompts, rollouts, num_samples=sampling.samples)
    return result.metrics()


def _configured(
    ckpt: Path,
    checkpoint: CheckpointInfo | None,
    config: Path | None,
    overrides: Sequence[str],
    *,
    data: Path,
    limit: int | None,
) -> RunConfig:
    """Configuration of the evaluation: the run's own, or `config`, with `data` as the only held-out file."""
    if config is None:
        if checkpoint is None:
            raise ConfigError(
                f"--ckpt {ckpt}: a model folder does not say how to grade. Give --config with the YAML file of "
                f"a run: its rewards, "
                "columns and budgets are used"
            )
        config = checkpoint.run_dir / "config.yaml"
    if not data.is_file():
        raise ConfigError(f"--data {data}: no such file")
    run = load_config(config, overrides)
    source = run.data.train[0].model_copy(
        update={"path": str(data.absolute()), "split": None, "subset": None, "limit": limit}
    )
    return run.model_copy(update={"eval": run.eval.model_copy(update={"data": (source,)})})


async def _evaluate(
    run: RunConfig, placement: RayPlacement, prompts: Sequence[Encoded], checkpoint: CheckpointInfo | None
) -> tuple[EvalResult, list[Rollout]]:
    grader = GradingPool(run.rewards)
    workers: list[WorkerHandle] = []
    learner: LearnerHandle | None = None
    pool: RolloutPool | None = None
    try:
        await grader.start()
        workers += await asyncio.gather(*(placement.worker(i) for i in range(run.rollout.workers)))
        starts: list[Any] = [w.start() for w in workers]
        if checkpoint is not None:
            learner = await placement.learner()
            starts.append(learner.start())
        await asyncio.gather(*starts)
        progress = Progress(limit_s=run.limits.progress_s)
        pool = RolloutPool(workers, replace=_no_replacement, max_restarts=0, progress=progress)
        pool.start()
        version = UNKNOWN_VERSION
        if learner is not None and checkpoint is not None:
            version = await _load(run, learner, pool, prompts, checkpoint, progress)
        else:
            for slot in pool.slots:
                slot.version = version
        evaluation = Evaluation(
            pool=pool,
            grader=grader,
            prompts=prompts,
            sampling=eval_sampling(run),
            num_samples=run.eval.sampling.samples,
            correct_above=run.eval.correct_above,
            seed=run.seed,
            version=version,
        )
        return await evaluation.run()
    finally:
        await grader.close()
        await (pool.close() if pool is not None else close_quietly(workers))
        if learner is not None:
            await learner.close()


async def _no_replacement(index: int) -> WorkerHandle:
    raise AssertionError(f"rollout worker {index}: an evaluation replaces no workers")


async def _load(
    run: RunConfig,
    learner: LearnerHandle,
    pool: RolloutPool,
    prompts: Sequence[Encoded],
    checkpoint: CheckpointInfo,
    progress: Progress,
) -> int:
    version = await learner.load(checkpoint.learner_dir)
    sync = weight_sync(run, learner=learner, pool=pool, prompts=prompts, progress=progress)
    await sync.connect()
    await sync.publish(version)
    return version


def _write(out: Path, prompts: Sequence[Encoded], rollouts: Sequence[Rollout], *, num_samples: int) -> None:
    """One JSON object per completion, in the order of the rows."""
    with out.open("w", encoding="utf-8") as file:
        for index, rollout in enumerate(rollouts):
            prompt = prompts[index // num_samples].prompt
            completion = rollout.completion
            record = {
                "row": prompt.row,
                "data_source": prompt.data_source,
                "answer": prompt.answer,
                "text": completion.text,
                "score": rollout.score.total,
                "parts": dict(rollout.score.parts),
                "status": rollout.status.value,
                "finish_reason": completion.finish_reason.value,
                "num_tokens": len(completion.token_ids),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
