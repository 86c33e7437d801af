"""Generates a workload's tokens with vLLM alone: the first part of what a run must at least cost.

    python -m bench.end_to_end.pure_generation CONFIG WORKLOAD RESULT

The engine has the run's settings (model, type, sizes, prefix cache) but none of s2rl's changes, and no
log-probabilities are asked for. All sequences are queued at once, so that the batch is always as full as it can be.
Each ends at the length that it had in the run.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from pathlib import Path

from bench.end_to_end.workload import Sequences, Workload
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
    parser.add_argument("--logprobs", action="store_true", help="ask for the sampled tokens' log-probabilities too")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    rollout = config.rollout
    os.environ |= {
        "OMP_NUM_THREADS": str(rollout.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # As in the run: without it vLLM compiles a helper of the sampler for some seconds.
        "TORCHDYNAMO_DISABLE": "1",
    }
    workload = Workload.load(arguments.workload)
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(rollout.threads)
    llm = LLM(
        model=str(config.model.path),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=rollout.dtype,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_prefix_caching=rollout.prefix_caching,
        block_size=rollout.block_size or 32,
        kv_cache_memory_bytes=int(rollout.kv_cache_gb * 2**30),
        enforce_eager=True,
        distributed_executor_backend="uni",
        async_scheduling=False,
        disable_log_stats=True,
    )

    def generate(sequences: Sequences, *, temperature: float) -> float:
        before = cpu_s()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in sequences.prompts],
            [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=length,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0 if arguments.logprobs else None,
                )
                for length in sequences.lengths
            ],
            use_tqdm=False,
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == sequences.lengths
        return cpu_s() - before

    ready = cpu_s()
    temperature = rollout.sampling.temperature
    result = {"start_up_s": ready, "rollouts_s": generate(workload.rollouts, temperature=temperature)}
    evaluations = workload.evaluations
    result["evaluations_s"] = generate(evaluations, temperature=0.0) if evaluations.prompts else 0.0
    write_json(arguments.result, result | {"threads": torch.get_num_threads()})
    sys.stdout.flush()
    os._exit(0)  # the engine's own shutdown is no part of the work


if __name__ == "__main__":
    main()
