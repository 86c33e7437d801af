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
    inputs, tokens = collate_samples([(s,) for s in samples], packed=packed, device=CPU)
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
    rows, _ = collate_samples([(s,) for s in samples], packed=False, device=CPU)
    packed, _ = collate_samples([(s,) for s in samples], packed=True, device=CPU)
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
        collate_forward([[np.array([1, 2], dtype=np.int32)]], [0], packed=False, device=CPU)


def test_lengths_that_do_not_fit_together_are_refused_by_group():
    (sample,) = make_samples(1)
    object.__setattr__(sample, "logprobs", sample.logprobs[:0])
    with pytest.raises(ValueError, match="sample of group g0"):
        collate_samples([(sample,)], packed=False, device=CPU)


def test_a_shared_prompt_stands_in_its_row_once_and_each_completion_sees_it_and_itself_only():
    ids = [np.array(row, dtype=np.int32) for row in ([5, 6, 7, 8], [5, 6, 9], [5, 6], [1, 2, 3])]
    inputs = collate_forward([ids[:3], ids[3:]], [2, 1], packed=False, device=CPU)
    assert inputs.input_ids.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 2], [0, 1, 2, 3, 4]]
    assert inputs.positions_N.tolist() == [1, 2, 1, 5, 6]
    assert inputs.targets_N.tolist() == [7, 8, 9, 2, 3]
    seen = inputs.model_inputs["attention_mask"]
    assert seen.shape == (2, 1, 5, 5) and seen.dtype == torch.bool
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert seen.any(-1).all()


def test_sequences_with_different_prompts_do_not_share_a_row():
    ids = [np.array(row, dtype=np.int32) for row in ([5, 6, 7], [5, 4, 7])]
    with pytest.raises(ValueError, match="same prompt"):
        collate_forward([ids], [2], packed=False, device=CPU)
    with pytest.raises(ValueError, match="packed rows cannot share"):
        collate_forward([[ids[0], ids[0]]], [2], packed=True, device=CPU)
