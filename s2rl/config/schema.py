"""The configuration of a run, section by section.

Every part of s2rl receives its own section and its collaborators, never the root. The docstring under a field is its
documentation: docs/config.md is generated from it. Checks that need one section only live here; checks across sections
are in `checks.py`. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]

Device = Literal["cpu", "cuda", "npu"]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, field docstrings are descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelConfig(Section):
    """The model that is trained."""

    path: Path
    """Folder with config.json, tokenizer and safetensors, as on the Hugging Face hub."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; the model's own when not set."""
    trust_remote_code: bool = False
    """Whether Python code in the model folder may be executed."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention implementation of the learner. `auto`: flash_attention_2 on cuda when installed, else sdpa."""


class DataSource(Section):
    """One file or data set of prompts."""

    path: str
    """A parquet, JSONL or JSON file, or the name of a data set for `datasets.load_dataset`."""
    subset: str | None = None
    """Configuration of a named data set (`main` for `openai/gsm8k`). Not allowed for files."""
    split: str | None = None
    """Split of a named data set; may be left out when there is only one. Not allowed for files."""
    limit: Positive | None = None
    """Use the first N rows only."""


class ColumnsConfig(Section):
    """Where a row keeps its parts; dots reach into nested columns. The defaults are verl's columns."""

    prompt: str = "prompt"
    """Chat messages (list of role and content) or a plain string."""
    answer: str = "reward_model.ground_truth"
    """The reference answer."""
    data_source: str = "data_source"
    """Name of the data source, used to choose rewards; may be absent."""
    extra: str = "extra_info"
    """Further fields for reward functions; may be absent."""


class DataConfig(Section):
    """Training prompts."""

    train: tuple[DataSource, ...] = Field(min_length=1)
    """Files or data sets; their rows are put one after the other and shuffled together."""
    columns: ColumnsConfig = ColumnsConfig()
    """Column names of all files."""
    plain_prompts: Literal["text", "chat"] = "text"
    """What a prompt column with plain strings holds: the whole prompt, or (`chat`) one user message that goes through
    the chat template."""
    max_prompt_tokens: Positive = 1024
    """Budget for the encoded prompt."""
    overlong: Literal["drop", "error"] = "drop"
    """What happens to a prompt over its budget: dropped and counted, or the run is refused."""
    shuffle: bool = True
    """Shuffle each epoch anew, from the run's seed."""
    system_prompt: str | None = None
    """Put in front of chat messages that do not start with a system message. Not for plain prompts."""


class RewardConfig(Section):
    """One reward function."""

    function: str
    """Name of a built-in (`exact_match`, `numeric`, `math_boxed`, `gsm8k`) or a path `package.module:function`."""
    weight: float = 1.0
    """Factor on this function's total when several apply to one row."""
    data_sources: tuple[str, ...] = ()
    """Apply to rows of these data sources only; empty: to all."""
    args: dict[str, str | int | float | bool | None] = {}
    """Keyword arguments for the function."""


class GradingConfig(Section):
    """How rewards are computed."""

    functions: tuple[RewardConfig, ...] = Field(min_length=1)
    """Reward functions; the score of a completion is the weighted sum of those that apply."""
    processes: Positive = 1
    """Size of the process pool."""
    time_limit_s: PositiveFloat = 10.0
    """Limit per call; a call over it scores zero and is counted."""


class SamplingConfig(Section):
    """Sampling parameters for training rollouts."""

    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Softmax temperature; the learner divides its logits by the same number. vLLM takes 0.01 to 2."""
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Only 1.0: with a truncated distribution the engine's log-probabilities are renormalised over tokens that the
    learner does not know, and importance ratios would be wrong."""
    top_k: Literal[0] = 0
    """Only 0 (no limit), for the same reason as `top_p`."""
    max_new_tokens: Positive = 512
    """Token budget of one completion, over all interruptions."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Token ids that end a completion, besides the model's end-of-sequence ids."""
    banned_token_ids: tuple[NonNegative, ...] = ()
    """Token ids that are never sampled."""


class RolloutConfig(Section):
    """Rollout workers: one vLLM engine each."""

    workers: Positive = 1
    """Number of engines."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters for training."""
    dtype: Dtype = "bfloat16"
    """Compute type of the engine."""
    tensor_parallel: Positive = 1
    """Devices per engine."""
    max_model_len: Positive = 2048
    """Longest prompt plus completion that the engine accepts."""
    max_num_seqs: Positive = 64
    """Completions that one engine decodes at once."""
    max_num_batched_tokens: Positive = 2048
    """Tokens per engine step (chunked prefill)."""
    prefix_caching: bool = True
    """Share the prompt's keys and values among the completions of a group. Needs `kv_on_update: recompute`."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of running sequences' keys and values at a weight update: computed anew under the new weights, or
    kept. Either way no sequence is lost or restarted."""
    enforce_eager: bool = False
    """Switch graph capture and compilation off. Always off on the CPU."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of an accelerator's memory for the engine. Not used on the CPU."""
    kv_cache_gb: PositiveFloat = 1.0
    """Key-value cache on the CPU, in GiB. Not used on accelerators."""
    block_size: Positive | None = None
    """Tokens per key-value block; the engine's default when not set (32 on the CPU)."""
    threads: Positive = 1
    """CPU threads per engine."""
    engine_args: dict[str, str | int | float | bool | None] = {}
    """Further vLLM engine arguments, passed as they are. Arguments that s2rl sets itself are refused."""


class OptimizerConfig(Section):
    """AdamW and its schedule, counted in optimizer steps."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, over the run's optimizer steps."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: Fraction = 0.0
    """Last learning rate of `linear` and `cosine` as a share of the peak."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm. A step whose norm is not finite is skipped and counted."""


class LearnerConfig(Section):
    """Policy learner: FSDP2 over `ranks` processes."""

    ranks: Positive = 1
    """Number of learner processes, one device each."""
    dtype: Dtype = "bfloat16"
    """Compute type; masters and gradient reduction are float32."""
    max_tokens_per_micro_batch: Positive = 4096
    """Budget (padding included) of one forward and backward on one rank."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Packed sequences (no padding) or length-sorted rows. `auto`: packed where the attention backend keeps packed
    sequences apart at no cost (flash_attention_2), else rows."""
    prompt_sharing: Literal["auto", "on", "off"] = "auto"
    """Compute a prompt once for the completions of its group that meet in a row, each of which sees the prompt and
    itself only. `auto`: on for rows (not packed) of a model that only has full attention, with the attention backend
    `sdpa`."""
    logprob_chunk_tokens: Positive = 1024
    """Completion tokens whose logits exist at once."""
    activation_checkpointing: bool = False
    """Recompute layer activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    reshard_after_forward: Literal["auto", "on", "off"] = "auto"
    """Free gathered layer weights after forward. `auto`: on when there is more than one rank."""
    wrap_classes: tuple[str, ...] = ()
    """Module classes that become one FSDP unit each; the model's own list when empty."""
    threads: Positive = 1
    """CPU threads per rank."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""


class KlConfig(Section):
    """KL divergence to the initial policy, as a loss term."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the term. 0: no reference model is held."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence (Schulman, 2020)."""


class AlgorithmConfig(Section):
    """GRPO: groups, advantage and loss."""

    group_size: Positive = 8
    """Completions per prompt."""
    groups_per_step: Positive = 8
    """Groups per batch."""
    updates_per_batch: Positive = 1
    """Optimizer steps on each batch. Each one makes a new version."""
    advantage: Literal["group_norm", "group_mean"] = "group_norm"
    """(R - mean) / (std + 1e-6) over the group (GRPO), or R - mean (Dr. GRPO)."""
    loss: Literal["clipped"] = "clipped"
    """Policy loss, by name."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all completion tokens of the batch, or mean over sequences of their token means."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: PositiveFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    old_policy: Literal["learner", "rollout"] = "learner"
    """What the clipped ratio is taken against: the learner's own policy at the start of the batch (decoupled, with the
    truncated importance correction for the difference to the rollout policy), or the rollout policy."""
    importance_cap: PositiveFloat | None = 2.0
    """Cap of the importance weight learner / rollout per token (`old_policy: learner`). None: no correction."""
    kl: KlConfig = KlConfig()
    """Divergence from the initial policy."""


class StalenessConfig(Section):
    """How far rollout may run ahead of the learner."""

    max_staleness: NonNegative = 1
    """No token is trained in the step from version v to v+1 if it was sampled by a version older than
    v - max_staleness. 0 is strict on-policy training."""
    depth: Positive | Literal["auto"] = "auto"
    """Groups outstanding at once: a number, or tuned below the bound so that data is as fresh as the learner allows."""


class SyncConfig(Section):
    """Weight sync from learner to rollout workers."""

    every: Positive = 1
    """Batches between two publications."""
    bucket_mb: PositiveFloat = 16.0
    """Size of one transfer buffer, in MiB. Six exist at a time on each side."""
    verify: Literal["always"] = "always"
    """Every sync is proven: fingerprints of all bytes and a probe of log-probabilities."""
    probe_tokens: Positive = 48
    """Length of the probe sequence."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean |difference| of the probe's log-probabilities, as a share of |log-probability| where that is above
    1. Not set: 1e-3 when both sides compute in float32, else 0.05."""


class ContractConfig(Section):
    """The check before the first step."""

    tokens: Positive = 256
    """Completion tokens that are compared."""
    tolerance: PositiveFloat | None = None
    """Largest mean |difference| of log-probabilities. Not set: 1e-4 when both sides compute in float32, else 5e-2.
    (Rounding a logit between 16 and 32 to bfloat16 once moves it by 0.03 on average.)"""


class EvalSamplingConfig(Section):
    """Sampling parameters for evaluation; every vLLM setting is allowed here."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: NonNegative = 0
    """0: no limit."""
    max_new_tokens: Positive | None = None
    """Token budget; the training budget when not set."""
    samples: Positive = 1
    """Completions per prompt."""


class EvalConfig(Section):
    """Held-out evaluation on the rollout workers while training goes on."""

    data: tuple[DataSource, ...] = ()
    """Held-out files; empty: no evaluation."""
    every: Positive = 10
    """Batches between two evaluations."""
    at_start: bool = True
    """Evaluate version 0 too."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    """Sampling parameters."""
    correct_above: float = 0.5
    """A completion counts as correct when its score is above this."""


class CheckpointConfig(Section):
    """Training checkpoints."""

    every: Positive | None = None
    """Batches between two checkpoints. Not set: at the end (and when interrupted) only."""
    keep: Positive = 2
    """Complete checkpoints kept; older ones are pruned after a newer one is complete."""
    resume: Literal["auto", "never"] = "auto"
    """`auto`: go on from the run folder's last complete checkpoint when there is one. `never`: refuse a run folder that
    already holds a run."""


class LoggingConfig(Section):
    """What is written while training."""

    live: Literal["auto", "on", "off"] = "auto"
    """Live view. `auto`: on when standard output is a terminal; plain lines otherwise."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (the package must be installed)."""
    rollouts: bool = True
    """Write every group to rollouts.jsonl."""


class LimitsConfig(Section):
    """Time limits, in seconds. When one passes, the run says who waited for whom and ends."""

    start_s: PositiveFloat = 600.0
    """Loading a model into an engine or a learner."""
    step_s: PositiveFloat = 1800.0
    """One training step."""
    sync_s: PositiveFloat = 600.0
    """One weight sync, its proof included."""
    progress_s: PositiveFloat = 900.0
    """No completion, no group and no step for this long."""
    save_s: PositiveFloat = 1800.0
    """Writing one checkpoint."""
    group_s: PositiveFloat = 3600.0
    """Sampling one group, from hand-over to its last completion; over it the group is dropped and counted."""
    worker_restarts: NonNegative = 3
    """Replacements of dead rollout workers over the run."""


class ClusterConfig(Section):
    """Ray."""

    address: str | None = None
    """Join this running cluster (`auto` or host:port). Not set: a local one is started and stopped by the run."""
    env_vars: dict[str, str] = {}
    """Environment variables for all processes on all nodes."""


class RunConfig(Section):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run; its folder is `<runs_dir>/<name>`."""
    runs_dir: Path = Path("runs")
    """Where run folders are made."""
    seed: NonNegative = 0
    """Seed of data order, sampling and initialisation."""
    device: Device = "cpu"
    """Where engines and learners compute."""
    steps: Positive
    """Batches to train. The run ends with version steps x algorithm.updates_per_batch."""
    stop_at_accuracy: Fraction | None = None
    """End early when eval/accuracy reaches this."""
    model: ModelConfig
    """The model that is trained."""
    data: DataConfig
    """Training prompts."""
    rewards: GradingConfig
    """Reward functions."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout workers."""
    learner: LearnerConfig = LearnerConfig()
    """Policy learner."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage and loss."""
    staleness: StalenessConfig = StalenessConfig()
    """How far rollout may run ahead."""
    sync: SyncConfig = SyncConfig()
    """Weight sync."""
    contract: ContractConfig = ContractConfig()
    """Start-up check."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Training checkpoints."""
    logging: LoggingConfig = LoggingConfig()
    """What is written."""
    limits: LimitsConfig = LimitsConfig()
    """Time limits."""
    cluster: ClusterConfig = ClusterConfig()
    """Ray."""

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.runs_dir / self.name
