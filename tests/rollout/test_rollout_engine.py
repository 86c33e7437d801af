"""Rollout workers with real vLLM engines, updated by a learner in another process over a real gloo group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from rollout_learner import Learner
from rollout_models import EOS, VOCAB_SIZE
from rollout_process import WorkerProcess

from s2rl.config.schema import ModelConfig, RolloutConfig
from s2rl.types import (
    Completion,
    Encoded,
    FinishReason,
    GroupRequest,
    Prompt,
    RolloutReport,
    SamplingSpec,
)

pytestmark = pytest.mark.dist

MAX_NUM_SEQS = 8
MAX_MODEL_LEN = 512
LONG = 300
"""Tokens of a completion in which a test wants to interfere."""
PROMPT = tuple(range(60, 100))
PRINTABLE = range(90)
"""Ids of the tiny tokenizer whose byte is an ASCII letter, digit or sign."""


def config(**changes: object) -> RolloutConfig:
    fields = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 64,  # less than two prompts: prefills are chunked
        "kv_cache_gb": 0.05,
    }
    return RolloutConfig(**(fields | changes))


def started(models_dir: Path, name: str, **changes: object) -> WorkerProcess:
    worker = WorkerProcess(
        index=3, model=ModelConfig(path=models_dir / name), config=config(**changes), device="cpu", seed=0
    )
    facts = worker.call("start")
    assert facts.vocab_size == VOCAB_SIZE
    assert facts.eos_token_ids == (EOS,)
    return worker


@pytest.fixture(scope="module")
def worker(models_dir: Path) -> Iterator[WorkerProcess]:
    """Computes keys and values anew at an update, with a prefix cache."""
    process = started(models_dir, "first")
    yield process
    process.close()


@pytest.fixture(scope="module")
def keeper(models_dir: Path) -> Iterator[WorkerProcess]:
    """Keeps keys and values at an update. Starts with the weights of `second`."""
    process = started(models_dir, "second", kv_on_update="keep", prefix_caching=False)
    yield process
    process.close()


@pytest.fixture(scope="module")
def learner(worker: WorkerProcess, models_dir: Path) -> Iterator[Learner]:
    sender = Learner(worker, models_dir)
    yield sender
    sender.close()


def request(group_id: str, *, n: int = 1, seed: int = 0, priority: int = 0, **sampling: object) -> GroupRequest:
    prompt = Prompt(prompt_id=group_id, row=0, epoch=0, text="", answer="")
    return GroupRequest(
        group_id=group_id,
        encoded=Encoded(prompt=prompt, token_ids=PROMPT),
        num_completions=n,
        sampling=SamplingSpec(**({"max_new_tokens": 20, "ignore_eos": True} | sampling)),
        seed=seed,
        priority=priority,
    )


def completion_logprobs(learner: Learner, name: str, completion: Completion, *, temperature: float = 1.0) -> np.ndarray:
    """What transformers gives the tokens of a completion of `PROMPT`."""
    ids = [*PROMPT, *completion.token_ids.tolist()]
    return learner.logprobs(name, ids, temperature=temperature)[len(PROMPT) - 1 :]


def gather(worker: WorkerProcess, count: int, *, limit_s: float = 60.0) -> list[Completion]:
    """Collect until `count` completions are there, ordered by group and index."""
    found: list[Completion] = []
    deadline = time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} completions came"
        report: RolloutReport = worker.call("collect", 1.0)
        assert not report.failed
        found.extend(report.completions)
    assert len(found) == count
    return sorted(found, key=lambda c: (c.group_id, c.index))


def sample(worker: WorkerProcess, *requests: GroupRequest) -> list[Completion]:
    worker.call("submit", requests)
    return gather(worker, sum(r.num_completions for r in requests))


def wait_for_tokens(worker: WorkerProcess, tokens: int) -> RolloutReport:
    """Until this many tokens were sampled since the worker's start; returns the last report."""
    deadline = time.monotonic() + 30
    while True:
        report = worker.call("collect", 0.0)
        assert not report.completions, "sequences ended before the test could interfere: make them longer"
        if report.stats.completion_tokens >= tokens:
            return report
        assert time.monotonic() < deadline


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    worker: WorkerProcess, learner: Learner, temperature: float
) -> None:
    learner.publish("first")
    completions = sample(worker, *(request(f"g{i}", n=6, seed=i, temperature=temperature) for i in range(3)))
    assert [(c.group_id, c.index) for c in completions] == [(f"g{i}", j) for i in range(3) for j in range(6)]
    difference = np.concatenate(
        [c.logprobs - completion_logprobs(learner, "first", c, temperature=temperature) for c in completions]
    )
    assert np.abs(difference).mean() < 1e-4
    assert np.abs(difference).max() < 1e-3
    for c in completions:
        assert (c.token_ids.dtype, c.logprobs.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions) == 20
        assert set(c.versions) == {learner.version}


def test_loading_over_the_group_equals_a_fresh_engine_bit_by_bit(
    worker: WorkerProcess, keeper: WorkerProcess, learner: Learner
) -> None:
    sent, loaded = learner.publish("second")
    assert loaded.fingerprints == sent.fingerprints
    assert (loaded.worker, loaded.version, loaded.num_bytes) == (3, learner.version, sent.num_bytes)
    assert loaded.unloaded == ()
    assert loaded.stalled_s > 0
    wanted = request("greedy", temperature=0.0, max_new_tokens=60)
    updated, fresh = sample(worker, wanted)[0], sample(keeper, wanted)[0]
    assert updated.token_ids.tolist() == fresh.token_ids.tolist()
    assert updated.logprobs.tobytes() == fresh.logprobs.tobytes()
    assert set(fresh.versions) == {-1}, "a worker that never synced does not know its version"
    sequences = [list(PROMPT), [1, 2, 3]]
    for a, b in zip(worker.call("score", sequences), keeper.call("score", sequences), strict=True):
        assert a.tobytes() == b.tobytes()


def check_interrupted(completions: list[Completion], versions: tuple[int, ...], length: int) -> None:
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions) == length, "one budget over all updates"
        assert c.finish_reason is FinishReason.LENGTH
        assert np.all(np.diff(c.versions) >= 0)
        assert set(c.versions) <= set(versions)
    running = completions[:MAX_NUM_SEQS]
    assert all(set(versions[:2]) <= set(c.versions) for c in running), "the update came while they were sampled"


def test_an_update_in_flight_recomputes_and_loses_no_token(worker: WorkerProcess, learner: Learner) -> None:
    learner.publish("first")
    old = learner.version
    before = worker.call("collect", 0.0).stats
    worker.call("submit", [request(f"g{i}", n=4, seed=9 * i, max_new_tokens=LONG) for i in range(4)])
    wait_for_tokens(worker, before.completion_tokens + 120)
    learner.publish("second")
    wait_for_tokens(worker, before.completion_tokens + 420)
    learner.publish("first")
    completions = gather(worker, 16)
    check_interrupted(completions, (old, old + 1, old + 2), LONG)
    for c in completions:
        by_model = {name: completion_logprobs(learner, name, c) for name in ("first", "second")}
        second = c.versions == old + 1
        expected = np.where(second, by_model["second"], by_model["first"])
        assert np.abs(c.logprobs - expected).mean() < 1e-4
        assert np.abs(c.logprobs - expected).max() < 1e-3
        if second.any():
            assert np.abs(by_model["first"] - by_model["second"])[second].mean() > 0.1, "the models do differ"
    after = worker.call("collect", 0.0).stats
    assert after.completion_tokens - before.completion_tokens == 16 * LONG
    assert after.running == 0
    assert after.stalled_s > before.stalled_s


def test_an_update_in_flight_keeps_keys_and_values_when_told_to(keeper: WorkerProcess, models_dir: Path) -> None:
    learner = Learner(keeper, models_dir)
    try:
        learner.publish("first")
        before = keeper.call("collect", 0.0).stats
        keeper.call("submit", [request(f"g{i}", n=4, seed=9 * i, max_new_tokens=LONG) for i in range(3)])
        wait_for_tokens(keeper, before.completion_tokens + 120)
        learner.publish("second")
        completions = gather(keeper, 12)
        check_interrupted(completions, (0, 1), LONG)
        for c in completions:
            old = c.versions == 0
            first, second = (completion_logprobs(learner, n, c) for n in ("first", "second"))
            assert np.abs(c.logprobs - first)[old].mean() < 1e-4 if old.any() else True
            if not old.any():  # begun after the update: nothing of the old weights is in its cache
                assert np.abs(c.logprobs - second).mean() < 1e-4
            else:
                assert np.abs(c.logprobs - second)[~old].mean() > 1e-3, "computed with the old weights' keys and values"
    finally:
        learner.close()


def test_a_tensor_corrupted_in_flight_shows_in_the_fingerprints_and_in_the_scores(
    worker: WorkerProcess, learner: Learner
) -> None:
    learner.publish("first")
    sequence = [*PROMPT, *range(30)]
    clean = worker.call("score", [sequence])[0]
    broadcast = learner.group.broadcast
    hit = []

    def corrupting(tensor: torch.Tensor, *, root: int = 0, label: str) -> object:
        if "bucket 5 " in label:
            tensor = tensor.clone()
            tensor.view(torch.float32)[7] += 1.0
            hit.append(label)
        return broadcast(tensor, root=root, label=label)

    learner.group.broadcast = corrupting
    try:
        sent, loaded = learner.publish("first")
    finally:
        del learner.group.broadcast
    assert len(hit) == 1
    differing = [n for n, value in sent.fingerprints.items() if loaded.fingerprints[n] != value]
    assert len(differing) == 1
    assert np.abs(worker.call("score", [sequence])[0] - clean).max() > 1e-6
    learner.publish("first")
    assert worker.call("score", [sequence])[0].tobytes() == clean.tobytes()


def test_parameters_that_receive_nothing_or_only_a_part_are_named(worker: WorkerProcess, learner: Learner) -> None:
    learner.join(without=("model.layers.1.self_attn.k_proj.weight", "model.norm.weight"))
    _, loaded = learner.publish("first")
    assert loaded.unloaded == ("model.layers.1.self_attn.qkv_proj.weight", "model.norm.weight")
    learner.join()
    _, loaded = learner.publish("first")
    assert loaded.unloaded == ()
    score = worker.call("score", [list(PROMPT)])[0]
    assert np.abs(score - learner.logprobs("first", list(PROMPT))).mean() < 1e-4


def test_scores_are_raw_logprobs_and_come_while_every_place_is_taken(worker: WorkerProcess, learner: Learner) -> None:
    learner.publish("first")
    tokens = worker.call("collect", 0.0).stats.completion_tokens
    worker.call("submit", [request("long", n=2 * MAX_NUM_SEQS, max_new_tokens=LONG, temperature=0.5)])
    wait_for_tokens(worker, tokens + 50)
    sequences = [[*PROMPT, *range(100, 200)], [5, 6], [7]]
    scores = worker.call("score", sequences)
    assert [len(s) for s in scores] == [139, 1, 0]
    assert all(s.dtype == np.float32 for s in scores)
    assert not worker.call("collect", 0.0).completions, "sampling of what ran went on, and nothing had to end first"
    for sequence, score in zip(sequences[:2], scores[:2], strict=True):
        assert np.abs(score - learner.logprobs("first", sequence)).mean() < 1e-4
    gather(worker, 2 * MAX_NUM_SEQS)
    with pytest.raises(ValueError, match=r"sequence 1 cannot be scored.*outside the vocabulary of 264"):
        worker.call("score", [[1, 2], [1, 264]])


def test_completions_end_at_stop_tokens_stop_strings_and_the_end_of_sequence(
    worker: WorkerProcess, learner: Learner
) -> None:
    learner.publish("first")
    printable = {"temperature": 0.9, "banned_token_ids": tuple(i for i in range(VOCAB_SIZE) if i not in PRINTABLE)}
    (whole,) = sample(worker, request("whole", max_new_tokens=60, seed=5, **printable))
    assert set(whole.token_ids) <= set(PRINTABLE), "banned ids are never sampled"
    assert len(whole.text) == 60
    stop_id = int(whole.token_ids[30])
    at = whole.token_ids.tolist().index(stop_id)
    by_id, by_text, capped = sample(
        worker,
        request("by_id", max_new_tokens=60, seed=5, stop_token_ids=(stop_id,), **printable),
        request("by_text", max_new_tokens=60, seed=5, stop=("never!!", whole.text[20:23]), **printable),
        request("capped", max_new_tokens=20, seed=5, stop=("never!!",), **printable),
    )
    assert by_id.token_ids.tolist() == whole.token_ids[: at + 1].tolist(), "the stop token belongs to the completion"
    end = whole.text.index(whole.text[20:23]) + 3
    assert by_text.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert by_text.text == whole.text[: end - 3], "the text is given without the stop string"
    for c in (by_id, by_text):
        assert c.finish_reason is FinishReason.STOP
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions)
        np.testing.assert_allclose(c.logprobs, whole.logprobs[: len(c.logprobs)], atol=1e-4)
    assert (capped.finish_reason, len(capped.token_ids)) == (FinishReason.LENGTH, 20)
    only_end = {"banned_token_ids": tuple(i for i in range(VOCAB_SIZE) if i not in (7, EOS)), "max_new_tokens": 100}
    ended, ignored = sample(
        worker, request("a", ignore_eos=False, **only_end), request("b", ignore_eos=True, **only_end)
    )
    assert (ended.finish_reason, ended.token_ids[-1]) == (FinishReason.STOP, EOS)
    assert "<end>" not in ended.text
    assert (ignored.finish_reason, len(ignored.token_ids)) == (FinishReason.LENGTH, 100)


def test_the_same_seed_gives_the_same_completion_and_members_of_a_group_differ(
    worker: WorkerProcess, learner: Learner
) -> None:
    learner.publish("first")
    one = sample(worker, request("one", n=6, seed=40))
    again = sample(worker, request("again", n=6, seed=40))
    shifted = sample(worker, request("shifted", n=2, seed=43))
    assert [c.token_ids.tolist() for c in one] == [c.token_ids.tolist() for c in again]
    assert len({tuple(c.token_ids) for c in one}) == 6
    assert shifted[0].token_ids.tolist() == one[3].token_ids.tolist(), "completion i is sampled with seed + i"


def test_groups_of_a_lower_priority_number_are_sampled_first(worker: WorkerProcess, learner: Learner) -> None:
    learner.publish("first")
    worker.call("submit", [request(f"late{i}", n=4, priority=10, max_new_tokens=60) for i in range(8)])
    worker.call("submit", [request("urgent", n=4, priority=1, max_new_tokens=10)])
    order = []
    while len(order) < 36:
        order.extend(c.group_id for c in worker.call("collect", 1.0).completions)
    assert max(i for i, g in enumerate(order) if g == "urgent") < 20


def test_nothing_of_an_aborted_group_is_reported_even_when_its_name_returns(
    worker: WorkerProcess, learner: Learner
) -> None:
    learner.publish("first")
    tokens = worker.call("collect", 0.0).stats.completion_tokens
    # One that ends at once and is not collected, one that runs, and one that waits for a place.
    worker.call("submit", [request("done", max_new_tokens=1)])
    worker.call("submit", [request("runs", n=6, max_new_tokens=LONG), request("waits", n=6, max_new_tokens=LONG)])
    worker.call("score", [[1, 2, 3]])  # answered after at least one step
    worker.call("abort", ["done", "runs", "waits", "unknown"])
    worker.call("submit", [request("runs", n=2, max_new_tokens=3)])
    completions = gather(worker, 2)
    assert [(c.group_id, len(c.token_ids)) for c in completions] == [("runs", 3), ("runs", 3)]
    last = worker.call("collect", 0.3)
    assert not last.completions
    assert last.stats.running == 0
    assert last.stats.completion_tokens > tokens


def test_what_cannot_be_sampled_is_a_failure_with_a_reason_and_the_worker_goes_on(
    worker: WorkerProcess, learner: Learner
) -> None:
    learner.publish("first")
    good = request("good", n=2)
    prompt = good.encoded.prompt

    def with_ids(group_id: str, ids: tuple[int, ...]) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            encoded=Encoded(prompt=prompt, token_ids=ids),
            num_completions=2,
            sampling=good.sampling,
            seed=0,
        )

    bad = [
        with_ids("empty", ()),
        with_ids("unknown", (5, VOCAB_SIZE)),
        with_ids("overlong", (5,) * MAX_MODEL_LEN),
        request("cold", temperature=0.001),
        request("hot", temperature=3.0),
    ]
    worker.call("submit", [*bad, good])
    failed, completions = {}, []
    while len(failed) < len(bad) or len(completions) < 2:
        report = worker.call("collect", 5.0)
        failed |= {f.group_id: f.reason for f in report.failed}
        completions.extend(report.completions)
    assert failed["empty"] == "the prompt is empty"
    assert "token ids [264] are outside the vocabulary of 264" in failed["unknown"]
    assert "512 tokens and rollout.max_model_len is 512" in failed["overlong"]
    assert "temperature is 0.001" in failed["cold"]
    assert "temperature is 3.0" in failed["hot"]
    assert {c.group_id for c in completions} == {"good"}
    nearly = sample(worker, with_ids("nearly", (5,) * (MAX_MODEL_LEN - 6)))
    assert [len(c.token_ids) for c in nearly] == [6, 6], "what max_model_len leaves"


def test_the_counters_add_up_and_the_engine_keeps_to_its_threads(worker: WorkerProcess, learner: Learner) -> None:
    learner.publish("first")
    start, before = time.monotonic(), worker.call("collect", 0.0).stats
    sample(worker, *(request(f"g{i}", n=8, max_new_tokens=100) for i in range(6)))
    time.sleep(0.2)
    after, wall = worker.call("collect", 0.0).stats, time.monotonic() - start
    busy, idle, stalled = (getattr(after, k) - getattr(before, k) for k in ("busy_s", "idle_s", "stalled_s"))
    assert busy + idle + stalled == pytest.approx(wall, abs=0.1)
    assert idle >= 0.15
    assert busy > 0
    assert after.completion_tokens - before.completion_tokens == 4800
    assert after.prompt_tokens - before.prompt_tokens == 48 * len(PROMPT)
    assert after.cpu_s - before.cpu_s < busy + 0.5, "one thread"
    assert after.rss_mb > 100


def test_an_engine_has_no_child_process_so_none_outlives_a_kill(models_dir: Path, worker: WorkerProcess) -> None:
    assert psutil.Process(worker.process.pid).children(recursive=True) == []
