from __future__ import annotations

import numpy as np
import pytest
import torch
from fsdp_models import make_samples

from s2rl.fsdp.collate import collate_forward, collate_samples

CPU = torch.device("cpu")


@pytest.mark.parametrize("packed", [False, True])
def test_every_completion_token_is_predicted_from_the_position_before_it(packed: bool):
    samples = make_samples(5)
    inputs, tokens = collate_samples(samples, packed=packed, device=CPU)
    targets = np.concatenate([s.token_ids[s.prompt_len :] for s in samples])
    before = np.concatenate([s.token_ids[s.prompt_len - 1 : -1] for s in samples])
    flat = inputs.input_ids.flatten()
    assert inputs.targets_N.tolist() == targets.tolist()
    assert flat[inputs.positions_N].tolist() == before.tolist()
    assert flat[inputs.positions_N + 1].tolist() == targets.tolist()
    assert tokens.rollout_logprobs.tolist() == np.concatenate([s.logprobs for s in samples]).tolist()
    assert tokens.sample_lengths.tolist() == [len(s.logprobs) for s in samples for _ in s.logprobs]


def test_rows_are_as_wide_as_the_longest_and_packed_ones_as_wide_as_all():
    samples = make_samples(5)
    rows, _ = collate_samples(samples, packed=False, device=CPU)
    packed, _ = collate_samples(samples, packed=True, device=CPU)
    assert rows.input_ids.shape == (5, max(len(s) for s in samples))
    assert packed.input_ids.shape == (1, sum(len(s) for s in samples))
    starts = (packed.position_ids[0] == 0).nonzero().flatten().tolist()
    assert starts == np.cumsum([0, *(len(s) for s in samples)])[:-1].tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_micro_batch_is_a_dummy_row_without_targets(packed: bool):
    inputs, tokens = collate_samples([], packed=packed, device=CPU)
    assert inputs.input_ids.numel() > 0
    assert len(inputs.targets_N) == len(inputs.positions_N) == len(tokens.advantages) == 0


def test_a_completion_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one prompt token"):
        collate_forward([np.array([1, 2], dtype=np.int32)], [0], packed=False, device=CPU)


def test_lengths_that_do_not_fit_together_are_refused_by_group():
    (sample,) = make_samples(1)
    object.__setattr__(sample, "logprobs", sample.logprobs[:0])
    with pytest.raises(ValueError, match="sample of group g0"):
        collate_samples([sample], packed=False, device=CPU)
