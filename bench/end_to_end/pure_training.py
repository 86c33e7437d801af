"""Forward, backward and optimizer step over a workload's batches alone: the second part of what a run must cost.

    python -m bench.end_to_end.pure_training CONFIG WORKLOAD RESULT

A plain loop around the bare transformers model: weights in the compute type, float32 masters with fused AdamW, one
process, no FSDP, no metrics, no comparison with rollouts. The output head is applied to completion tokens only, which
is cheaper than the model's own forward.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from bench.end_to_end.workload import Row, Step, Workload
from bench.report import write_json
from s2rl.config import load_config


def cpu_s() -> float:
    """CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("workload", type=Path)
    parser.add_argument("result", type=Path)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    os.environ["OMP_NUM_THREADS"] = str(config.learner.threads)
    workload = Workload.load(arguments.workload)
    import torch
    from torch import Tensor
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(config.learner.threads)
    compute = getattr(torch, config.learner.dtype)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=compute)
    parameters = list(model.parameters())
    masters = (
        [p.detach().float().clone().requires_grad_() for p in parameters] if compute != torch.float32 else parameters
    )
    settings = config.learner.optimizer
    optimizer = torch.optim.AdamW(
        masters,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def loss_of(rows: Sequence[Row], step: Step) -> Tensor:
        width = max(len(r.token_ids) for r in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        positions, targets, weights = [], [], []
        for index, row in enumerate(rows):
            ids[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
            positions += [index * width + p - 1 for p in range(row.prompt_len, len(row.token_ids))]
            targets += row.token_ids[row.prompt_len :]
            weights += [row.advantage / step.num_loss_tokens] * (len(row.token_ids) - row.prompt_len)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden.flatten(0, 1)[torch.tensor(positions)])
        losses = torch.nn.functional.cross_entropy(
            logits.float() / config.rollout.sampling.temperature, torch.tensor(targets), reduction="none"
        )
        return (losses * torch.tensor(weights)).sum()

    def take(step: Step) -> None:
        for rows in step.micro_batches:
            if rows:
                loss_of(rows, step).backward()
        if masters is not parameters:
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters is not parameters:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters, strict=True):
                    parameter.copy_(master)
                    parameter.grad = None

    ready = cpu_s()
    for step in workload.steps:
        take(step)
    write_json(
        arguments.result,
        {"start_up_s": ready, "training_s": cpu_s() - ready, "threads": torch.get_num_threads()},
    )


if __name__ == "__main__":
    main()
