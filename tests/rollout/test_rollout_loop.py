"""The worker around an engine that is a fake: order, accounting, failures and deaths, without vLLM."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from s2rl.config.schema import ModelConfig, RolloutConfig
from s2rl.errors import ConfigError, ModelError, RunError, StalledError, SyncError, WorkerDied
from s2rl.rollout import RolloutWorker
from s2rl.rollout.loop import Finished, RolloutLoop
from s2rl.rollout.protocol import Delta, RankLoad
from s2rl.rollout.requests import EngineLimits, SequenceParams
from s2rl.types import Encoded, FinishReason, GroupRequest, Prompt, RolloutReport, SamplingSpec, SyncGroupSpec

SPEC = SyncGroupSpec(
    backend="gloo", host="127.0.0.1", port=1, rank=1, world_size=2, timeout_s=5.0, bucket_bytes=1 << 20
)


class FakeEngine:
    """Gives each sequence one token a step: its position. Everything that it is told is in `log`."""

    def __init__(self) -> None:
        self.limits = EngineLimits(vocab_size=100, max_model_len=50, eos_token_ids=(2,), can_stop_at_strings=False)
        self.log: list[tuple] = []
        self.active: dict[str, tuple[int, int]] = {}  # id -> tokens so far, budget
        self.scored: dict[str, list[int]] = {}
        self.most_active = 0
        self.step_error: BaseException | None = None
        self.load_error: BaseException | None = None
        self.ranks = [RankLoad(num_bytes=10, fingerprints={"w": 1}, unloaded=())]
        self.step_gate: threading.Event | None = None
        self.in_step = threading.Event()
        self.give_up: set[str] = set()

    def add(
        self, sequence_id: str, token_ids: Sequence[int], params: SequenceParams, *, priority: int, **_: Any
    ) -> None:
        if token_ids[0] == 13:
            raise ValueError("thirteen is refused by the engine")
        self.log.append(("add", sequence_id, params, priority))
        self.active[sequence_id] = (0, params.max_tokens)

    def add_scored(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        self.log.append(("add_scored", sequence_id))
        self.scored[sequence_id] = list(token_ids)

    def abort(self, sequence_ids: Sequence[str]) -> None:
        self.log.append(("abort", tuple(sequence_ids)))
        for sequence_id in sequence_ids:
            self.active.pop(sequence_id, None)
            self.scored.pop(sequence_id, None)

    def step(self) -> list[Delta]:
        self.in_step.set()
        if self.step_gate is not None:
            self.step_gate.wait(10)
        if self.step_error is not None:
            raise self.step_error
        time.sleep(0.0005)
        self.most_active = max(self.most_active, len(self.active))
        deltas = []
        for sequence_id, (position, budget) in list(self.active.items()):
            finish = FinishReason.LENGTH if position + 1 == budget else None
            if sequence_id in self.give_up:
                finish = FinishReason.ABORT
            deltas.append(Delta(sequence_id=sequence_id, token_ids=[position], logprobs=[-0.5], finish_reason=finish))
            self.active[sequence_id] = (position + 1, budget)
            if finish is not None:
                del self.active[sequence_id]
        for sequence_id, token_ids in self.scored.items():
            logprobs = np.asarray(token_ids[1:], dtype=np.float32)
            deltas.append(
                Delta(
                    sequence_id=sequence_id,
                    token_ids=[0],
                    logprobs=(),
                    finish_reason=FinishReason.LENGTH,
                    prompt_logprobs=logprobs,
                )
            )
        self.scored.clear()
        return deltas

    def join_sync(self, spec: SyncGroupSpec, manifest: Sequence) -> None:
        self.log.append(("join", spec.port))

    def load_weights(self, version: int) -> list[RankLoad]:
        self.log.append(("load", version))
        if self.load_error is not None:
            raise self.load_error
        return self.ranks

    def drop_caches(self, *, recompute: bool) -> None:
        self.log.append(("drop", recompute))

    def close(self) -> None:
        self.log.append(("close",))


class FakedWorker(RolloutWorker):
    """A worker whose thread owns `self.engine`."""

    def __init__(self, folder: Path, **changes: object) -> None:
        config = RolloutConfig(**({"max_num_seqs": 4} | changes))
        super().__init__(index=7, model=ModelConfig(path=folder), config=config, device="cpu", seed=0)
        self.engine = FakeEngine()
        self.build_error: BaseException | None = None

    def _build(self) -> RolloutLoop:
        if self.build_error is not None:
            raise self.build_error
        return RolloutLoop(
            self.engine,
            index=self.index,
            max_running=self._config.max_num_seqs,
            kv_on_update=self._config.kv_on_update,
            tokenizer=None,
            deliver=self._deliver,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
async def worker(folder: Path):
    faked = FakedWorker(folder)
    await faked.start()
    yield faked
    await faked.close()


def request(group_id: str, *, n: int = 1, tokens: int = 5, priority: int = 0, first: int = 5) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        encoded=Encoded(prompt=Prompt(prompt_id="p", row=0, epoch=0, text="", answer=""), token_ids=(first, 6)),
        num_completions=n,
        sampling=SamplingSpec(max_new_tokens=tokens),
        seed=100,
        priority=priority,
    )


async def collect(worker: RolloutWorker, items: int) -> RolloutReport:
    completions, failed = [], []
    async with asyncio.timeout(10):
        while len(completions) + len(failed) < items:
            report = await worker.collect(1.0)
            completions.extend(report.completions)
            failed.extend(report.failed)
    return RolloutReport(completions=completions, failed=failed, stats=report.stats)


async def test_every_completion_is_reported_once_and_no_more_run_than_may(worker: FakedWorker) -> None:
    await worker.submit([request(f"g{i}", n=3, tokens=i + 1) for i in range(5)])
    report = await collect(worker, 15)
    assert sorted((c.group_id, c.index) for c in report.completions) == [
        (f"g{i}", j) for i in range(5) for j in range(3)
    ]
    assert all(c.token_ids.tolist() == list(range(int(c.group_id[1]) + 1)) for c in report.completions)
    assert worker.engine.most_active == 4
    assert report.stats.completion_tokens == 3 * (1 + 2 + 3 + 4 + 5)
    assert report.stats.prompt_tokens == 30
    assert not (await worker.collect(0.01)).completions
    seeds = [entry[2].seed for entry in worker.engine.log if entry[:2] == ("add", "g2/1")]
    assert seeds == [101], "completion i has seed + i"


async def test_waiting_groups_begin_in_the_order_of_their_priority(worker: FakedWorker) -> None:
    worker.engine.step_gate = threading.Event()
    await worker.submit([request("now", n=4)])
    await worker.submit([request("last", n=2, priority=9), request("second", n=2, priority=3)])
    await worker.submit([request("first", n=2, priority=1), request("also-second", n=2, priority=3)])
    worker.engine.step_gate.set()
    await collect(worker, 12)
    begun = [entry[1].split("/")[0] for entry in worker.engine.log if entry[0] == "add"]
    assert begun[4:] == ["first"] * 2 + ["second"] * 2 + ["also-second"] * 2 + ["last"] * 2


async def test_tokens_carry_the_version_of_the_step_that_sampled_them(worker: FakedWorker) -> None:
    await worker.join_sync(SPEC, [])
    worker.engine.step_gate = threading.Event()
    worker.engine.step_gate.set()
    await worker.submit([request("g", n=2, tokens=40)])
    for version in (0, 1, 2):
        await asyncio.sleep(0.004)
        report = await worker.load_weights(version)
        assert (report.worker, report.version, report.num_bytes, report.fingerprints) == (7, version, 10, {"w": 1})
    completions = (await collect(worker, 2)).completions
    for c in completions:
        assert c.token_ids.tolist() == list(range(40)), "no token is lost or repeated"
        assert np.all(np.diff(c.versions) >= 0)
        assert set(c.versions) <= {-1, 0, 1, 2}
        assert len(set(c.versions)) > 1
    assert completions[0].versions.tolist() == completions[1].versions.tolist()
    loads = [entry for entry in worker.engine.log if entry[0] in ("load", "drop")]
    assert loads == [("load", 0), ("drop", True), ("load", 1), ("drop", True), ("load", 2), ("drop", True)]


async def test_kept_keys_and_values_are_not_dropped(folder: Path) -> None:
    worker = FakedWorker(folder, kv_on_update="keep", prefix_caching=False)
    await worker.start()
    await worker.join_sync(SPEC, [])
    await worker.load_weights(0)
    assert worker.engine.log[-1] == ("drop", False)
    await worker.close()
    with pytest.raises(ConfigError, match=r"rollout.kv_on_update: 'keep' needs rollout.prefix_caching: false"):
        FakedWorker(folder, kv_on_update="keep")


async def test_an_aborted_group_is_forgotten_wherever_it_is(worker: FakedWorker) -> None:
    gate = worker.engine.step_gate = threading.Event()
    await worker.submit([request("runs", n=3, tokens=1)])
    await worker.submit([request("waits", n=3, tokens=30), request("stays", n=1, tokens=2)])
    await worker.abort(["runs", "waits", "never-seen"])
    await worker.submit([request("runs", n=1, tokens=3)])
    gate.set()
    report = await collect(worker, 2)
    assert sorted((c.group_id, len(c.token_ids)) for c in report.completions) == [("runs", 3), ("stays", 2)]
    last = await worker.collect(0.05)
    assert (last.completions, last.failed, last.stats.running) == ([], [], 0)


async def test_a_group_that_the_engine_refuses_or_gives_up_fails_as_a_whole(worker: FakedWorker) -> None:
    worker.engine.give_up.add("given-up/1")
    await worker.submit([request("refused", n=3, first=13), request("given-up", n=3), request("good", n=2)])
    report = await collect(worker, 4)
    reasons = {f.group_id: f.reason for f in report.failed}
    assert reasons == {
        "refused": "thirteen is refused by the engine",
        "given-up": "the engine gave the sequence up",
    }
    assert {c.group_id for c in report.completions} == {"good"}
    assert (await worker.collect(0.05)).stats.running == 0


async def test_a_group_must_not_be_submitted_twice_at_a_time(worker: FakedWorker) -> None:
    await worker.submit([request("g")])
    with pytest.raises(RunError, match="submitted twice: g"):
        await worker.submit([request("g")])
    await collect(worker, 1)
    await worker.submit([request("g")])
    await collect(worker, 1)


async def test_scores_start_again_when_weights_change_in_between(folder: Path) -> None:
    engine, finished = FakeEngine(), []
    loop = RolloutLoop(
        engine, index=0, max_running=2, kv_on_update="recompute", tokenizer=None, deliver=finished.extend
    )
    from concurrent.futures import Future

    future: Future = Future()
    loop.score([[1, 2, 3], [4], [5, 6]], future)
    loop.load_weights(4)
    loop.step()
    assert [s.tolist() for s in future.result(timeout=0)] == [[2.0, 3.0], [], [6.0]]
    assert [e for e in engine.log if e[0] != "drop"] == [
        ("add_scored", "score/0"),
        ("add_scored", "score/1"),
        ("load", 4),
        ("abort", ("score/0", "score/1")),
        ("add_scored", "score/2"),
        ("add_scored", "score/3"),
    ]
    assert not finished
    assert not loop.has_work


async def test_scoring_goes_on_beside_sampling(worker: FakedWorker) -> None:
    await worker.submit([request("g", n=8, tokens=30)])
    scores = await worker.score([[9, 8, 7]])
    assert scores[0].tolist() == [8.0, 7.0]
    await collect(worker, 8)
    with pytest.raises(ValueError, match="sequence 0 cannot be scored: the prompt is empty"):
        await worker.score([[]])


async def test_an_engine_that_breaks_fails_every_call_with_its_own_error(folder: Path) -> None:
    worker = FakedWorker(folder)
    await worker.start()
    gate = worker.engine.step_gate = threading.Event()
    worker.engine.step_error = MemoryError("no room for the batch")
    await worker.submit([request("g")])
    assert await asyncio.to_thread(worker.engine.in_step.wait, 5)
    pending = [
        asyncio.create_task(worker.collect(30.0)),
        asyncio.create_task(worker.score([[1, 2]])),
        asyncio.create_task(worker.join_sync(SPEC, [])),
    ]
    await asyncio.sleep(0.01)
    gate.set()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*pending, return_exceptions=True)
    for result in results:
        assert isinstance(result, WorkerDied)
        assert "rollout worker 7: the engine ended with MemoryError: no room for the batch" in str(result)
        assert isinstance(result.__cause__, MemoryError)
    for call in (worker.collect(1.0), worker.submit([]), worker.abort(["g"]), worker.score([[1, 2]])):
        with pytest.raises(WorkerDied, match="no room for the batch"):
            await call
    await worker.close()
    assert worker.engine.log[-1] == ("close",), "what the engine holds is released all the same"


async def test_an_error_while_weights_are_loaded_ends_the_engine(folder: Path) -> None:
    worker = FakedWorker(folder)
    await worker.start()
    with pytest.raises(RunError, match="asked for version 3 before join_sync"):
        await worker.load_weights(3)
    await worker.join_sync(SPEC, [])
    worker.engine.load_error = SyncError("bucket 4 never came")
    with pytest.raises(SyncError, match="bucket 4 never came"):
        await worker.load_weights(3)
    with pytest.raises(WorkerDied, match="SyncError: bucket 4 never came"):
        await worker.submit([request("g")])
    await worker.close()


async def test_ranks_that_received_different_bytes_are_named(worker: FakedWorker) -> None:
    await worker.join_sync(SPEC, [])
    worker.engine.ranks = [
        RankLoad(num_bytes=10, fingerprints={"a": 1, "b": 2}, unloaded=("x",)),
        RankLoad(num_bytes=10, fingerprints={"a": 1, "b": 3}, unloaded=("y",)),
    ]
    with pytest.raises(SyncError, match=r"version 0: engine ranks 0 and 1 received different bytes of b"):
        await worker.load_weights(0)


async def test_what_ranks_did_not_load_is_reported_together(worker: FakedWorker) -> None:
    await worker.join_sync(SPEC, [])
    worker.engine.ranks = [
        RankLoad(num_bytes=10, fingerprints={"a": 1}, unloaded=("x", "y")),
        RankLoad(num_bytes=10, fingerprints={"a": 1}, unloaded=("a", "y")),
    ]
    assert (await worker.load_weights(0)).unloaded == ("a", "x", "y")


async def test_a_model_that_cannot_be_loaded_fails_the_start(folder: Path, tmp_path_factory) -> None:
    worker = FakedWorker(folder)
    worker.build_error = ValueError("no such architecture")
    with pytest.raises(ValueError, match="no such architecture"):
        await worker.start()
    with pytest.raises(WorkerDied, match="no such architecture"):
        await worker.collect(1.0)
    await worker.close()
    with pytest.raises(ModelError, match=r"has no config.json"):
        await FakedWorker(tmp_path_factory.mktemp("empty")).start()


async def test_a_start_that_takes_too_long_says_who_waited_for_what(folder: Path) -> None:
    worker = FakedWorker(folder)
    worker._start_limit_s = 0.05
    worker._build = lambda: time.sleep(0.5)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(StalledError, match=r"rollout worker 7 waited 0.05 s for its engine: loading the model"):
        await worker.start()
    await worker.close()


async def test_an_idle_worker_uses_no_cpu_and_close_ends_its_thread(worker: FakedWorker) -> None:
    before = time.process_time()
    assert not (await worker.collect(0.3)).completions
    assert time.process_time() - before < 0.1
    stats = (await worker.collect(0.0)).stats
    assert stats.idle_s > 0.25
    assert stats.busy_s == 0
    await worker.close()
    assert not any("rollout worker 7" in t.name for t in threading.enumerate())
    with pytest.raises(WorkerDied, match="is closed"):
        await worker.score([[1, 2]])
    await worker.close()


async def test_close_does_not_leave_a_pending_call_waiting(folder: Path) -> None:
    worker = FakedWorker(folder)
    await worker.start()
    gate = worker.engine.step_gate = threading.Event()
    await worker.submit([request("g", tokens=40)])
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0.01)
    scoring = asyncio.create_task(worker.score([[1, 2]]))
    await asyncio.sleep(0.01)
    gate.set()
    async with asyncio.timeout(5):
        await closing
        with pytest.raises(WorkerDied, match="is closed"):
            await scoring


def test_finished_items_name_the_submission_they_belong_to() -> None:
    engine, finished = FakeEngine(), []
    loop = RolloutLoop(
        engine, index=0, max_running=2, kv_on_update="recompute", tokenizer=None, deliver=finished.extend
    )
    loop.submit([(11, request("a", tokens=1)), (12, request("b", tokens=1))])
    while loop.has_work:
        loop.step()
    assert sorted((f.ticket, f.item.group_id) for f in finished if isinstance(f, Finished)) == [(11, "a"), (12, "b")]
