from __future__ import annotations

import torch


def test_the_last_number_counts(one_file):
    assert one_file.reward("2 - 7 = -5", "-5") == 1.0
    assert one_file.reward("-5, no, 6", "-5") == 0.0
    assert one_file.reward("", "1") == 0.0
    assert one_file.reward("0123", "0123") == 1.0


def test_advantages_are_relative_to_the_group(one_file):
    advantages = one_file.group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), group_size=2)
    half = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([half, -half, 0.0, 0.0]))


def test_the_ratio_is_clipped_only_where_it_would_gain(one_file):
    settings = one_file.Settings(clip_low=0.2, clip_high=0.3)
    old = torch.zeros(2, 2)
    new = torch.log(torch.tensor([[2.0, 0.5], [2.0, 0.5]]))
    loss = one_file.clipped_loss(new, old, torch.tensor([1.0, -1.0]), torch.ones(2, 2), settings)
    # Good completion: 1.3 (clipped) + 0.5. Bad completion: -2.0 - 0.8 (clipped).
    torch.testing.assert_close(loss, torch.tensor(-(1.3 + 0.5 - 2.0 - 0.8)))


def test_masked_tokens_have_no_gradient(one_file):
    logprobs = torch.zeros(1, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0]])
    one_file.clipped_loss(logprobs, torch.zeros(1, 3), torch.tensor([2.0]), mask, one_file.Settings()).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, -2.0, 0.0]]


def test_missing_files_are_named(one_file, tmp_path, capsys):
    assert one_file.main(["--model", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_it_learns(tiny, one_file, tmp_path):
    size = tiny.Size(hidden_size=96, num_layers=2, num_heads=3, num_digits=3, warm_start_steps=250, num_train=600)
    example = tiny.build(tmp_path / "example", size=size)
    assert 0.2 <= example.greedy_accuracy <= 0.6
    settings = one_file.Settings(steps=20, groups_per_step=8, max_new_tokens=5, lr=3e-4)
    before, after = one_file.train(example.model, example.train, example.heldout, settings)
    assert after >= before + 0.25
