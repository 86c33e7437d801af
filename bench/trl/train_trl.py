"""TRL's GRPOTrainer on the same model, data and settings. Runs in TRL's own environment; of s2rl it uses the reward
function alone.

Settings that make TRL faster here than its defaults: no activation checkpointing, one micro-batch for the whole batch,
a thread per core, fused AdamW, no reference model (its default too), nothing saved, nothing reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from s2rl.rewards import RewardInput, builtin


def numeric(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """s2rl's reward function of this name, in TRL's form."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [builtin.numeric(RewardInput(text=t, answer=a)) for t, a in zip(texts, answer, strict=True)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Prompt and answer of every row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{"prompt": r["prompt"], "answer": r["reward_model"]["ground_truth"]} for r in rows]


def main() -> None:
    """Train and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--continuous-batching", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the trained model here")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    torch.set_num_threads(arguments.threads)
    batch = arguments.prompts * arguments.samples
    config = trl.GRPOConfig(
        output_dir=str(arguments.result.with_suffix("")),
        model_init_kwargs={"dtype": arguments.weights},
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=batch // arguments.micro_batch,
        num_generations=arguments.samples,
        max_completion_length=arguments.max_new_tokens,
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant_with_warmup" if arguments.warmup_steps else "constant",
        warmup_steps=arguments.warmup_steps,
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=arguments.continuous_batching,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )
    times: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "reward" in logs:
                rewards.append(float(logs["reward"]))

    trainer = trl.GRPOTrainer(
        model=str(arguments.model),
        reward_funcs=numeric,
        args=config,
        train_dataset=Dataset.from_list(rows_of(arguments.train)),
        callbacks=[Clock()],
    )
    trainer.train()
    if arguments.save is not None:
        trainer.model.to(torch.bfloat16).save_pretrained(arguments.save)
        trainer.processing_class.save_pretrained(arguments.save)
    seconds = [b - a for a, b in itertools.pairwise(times)]
    result = {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "samples": batch * arguments.steps,
        "seconds": times[-1] - times[0],
        "samples_per_s": batch * arguments.steps / (times[-1] - times[0]),
        "step_s": seconds,
        "reward": rewards,
    }
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
