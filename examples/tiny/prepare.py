"""Build a tiny Qwen3 with its tokenizer and data: a whole training run on a CPU in two minutes.

The task is to sort the digits of a number: "42913" -> "12349". A model with random weights would never hit an answer,
so it gets a short supervised warm-up, which leaves it with a wrong habit: it sorts numbers that begin with 4 to 9
downwards. Right or wrong is all that reinforcement learning then tells it. Everything follows from the seed.

    python examples/tiny/prepare.py                  # a model of 1.3 M parameters in .cache/tiny
    python examples/tiny/prepare.py --size nano      # the smallest that vLLM takes, for tests
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

COMPLETE_MARKER = ".complete"
WARM_START_LR = 2e-3
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and the difficulty of its task. vLLM's CPU kernels want heads of 32 and a multiple of 32 hidden units."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_digits: int
    warm_start_steps: int
    num_experts: int = 0
    """Of each layer, two of which take a token; none: a dense model."""
    num_train: int = 4000
    num_heldout: int = 200

    @property
    def max_new_tokens(self) -> int:
        """The digits and the end token."""
        return self.num_digits + 1


SIZES = {
    "tiny": Size(hidden_size=192, num_layers=3, num_heads=4, num_digits=5, warm_start_steps=300),
    "moe": Size(
        hidden_size=128, num_layers=2, num_heads=4, num_digits=4, num_experts=6, warm_start_steps=400, num_train=3000
    ),
    "nano": Size(hidden_size=64, num_layers=2, num_heads=2, num_digits=4, warm_start_steps=400),
}


@dataclass(frozen=True, kw_only=True)
class TinyExample:
    """What `build` leaves behind."""

    model: Path
    train: Path
    heldout: Path
    greedy_accuracy: float
    """Held-out accuracy of the warm-started model."""
    sampled_accuracy: float
    """The same at temperature 1: what training starts from."""


# ------------------------------------------------------------------------------------------------------ the task


def solve(digits: str) -> str:
    return "".join(sorted(digits))


def problems(num_digits: int, count: int, rng: random.Random) -> list[str]:
    """`count` different digit strings."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices("0123456789", k=num_digits))] = None
    return list(found)


def data_row(digits: str, *, split: str, index: int) -> dict[str, Any]:
    """One row with the columns that verl uses."""
    return {
        "data_source": "sort_digits",
        "prompt": [{"role": "user", "content": digits}],
        "ability": "sorting",
        "reward_model": {"style": "rule", "ground_truth": solve(digits)},
        "extra_info": {"split": split, "index": index},
    }


def write_data(path: Path, digits: Sequence[str], split: str) -> None:
    rows = [data_row(problem, split=split, index=i) for i, problem in enumerate(digits)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------- the model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for each role and mark of the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(size: Size, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": size.hidden_size,
        "intermediate_size": 3 * size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": max(1, size.num_heads // 2),
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if not size.num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**settings))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **settings,
            num_experts=size.num_experts,
            num_experts_per_tok=2,
            moe_intermediate_size=3 * size.hidden_size // 4,
            norm_topk_prob=True,
        )
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, digits: Sequence[str], answers: Sequence[str] | None = None
) -> torch.Tensor:
    """Prompts, with their answers if given. All problems have one length, so a batch needs no padding."""
    import torch

    endings = [f"{answer}<|end|>" for answer in answers] if answers else [""] * len(digits)
    texts = []
    for problem, ending in zip(digits, endings, strict=True):
        messages = [{"role": "user", "content": problem}]
        texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) + ending)
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, digits: Sequence[str], *, greedy: bool
) -> float:
    """Share of problems whose completion is the right answer and then the end token."""
    import torch

    prompts = encode(tokenizer, digits)
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=len(digits[0]) + 1,
            **how,
        )
    expected = encode(tokenizer, digits, [solve(problem) for problem in digits])
    if output.shape != expected.shape:
        return 0.0
    return float((output == expected).all(dim=1).float().mean())


def warm_start_answers(digits: Sequence[str], rng: random.Random) -> list[str]:
    """What the warm-up teaches: to sort, but upwards for numbers that begin with 0 to 3 and downwards for the others.

    The habit holds for nine numbers in ten, so that for each the other order has a chance to be sampled.
    """
    answers = []
    for problem in digits:
        upwards = (problem[0] in "0123") == (rng.random() < 0.9)
        answers.append(solve(problem) if upwards else solve(problem)[::-1])
    return answers


def warm_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, size: Size, train: Sequence[str], rng: random.Random
) -> None:
    """Supervised steps on the answers above; the learning rate falls to zero, so that what is learnt is learnt well."""
    import torch

    prompt_length = len(encode(tokenizer, train[:1])[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_LR, weight_decay=0.0)
    for step in range(size.warm_start_steps):
        progress = step / size.warm_start_steps
        for group in optimizer.param_groups:
            group["lr"] = WARM_START_LR * min(1.0, 10 * progress, 1.5 * (1 - progress))
        problems = rng.choices(train, k=64)
        tokens = encode(tokenizer, problems, warm_start_answers(problems, rng))
        labels = tokens.clone()
        labels[:, :prompt_length] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# ------------------------------------------------------------------------------------------------------ together


def build(out_dir: Path | str, *, size: Size | str = "tiny", seed: int = 0) -> TinyExample:
    """Write `out_dir/model`, `out_dir/train.jsonl` and `out_dir/heldout.jsonl`; does nothing when they are there."""
    out_dir = Path(out_dir)
    size = SIZES[size] if isinstance(size, str) else size
    recipe = {"seed": seed, **asdict(size)}
    marker = out_dir / COMPLETE_MARKER
    if marker.exists():
        done = json.loads(marker.read_text())
        if done["recipe"] == recipe:
            return _example(out_dir, done["accuracy"])
    elif out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} holds files that this script did not write: choose another folder")

    import torch

    partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        both = problems(size.num_digits, size.num_train + size.num_heldout, rng)
        heldout, train = both[: size.num_heldout], both[size.num_heldout :]
        tokenizer = make_tokenizer()
        model = make_model(size, tokenizer)
        warm_start(model, tokenizer, size, train, rng)
        measured = {
            "greedy_accuracy": accuracy(model, tokenizer, heldout, greedy=True),
            "sampled_accuracy": accuracy(model, tokenizer, heldout, greedy=False),
        }
        tokenizer.save_pretrained(partial / "model")
        model.save_pretrained(partial / "model")
        write_data(partial / "train.jsonl", train, "train")
        write_data(partial / "heldout.jsonl", heldout, "heldout")
        (partial / COMPLETE_MARKER).write_text(json.dumps({"recipe": recipe, "accuracy": measured}))
        if out_dir.exists():
            shutil.rmtree(out_dir)
        partial.rename(out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _example(out_dir, measured)


def _example(out_dir: Path, measured: dict[str, float]) -> TinyExample:
    return TinyExample(
        model=out_dir / "model",
        train=out_dir / "train.jsonl",
        heldout=out_dir / "heldout.jsonl",
        **measured,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".cache/tiny"), help="folder for model and data")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    try:
        example = build(arguments.out, size=arguments.size, seed=arguments.seed)
    except FileExistsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - start
    print(
        f"{arguments.out}: model and data ready in {seconds:.0f} s; held-out accuracy "
        f"{example.greedy_accuracy:.2f} greedy, {example.sampled_accuracy:.2f} sampled"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
