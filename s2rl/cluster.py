"""The one door to Ray: start or join a cluster, host plain classes in actors, call them with time limits.

Owns: the Ray session of a run (its processes, its temporary folder) and the actors in it. Does not know what the hosted
classes do. An actor hosts one object built from a dotted path, so the classes themselves need no Ray to be tested.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import inspect
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from s2rl.config.schema import ClusterConfig
from s2rl.errors import ConfigError, RunError, StalledError
from s2rl.reaper import MARK, reap

logger = logging.getLogger(__name__)

_TEMP_PREFIX = "s2rl-ray-"
_OBJECT_STORE_BYTES = 512 * 1024 * 1024
# Messages between our processes are small (token ids, reports); weights never travel through the object store.
_REAP_S = 30.0
_CONNECT_S = 10.0


class ActorDied(RunError):
    """The process of an actor is gone."""


class Host:
    """Runs inside an actor process: owns one object and the threads that its methods run in.

    A coroutine method runs in the actor's event loop. A plain method runs in a thread of the lane it is called on; each
    lane is one thread for the life of the process, so that a device context or a collective always sees the
    same thread.
    """

    def __init__(self, *, name: str, log_file: str | None, env: Mapping[str, str]) -> None:
        os.environ.update(env)
        self._lanes: dict[str, concurrent.futures.ThreadPoolExecutor] = {}
        self._target: Any = None
        self._name = name
        if log_file is not None:
            handler = logging.FileHandler(log_file)
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logging.getLogger().addHandler(handler)
            logging.getLogger("s2rl").setLevel(logging.INFO)

    async def build(self, factory: str, kwargs: Mapping[str, Any]) -> int:
        """Build the hosted object on the main lane; `factory` is `package.module:Class`. Returns the process id."""
        module, _, attribute = factory.partition(":")

        def make() -> Any:
            return getattr(importlib.import_module(module), attribute)(**kwargs)

        self._target = await self._on_lane("main", make)
        return os.getpid()

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], lane: str) -> Any:
        """Call a method of the hosted object."""
        function = getattr(self._target, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        return await self._on_lane(lane, lambda: function(*args, **kwargs))

    async def _on_lane(self, lane: str, function: Any) -> Any:
        if lane not in self._lanes:
            self._lanes[lane] = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-{lane}")
        return await asyncio.get_running_loop().run_in_executor(self._lanes[lane], function)

    async def address(self) -> str:
        """Address of this node as the other nodes see it."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def free_port(self) -> int:
        """A port that is free on this node now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])


class Actor:
    """The driver's end of one hosted object."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self.name = name
        self.pid: int | None = None

    async def build(self, factory: str, *, limit_s: float, **kwargs: Any) -> None:
        """Build the hosted object."""
        self.pid = await self._wait(self._actor.build.remote(factory, kwargs), "build", limit_s)
        logger.info("%s is process %d", self.name, self.pid)

    async def call(self, method: str, *args: Any, limit_s: float, lane: str = "main", **kwargs: Any) -> Any:
        """Call a method; raises what it raised, `ActorDied` when the process is gone, `StalledError` after
        `limit_s`."""
        return await self._wait(self._actor.call.remote(method, args, kwargs, lane), method, limit_s)

    async def address(self, *, limit_s: float) -> str:
        """Address of the actor's node."""
        return str(await self._wait(self._actor.address.remote(), "address", limit_s))

    async def free_port(self, *, limit_s: float) -> int:
        """A free port on the actor's node."""
        return int(await self._wait(self._actor.free_port.remote(), "free_port", limit_s))

    def kill(self) -> None:
        """End the process at once."""
        import ray

        ray.kill(self._actor, no_restart=True)

    async def _wait(self, ref: Any, method: str, limit_s: float) -> Any:
        import ray.exceptions

        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(ref.future())
        except TimeoutError as error:
            raise StalledError(f"waited {limit_s:.0f} s for {self.name} to answer {method}()") from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else RunError(f"{self.name}.{method}: {error}")) from error
        except (
            ray.exceptions.RayActorError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.RaySystemError,
        ) as error:
            raise ActorDied(f"{self.name} died during {method}(): {_first_line(error)}") from error


class Cluster:
    """A Ray session of our own, or a place in one that runs already."""

    def __init__(self, config: ClusterConfig, *, name: str, log_dir: Path | None) -> None:
        self._config = config
        self._name = name
        self._log_dir = log_dir
        self._temp_dir: Path | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._actors: list[Actor] = []

    @property
    def host(self) -> str | None:
        """Address that all actors share when the session is local to this machine."""
        return None if self._temp_dir is None else "127.0.0.1"

    def start(self) -> None:
        """Join `config.address`, or start a local session with a temporary folder of its own."""
        # Ray would otherwise rewrite the accelerator variables of actors that claim no device.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's state server would keep a record of every call, and grow with each.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Ray prints half a page about each process that dies; what it means for the run is said by the run.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
        import ray

        common: dict[str, Any] = {
            "namespace": self._name,
            "log_to_driver": False,
            "configure_logging": False,
            "include_dashboard": False,
        }
        if self._config.env_vars:
            common["runtime_env"] = {"env_vars": dict(self._config.env_vars)}
        if self._config.address is not None:
            common.pop("include_dashboard")
            _check_reachable(self._config.address)
            try:
                ray.init(address=self._config.address, **common)
            except ConnectionError as error:
                raise ConfigError(
                    f"cluster.address={self._config.address!r}: no Ray cluster answers there ({_first_line(error)}); "
                    "start one with `ray start --head`, or leave the key out to run on this machine"
                ) from error
            return
        # It turns token authentication on, with a notice that a local session does not need. Asking for it by the
        # environment comes too late once ray is imported: this process then keeps "disabled", and its session "token".
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        remove_stale_sessions()
        # Unix sockets live below this folder and their paths must stay under 108 bytes, so it cannot be the run folder.
        self._temp_dir = Path(tempfile.gettempdir()) / f"{_TEMP_PREFIX}{os.getpid()}"
        self._start_reaper(self._temp_dir)
        try:
            ray.init(
                address="local",
                _node_ip_address="127.0.0.1",
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp_dir),
                **common,
            )
        except Exception as error:
            # Ray tells most failures of its own processes by bare RuntimeErrors.
            raise RunError(f"Ray could not be started on this machine: {_first_line(error)}") from error

    def _start_reaper(self, temp_dir: Path) -> None:
        """Everything started from here on carries the mark, and ends with this process however that ends."""
        mark = temp_dir.name
        reaper_file = Path(__file__).with_name("reaper.py")
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(reaper_file), mark, str(temp_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def require(self, needs: Mapping[str, float]) -> None:
        """Refuse a run that asks for more devices than the cluster has. Keys are Ray resource names (`GPU`, `NPU`)."""
        import ray

        have = ray.cluster_resources()
        for resource, amount in needs.items():
            if amount > have.get(resource, 0):
                raise ConfigError(
                    f"the run needs {amount:g} {resource} devices (rollout.workers x rollout.tensor_parallel + "
                    f"learner.ranks), "
                    f"the cluster has {have.get(resource, 0):g}; lower one of the three or add nodes"
                )

    async def spawn(
        self, name: str, *, env: Mapping[str, str], resources: Mapping[str, float], limit_s: float
    ) -> Actor:
        """Start one actor process. `resources`: Ray resource names; `GPU` is Ray's own kind, the others are custom."""
        import ray

        options: dict[str, Any] = {
            # CPU work is bounded by the thread settings, not by Ray's slots; 2 cores must be able to hold 3 processes.
            "num_cpus": 0,
            "num_gpus": resources.get("GPU", 0),
            "resources": {k: v for k, v in resources.items() if k != "GPU"},
            "max_restarts": 0,
            "max_concurrency": 64,
        }
        log_file = None if self._log_dir is None else str(self._log_dir / f"{name}.log")
        handle = ray.remote(Host).options(**options).remote(name=name, log_file=log_file, env=dict(env))
        actor = Actor(handle, name)
        self._actors.append(actor)
        await actor.address(limit_s=limit_s)
        return actor

    def stop(self) -> None:
        """Kill what is left of our actors; end the session and remove its folder when it is ours."""
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                actor.kill()
            ray.shutdown()
        self._actors.clear()
        if self._reaper is not None:
            assert self._reaper.stdin is not None
            self._reaper.stdin.close()
            try:
                self._reaper.wait(timeout=_REAP_S)
            except subprocess.TimeoutExpired:  # it goes on without us; the run's outcome stands
                logger.warning("processes of the run do not end; process %d goes on ending them", self._reaper.pid)
            self._reaper = None
            del os.environ[MARK]


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` when nothing listens at `host:port`: Ray itself would go on trying for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        if not host or not port.isdecimal():
            raise OSError("it is neither `auto` nor host:port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address={address!r}: no Ray cluster answers there ({error}); start one with `ray start --head`, "
            "or leave the key out to run on this machine"
        ) from error


def remove_stale_sessions() -> None:
    """End and remove what runs left behind whose reaper was killed too."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(_TEMP_PREFIX)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            logger.info("removing the Ray session folder %s of a dead run", folder)
            reap(folder.name, grace_s=0.0)
            shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
