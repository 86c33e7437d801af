"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, behind one small interface."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from s2rl.logs.metrics import Metrics


class Sink(Protocol):
    """Receives every row of metrics."""

    def log(self, step: int, metrics: Metrics) -> None:
        """One row."""
        ...

    def purge(self, step: int) -> None:
        """The run goes on from `step`: rows of later steps are void."""
        ...

    def close(self) -> None:
        """Write everything out."""
        ...


class TensorBoardSink:
    """Event files, written with TensorBoard's own record format and without torch, so that the controller stays "
    "small."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2, summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        # The clock in the name orders the files of a run that was resumed.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._add(file_version="brain.Event:2")

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Sink`. Values that do not exist are left out."""
        values = [
            self._summary.Summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
            if value is not None and name != "step"
        ]
        self._add(step=step, summary=self._summary.Summary(value=values))

    def purge(self, step: int) -> None:
        """See `Sink`: TensorBoard hides what older files hold from `step + 1` on."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(step=step + 1, session_log=start)

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write(self._event.Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()


class WandbSink:
    """A Weights & Biases run whose id is kept in the run folder, so that a resumed run goes on in the same one."""

    def __init__(self, *, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        id_file = folder / "wandb_id"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project, name=name, dir=str(folder), config=dict(config), id=run_id, resume="allow"
        )
        id_file.write_text(str(self._run.id), encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Sink`."""
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def purge(self, step: int) -> None:
        """See `Sink`: wandb keeps steps in order and ignores those it has, so there is nothing to take back."""

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()
