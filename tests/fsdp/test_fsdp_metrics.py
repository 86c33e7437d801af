from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from fsdp_models import free_port

from s2rl.fsdp.metrics import MetricSums


@pytest.fixture
def alone():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_means_are_over_everything_added_and_not_over_the_additions(alone):
    metrics = MetricSums()
    metrics.mean("m", torch.tensor([1.0, 2.0, 3.0]))
    metrics.mean("m", torch.tensor([6.0]))
    metrics.mean("m", torch.tensor([]))
    metrics.mean("share", torch.tensor([True, False, False, False]))
    metrics.total("t", torch.tensor(0.5))
    metrics.total("t", 0.25)
    assert metrics.reduce() == {"m": 3.0, "share": 0.25, "t": 0.75}


def test_a_mean_or_maximum_over_nothing_is_absent(alone):
    metrics = MetricSums()
    metrics.mean("m", torch.tensor([]))
    metrics.maximum("x", torch.tensor([]))
    assert metrics.reduce() == {}


def test_a_broken_value_is_seen_in_means_and_maxima(alone):
    metrics = MetricSums()
    metrics.mean("m", torch.tensor([1.0, math.nan]))
    for values in (torch.tensor([1.0]), torch.tensor([math.nan, 2.0]), 3.0):
        metrics.maximum("x", values)
    assert all(math.isnan(v) for v in metrics.reduce().values())
