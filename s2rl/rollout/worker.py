"""The rollout worker: a plain class with asynchronous methods around one engine. The trainer places it as a Ray actor.

    consumes   groups to sample, weight publications
    produces   completions in batches (`collect`), scores
    waits for  the engine thread, each time with a limit
    woken by   the engine thread

Nothing here imports vllm: its environment is set first, in `start`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import psutil

from s2rl.config.schema import Device, ModelConfig, RolloutConfig
from s2rl.data.tokenizer import eos_token_ids, facts_of, has_tokenizer, load_tokenizer
from s2rl.errors import ConfigError, ModelError, RunError, StalledError
from s2rl.rollout import vllm_compat
from s2rl.rollout.loop import Finished, RolloutLoop
from s2rl.rollout.stopping import cut_at_stop
from s2rl.rollout.thread import EngineThread
from s2rl.types import (
    Completion,
    FailedRequest,
    FloatArray,
    GroupRequest,
    LoadReport,
    RolloutReport,
    SyncGroupSpec,
    TensorSpec,
    TokenizerFacts,
    WorkerStats,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SCORE_LIMIT_S = 600.0
_CLOSE_LIMIT_S = 60.0
_SYNC_SLACK_S = 60.0
"""Beyond the group's own limit: the engine step in progress, post-processing of the weights."""


class RolloutWorker:
    """See `s2rl.trainer.parts.WorkerHandle`. All methods are called from one event loop.

    When the engine ends with an error, every pending and later call raises `WorkerDied` that names it.
    """

    def __init__(
        self,
        *,
        index: int,
        model: ModelConfig,
        config: RolloutConfig,
        device: Device,
        seed: int,
        extension_cls: str = "s2rl.rollout.extension.SyncExtension",
        start_limit_s: float = 1800.0,
    ) -> None:
        """`extension_cls` is the dotted path of a `SyncExtension`; `start_limit_s` bounds `start`."""
        if config.kv_on_update == "keep" and config.prefix_caching:
            raise ConfigError(
                "rollout.kv_on_update: 'keep' needs rollout.prefix_caching: false, or the prefix cache would serve "
                "keys of another version"
            )
        self.index = index
        self._model = model
        self._config = config
        self._device = device
        self._seed = seed
        self._extension_cls = extension_cls
        self._start_limit_s = start_limit_s
        self._tokenizer: Any | None = None
        self._thread = EngineThread(name=f"rollout worker {index}", on_death=self._notify)
        self._finished: deque[Finished] = deque()
        self._tickets = itertools.count()
        self._live: dict[str, tuple[int, int]] = {}
        """Group id -> ticket of its submission, items still to come."""
        self._sync_limit_s = 0.0
        self._process = psutil.Process()
        self._wake: asyncio.Event | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    # WorkerHandle --------------------------------------------------------------------------------------------------

    async def start(self) -> TokenizerFacts:
        """Load the model from its folder. Raises ModelError for a folder that holds none."""
        if not (self._model.path / "config.json").is_file():
            raise ModelError(
                f"model.path: {self._model.path} has no config.json; give a folder with a model in Hugging Face format"
            )
        os.environ.update(vllm_compat.environment(self._config, device=self._device))
        self._event_loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        if has_tokenizer(self._model):
            self._tokenizer = load_tokenizer(self._model)
        await self._result(self._thread.start(self._build), "loading the model", self._start_limit_s)
        assert self._thread.loop is not None
        vocab_size = self._thread.loop.engine.limits.vocab_size
        return facts_of(self._tokenizer, model=self._model, vocab_size=vocab_size)

    async def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Hand over groups; returns at once. What cannot be sampled comes back from `collect` as a failure."""
        self._check_alive()
        twice = [r.group_id for r in requests if r.group_id in self._live]
        if twice or len({r.group_id for r in requests}) < len(requests):
            names = ", ".join(twice[:5]) or "in one call"
            raise RunError(f"rollout worker {self.index}: groups submitted twice: {names}")
        batch = []
        for request in requests:
            ticket = next(self._tickets)
            self._live[request.group_id] = (ticket, max(request.num_completions, 1))
            batch.append((ticket, request))
        self._thread.call(lambda loop: loop.submit(batch), fatal=True)

    async def collect(self, max_wait_s: float) -> RolloutReport:
        """Everything that finished since the last call; waits up to `max_wait_s` for the first item."""
        self._check_alive()
        assert self._wake is not None
        if not self._finished:
            self._wake.clear()
            if not self._finished and not self._thread.is_dead:  # the thread may have been faster than `clear`
                try:
                    async with asyncio.timeout(max_wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        self._check_alive()
        completions: list[Completion] = []
        failed: list[FailedRequest] = []
        for finished in self._drain():
            if isinstance(finished.item, FailedRequest):
                failed.append(finished.item)
            else:
                completions.append(self._with_text(finished.item, finished.stop))
        return RolloutReport(completions=completions, failed=failed, stats=self._stats())

    async def abort(self, group_ids: Sequence[str]) -> None:
        """Forget these groups; nothing of them is reported any more. Unknown ids are ignored."""
        self._check_alive()
        known = [group_id for group_id in group_ids if self._live.pop(group_id, None) is not None]
        if known:
            self._thread.call(lambda loop: loop.abort(known), fatal=True)

    async def join_sync(self, spec: SyncGroupSpec, manifest: Sequence[TensorSpec]) -> None:
        """Enter the weight-sync group (collective); an older group is left. Sampling stands still meanwhile."""
        self._sync_limit_s = 2 * spec.timeout_s + _SYNC_SLACK_S
        tensors = tuple(manifest)
        future = self._thread.call(lambda loop: loop.join_sync(spec, tensors))
        await self._result(future, "joining the weight-sync group", self._sync_limit_s)

    async def load_weights(self, version: int) -> LoadReport:
        """Receive and load one publication between two engine steps. An error in it ends the engine."""
        if not self._sync_limit_s:
            raise RunError(f"rollout worker {self.index} was asked for version {version} before join_sync")
        future = self._thread.call(lambda loop: loop.load_weights(version), fatal=True)
        return await self._result(future, f"loading weights of version {version}", self._sync_limit_s)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Log-probability (temperature 1) of each token after the first: float32, one shorter than the sequence.

        All of one call are of one version. Sampling goes on. Raises ValueError for a sequence the engine cannot take:
        an unknown id, or not shorter than `max_model_len`.
        """
        scores: Future[list[FloatArray]] = self._thread.promise()
        started = self._thread.call(lambda loop: loop.score(sequences, scores), fatal=True)
        await self._result(started, "scoring", _SCORE_LIMIT_S)
        return await self._result(scores, "scoring", _SCORE_LIMIT_S)

    async def close(self) -> None:
        """Stop after the step in progress and release the engine. Idempotent."""
        ended = await asyncio.to_thread(self._thread.close, timeout_s=_CLOSE_LIMIT_S)
        if not ended:
            raise StalledError(
                f"rollout worker {self.index} waited {_CLOSE_LIMIT_S:g} s for its engine thread to end; end the process"
            )

    # The engine thread's side --------------------------------------------------------------------------------------

    def _build(self) -> RolloutLoop:
        """Runs in the engine thread, which owns what is built here."""
        from s2rl.rollout.vllm_engine import VllmEngine

        engine = VllmEngine(
            model=self._model,
            config=self._config,
            device=self._device,
            seed=self._seed,
            extension_cls=self._extension_cls,
            eos_token_ids=eos_token_ids(self._model, self._tokenizer),
            has_tokenizer=self._tokenizer is not None,
        )
        return RolloutLoop(
            engine,
            index=self.index,
            max_running=self._config.max_num_seqs,
            kv_on_update=self._config.kv_on_update,
            tokenizer=self._tokenizer,
            deliver=self._deliver,
        )

    def _deliver(self, finished: list[Finished]) -> None:
        self._finished.extend(finished)
        self._notify()

    def _notify(self) -> None:
        assert self._event_loop is not None and self._wake is not None
        try:
            self._event_loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the event loop is closed: nobody waits any more
            logger.debug("rollout worker %d: nobody left to notify", self.index)

    # Helpers -------------------------------------------------------------------------------------------------------

    def _drain(self) -> list[Finished]:
        """Take what finished, but for items of aborted groups."""
        taken = []
        while self._finished:
            finished = self._finished.popleft()
            group_id = finished.item.group_id
            ticket, left = self._live.get(group_id, (-1, 0))
            if ticket != finished.ticket:
                continue
            if left == 1 or isinstance(finished.item, FailedRequest):
                del self._live[group_id]
            else:
                self._live[group_id] = (ticket, left - 1)
            taken.append(finished)
        return taken

    def _with_text(self, completion: Completion, stop: tuple[str, ...]) -> Completion:
        if self._tokenizer is None:
            return completion
        text = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return replace(completion, text=cut_at_stop(text, stop))

    def _stats(self) -> WorkerStats:
        loop = self._thread.loop
        assert loop is not None
        stats = loop.stats
        rss, cpu = _usage(self._process, children=self._config.tensor_parallel > 1)
        return WorkerStats(
            version=stats.version,
            running=stats.running,
            busy_s=loop.clock.seconds("busy"),
            idle_s=loop.clock.seconds("idle"),
            stalled_s=loop.clock.seconds("stalled"),
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            rss_mb=rss / 2**20,
            cpu_s=cpu,
        )

    def _check_alive(self) -> None:
        if self._thread.is_dead or self._thread.is_closed:
            raise self._thread.death()
        if self._thread.loop is None:
            raise RunError(f"rollout worker {self.index} is not started")

    async def _result(self, future: Future[T], what: str, limit_s: float) -> T:
        """What the engine thread answers; raises StalledError when it takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise StalledError(f"rollout worker {self.index} waited {limit_s:g} s for its engine: {what}") from error


def _usage(process: psutil.Process, *, children: bool) -> tuple[int, float]:
    """Resident bytes and CPU seconds of this process and, if asked, of the engine's further ranks."""
    rss, cpu = 0, 0.0
    for member in [process, *(process.children(recursive=True) if children else ())]:
        try:
            times = member.cpu_times()
            rss += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        cpu += times.user + times.system
    return rss, cpu
