"""Device names, and the accelerator branches against stand-ins for their modules."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from s2rl import device
from s2rl.errors import ConfigError


def test_each_device_has_a_cpu_backend_beside_its_own():
    assert device.device_spec("cpu").process_group == "gloo"
    assert device.device_spec("cuda").process_group == "cpu:gloo,cuda:nccl"
    assert device.device_spec("npu").process_group == "cpu:gloo,npu:hccl"


def test_ray_is_asked_for_gpus_by_number_and_for_npus_by_name():
    assert device.ray_options("cpu", num_devices=1, num_cpus=2) == {"num_cpus": 2}
    assert device.ray_options("cuda", num_devices=1, num_cpus=1) == {"num_cpus": 1, "num_gpus": 1}
    assert device.ray_options("npu", num_devices=2, num_cpus=1) == {"num_cpus": 1, "resources": {"NPU": 2}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused():
    assert device.count("cuda") == 0
    with pytest.raises(ConfigError, match="'cuda' was asked for but this process sees no such device"):
        device.claim("cuda")


def test_an_npu_without_its_library_counts_as_none():
    assert device.count("npu") == 0


def test_accelerator_calls_go_to_the_module_of_the_device(monkeypatch):
    calls: list[object] = []
    fake = types.SimpleNamespace(
        device_count=lambda: 1,
        set_device=lambda index: calls.append(("set_device", index)),
        manual_seed_all=lambda seed: calls.append(("seed", seed)),
        synchronize=lambda: calls.append("synchronize"),
        get_rng_state=lambda: torch.tensor([1], dtype=torch.uint8),
        set_rng_state=lambda state: calls.append(("rng", state.tolist())),
        max_memory_allocated=lambda: 3 * 2**20,
    )
    monkeypatch.setattr(device, "_module", lambda name: fake)
    assert device.claim("cuda") == torch.device("cuda", 0)
    device.seed_all(4, device="cuda")
    device.synchronize("cuda")
    device.set_rng_state(device.rng_state("cuda"))
    assert device.peak_memory_mb("cuda") == 3.0
    assert calls == [("set_device", 0), ("seed", 4), "synchronize", ("rng", [1])]


def test_the_random_state_of_the_cpu_can_be_restored():
    states = device.rng_state("cpu")
    first = torch.rand(3)
    device.set_rng_state(states)
    assert torch.equal(torch.rand(3), first)


def test_resident_memory_follows_what_the_process_touches():
    before = device.resident_memory_mb()
    block = np.ones(2**25, dtype=np.uint8)
    assert device.resident_memory_mb() - before > 25
    assert block[0] == 1
