"""Rollout workers: one vLLM engine each, driven by one thread, updated between two engine steps.

    worker      `RolloutWorker`, the asynchronous face that the trainer sees; no vLLM until `start`
    thread      the one thread that owns the engine: runs commands between two steps, hands on what finished
    loop        what happens in that thread: sequences, versions, weight updates
    protocol    what the loop needs of an engine
    vllm_engine that, on top of vLLM
    extension   mixed into vLLM's workers: joins the weight-sync group, loads weights
    vllm_compat everything that depends on vLLM's version
    requests    requests to sampling parameters; what is refused and why
    stopping    stop strings

Nothing outside this package imports vllm.
"""

from s2rl.rollout.worker import RolloutWorker

__all__ = ["RolloutWorker"]
