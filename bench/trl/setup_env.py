"""Make a virtual environment with TRL 1.16.0 on the CPU build of torch 2.13.0, apart from s2rl's own.

    python bench/trl/setup_env.py [FOLDER]

Does nothing when the folder holds a finished one.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = Path(".cache/bench/trl_env")
TORCH, TRL = "torch==2.13.0", "trl==1.16.0"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def make_env(folder: Path) -> Path:
    """The environment's interpreter."""
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if done.exists():
        return python
    venv.create(folder, clear=True, with_pip=True)
    # torch first, from the CPU builds unless pip would take one anyway: TRL alone would pull in a CUDA build.
    report = subprocess.run(
        [python, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--report", "-", TORCH],
        capture_output=True,
        text=True,
        timeout=180,
    )
    index = [] if "+cpu" in report.stdout else ["--index-url", CPU_WHEELS]
    subprocess.run([python, "-m", "pip", "install", "-qq", *index, TORCH], check=True)
    subprocess.run([python, "-m", "pip", "install", "-qq", TORCH, TRL], check=True)
    subprocess.run([python, "-c", "from trl import GRPOConfig, GRPOTrainer"], check=True)
    done.touch()
    return python


if __name__ == "__main__":
    print(make_env(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
