"""Byte-level BPE tokenizers with the control tokens of the real models, learned from a few lines of text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text before merging: digits stand alone."""

_SPLIT_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's: combining marks belong to the word."""

CORPUS = (
    "In the figure, find the measure of angle ABC. The answer is the length of the line segment.",
    "The triangle has a right angle at C, so the area of the square on the hypotenuse is the sum of the other two.",
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. ",
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.",
    "Solve the following math problem step by step. Let x be the radius of the circle; then 2 \\sqrt { 3 } = \\frac.",
    "Two parallel lines are cut by a transversal. Given AB = 12 and BC = 5, what is the perimeter of rectangle ABCD?",
    "The diameter bisects the chord, therefore its radius is half as long. Round your answer to the nearest tenth.",
    "Natalia sold clips to her friends in April and half as many in May. How much money did she earn altogether?",
    "First, calculate the total number of apples; next, subtract those which were sold, and finally divide by four.",
    "Which object lies above, below, left or right of the green triangle, the yellow circle or the black rectangle?",
    "Is there an even or odd number of small purple diamonds near the middle, top, bottom or corner of this picture?",
    "How many shapes of this colour are there in the image? Count the red circles and the blue squares.",
)

_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_PLAIN = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""One token each, but part of the text: they stay when special tokens are left out."""

_LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)

Kind = Literal["qwen", "qwen3_5", "llama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTokenizer:
    """A tokenizer that was written, and the ids that a model's configuration names."""

    size: int
    """Tokens, the added ones included."""
    ids: dict[str, int]
    """Id of each added token."""
    eos: str
    pad: str
    bos: str | None


def save_tokenizer(
    folder: Path, *, kind: Kind, chat_template: str, template_in_config: bool, corpus: Sequence[str], num_merges: int
) -> SmallTokenizer:
    """Write tokenizer.json, vocab.json, merges.txt, tokenizer_config.json (and special_tokens_map.json).

    `template_in_config`: the chat template stands in tokenizer_config.json; the caller writes its own file otherwise.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    merges = learn_merges(corpus, num_merges=num_merges)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if kind != "llama":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_WITH_MARKS if kind == "qwen3_5" else _SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special, plain = (_LLAMA_SPECIAL, ()) if kind == "llama" else (_QWEN_SPECIAL, _QWEN_PLAIN)
    tokenizer.add_tokens([AddedToken(t, special=t in special, normalized=False) for t in (*special, *plain)])
    byte_level = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    if kind == "llama":
        bos = "<|begin_of_text|>"
        begin = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
        tokenizer.post_processor = processors.Sequence([byte_level, begin])
    else:
        tokenizer.post_processor = byte_level
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    added = tokenizer.get_vocab(with_added_tokens=True)
    written = SmallTokenizer(
        size=tokenizer.get_vocab_size(with_added_tokens=True),
        ids={t: added[t] for t in (*special, *plain)},
        eos="<|eot_id|>" if kind == "llama" else "<|im_end|>",
        pad="<|finetune_right_pad_id|>" if kind == "llama" else "<|endoftext|>",
        bos="<|begin_of_text|>" if kind == "llama" else None,
    )
    _save_config(folder, written, kind=kind, special=special, chat_template=chat_template if template_in_config else "")
    return written


def _save_config(
    folder: Path, tokenizer: SmallTokenizer, *, kind: Kind, special: Sequence[str], chat_template: str
) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(n): {"content": token, **flags, "special": token in special} for token, n in tokenizer.ids.items()
        },
        "bos_token": tokenizer.bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.eos,
        "model_max_length": 262144,
        "pad_token": tokenizer.pad,
    }
    if kind != "llama":
        config |= {
            "add_bos_token": False,
            "add_prefix_space": False,
            "additional_special_tokens": list(special[1:]),
            "errors": "replace",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        }
    else:
        config |= {
            "model_input_names": ["input_ids", "attention_mask"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
    if chat_template:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)


def learn_merges(corpus: Sequence[str], *, num_merges: int) -> list[tuple[str, str]]:
    """The byte pairs that BPE merges, most frequent first; equal counts in the order of the text of the pair.

    Ends early when every word is one token. Made for a few kilobytes of text.
    """
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts: dict[tuple[str, ...], int] = {}
    for text in corpus:
        for piece, _ in split.pre_tokenize_str(text):
            letters = tuple(piece)
            counts[letters] = counts.get(letters, 0) + 1
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        pairs: dict[tuple[str, str], int] = {}
        for word, count in counts.items():
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None:
            break
        merges.append(best)
        counts = _merge(counts, best)
    return merges


def _merge(counts: dict[tuple[str, ...], int], pair: tuple[str, str]) -> dict[tuple[str, ...], int]:
    merged: dict[tuple[str, ...], int] = {}
    for word, count in counts.items():
        parts: list[str] = []
        for part in word:
            if parts and (parts[-1], part) == pair:
                parts[-1] += part
            else:
                parts.append(part)
        joined = tuple(parts)
        merged[joined] = merged.get(joined, 0) + count
    return merged


def write_json(path: Path, value: Any) -> None:
    """JSON as the hub's files have it: two spaces, text as it is."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
