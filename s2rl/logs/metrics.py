"""Every metric that a run writes, with its unit and meaning. docs/metrics.md is generated from this table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MetricValue = float | int | bool | None
"""None where a number does not exist, for instance the loss of a skipped step; JSON has no NaN."""
Metrics = Mapping[str, MetricValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One name. `*` at its end stands for a part that the run decides."""

    name: str
    unit: str
    meaning: str


def _metrics(group: str, rows: Iterable[tuple[str, str, str]]) -> tuple[Metric, ...]:
    return tuple(
        Metric(name=f"{group}/{name}" if group else name, unit=unit, meaning=text) for name, unit, text in rows
    )


METRICS: tuple[Metric, ...] = (
    *_metrics(
        "",
        [
            (
                "step",
                "batches",
                "Batches trained so far; the row describes the last of them. Row 0, where there is one, holds "
                "the evaluation before training.",
            ),
            ("version", "optimizer steps", "Completed optimizer steps after this batch."),
        ],
    ),
    *_metrics(
        "reward",
        [
            ("mean", "score", "Mean score of all completions of the batch."),
            ("std", "score", "Standard deviation of these scores."),
            (
                "mixed_groups",
                "share",
                "Groups whose completions do not all have the same score; only they teach something.",
            ),
            ("part/*", "score", "Mean of one part of the score, as the reward function names it."),
            (
                "grader_timeouts",
                "completions",
                "Completions of the batch whose grading outlived its limit (scored zero).",
            ),
            ("grader_errors", "completions", "Completions of the batch whose grading failed (scored zero)."),
        ],
    ),
    *_metrics(
        "eval",
        [
            ("accuracy", "share", "Held-out completions with a score above `eval.correct_above`."),
            ("score_mean", "score", "Mean score of the held-out completions."),
            (
                "version",
                "optimizer steps",
                "The version that was evaluated: every token of the evaluation was sampled by it.",
            ),
            ("samples", "completions", "Completions that were scored."),
            ("length_mean", "tokens", "Mean length of the completions."),
            ("truncated", "share", "Completions that the token budget ended."),
        ],
    ),
    *_metrics(
        "loss",
        [
            ("total", "", "Policy loss plus KL term, as it is minimised; mean over the batch's optimizer steps."),
            ("policy", "", "The policy loss alone."),
            ("kl", "nats", "The KL term with its coefficient; only with `algorithm.kl.coefficient` above 0."),
        ],
    ),
    *_metrics(
        "policy",
        [
            (
                "kl_rollout",
                "nats per token",
                "Estimated KL divergence (k3) between rollout policy and learner at the start of the batch.",
            ),
            (
                "logprob_diff_mean",
                "nats",
                "Mean |log-probability by the learner - by the rollout engine| over the completion tokens of the "
                "batch, before its first optimizer step.",
            ),
            ("logprob_diff_max", "nats", "The largest of these differences."),
            (
                "logprob_diff_mean_fresh",
                "nats",
                "The same mean over tokens that were sampled by the version being trained: what is left is the "
                "numerical noise of two engines. Absent when there is no such token.",
            ),
            ("ratio_mean", "ratio", "Mean probability ratio that the loss clips."),
            ("clip_fraction", "share", "Completion tokens whose ratio was clipped, so that they give no gradient."),
            (
                "entropy",
                "nats per token",
                "Mean entropy of the learner's next-token distribution at completion tokens, at the sampling "
                "temperature.",
            ),
            (
                "importance_mean",
                "ratio",
                "Mean weight of the truncated importance correction (learner over rollout policy).",
            ),
            ("importance_max", "ratio", "Largest of these weights before truncation."),
            (
                "importance_capped_fraction",
                "share",
                "Completion tokens whose weight was truncated at `algorithm.importance_cap`.",
            ),
        ],
    ),
    *_metrics(
        "staleness",
        [
            (
                "max",
                "optimizer steps",
                "Age of the oldest token of the batch in its last optimizer step: that step's version minus the "
                "version that sampled the token. Never above `staleness.max_staleness`.",
            ),
            ("mean", "optimizer steps", "Mean age of the batch's completion tokens."),
        ],
    ),
    *_metrics(
        "queue",
        [
            (
                "drawn",
                "prompts",
                "Prompts drawn since the run began: waiting + in_flight + finished + trained + dropped.",
            ),
            ("waiting", "prompts", "Admitted, not yet at a worker."),
            ("in_flight", "prompts", "Being sampled or graded."),
            ("finished", "prompts", "Groups complete and not yet trained."),
            ("trained", "prompts", "Trained since the run began."),
            ("dropped", "prompts", "Given up since the run began; rollouts.jsonl holds the reason of each."),
            ("depth", "prompts", "Groups that may be outstanding at once."),
        ],
    ),
    *_metrics(
        "batch",
        [
            ("samples", "completions", "Completions that were computed."),
            (
                "skipped_samples",
                "completions",
                "Completions with advantage zero: counted in every mean, but not computed, as they give no gradient.",
            ),
            ("tokens", "tokens", "Prompt and completion tokens that were computed; a shared prompt counts once."),
            ("loss_tokens", "tokens", "Completion tokens that were computed."),
            ("micro_batches", "count", "Forward and backward passes per rank."),
            ("padding_fraction", "share", "Padding positions over all positions computed."),
        ],
    ),
    *_metrics(
        "rollout",
        [
            ("length_mean", "tokens", "Mean length of the batch's completions."),
            ("length_max", "tokens", "Longest of them."),
            ("truncated", "share", "Completions that the token budget ended."),
        ],
    ),
    *_metrics(
        "time",
        [
            ("step_s", "s", "From the end of the last step to the end of this one, sync included."),
            ("train_s", "s", "The learner's part of the step: forward, backward, optimizer."),
            ("forward_backward_s", "s", "Forward and backward passes, the slowest rank."),
            ("optimizer_s", "s", "Clipping and optimizer step, the slowest rank."),
            ("learner_idle_s", "s", "The learner waited this long for the batch."),
            (
                "rollout_idle_s",
                "s",
                "Seconds of this step in which a rollout worker had nothing to sample, mean over workers.",
            ),
            ("rollout_busy_s", "s", "Seconds of this step in which a rollout worker sampled, mean over workers."),
            ("eval_s", "s", "Duration of the evaluation, which ran beside training."),
        ],
    ),
    *_metrics(
        "throughput",
        [
            ("train_tokens_per_s", "tokens/s", "Prompt and completion tokens of the batch over `time/step_s`."),
            (
                "rollout_tokens_per_s",
                "tokens/s",
                "Completion tokens that all workers sampled during the step, evaluation included, over `time/step_s`.",
            ),
        ],
    ),
    *_metrics(
        "sync",
        [
            ("seconds", "s", "One weight sync: publication, loading and proof. Absent in steps without one."),
            ("bytes", "bytes", "Size of the weights that were sent to each worker."),
            ("stalled_s", "s", "Longest time that a worker's generation stood still for it."),
            (
                "verified",
                "0 or 1",
                "1: fingerprints of all bytes and the probe's log-probabilities agreed on every worker. A sync "
                "that cannot be proven ends the run.",
            ),
            (
                "probe_difference",
                "nats",
                "Mean |difference| between learner and engine on the probe sequence, the worst worker.",
            ),
        ],
    ),
    *_metrics(
        "optim",
        [
            ("lr", "", "Learning rate of the batch's last optimizer step."),
            ("grad_norm", "", "Norm of the gradient before clipping, the largest of the batch's optimizer steps."),
            (
                "skipped_steps",
                "steps",
                "Optimizer steps of the batch that were skipped because the gradient norm was not finite.",
            ),
        ],
    ),
    *_metrics(
        "memory",
        [
            ("learner_rss_mb", "MiB", "Resident memory of the largest learner rank."),
            ("rollout_rss_mb", "MiB", "Resident memory of the largest rollout worker, its engine included."),
            ("controller_rss_mb", "MiB", "Resident memory of the process that drives the run."),
        ],
    ),
)

_HEAD = """\
# Metrics

Generated from `s2rl/logs/metrics.py` by `python -m s2rl.logs.docs`; a test checks that it is current.

`RUN/metrics.jsonl` holds one JSON object per batch; TensorBoard and Weights & Biases get the same numbers by the same
names.
A number that does not exist (the loss of a skipped step, for instance) is `null`: JSON has no NaN.
A key is absent where nothing was measured: `eval/...` in batches without an evaluation, `sync/...` without a sync.

`RUN/rollouts.jsonl` holds one object per group, before any filter: `group_id`, `prompt_id`, `row`, `epoch`,
`data_source`, `prompt`, `answer`, `fate` (`trained` or `dropped:<reason>`), `step` (the batch that trained it, or that
was under way when it was dropped), `worker`, `taken_version`, and `rollouts`: per completion `index`, `text`, `score`,
`parts`, `status`, `finish_reason`, `num_tokens`, `version_min`, `version_max`.
"""


def known(name: str) -> bool:
    """Whether a metric of this name is in the table."""
    return any(name == m.name or (m.name.endswith("*") and name.startswith(m.name[:-1])) for m in METRICS)


def markdown() -> str:
    """docs/metrics.md."""
    lines = [_HEAD, "| name | unit | meaning |", "| --- | --- | --- |"]
    for metric in METRICS:
        meaning = metric.meaning.replace("|", "\\|")
        lines.append(f"| `{metric.name.replace('*', 'NAME')}` | {metric.unit} | {meaning} |")
    return "\n".join(lines) + "\n"
