"""What the proof accepts, what it refuses, and what it says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from s2rl.errors import SyncError
from s2rl.sync import check_fingerprints, check_probe
from s2rl.types import LoadReport, PublishReport

PRINTS = {f"layer.{i}": i * 7919 for i in range(9)}
PUBLISHED = PublishReport(version=12, num_bytes=90, seconds=1.0, fingerprints=PRINTS)
LOADED = LoadReport(worker=1, version=12, num_bytes=90, stalled_s=0.5, fingerprints=dict(PRINTS))


def test_equal_fingerprints_of_equal_tensors_pass() -> None:
    check_fingerprints(PUBLISHED, LOADED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 11}, r"worker 1, version 12: the worker reports that it loaded version 11"),
        ({"fingerprints": {**PRINTS, "layer.3": 1}}, r"1 tensors arrived with other bytes .*: layer\.3$"),
        (
            {"fingerprints": dict.fromkeys(PRINTS, 1)},
            r"9 tensors arrived .*layer\.0, layer\.1, layer\.2, layer\.3, layer\.4 and 4 more",
        ),
        ({"fingerprints": {k: v for k, v in PRINTS.items() if k != "layer.8"}}, r"did not reach .*: layer\.8$"),
        ({"fingerprints": {**PRINTS, "odd": 5}}, r"1 tensors that the learner did not publish .*: odd$"),
        ({"unloaded": ("lm_head.weight",)}, r"1 engine parameters received no tensor: lm_head\.weight$"),
        ({"num_bytes": 88}, r"88 bytes arrived of 90"),
    ],
)
def test_any_difference_is_refused_and_named(change: dict, message: str) -> None:
    with pytest.raises(SyncError, match=message):
        check_fingerprints(PUBLISHED, dataclasses.replace(LOADED, **change))


def logprobs(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [-rng.random(length, dtype=np.float32) for length in lengths]


def test_a_probe_within_its_tolerance_passes_and_returns_the_mean_difference() -> None:
    ours = logprobs(4, 6)
    theirs = [a + np.float32(1e-4) for a in ours]
    mean = check_probe(ours, theirs, tolerance=2e-4, worker=0, version=1)
    assert mean == pytest.approx(1e-4, rel=1e-2)


def test_a_probe_over_its_tolerance_names_worker_version_and_the_worst_token() -> None:
    ours = logprobs(4, 6)
    theirs = [a.copy() for a in ours]
    ours[1][2], theirs[1][2] = -0.5, -3.5
    message = r"worker 3, version 8.*mean relative \|difference\| 0\.3 .*3 at sequence 1, token 3"
    with pytest.raises(SyncError, match=message):
        check_probe(ours, theirs, tolerance=0.05, worker=3, version=8)


def test_the_same_relative_rounding_weighs_the_same_on_likely_and_unlikely_tokens() -> None:
    unlikely = [np.full(4, -16.0, dtype=np.float32)]
    assert check_probe(unlikely, [a * 1.01 for a in unlikely], tolerance=0.05, worker=0, version=1) == pytest.approx(
        0.01
    )
    with pytest.raises(SyncError):
        check_probe(unlikely, [a * 1.1 for a in unlikely], tolerance=0.05, worker=0, version=1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["learner", "engine"])
def test_a_value_that_is_not_finite_is_a_failure_whatever_the_tolerance(side: str, value: float) -> None:
    ours, theirs = logprobs(5), logprobs(5)
    (ours if side == "learner" else theirs)[0][4] = value
    with pytest.raises(SyncError, match=rf"of the {side} are not finite, the first .* at sequence 0, token 5"):
        check_probe(ours, theirs, tolerance=1e9, worker=0, version=0)


@pytest.mark.parametrize("engine", [[5, 2], [4], []])
def test_probes_of_different_lengths_are_refused(engine: list[int]) -> None:
    with pytest.raises(SyncError, match=r"must be the same and not empty"):
        check_probe(logprobs(5), logprobs(*engine), tolerance=1.0, worker=0, version=0)


def test_a_probe_without_tokens_proves_nothing() -> None:
    with pytest.raises(SyncError, match=r"not empty"):
        check_probe([], [], tolerance=1.0, worker=0, version=0)
