"""Rollout workers and a learner that sleep instead of computing, behind the protocols of `s2rl.trainer.parts`.

They keep the rules of the real ones where the controller could tell the difference: a worker decodes up to
`max_num_seqs` completions at once, each at a fixed pace; a weight load stops them and the tokens after it carry the new
version; a publication is a collective that a missing member breaks for all; fingerprints and log-probabilities follow
from the version. `Faults` says what goes wrong and when. All times are those of the running event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from s2rl.errors import LearnerDied, SyncError
from s2rl.types import (
    FloatArray,
    IntArray,
    PublishReport,
    RankBatch,
    RowLayout,
    StepResult,
    SyncGroupSpec,
    TensorSpec,
    TokenizerFacts,
)

FACTS = TokenizerFacts(
    vocab_size=1000, tokenizer_size=1000, eos_token_ids=(0,), pad_token_id=None, bos_token_id=None, digest="simulated"
)
MANIFEST = [TensorSpec(name=n, shape=(4,), dtype="float32") for n in ("head.weight", "layer.weight", "norm.weight")]
NUM_BYTES = 48


def log_probabilities(token_ids: IntArray, versions: IntArray | int, *, temperature: float) -> FloatArray:
    """What a model of this version says of each token: any fixed function of token, version and temperature will do."""
    steps = (token_ids.astype(np.int64) * 7919 + np.asarray(versions, dtype=np.int64) * 104729) % 997
    return (-0.05 - steps / 500.0 / temperature).astype(np.float32)


def fingerprints(version: int) -> dict[str, int]:
    """Per tensor of `MANIFEST`, as a model of this version has them."""
    return {spec.name: zlib.crc32(f"{spec.name}:{version}".encode()) for spec in MANIFEST}


def lognormal_length(*, median: float, sigma: float, longest: int, seed: int = 0) -> Callable[[str, int], int]:
    """Completion lengths with a heavy tail, fixed by group id and index."""

    def length(group_id: str, index: int) -> int:
        rng = np.random.default_rng((seed, zlib.crc32(group_id.encode()), index))
        return int(np.clip(rng.lognormal(np.log(median), sigma), 1, longest))

    return length


@dataclass(slots=True, kw_only=True)
class Costs:
    """Seconds."""

    token_s: float = 0.01
    """One token of one running completion."""
    load_s: float = 0.05
    """One publication: workers stand still and the learner waits for as long."""
    train_s: float = 0.5
    train_token_s: float = 0.0
    """Per completion token of a batch, on top of `train_s`."""
    score_s: float = 0.01
    start_s: float = 1.0
    save_s: float = 0.2
    answer_s: float = 30.0
    """A call that gets no answer raises `StalledError` after this."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong with one process, a worker's or the learner's. Its successor has faults of its own, or none."""

    die_at: float | None = None
    """Seconds after the loop began."""
    die_in: tuple[str, int] | None = None
    """Method and which call of it (from 1) the process does not survive."""
    hang_in: tuple[str, int] | None = None
    """Method and which call of it hangs; other calls are answered."""
    hang_at: float | None = None
    """From then on nothing finishes and no call is answered."""
    corrupt: Mapping[int, str] = field(default_factory=dict)
    """Version -> tensor that arrives with other bytes."""
    probe_off: Mapping[int, float] = field(default_factory=dict)
    """Version -> error of the engine's log-probabilities after it."""
    temperature: float | None = None
    """Samples at this temperature, whatever is asked for."""
    fail: Callable[[str], str | None] = lambda group_id: None
    """Why a group cannot be sampled, if so."""
    stuck: Callable[[str], bool] = lambda group_id: False
    """Groups of which the last completion never ends."""


class SyncGroup:
    """The members of one process group; a collective ends when all have come, or fails for all when one is gone."""

    def __init__(self, spec: SyncGroupSpec) -> None:
        self.world_size = spec.world_size
        self.timeout_s = spec.timeout_s
        self._members: set[int] = set()
        self._gone = False
        self._round: tuple[str, set[int], asyncio.Future[None]] | None = None

    async def meet(self, rank: int, what: str) -> None:
        """Wait for all members. Raises `SyncError` when one is gone or does not come in time."""
        if self._gone:
            raise SyncError(f"{what}: a member is gone")
        if self._round is None:
            self._round = (what, set(), asyncio.get_running_loop().create_future())
        name, present, future = self._round
        assert name == what and rank not in present, (name, what, rank, present)
        present.add(rank)
        if len(present) == self.world_size:
            self._round = None
            future.set_result(None)
        try:
            await asyncio.wait_for(asyncio.shield(future), self.timeout_s)
        except TimeoutError as error:
            raise SyncError(f"{what}: {self.world_size - len(present)} members did not come") from error

    def leave(self) -> None:
        """A member's process is gone."""
        self._gone = True
        if self._round is not None:
            what, _, future = self._round
            if not future.done():
                future.set_exception(SyncError(f"{what}: a member is gone"))
                future.exception()  # read, so that a future nobody waits for is not reported


class Network:
    """Where processes find each other: one sync group per port."""

    def __init__(self) -> None:
        self._ports = itertools.count(20000)
        self._groups: dict[int, SyncGroup] = {}

    def free_port(self) -> int:
        """A new one."""
        return next(self._ports)

    def group(self, spec: SyncGroupSpec) -> SyncGroup:
        """The group at this address."""
        return self._groups.setdefault(spec.port, SyncGroup(spec))


class SimulatedLearner:
    """All learner ranks. Keeps what it was given, so that tests can ask."""

    def __init__(
        self,
        *,
        network: Network,
        costs: Costs,
        updates_per_batch: int = 1,
        world_size: int = 1,
        faults: Faults | None = None,
    ) -> None:
        self.world_size = world_size
        self.version = 0
        self.dead = False
        self.calls: list[str] = []
        self.batches: list[list[RankBatch]] = []
        self.published: list[int] = []
        self.faults = faults or Faults()
        self._counts: Counter[str] = Counter()
        self._network, self._costs, self._updates = network, costs, updates_per_batch
        self._group: SyncGroup | None = None
        self._saved: asyncio.Task[None] | None = None

    def _enter(self, method: str) -> None:
        self.calls.append(method)
        self._counts[method] += 1
        if self.faults.die_in == (method, self._counts[method]):
            self.dead = True
            if self._group is not None:
                self._group.leave()
        if self.dead:
            raise LearnerDied(f"learner-0 died during {method}()")

    async def start(self) -> TokenizerFacts:
        """See `LearnerHandle`."""
        self._enter("start")
        await asyncio.sleep(self._costs.start_s)
        return FACTS

    async def layout(self) -> RowLayout:
        """See `LearnerHandle`."""
        return RowLayout()

    async def manifest(self) -> list[TensorSpec]:
        """See `LearnerHandle`."""
        self._enter("manifest")
        return MANIFEST

    async def sync_endpoint(self) -> tuple[str, int]:
        """See `LearnerHandle`."""
        return "127.0.0.1", self._network.free_port()

    async def join_sync(self, spec: SyncGroupSpec) -> None:
        """See `LearnerHandle`."""
        self._enter("join_sync")
        self._group = self._network.group(spec)
        await self._group.meet(0, "joining")

    async def publish(self, version: int) -> PublishReport:
        """See `LearnerHandle`."""
        self._enter("publish")
        assert version == self.version, (version, self.version)
        assert self._group is not None
        await self._group.meet(0, f"publication of version {version}")
        await asyncio.sleep(self._costs.load_s)
        self.published.append(version)
        return PublishReport(
            version=version, num_bytes=NUM_BYTES, seconds=self._costs.load_s, fingerprints=fingerprints(version)
        )

    async def train(self, batches: Sequence[RankBatch]) -> StepResult:
        """See `LearnerHandle`."""
        self._enter("train")
        assert len(batches) == self.world_size and all(b.version == self.version for b in batches)
        self.batches.append(list(batches))
        await asyncio.sleep(self._costs.train_s + self._costs.train_token_s * batches[0].num_loss_tokens)
        if self.dead:
            raise LearnerDied("learner-0 died during train()")
        self.version += self._updates
        metrics = {"loss/total": 0.0, "optim/lr": 1e-6, "optim/grad_norm": 1.0, "memory/learner_rss_mb": 1.0}
        return StepResult(version=self.version, metrics=metrics, num_skipped_steps=0)

    async def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Any = None, as_sampled: bool = False
    ) -> list[FloatArray]:
        """See `LearnerHandle`."""
        self._enter("score")
        await asyncio.sleep(self._costs.score_s)
        return [
            log_probabilities(np.array(s[1:], dtype=np.int32), self.version, temperature=temperature) for s in sequences
        ]

    async def save(self, path: Path) -> None:
        """See `LearnerHandle`."""
        self._enter("save")
        version = self.version
        await asyncio.sleep(self._costs.save_s / 10)

        def put() -> None:
            if path.parent.is_dir():  # checkpoints that are not kept have no folder
                path.mkdir(exist_ok=True)
                (path / "version").write_text(str(version))

        async def write() -> None:
            await asyncio.sleep(self._costs.save_s)
            await asyncio.to_thread(put)

        self._saved = asyncio.create_task(write())

    async def save_done(self) -> None:
        """See `LearnerHandle`."""
        self._enter("save_done")
        assert self._saved is not None
        await self._saved

    async def load(self, path: Path) -> int:
        """See `LearnerHandle`."""
        self._enter("load")
        self.version = int(await asyncio.to_thread((path / "version").read_text))
        return self.version

    async def memory(self) -> Mapping[int, float]:
        """See `LearnerHandle`."""
        self._enter("memory")
        return {0: 1.0}

    async def close(self) -> None:
        """See `LearnerHandle`."""
        self.calls.append("close")
