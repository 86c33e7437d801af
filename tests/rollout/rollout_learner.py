"""The sending side of a weight sync: what the learner does, with weights from folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rollout_process import WorkerProcess
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from s2rl.sync import SyncGroup, WeightSender, free_port
from s2rl.types import LoadReport, PublishReport, SyncGroupSpec, TensorSpec


class Learner:
    """The sending side: publishes models of a folder to one worker."""

    def __init__(self, worker: WorkerProcess, models_dir: Path, *, engine_ranks: int = 1) -> None:
        self.worker = worker
        self.engine_ranks = engine_ranks
        self.version = -1
        self.weights = {n: load_file(models_dir / n / "model.safetensors") for n in ("first", "second")}
        self.models = {n: AutoModelForCausalLM.from_pretrained(models_dir / n) for n in ("first", "second")}
        self.group: SyncGroup | None = None
        self.join()

    def join(self, *, without: tuple[str, ...] = ()) -> None:
        """Build a new sync group for all tensors but some."""
        self.close()
        names = sorted(set(self.weights["first"]) - set(without))
        self.manifest = [
            TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for n, t in ((n, self.weights["first"][n]) for n in names)
        ]
        spec = {
            "backend": "gloo",
            "host": "127.0.0.1",
            "port": free_port(host="127.0.0.1"),
            "world_size": 1 + self.engine_ranks,
            "timeout_s": 30.0,
            "bucket_bytes": 32768,
        }
        joined = self.worker.begin("join_sync", SyncGroupSpec(rank=1, **spec), self.manifest)
        self.group = SyncGroup(SyncGroupSpec(rank=0, **spec), device="cpu")
        joined.result(timeout=60)
        self.sender = WeightSender(self.group, self.manifest)

    def publish(self, name: str) -> tuple[PublishReport, LoadReport]:
        self.version += 1
        loaded = self.worker.begin("load_weights", self.version)
        sent = self.sender.send(((s.name, self.weights[name][s.name]) for s in self.manifest), self.version)
        return sent, loaded.result(timeout=60)

    def logprobs(self, name: str, token_ids: list[int], *, temperature: float = 1.0) -> np.ndarray:
        """By transformers in float32, entry i belongs to token i + 1."""
        with torch.no_grad():
            logits = self.models[name](torch.tensor([token_ids])).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
