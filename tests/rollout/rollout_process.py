"""A rollout worker in a process of its own, reached by name of method: what Ray does with it, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from concurrent.futures import Future
from typing import Any

_LIMIT_S = 120.0


class WorkerProcess:
    """`begin` starts a call and returns a future, `call` waits for it. Errors of the worker are raised here."""

    def __init__(self, *, daemon: bool = True, **kwargs: Any) -> None:
        """A process that is no daemon may have children of its own, and must be ended by the test."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_main, args=(child, kwargs), daemon=daemon)
        self.process.start()
        child.close()
        self._ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, method: str, *args: Any) -> Future[Any]:
        number = next(self._ids)
        future = self._calls[number] = Future()
        self._pipe.send((number, method, args))
        return future

    def call(self, method: str, *args: Any) -> Any:
        return self.begin(method, *args).result(timeout=_LIMIT_S)

    def close(self) -> None:
        if self.process.is_alive():
            self.begin("close").result(timeout=_LIMIT_S)
            self._pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError("the worker process did not end")

    def _read(self) -> None:
        while True:
            try:
                number, result, error = self._pipe.recv()
            except (EOFError, OSError):
                for future in self._calls.values():
                    if not future.done():
                        future.set_exception(ConnectionError("the worker process is gone"))
                return
            future = self._calls.pop(number)
            future.set_exception(error) if error is not None else future.set_result(result)


def _main(pipe: Any, kwargs: dict[str, Any]) -> None:
    asyncio.run(_serve(pipe, kwargs))


async def _serve(pipe: Any, kwargs: dict[str, Any]) -> None:
    from s2rl.rollout import RolloutWorker

    worker = RolloutWorker(**kwargs)
    tasks: set[asyncio.Task[None]] = set()

    async def run(number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            pipe.send((number, await getattr(worker, method)(*args), None))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            pipe.send((number, None, error))

    while True:
        try:
            request = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        if request is None:
            await asyncio.gather(*tasks)
            return
        task = asyncio.create_task(run(*request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
