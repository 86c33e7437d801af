"""Ends what a run leaves behind, however the run ended.

Started by `cluster.py` as a small process of its own session, with a pipe from the run. When the pipe closes (the run
said goodbye, or was killed with -9) every process that carries the run's mark in its environment is ended and the run's
temporary folder is removed. It needs nothing but the standard library, so it is run as a file:
`python -I -S reaper.py MARK FOLDER`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "S2RL_SESSION"
_GRACE_S = 2.0
# Ray's processes end by themselves when they notice that the driver is gone; what has not after this long is killed.


def marked_processes(mark: str) -> list[int]:
    """Ids of all processes that were started with `S2RL_SESSION=<mark>` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or it is not ours
        if wanted in environment:
            found.append(int(entry.name))
    return found


def reap(mark: str, *, grace_s: float = _GRACE_S) -> int:
    """End all marked processes; returns how many had to be killed."""
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left)


def main() -> None:
    """Wait for the pipe to close, then clean up."""
    # A terminal's Ctrl-C goes to the whole foreground group; cleaning up must outlive it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, folder = sys.argv[1], sys.argv[2]
    sys.stdin.buffer.read()
    while reap(mark):
        pass
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
