"""GRPO in one file: the algorithm to read first. Synchronous, one process, no Ray and no vLLM.

Each step samples a group of completions for each of a few prompts, scores every completion, and makes the ones that
beat their own group's mean more likely. That is all there is to group-relative policy optimisation: the group's mean
stands in for a value network.

    prompts -> groups of rollouts -> rewards -> advantages -> batch -> loss -> optimizer step -> version + 1

The trainer in `s2rl/` does the same with the two halves, sampling and learning, running at the same time in different
processes. The words here are the words there.

    python examples/grpo_in_one_file.py                       # the tiny model: learns in about a minute
    python examples/grpo_in_one_file.py --model DIR --train FILE --heldout FILE --lr 2e-5    # any causal LM
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = 25
    groups_per_step: int = 16
    group_size: int = 8
    updates_per_batch: int = 2
    """More than one makes the later updates off-policy: that is what the clipping below is for."""
    max_new_tokens: int = 20
    temperature: float = 1.0
    lr: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    micro_batch_size: int = 64
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prompt:
    text: str
    """As the model reads it: the chat template is applied."""
    answer: str


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """One completion in each row, a group's rows in sequence. B rows, P prompt tokens, T completion tokens."""

    token_ids: torch.Tensor  # [B, P + T]: prompts padded on the left, completions on the right
    attention_mask: torch.Tensor  # [B, P + T]
    completion_mask: torch.Tensor  # [B, T]: the end token counts, what follows does not
    rewards: torch.Tensor  # [B]


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Read JSONL rows with the columns `prompt` (chat messages) and `reward_model.ground_truth`."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(text=str(text), answer=row["reward_model"]["ground_truth"]))
    return prompts


def reward(completion: str, answer: str) -> float:
    """1 when the last number of the completion is the answer, else 0. Nothing else teaches the model."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    settings: Settings,
    *,
    greedy: bool = False,
) -> Rollouts:
    """Sample one completion for each prompt and score it."""
    inputs = tokenizer([p.text for p in prompts], return_tensors="pt", padding=True, add_special_tokens=False)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
    token_ids = policy.generate(**inputs, max_new_tokens=settings.max_new_tokens, **how)
    completions = token_ids[:, inputs["input_ids"].shape[1] :]

    # A token belongs to its completion when no end token comes before it.
    is_end = (completions == tokenizer.eos_token_id).long()
    completion_mask = (is_end.cumsum(dim=1) - is_end == 0).long()
    texts = [
        str(tokenizer.decode(ids[mask.bool()], skip_special_tokens=True))
        for ids, mask in zip(completions, completion_mask, strict=True)
    ]
    return Rollouts(
        token_ids=token_ids,
        attention_mask=torch.cat([inputs["attention_mask"], completion_mask], dim=1),
        completion_mask=completion_mask,
        rewards=torch.tensor([reward(text, p.answer) for text, p in zip(texts, prompts, strict=True)]),
    )


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """How much better each completion is than its group, in standard deviations. All alike: nothing to learn, zero."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten()


def completion_logprobs(
    policy: PreTrainedModel, rollouts: Rollouts, rows: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probabilities [len(rows), T] that the policy gives to the completion tokens now."""
    token_ids, mask = rollouts.token_ids[rows], rollouts.attention_mask[rows]
    num_tokens = rollouts.completion_mask.shape[1]
    output = policy(
        input_ids=token_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=num_tokens + 1,
    )
    logits = output.logits[:, :-1].float() / temperature  # the logits at position t - 1 predict token t
    targets = token_ids[:, -num_tokens:]
    return logits.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def clipped_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """The sum over tokens of PPO's clipped objective, negated; every token of a completion has its advantage."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(objective * mask).sum()


def update(policy: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: Rollouts, settings: Settings) -> None:
    """Train on one batch: `updates_per_batch` optimizer steps."""
    advantages = group_advantages(rollouts.rewards, settings.group_size)
    rows = advantages.nonzero().flatten()  # the others have no gradient
    if len(rows) == 0:
        return
    micro_batches = rows.split(settings.micro_batch_size)
    num_tokens = rollouts.completion_mask.sum()
    with torch.no_grad():
        old_logprobs = [completion_logprobs(policy, rollouts, part, settings.temperature) for part in micro_batches]
    for _ in range(settings.updates_per_batch):
        optimizer.zero_grad()
        for part, old in zip(micro_batches, old_logprobs, strict=True):
            logprobs = completion_logprobs(policy, rollouts, part, settings.temperature)
            loss = clipped_loss(logprobs, old, advantages[part], rollouts.completion_mask[part], settings)
            (loss / num_tokens).backward()  # the mean over all tokens of the batch
        torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.max_grad_norm)
        optimizer.step()


def accuracy(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], settings: Settings
) -> float:
    """The share of held-out prompts that greedy decoding answers rightly."""
    return float(sample(policy, tokenizer, prompts, settings, greedy=True).rewards.mean())


def train(model: Path, train_file: Path, heldout_file: Path, settings: Settings) -> tuple[float, float]:
    """Run all steps; returns the held-out accuracy before and after."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()  # no dropout: one policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, weight_decay=0.0)
    train_prompts, heldout_prompts = load_prompts(train_file, tokenizer), load_prompts(heldout_file, tokenizer)

    before = accuracy(policy, tokenizer, heldout_prompts, settings)
    print(f"before: held-out accuracy {before:.3f}")
    start = time.monotonic()
    for step in range(1, settings.steps + 1):
        batch = rng.sample(train_prompts, settings.groups_per_step)
        groups = [prompt for prompt in batch for _ in range(settings.group_size)]
        rollouts = sample(policy, tokenizer, groups, settings)
        update(policy, optimizer, rollouts, settings)
        version = step * settings.updates_per_batch
        if step % 5 == 0 or step == settings.steps:
            print(
                f"step {step:3d}  version {version:3d}  reward {rollouts.rewards.mean():.3f}"
                f"  {time.monotonic() - start:5.1f} s"
            )
    after = accuracy(policy, tokenizer, heldout_prompts, settings)
    print(f"after:  held-out accuracy {after:.3f}")
    return before, after


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(".cache/tiny/model"))
    parser.add_argument("--train", type=Path, default=Path(".cache/tiny/train.jsonl"))
    parser.add_argument("--heldout", type=Path, default=Path(".cache/tiny/heldout.jsonl"))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--groups-per-step", type=int, default=Settings.groups_per_step)
    parser.add_argument("--lr", type=float, default=Settings.lr)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args(argv)
    for path in (arguments.model / "config.json", arguments.train, arguments.heldout):
        if not path.is_file():
            print(f"error: {path} is missing; `python examples/tiny/prepare.py` makes the defaults", file=sys.stderr)
            return 2
    settings = Settings(
        steps=arguments.steps,
        groups_per_step=arguments.groups_per_step,
        lr=arguments.lr,
        seed=arguments.seed,
    )
    train(arguments.model, arguments.train, arguments.heldout, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
