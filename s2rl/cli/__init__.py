"""The command line: `s2rl train`, `eval`, `export`, `verify`, `version`.

Help and `--dry-run` import neither torch nor ray nor vllm. Exit codes: 0 done, 2 something that the user can mend, 1 a
run that could not go on, 130 interrupted.
"""

from __future__ import annotations

from s2rl.cli.app import main

__all__ = ["main"]
