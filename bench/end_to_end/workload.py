"""What a finished run generated and trained, taken from its folder: the input of the two pure programs.

Prompts are encoded again with the run's own encoder. Of completions the run keeps lengths, texts and scores, no token
ids: the text is encoded again and cut or filled up to the length. Lengths decide the cost, ids hardly do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from s2rl.config import RunConfig
from s2rl.data.encode import Encoder
from s2rl.data.rows import load_rows
from s2rl.data.tokenizer import load_tokenizer
from s2rl.trainer.batching import plan_batch, samples_of
from s2rl.types import (
    Completion,
    Encoded,
    FinishReason,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    RowLayout,
    Score,
)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts and how many tokens to generate for each."""

    prompts: list[list[int]]
    lengths: list[int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a micro-batch."""

    token_ids: list[int]
    prompt_len: int
    advantage: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """The micro-batches that one optimizer step computed. Samples without effect on the gradient are not among them."""

    micro_batches: list[list[Row]]
    num_loss_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """All of a run."""

    rollouts: Sequences
    evaluations: Sequences
    steps: list[Step]

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Workload:
        """What `save` wrote."""
        data = json.loads(path.read_text())
        return Workload(
            rollouts=Sequences(**data["rollouts"]),
            evaluations=Sequences(**data["evaluations"]),
            steps=[
                Step(
                    micro_batches=[[Row(**row) for row in micro] for micro in step["micro_batches"]],
                    num_loss_tokens=step["num_loss_tokens"],
                )
                for step in data["steps"]
            ],
        )


def read_workload(config: RunConfig) -> Workload:
    """From the run folder of `config`, whose run must be finished and have started at step 0."""
    metrics = _read(config.run_dir / "metrics.jsonl")
    records = _read(config.run_dir / "rollouts.jsonl")
    tokenizer = load_tokenizer(config.model)
    encoder = Encoder(tokenizer, config.data)
    by_step: dict[int, list[RolloutGroup]] = {}
    rollouts = Sequences(prompts=[], lengths=[])
    for record in records:
        if not record["rollouts"]:
            continue
        group = _group(record, encoder, tokenizer)
        for rollout in group.rollouts_G:
            rollouts.prompts.append(list(group.encoded.token_ids))
            rollouts.lengths.append(len(rollout.completion.token_ids))
        if record["fate"] == "trained":
            by_step.setdefault(int(record["step"]), []).append(group)
    return Workload(
        rollouts=rollouts,
        evaluations=_evaluations(config, encoder, metrics),
        steps=[_step(config, by_step[step]) for step in sorted(by_step)],
    )


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _group(record: Mapping[str, Any], encoder: Encoder, tokenizer: Any) -> RolloutGroup:
    text = record["prompt"]
    prompt = Prompt(
        prompt_id=record["prompt_id"],
        row=record["row"],
        epoch=record["epoch"],
        messages=None if isinstance(text, str) else tuple(Message(**m) for m in text),
        text=text if isinstance(text, str) else None,
        answer=record["answer"],
    )
    encoded = encoder.encode(prompt)
    assert isinstance(encoded, Encoded), encoded
    return RolloutGroup(
        group_id=record["group_id"],
        encoded=encoded,
        rollouts_G=tuple(_rollout(record["group_id"], r, tokenizer) for r in record["rollouts"]),
        worker=record["worker"],
        taken_version=record["taken_version"],
    )


def _rollout(group_id: str, record: Mapping[str, Any], tokenizer: Any) -> Rollout:
    length = int(record["num_tokens"])
    ids = tokenizer(record["text"], add_special_tokens=False)["input_ids"][:length]
    ids += [tokenizer.eos_token_id] * (length - len(ids))
    return Rollout(
        completion=Completion(
            group_id=group_id,
            index=record["index"],
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.zeros(length, dtype=np.float32),
            versions=np.zeros(length, dtype=np.int32),
            finish_reason=FinishReason(record["finish_reason"]),
            text=record["text"],
        ),
        score=Score(total=record["score"]),
    )


def _step(config: RunConfig, groups: Sequence[RolloutGroup]) -> Step:
    """The same plan that the run made: a pure function of the groups."""
    samples = [s for g in groups for s in samples_of(g, advantage=config.algorithm.advantage)]
    plan = plan_batch(
        samples,
        version=0,
        num_ranks=config.learner.ranks,
        max_tokens=config.learner.max_tokens_per_micro_batch,
        layout=RowLayout(),
        skip_zero_advantage=config.algorithm.kl.coefficient == 0.0,
    )
    micros = [micro for rank in plan.rank_batches for micro in rank.micro_batches]
    return Step(
        micro_batches=[
            [Row(token_ids=s.token_ids.tolist(), prompt_len=s.prompt_len, advantage=s.advantage) for s in micro.samples]
            for micro in micros
        ],
        num_loss_tokens=plan.rank_batches[0].num_loss_tokens,
    )


def _evaluations(config: RunConfig, encoder: Encoder, metrics: Sequence[Mapping[str, Any]]) -> Sequences:
    """Every evaluation's prompts. The run logs the mean length only; all get it, which is the cheapest way to generate
    so many tokens."""
    found = Sequences(prompts=[], lengths=[])
    if not config.eval.data:
        return found
    encoded = [encoder.encode(p) for p in load_rows(config.eval.data, columns=config.data.columns).prompts()]
    prompts = [list(e.token_ids) for e in encoded if isinstance(e, Encoded)]
    for row in metrics:
        if "eval/length_mean" not in row:
            continue
        count = round(row["eval/samples"])
        total = round(row["eval/length_mean"] * count)
        for index in range(count):
            found.prompts.append(prompts[index // config.eval.sampling.samples])
            found.lengths.append(total // count + (index < total % count))
    return found
