"""The facade that the trainer talks to: one call per thing that happened, written everywhere it belongs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console

from s2rl.config import RunConfig
from s2rl.logs.closing import Closing, closing_lines
from s2rl.logs.curve import draw_curve
from s2rl.logs.metrics import Metrics
from s2rl.logs.run_folder import RunFolder
from s2rl.logs.sinks import Sink, TensorBoardSink, WandbSink
from s2rl.logs.view import LiveView, PlainView, View, ViewState
from s2rl.logs.writers import JsonLines, dropped_record, group_record, plain_metrics, read_lines
from s2rl.types import Prompt, RolloutGroup

logger = logging.getLogger(__name__)


class RunLog:
    """Everything that a run writes and shows. Not thread-safe; belongs to the controller's thread."""

    def __init__(self, config: RunConfig, *, console: Console | None = None) -> None:
        """Open and lock the run folder. Files keep what they hold until `restore` says where the run goes on."""
        self.folder = RunFolder(config.run_dir)
        self.folder.open(config)
        self._config = config
        self._process = psutil.Process()
        self._drop_kinds: set[str] = set()
        self._metrics = JsonLines(self.folder.metrics)
        self._rollouts = JsonLines(self.folder.rollouts) if config.logging.rollouts else None
        self._sinks: list[Sink] = []
        if config.logging.tensorboard:
            self._sinks.append(TensorBoardSink(self.folder.tensorboard))
        if config.logging.wandb_project is not None:
            self._sinks.append(
                WandbSink(
                    project=config.logging.wandb_project,
                    name=config.name,
                    folder=self.folder.path,
                    config=config.model_dump(mode="json"),
                )
            )
        self._state = ViewState(
            name=config.name,
            total_steps=config.steps,
            max_staleness=config.staleness.max_staleness,
            target_accuracy=config.stop_at_accuracy,
        )
        self._view = self._open_view(console or Console())
        self._handlers = _LogHandlers(self.folder.log, self._view)

    def _open_view(self, console: Console) -> View:
        live = self._config.logging.live
        if live == "on" or (live == "auto" and console.is_terminal):
            return LiveView(self._state, console=console)
        return PlainView(self._state, console=console)

    # ---- what happened -----------------------------------------------------------------------------------------

    def step(self, metrics: Metrics) -> None:
        """One row of metrics.jsonl; needs the key `step`. NaN and infinities are written as null.

        The controller's own memory is added: this process is the controller.
        """
        row = plain_metrics({**metrics, "memory/controller_rss_mb": self._process.memory_info().rss / 2**20})
        step = row["step"]
        assert isinstance(step, int), step
        self._metrics.append(row)
        for sink in self._sinks:
            sink.log(step, row)
        self._view.step(row)

    def group(self, group: RolloutGroup, *, fate: str, step: int) -> None:
        """A group that was sampled and graded, and what became of it: `trained` or `dropped:<reason>`."""
        if self._rollouts is not None:
            self._rollouts.append(group_record(group, fate=fate, step=step))

    def dropped(self, prompt: Prompt, *, reason: str, step: int) -> None:
        """A prompt that never became a complete group."""
        kind = reason.partition(":")[0]
        first = kind not in self._drop_kinds
        self._drop_kinds.add(kind)
        text = "prompt %s was dropped: %s" + (" (further ones only in run.log and rollouts.jsonl)" if first else "")
        logger.log(logging.WARNING if first else logging.INFO, text, prompt.prompt_id, reason)
        if self._rollouts is not None:
            self._rollouts.append(dropped_record(prompt, reason=reason, step=step))

    def status(self, values: Mapping[str, float | int | str]) -> None:
        """Live values between rows, for the view alone. The key `phase` says in words what the run is doing."""
        self._view.status(values)

    def event(self, text: str, *, level: int = logging.INFO) -> None:
        """Something that a reader of the terminal and of run.log wants to know: a worker replaced, a run resumed."""
        logger.log(level, text)
        if level < logging.WARNING:  # warnings reach the terminal by way of the log
            self._view.message(text)

    # ---- resume --------------------------------------------------------------------------------------------------

    @property
    def rollouts_position(self) -> int:
        """Bytes of rollouts.jsonl; stored in a checkpoint: a drop may be in one of the step before its own."""
        return 0 if self._rollouts is None else self._rollouts.position

    def restore(self, step: int, *, rollouts: int = 0) -> Sequence[float]:
        """Forget rows of steps after `step`, and rollouts after `rollouts` bytes; show what was reached.

        Returns the held-out accuracies of the rows that stay. Called once, before the first row.
        """
        self._metrics.keep_steps(step)
        if self._rollouts is not None:
            self._rollouts.truncate(rollouts)
        rows = read_lines(self.folder.metrics)
        for row in rows:
            self._state.take(row)
        for sink in self._sinks:
            sink.purge(int(rows[-1]["step"]) if rows else -1)
        return tuple(self._state.accuracies)

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(
        self, outcome: Literal["done", "interrupted", "failed", "refused"] = "done", *, checkpoint: Path | None = None
    ) -> None:
        """Write everything out, draw the curve, say where the results are. Safe to call twice.

        A folder that this run made is removed again when the run was `refused` before it trained anything.
        """
        if self._metrics.closed:
            return
        self._view.close()
        self._handlers.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - a logger's failure at the end must not hide the run's outcome
                self._view.message(f"{type(sink).__name__} could not be closed: {error}", style="yellow")
        self._metrics.close()
        if self._rollouts is not None:
            self._rollouts.close()
        if outcome == "refused" and self.folder.discard():
            return
        curve = self._draw()
        self.folder.close()
        if outcome in ("failed", "refused"):
            self._view.message(f"Run folder: {self.folder.path}")
            return
        accuracies = self._state.accuracies
        closing = Closing(
            run_dir=self.folder.path,
            curve=curve,
            checkpoint=checkpoint,
            held_out=self._config.eval.data[0].path if self._config.eval.data else None,
            step=self._state.step,
            total_steps=self._config.steps,
            first_accuracy=accuracies[0] if accuracies else None,
            last_accuracy=accuracies[-1] if accuracies else None,
            goal=self._config.stop_at_accuracy,
            can_extend=self._config.learner.optimizer.schedule == "constant",
        )
        self._view.message("")
        for line in closing_lines(closing):
            self._view.message(line)

    def _draw(self) -> Path | None:
        try:
            return draw_curve(metrics=self.folder.metrics, target=self.folder.curve, title=self._config.name)
        except Exception as error:  # noqa: BLE001 - a picture that cannot be drawn must not hide the run's outcome
            self._view.message(f"the curve could not be drawn: {error}", style="yellow")
            return None


class _LogHandlers:
    """Python's log, warnings included: all of s2rl's into run.log, warnings and worse onto the terminal too."""

    def __init__(self, path: Path, view: View) -> None:
        self._root = logging.getLogger()
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handlers = [file, _ViewHandler(view)]
        self._levels = (self._root.level, logging.getLogger("s2rl").level)
        self._root.setLevel(logging.WARNING)
        logging.getLogger("s2rl").setLevel(logging.INFO)
        logging.captureWarnings(True)
        for handler in self._handlers:
            self._root.addHandler(handler)

    def close(self) -> None:
        """Put Python's log back as it was."""
        for handler in self._handlers:
            self._root.removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
        self._root.setLevel(self._levels[0])
        logging.getLogger("s2rl").setLevel(self._levels[1])


class _ViewHandler(logging.Handler):
    """Warnings and errors as lines of the view."""

    def __init__(self, view: View) -> None:
        super().__init__(level=logging.WARNING)
        self._view = view
        self._local = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. A warning that printing itself causes is not printed again."""
        if getattr(self._local, "busy", False):
            return
        self._local.busy = True
        try:
            style = "red" if record.levelno >= logging.ERROR else "yellow"
            self._view.message(f"{record.levelname.lower()}: {record.getMessage().strip()}", style=style)
        except Exception:  # noqa: BLE001 - logging must never end a run
            self.handleError(record)
        finally:
            self._local.busy = False
