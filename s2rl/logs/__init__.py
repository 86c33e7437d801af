"""What a run writes and shows: run folder, metrics, rollouts, TensorBoard, live view, curve. Never imports torch."""

from __future__ import annotations

from s2rl.logs.metrics import METRICS, Metric, Metrics
from s2rl.logs.run_folder import RunFolder
from s2rl.logs.run_log import RunLog
from s2rl.logs.writers import read_lines

__all__ = ["METRICS", "Metric", "Metrics", "RunFolder", "RunLog", "read_lines"]
