"""From a `GroupRequest` to what an engine takes, and the reasons for which a request is refused. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s2rl.types import GroupRequest, SamplingSpec

MIN_TEMPERATURE = 0.01
"""vLLM raises a smaller temperature to this without telling: log-probabilities would be of another distribution."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses more."""
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take, known once it is built."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    can_stop_at_strings: bool
    """Whether there is a tokenizer, which stop strings need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParams:
    """How an engine samples one sequence. `temperature` 0 is greedy, `top_k` 0 no limit."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    """All of them, end-of-sequence ids included: the engine adds none."""
    banned_token_ids: tuple[int, ...]


def sequence_params(request: GroupRequest, *, index: int, limits: EngineLimits) -> SequenceParams:
    """Parameters of completion `index`. The request must have passed `refusal`.

    The token budget is cut to what `max_model_len` leaves. Banned ids get a logit of minus infinity before the softmax,
    so reported log-probabilities are those of the distribution over the other tokens, as the learner's are.
    """
    spec = request.sampling
    stop = set(spec.stop_token_ids)
    if not spec.ignore_eos:
        stop.update(limits.eos_token_ids)
    return SequenceParams(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        max_tokens=min(spec.max_new_tokens, limits.max_model_len - len(request.encoded.token_ids)),
        seed=(request.seed + index) % _MAX_SEED,
        stop_token_ids=tuple(sorted(stop)),
        banned_token_ids=spec.banned_token_ids,
    )


def refusal(request: GroupRequest, limits: EngineLimits) -> str | None:
    """Why this request cannot be sampled, or None."""
    if request.num_completions < 1:
        return f"num_completions is {request.num_completions}; it must be at least 1"
    return prompt_refusal(request.encoded.token_ids, limits) or _sampling_refusal(request.sampling, limits)


def prompt_refusal(token_ids: Sequence[int], limits: EngineLimits) -> str | None:
    """Why this prompt cannot be processed, or None."""
    if not token_ids:
        return "the prompt is empty"
    if len(token_ids) >= limits.max_model_len:
        return (
            f"the prompt has {len(token_ids)} tokens and rollout.max_model_len is {limits.max_model_len}: "
            "no room for a completion"
        )
    return _ids_refusal("the prompt", token_ids, limits)


def _sampling_refusal(spec: SamplingSpec, limits: EngineLimits) -> str | None:
    if spec.max_new_tokens < 1:
        return f"max_new_tokens is {spec.max_new_tokens}; it must be at least 1"
    if spec.temperature != 0 and not MIN_TEMPERATURE <= spec.temperature <= MAX_TEMPERATURE:
        return f"temperature is {spec.temperature}; the engine takes 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
    if not 0 < spec.top_p <= 1:
        return f"top_p is {spec.top_p}; it must be above 0 and at most 1"
    if spec.top_k < 0:
        return f"top_k is {spec.top_k}; it must be 0 (no limit) or positive"
    if spec.stop and not limits.can_stop_at_strings:
        return "stop strings need a tokenizer, and the model folder has none"
    if not all(spec.stop):
        return "a stop string is empty"
    if len(set(spec.banned_token_ids)) >= limits.vocab_size:
        return "every token is banned"
    return _ids_refusal("stop_token_ids", spec.stop_token_ids, limits) or _ids_refusal(
        "banned_token_ids", spec.banned_token_ids, limits
    )


def _ids_refusal(what: str, token_ids: Sequence[int], limits: EngineLimits) -> str | None:
    bad = sorted({i for i in token_ids if not 0 <= i < limits.vocab_size})
    if not bad:
        return None
    return f"{what}: token ids {bad[:5]} are outside the vocabulary of {limits.vocab_size}"
