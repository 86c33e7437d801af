"""Grades completions in a pool of processes; each call of a reward function has a time limit.

A call is one function on one completion. Calls that wait are handed out in lots, small enough for a lot to take about
`_LOT_S`. Results come back one by one, so the limit is kept per call and a lost process costs one call only:

- a call over its limit: its process is killed, the call scores zero with `grader_timeout`, the rest of its lot is
  graded by another process;
- a call that raises, returns something that is no finite score, or takes its process down: zero with `grader_error`.

Written for this purpose instead of taken from `multiprocessing` or pebble: their children import the user's main
script again, which trains a second time when it has no `__main__` guard; a pebble pool is broken for good when an idle
process dies; and both limit a whole lot, not a call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from s2rl.config.schema import GradingConfig
from s2rl.errors import ConfigError, RunError
from s2rl.rewards.base import RewardInput
from s2rl.rewards.calls import Batch, Call, Counters, GradingStats, Job, Worker
from s2rl.rewards.plan import RewardPlan
from s2rl.rewards.process import GraderProcess
from s2rl.rewards.wire import BEGAN, CallMessage, ReadyMessage, ResultMessage, StartMessage
from s2rl.types import Completion, Prompt, Rollout, RolloutStatus, Score

log = logging.getLogger(__name__)

_LOT_S = 0.05
_LARGEST_LOT = 64
_START_LIMIT_S = 120.0
"""Starting Python and importing the modules of the reward functions."""
_MAX_FAILED_STARTS = 3
"""In a row; then nothing can be graded any more, and the run has to know."""
_RETRY_S = 0.2
_MAX_LOST = 3
"""Processes that may vanish before they begin a call, before the call is given up."""
_ZERO = Score(total=0.0)


class GradingPool:
    """`start`, then `grade` from any number of tasks of one event loop, then `close`."""

    def __init__(self, config: GradingConfig, *, log_path: Path | None = None) -> None:
        """`log_path`: where reward functions' own output goes; standard error when not set."""
        self.plan = RewardPlan(config.functions)
        self._limit_s = config.time_limit_s
        self._num_processes = config.processes
        self._log_path = log_path
        self._start_message = StartMessage(tuple((f.function, dict(f.args)) for f in config.functions))
        self._workers: dict[GraderProcess, Worker] = {}
        self._pending: deque[Call] = deque()
        self._ids = itertools.count()
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counters = Counters()
        self._batches: set[Batch] = set()
        self._unreaped: set[GraderProcess] = set()
        self._call_s = _LOT_S / 4
        """Running mean of seconds per call."""
        self._failed_starts = 0
        self._failure: Exception | None = None
        self._num_open = 0
        self._closed = False

    async def start(self) -> None:
        """Start the processes and load the reward functions in them; bounded by the start limit of a process.

        Raises ConfigError when a function cannot be loaded, RunError when no process comes up.
        """
        try:
            await asyncio.gather(*(self._spawn() for _ in range(self._num_processes)))
            await self._ready.wait()
        except BaseException:
            await self.close()
            raise
        if self._failure is not None:
            failure = self._failure
            await self.close()
            raise failure

    async def grade(self, completion: Completion, *, prompt: Prompt) -> Rollout:
        """One completion; see `grade_many`."""
        (rollout,) = await self.grade_many([(completion, prompt)])
        return rollout

    async def grade_many(self, items: Sequence[tuple[Completion, Prompt]]) -> list[Rollout]:
        """Scores in the order of `items`. Failures of reward functions are data (`Rollout.status`).

        The time is bounded by the calls that wait times their limit. Raises RunError when the pool is closed or its
        processes do not come up any more.
        """
        if self._failure is not None or self._closed or not self._workers:
            raise self._failure or RunError("the grading pool is not running")
        if not items:
            return []
        batch = Batch(future=asyncio.get_running_loop().create_future(), waiting=len(items))
        self._batches.add(batch)
        jobs: list[Job] = []
        for completion, prompt in items:
            functions = self.plan.applicable(prompt.data_source)
            assert functions, f"no reward function applies to {prompt.data_source!r}; RewardPlan.check was left out"
            job = Job(completion=completion, waiting=len(functions), batch=batch)
            jobs.append(job)
            item = _item(completion, prompt=prompt)
            self._pending.extend(Call(message=CallMessage(next(self._ids), i, item), job=job) for i in functions)
            self._num_open += len(functions)
        self._dispatch()
        try:
            await batch.future
        finally:
            self._batches.discard(batch)
        return [Rollout(completion=j.completion, score=self.plan.combine(j.scores), status=j.status) for j in jobs]

    def stats(self) -> GradingStats:
        """The counters now."""
        return GradingStats(**asdict(self._counters), waiting=self._num_open)

    def pids(self) -> list[int]:
        """Process ids of the pool."""
        return [w.process.pid for w in self._workers.values()]

    async def close(self) -> None:
        """End all processes; open calls raise RunError. May be called more than once."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for worker in self._workers.values():
            if worker.timer is not None:
                worker.timer.cancel()
        self._workers.clear()
        processes = list(self._unreaped)
        for process in processes:
            process.kill()
        await asyncio.gather(*(p.wait() for p in processes), *self._tasks, return_exceptions=True)
        self._unreaped.clear()
        self._fail_all(self._failure or RunError("the grading pool was closed"))

    # ---- processes

    async def _spawn(self) -> None:
        process = GraderProcess(on_message=self._on_message, on_lost=self._on_lost, log_path=self._log_path)
        self._unreaped.add(process)
        await process.start()
        worker = Worker(process=process)
        self._workers[process] = worker
        process.send(self._start_message)
        self._watch(worker, limit_s=_START_LIMIT_S)

    def _on_message(self, process: GraderProcess, message: Any) -> None:
        worker = self._workers.get(process)
        if worker is None:
            return  # killed meanwhile
        worker.since = asyncio.get_running_loop().time()
        if isinstance(message, ResultMessage):
            call = worker.calls.popleft()
            assert call.message.call_id == message.call_id, "results come in the order of calls"
            self._call_s += 0.1 * (message.seconds - self._call_s)
            if message.error is None:
                self._finish(call, score=Score(total=message.total, parts=message.parts), seconds=message.seconds)
            else:
                self._fail_call(call, RolloutStatus.GRADER_ERROR, message.error, seconds=message.seconds)
            if not worker.calls:
                worker.began = False
                self._dispatch()
        elif message == BEGAN:
            worker.began = True
        else:
            assert isinstance(message, ReadyMessage)
            self._on_ready(worker, message)

    def _on_ready(self, worker: Worker, message: ReadyMessage) -> None:
        if message.refusal is not None:
            self._give_up(ConfigError(message.refusal))
            return
        worker.ready = True
        self._failed_starts = 0
        if all(w.ready for w in self._workers.values()) and len(self._workers) == self._num_processes:
            self._ready.set()
        self._dispatch()

    def _on_lost(self, process: GraderProcess) -> None:
        worker = self._workers.get(process)
        if worker is not None:
            self._retire(worker, reason=None)

    def _watch(self, worker: Worker, *, limit_s: float) -> None:
        """Look at the running call (or the start) when its time is over; one timer per process, re-armed lazily."""
        loop = asyncio.get_running_loop()
        worker.since = loop.time()
        if worker.timer is not None:
            worker.timer.cancel()
        worker.timer = loop.call_later(limit_s, self._on_timer, worker, limit_s)

    def _on_timer(self, worker: Worker, limit_s: float) -> None:
        worker.timer = None
        if worker.process not in self._workers or (worker.ready and not worker.calls):
            return
        loop = asyncio.get_running_loop()
        # The loop handles what arrived before it handles timers, so `since` is never behind a result that is there.
        left = worker.since + limit_s - loop.time()
        if left > 0:
            worker.timer = loop.call_later(left, self._on_timer, worker, limit_s)
        else:
            self._retire(worker, reason=f"no answer within {limit_s:g} s")

    def _retire(self, worker: Worker, *, reason: str | None) -> None:
        """Kill a process, settle its running call, hand the others back, start another. `reason`: its time was over."""
        del self._workers[worker.process]
        worker.process.kill()
        if worker.timer is not None:
            worker.timer.cancel()
        running = worker.calls.popleft() if worker.began and worker.calls else None
        if running is not None and reason is not None:
            self._call_s += 0.1 * (self._limit_s - self._call_s)
            self._fail_call(running, RolloutStatus.GRADER_TIMEOUT, reason, seconds=self._limit_s)
            running = None
        for call in reversed(worker.calls):
            call.lost += not worker.began
            if call.lost >= _MAX_LOST:
                self._fail_call(call, RolloutStatus.GRADER_ERROR, "its grading process vanished again and again")
            else:
                self._pending.appendleft(call)
        worker.calls.clear()
        self._background(self._bury(worker, running=running, reason=reason))

    async def _bury(self, worker: Worker, *, running: Call | None, reason: str | None) -> None:
        """Wait for the end of a process, settle the call that it took down, start another process."""
        code = await worker.process.wait()
        self._unreaped.discard(worker.process)
        if running is not None:
            what = "did not end" if code is None else f"died by signal {-code}" if code < 0 else f"exited with {code}"
            self._fail_call(running, RolloutStatus.GRADER_ERROR, f"its process {what}")
        why = None if worker.ready else reason or f"exit code {code}"
        while True:
            if why is not None:
                self._failed_starts += 1
                if self._failed_starts >= _MAX_FAILED_STARTS:
                    why = f"{self._failed_starts} in a row; last: {why}"
                    self._give_up(RunError(f"the processes that grade do not come up ({why})"))
                    return
                await asyncio.sleep(_RETRY_S)
            self._counters.restarts += 1
            try:
                await self._spawn()
            except OSError as error:
                why = str(error)
            else:
                return

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_up(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        self._fail_all(self._failure)
        self._ready.set()

    def _fail_all(self, error: Exception) -> None:
        self._pending.clear()
        for batch in self._batches:
            if not batch.future.done():
                batch.future.set_exception(error)

    # ---- calls

    def _dispatch(self) -> None:
        """Give lots to the processes that have none."""
        idle = [w for w in self._workers.values() if w.ready and not w.calls]
        while idle and self._pending:
            fair = -(-len(self._pending) // len(idle))
            size = max(1, min(_LARGEST_LOT, int(_LOT_S / max(self._call_s, 1e-6)), fair))
            lot: list[Call] = []
            while self._pending and len(lot) < size:
                call = self._pending.popleft()
                if not call.job.batch.future.done():  # the caller was cancelled
                    lot.append(call)
                else:
                    self._num_open -= 1
            if lot:
                self._send(idle.pop(), lot)

    def _send(self, worker: Worker, lot: list[Call]) -> None:
        try:
            worker.process.send([c.message for c in lot])
        except Exception as error:  # noqa: BLE001 - pickling runs code of the values in `extra`; the failure is data of the call
            if len(lot) == 1:
                self._fail_call(lot[0], RolloutStatus.GRADER_ERROR, f"the row cannot be sent to a grader: {error}")
                self._background(self._dispatch_later())
            else:
                self._send(worker, lot[:1])
                self._pending.extendleft(reversed(lot[1:]))
            return
        worker.calls.extend(lot)
        worker.began = False
        self._watch(worker, limit_s=self._limit_s)

    async def _dispatch_later(self) -> None:
        self._dispatch()

    def _fail_call(self, call: Call, status: RolloutStatus, error: str, *, seconds: float = 0.0) -> None:
        name = self.plan.names[call.message.function]
        text = f"{name}: {error}"
        self._counters.last_error = text
        if status is RolloutStatus.GRADER_TIMEOUT:
            self._counters.timeouts += 1
        else:
            self._counters.errors += 1
        failures = self._counters.timeouts + self._counters.errors
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8, ...: a grader that always fails must not fill the log
            log.warning("reward function failed and scores zero (%s; %d so far): %s", status, failures, text)
        call.job.status = status
        self._finish(call, score=_ZERO, seconds=seconds)

    def _finish(self, call: Call, *, score: Score, seconds: float) -> None:
        self._counters.calls += 1
        self._counters.seconds += seconds
        self._num_open -= 1
        job = call.job
        job.scores[call.message.function] = score
        job.waiting -= 1
        if job.waiting == 0:
            job.batch.waiting -= 1
            if job.batch.waiting == 0 and not job.batch.future.done():
                job.batch.future.set_result(None)


def _item(completion: Completion, *, prompt: Prompt) -> RewardInput:
    return RewardInput(
        text=completion.text,
        answer=prompt.answer,
        data_source=prompt.data_source,
        extra=prompt.extra,
        messages=prompt.messages,
        prompt=prompt.text,
        finish_reason=completion.finish_reason,
        num_tokens=len(completion.token_ids),
    )


def check_functions(config: GradingConfig) -> None:
    """Load all reward functions once, in a process that ends again: about half a second. Not for use in an event loop.

    For the time before a run folder is made. Raises what `GradingPool.start` raises.
    """

    async def load() -> None:
        pool = GradingPool(config.model_copy(update={"processes": 1}))
        await pool.start()
        await pool.close()

    asyncio.run(load())
