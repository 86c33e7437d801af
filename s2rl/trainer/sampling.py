"""How the run's configuration samples: training rollouts and held-out evaluation."""

from __future__ import annotations

from s2rl.config.model_folder import image_token_ids
from s2rl.config.schema import RunConfig
from s2rl.types import SamplingSpec


def banned_token_ids(config: RunConfig) -> tuple[int, ...]:
    """Ids that are never sampled: those of the configuration, and the placeholders of images and videos.

    A sampled placeholder would stand for an image that nobody has.
    """
    return tuple(sorted({*config.rollout.sampling.banned_token_ids, *image_token_ids(config.model.path)}))


def train_sampling(config: RunConfig) -> SamplingSpec:
    """Sampling parameters of training rollouts."""
    sampling = config.rollout.sampling
    return SamplingSpec(
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        banned_token_ids=banned_token_ids(config),
    )


def eval_sampling(config: RunConfig) -> SamplingSpec:
    """Sampling parameters of held-out evaluation; stop conditions are those of training."""
    sampling, train = config.eval.sampling, config.rollout.sampling
    return SamplingSpec(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens or train.max_new_tokens,
        stop=train.stop,
        stop_token_ids=train.stop_token_ids,
        banned_token_ids=banned_token_ids(config),
    )
