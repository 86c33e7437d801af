"""The proof after each sync: the bytes that arrived are the learner's, and the engine computes with them.

A fingerprint alone misses an engine that holds the right bytes and computes with others (experts that were not packed
again, a parameter that received no tensor); a probe alone misses a small difference. Both must pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from s2rl.errors import SyncError
from s2rl.types import FloatArray, LoadReport, PublishReport

_NAMED = 5


def check_fingerprints(published: PublishReport, loaded: LoadReport) -> None:
    """Raise SyncError unless the worker loaded exactly what the learner published, into every parameter it has."""
    where = f"rollout worker {loaded.worker}, version {published.version}"
    if loaded.version != published.version:
        raise SyncError(f"{where}: the worker reports that it loaded version {loaded.version}")
    problems = []
    missing = sorted(published.fingerprints.keys() - loaded.fingerprints.keys())
    extra = sorted(loaded.fingerprints.keys() - published.fingerprints.keys())
    differ = sorted(
        name for name, value in published.fingerprints.items() if loaded.fingerprints.get(name, value) != value
    )
    if differ:
        problems.append(f"{len(differ)} tensors arrived with other bytes than the learner has: {_names(differ)}")
    if missing:
        problems.append(f"{len(missing)} tensors did not reach the engine: {_names(missing)}")
    if extra:
        problems.append(f"{len(extra)} tensors that the learner did not publish reached the engine: {_names(extra)}")
    if loaded.unloaded:
        problems.append(f"{len(loaded.unloaded)} engine parameters received no tensor: {_names(loaded.unloaded)}")
    if not problems and loaded.num_bytes != published.num_bytes:
        problems.append(f"{loaded.num_bytes} bytes arrived of {published.num_bytes}")
    if problems:
        raise SyncError(f"weight sync failed its proof ({where}): {'; '.join(problems)}")


def check_probe(
    learner: Sequence[FloatArray], engine: Sequence[FloatArray], *, tolerance: float, worker: int, version: int
) -> float:
    """Compare log-probabilities of the probe sequences; returns the mean |difference|, as a share of |log-probability|
    where that is above 1: rounding in bfloat16 grows with the logits, and unlikely tokens have large ones.

    Entry i of an array belongs to token i + 1 of its sequence. Raises SyncError when the mean is above `tolerance`,
    when a value is not finite, or when the lengths differ.
    """
    where = f"rollout worker {worker}, version {version}"
    lengths = [len(a) for a in learner], [len(a) for a in engine]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise SyncError(
            f"weight sync probe ({where}): the learner scored sequences of {lengths[0]} tokens, the engine of "
            f"{lengths[1]}; they must be the same and not empty"
        )
    ours = np.concatenate([np.asarray(a, dtype=np.float64) for a in learner])
    theirs = np.concatenate([np.asarray(a, dtype=np.float64) for a in engine])
    for side, values in (("learner", ours), ("engine", theirs)):
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise SyncError(
                f"weight sync probe ({where}): {bad.size} of {values.size} log-probabilities of the {side} are not "
                f"finite, the first ({values[bad[0]]}) at {_position(int(bad[0]), lengths[0])}"
            )
    difference = np.abs(ours - theirs) / np.maximum(1.0, np.abs(ours))
    mean = float(difference.mean())
    if not mean <= tolerance:
        worst = int(difference.argmax())
        raise SyncError(
            f"weight sync probe ({where}): engine and learner disagree on log-probabilities: mean relative "
            f"|difference| {mean:.3g} is above the tolerance {tolerance:.3g}; the largest is "
            f"{difference[worst]:.3g} at {_position(worst, lengths[0])} (learner {ours[worst]:.5f}, engine "
            f"{theirs[worst]:.5f}). The engine does not compute with the weights that it was sent"
        )
    return mean


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _position(flat: int, lengths: Sequence[int]) -> str:
    """Where entry `flat` of the concatenated arrays lies."""
    for sequence, length in enumerate(lengths):
        if flat < length:
            return f"sequence {sequence}, token {flat + 1}"
        flat -= length
    raise AssertionError("position outside of all sequences")
