"""The one door to devices: names that differ between CPU, CUDA and Ascend NPU, and the few calls that need them.

Everything else speaks of `cpu`, `cuda` or `npu` and never imports torch.cuda or torch_npu. torch is imported when a
function needs it, so that the controller can ask for resource names without it. The `npu` branch follows torch_npu's
documented names; it has not been run on the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from s2rl.config.schema import Device
from s2rl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What a device is called by the libraries around it."""

    name: Device
    process_group: str
    """Backend of torch.distributed. A CPU backend is always part of it: asynchronous checkpoints need one."""
    collective: str
    """Backend that moves device tensors; the weight-sync group uses it."""
    ray_resource: str | None
    """Ray's name of one device. `None`: only CPU cores are asked for."""


_SPECS: Mapping[Device, DeviceSpec] = MappingProxyType(
    {
        "cpu": DeviceSpec(name="cpu", process_group="gloo", collective="gloo", ray_resource=None),
        "cuda": DeviceSpec(name="cuda", process_group="cpu:gloo,cuda:nccl", collective="nccl", ray_resource="GPU"),
        "npu": DeviceSpec(name="npu", process_group="cpu:gloo,npu:hccl", collective="hccl", ray_resource="NPU"),
    }
)


def device_spec(device: Device) -> DeviceSpec:
    """Names of `device` for torch.distributed, weight sync and Ray."""
    return _SPECS[device]


def ray_options(device: Device, *, num_devices: int, num_cpus: float) -> dict[str, Any]:
    """Resource arguments for a Ray actor that holds `num_devices` devices and `num_cpus` CPU cores."""
    resource = _SPECS[device].ray_resource
    options: dict[str, Any] = {"num_cpus": num_cpus}
    if resource == "GPU":  # Ray knows GPUs by an argument of their own, every other accelerator by name
        options["num_gpus"] = num_devices
    elif resource is not None:
        options["resources"] = {resource: num_devices}
    return options


def _module(device: Device) -> Any:
    """torch.cuda or torch.npu; `None` for the CPU."""
    import torch

    if device == "cpu":
        return None
    if device == "npu":
        import torch_npu  # noqa: F401  (registers torch.npu and the hccl backend)
    return getattr(torch, device)


def count(device: Device) -> int:
    """Devices that this process sees (CPU cores for `cpu`); 0 where the device's library is missing."""
    if device == "cpu":
        return len(os.sched_getaffinity(0))
    try:
        return int(_module(device).device_count())
    except (ImportError, AttributeError, RuntimeError):  # no torch_npu, or one that finds no driver
        return 0


def claim(device: Device) -> torch.device:
    """The device of this process. Ray shows each actor its own device only, so it is always number 0.

    Raises ConfigError when there is none.
    """
    import torch

    if device == "cpu":
        return torch.device("cpu")
    if count(device) < 1:
        raise ConfigError(
            f"device: '{device}' was asked for but this process sees no such device; "
            "use `device: cpu`, or check the driver and the visible-devices variable."
        )
    _module(device).set_device(0)
    return torch.device(device, 0)


def seed_all(seed: int, *, device: Device) -> None:
    """Seed torch's generators of the CPU and of `device`."""
    import torch

    torch.manual_seed(seed)
    if device != "cpu":
        _module(device).manual_seed_all(seed)


def rng_state(device: Device) -> dict[str, torch.Tensor]:
    """States of torch's generators: key `cpu`, and the device's name where it has its own."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if device != "cpu":
        states[device] = _module(device).get_rng_state()
    return states


def set_rng_state(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what `rng_state` returned; states of devices that this process lacks are left out."""
    import torch

    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif count(name) > 0:  # type: ignore[arg-type]
            _module(name).set_rng_state(state)  # type: ignore[arg-type]


def synchronize(device: Device) -> None:
    """Wait for everything that was queued on the device."""
    if device != "cpu":
        _module(device).synchronize()


def peak_memory_mb(device: Device) -> float:
    """Largest device memory allocated so far, in MiB; 0 for the CPU."""
    return 0.0 if device == "cpu" else _module(device).max_memory_allocated() / 2**20


def empty_cache(device: Device) -> None:
    """Give cached device memory back."""
    if device != "cpu":
        _module(device).empty_cache()


# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_host_memory() -> bool:
    """Make this process reuse the host memory that it frees, instead of handing it back and faulting it in again.

    A training step on the CPU allocates and frees the same large tensors over and over. By default glibc maps each of
    them anew, and the kernel zeroes every page at its first touch: that takes 4 to 13 times as long as an elementwise
    operation on 150 MB, and 15 % of a whole step. Resident memory then stays at its peak. False without glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    largest_int = 2**31 - 1
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, largest_int), (_M_TOP_PAD, 2**26))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings)


def limit_kernel_caches() -> None:
    """Bound what torch's CPU kernels remember per tensor shape; before the first computation of this process.

    oneDNN and torch's layer above it keep up to 1,024 generated kernels each. Micro-batches come in ever new shapes, so
    by default a learner grows by half a GiB over its first hundred steps. A step needs a few dozen per micro-batch.
    Values that the environment sets already stay.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def return_host_memory() -> None:
    """Hand free memory back to the system once: after something large that does not come again at every step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(ctypes.c_size_t(0))


def resident_memory_mb() -> float:
    """Resident host memory of this process, in MiB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
