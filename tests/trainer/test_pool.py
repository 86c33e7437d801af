"""The pool's books at the moments at which a worker goes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bench.controller.clock import run_in_virtual_time
from s2rl.errors import StalledError, WorkerDied
from s2rl.trainer.pool import RolloutPool
from s2rl.trainer.waiting import Progress, within
from s2rl.types import Encoded, GroupRequest, Prompt, RolloutReport, SamplingSpec, WorkerStats

STATS = WorkerStats(
    version=0,
    running=0,
    busy_s=1.0,
    idle_s=1.0,
    stalled_s=0.0,
    prompt_tokens=0,
    completion_tokens=100,
    rss_mb=1.0,
    cpu_s=0.0,
)


class Worker:
    """Answers; `late` calls fail only after that many seconds."""

    def __init__(
        self, index: int, *, submit_fails_after: float | None = None, collect_fails_after: float = 1e9
    ) -> None:
        self.index, self.submitted = index, []
        self._submit_fails_after = submit_fails_after
        self._ends = asyncio.get_running_loop().time() + collect_fails_after

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        if self._submit_fails_after is not None:
            await asyncio.sleep(self._submit_fails_after)
            raise StalledError("no answer to submit()")
        self.submitted += [r.group_id for r in requests]

    async def collect(self, max_wait_s: float) -> RolloutReport:
        await asyncio.sleep(max_wait_s)
        if asyncio.get_running_loop().time() >= self._ends:
            raise WorkerDied(f"worker {self.index} is gone")
        return RolloutReport(completions=[], failed=[], stats=STATS)

    async def abort(self, group_ids: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


class Sink:
    def __init__(self) -> None:
        self.lost_groups: list[str] = []
        self.failed_groups: list[tuple[str, str]] = []

    def completed(self, completion: object) -> None: ...

    def failed(self, group_id: str, reason: str) -> None:
        self.failed_groups.append((group_id, reason))

    def lost(self, request: GroupRequest) -> None:
        self.lost_groups.append(request.group_id)


def request(name: str) -> GroupRequest:
    prompt = Prompt(prompt_id=name, row=0, epoch=0, text="", answer="")
    return GroupRequest(
        group_id=name,
        encoded=Encoded(prompt=prompt, token_ids=(1,)),
        num_completions=2,
        sampling=SamplingSpec(max_new_tokens=5),
        seed=0,
    )


def pool_of(*workers: Worker, max_restarts: int = 3) -> RolloutPool:
    async def replace(index: int) -> Worker:
        return Worker(index)

    pool = RolloutPool(workers, replace=replace, max_restarts=max_restarts, progress=Progress(limit_s=100))
    for slot in pool.slots:
        slot.version = 0
    pool.start()
    return pool


def test_groups_for_a_worker_that_is_gone_by_then_are_lost_at_once():
    async def main() -> None:
        pool, sink = pool_of(Worker(0)), Sink()
        slot = pool.slots[0]
        pool.died(slot, WorkerDied("gone"), handle=slot.handle)
        await pool.submit([request("a"), request("b")], slot=slot, sink=sink)
        assert sink.lost_groups == ["a", "b"] and not slot.assigned
        await asyncio.sleep(5)
        await pool.close()

    run_in_virtual_time(main())


def test_groups_for_a_worker_are_not_given_to_a_successor_without_weights():
    async def main() -> None:
        pool, sink = pool_of(Worker(0)), Sink()
        slot = pool.slots[0]
        pool.died(slot, WorkerDied("gone"), handle=slot.handle)
        await asyncio.sleep(5)
        assert pool.has_newcomer
        await pool.submit([request("a")], slot=slot, sink=sink)
        assert sink.lost_groups == ["a"] and slot.handle.submitted == []
        await pool.close()

    run_in_virtual_time(main())


def test_a_call_that_fails_late_is_not_charged_to_the_successor():
    async def main() -> None:
        old = Worker(0, submit_fails_after=30.0, collect_fails_after=5.0)
        pool, sink = pool_of(old, max_restarts=1), Sink()
        slot = pool.slots[0]
        await pool.submit([request("a")], slot=slot, sink=sink)
        assert slot.alive and slot.handle is not old
        assert sink.lost_groups == ["a"]
        await asyncio.sleep(5)
        pool.check()
        await pool.close()

    run_in_virtual_time(main())


def test_a_submission_that_is_not_answered_costs_the_worker_not_the_run():
    async def main() -> None:
        pool, sink = pool_of(Worker(0, submit_fails_after=30.0)), Sink()
        await pool.submit([request("a")], slot=pool.slots[0], sink=sink)
        await asyncio.sleep(5)
        pool.check()
        assert sink.lost_groups == ["a"] and pool.has_newcomer
        await pool.close()

    run_in_virtual_time(main())


def test_what_a_dead_worker_did_stays_in_the_totals():
    async def main() -> None:
        pool = pool_of(Worker(0, collect_fails_after=2.5), Worker(1))
        await asyncio.sleep(10)
        assert pool.totals.completion_tokens == 300  # the dead one, its successor, the other
        await pool.close()

    run_in_virtual_time(main())


def test_overdue_groups_fail_and_others_do_not():
    async def main() -> None:
        pool, sink = pool_of(Worker(0)), Sink()
        await pool.submit([request("old")], slot=pool.slots[0], sink=sink)
        await asyncio.sleep(20)
        await pool.submit([request("new")], slot=pool.slots[0], sink=sink)
        await pool.expire(limit_s=10)
        assert sink.failed_groups == [("old", "timeout")]
        assert list(pool.slots[0].assigned) == ["new"] and pool.slots[0].load == 2
        await pool.close()

    run_in_virtual_time(main())


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_a_wait_over_its_limit_says_who_waited_for_what():
    with pytest.raises(StalledError, match="the learner waited 7 s for a batch"):
        run_in_virtual_time(within(asyncio.sleep(100), limit_s=7, who="the learner", what="a batch"))


def test_a_cancellation_that_meets_the_result_is_not_lost():
    """`asyncio.wait_for` loses it up to Python 3.11."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        task = asyncio.create_task(within(future, limit_s=100, who="a", what="b"))
        await asyncio.sleep(0)

        def both() -> None:
            future.set_result(None)
            task.cancel()

        loop.call_soon(both)
        await asyncio.wait([task])
        assert task.cancelled()

    run_in_virtual_time(main())


def test_progress_names_what_moved_last_and_the_last_errors():
    async def main() -> None:
        progress = Progress(limit_s=50)
        progress.moved("step")
        await asyncio.sleep(40)
        progress.moved("completion")
        progress.failed("rollout worker 1", WorkerDied("is gone"))
        progress.check("the learner, for a batch")
        await asyncio.sleep(51)
        progress.check("the learner, for a batch")

    expected = (
        r"nothing moved for 51 s \(limits.progress_s=50\). Waiting: the learner, for a batch. "
        r"Last seen: completion 51 s ago, step 91 s ago. Last errors: rollout worker 1: WorkerDied: is gone"
    )
    with pytest.raises(StalledError, match=expected):
        run_in_virtual_time(main())
