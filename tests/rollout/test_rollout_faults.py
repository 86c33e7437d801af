"""Faults of vLLM that s2rl mends would be silent: these tests show both the fault and the repair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from rollout_learner import Learner
from rollout_models import save_dense, save_moe
from rollout_process import WorkerProcess

from s2rl.config.schema import ModelConfig, RolloutConfig
from s2rl.types import Encoded, GroupRequest, Prompt, SamplingSpec

pytestmark = pytest.mark.dist

SEQUENCE = list(range(60, 120))


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    save_moe(folder / "first", seed=1)
    save_moe(folder / "second", seed=2)
    return folder


def start(folder: Path, **changes: object) -> WorkerProcess:
    extension = changes.pop("extension_cls", "s2rl.rollout.extension.SyncExtension")
    fields = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "kv_cache_gb": 0.05} | changes
    worker = WorkerProcess(
        daemon=changes.get("tensor_parallel", 1) == 1,
        index=0,
        model=ModelConfig(path=folder),
        config=RolloutConfig(**fields),
        device="cpu",
        seed=0,
        extension_cls=extension,
    )
    worker.call("start")
    return worker


@pytest.fixture(scope="module")
def forgetful(moe_dir: Path) -> Iterator[WorkerProcess]:
    worker = start(moe_dir / "first", extension_cls="rollout_extensions.ForgetfulExtension")
    yield worker
    worker.close()


def test_post_processing_that_is_left_out_is_seen_in_the_scores_and_nowhere_else(
    forgetful: WorkerProcess, moe_dir: Path
) -> None:
    learner = Learner(forgetful, moe_dir)
    expected = {name: learner.logprobs(name, SEQUENCE) for name in ("first", "second")}
    assert np.abs(expected["first"] - expected["second"]).mean() > 0.5
    differences = {}
    try:
        for name in ("first", "second", "first", "first", "second"):
            sent, loaded = learner.publish(name)
            assert loaded.fingerprints == sent.fingerprints, "the bytes are right every time"
            assert loaded.unloaded == ()
            score = forgetful.call("score", [SEQUENCE])[0]
            differences[loaded.version] = float(np.abs(score - expected[name]).mean())
    finally:
        learner.close()
    assert differences[0] < 1e-4
    assert differences[1] > 0.1, "experts that were not packed again"
    assert differences[2] > 0.1, "a head tied to the embedding that was not packed again"
    assert differences[3] < 1e-4, "everything done"
    assert differences[4] < 1e-4, "and again"


@pytest.mark.slow
def test_two_tensor_parallel_ranks_sample_and_load_as_one(tmp_path: Path) -> None:
    """On the CPU, over vLLM's gloo groups and worker processes; not what a user would configure."""
    for name, seed in (("first", 1), ("second", 2)):
        save_dense(tmp_path / name, seed=seed, heads=4, kv_heads=2)
    worker = start(tmp_path / "first", tensor_parallel=2)
    try:
        children = psutil.Process(worker.process.pid).children(recursive=True)
        assert len(children) >= 2
        learner = Learner(worker, tmp_path, engine_ranks=2)
        for name in ("first", "second"):
            sent, loaded = learner.publish(name)
            assert loaded.fingerprints == sent.fingerprints
            assert loaded.unloaded == ()
            score = worker.call("score", [SEQUENCE])[0]
            assert np.abs(score - learner.logprobs(name, SEQUENCE)).mean() < 1e-4
        prompt = Prompt(prompt_id="p", row=0, epoch=0, text="", answer="")
        encoded = Encoded(prompt=prompt, token_ids=tuple(SEQUENCE))
        sampling = SamplingSpec(max_new_tokens=5, ignore_eos=True)
        worker.call(
            "submit", [GroupRequest(group_id="g", encoded=encoded, num_completions=2, sampling=sampling, seed=0)]
        )
        assert len(worker.call("collect", 30.0).completions) > 0
        learner.close()
    finally:
        worker.process.kill()
        worker.process.join(10)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, "ranks of an engine whose process is killed end with it"
    assert gone
