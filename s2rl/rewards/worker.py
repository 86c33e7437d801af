"""The grading process: loads the reward functions, then grades what arrives until the controller is gone.

It is a plain child with nothing of the controller's memory or threads: not a fork (torch, gloo and Ray do not survive
one), and not a `multiprocessing` child (which would run the user's main script again).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from s2rl.errors import ConfigError
from s2rl.rewards.registry import Grader, add_working_folder, load_function
from s2rl.rewards.wire import BEGAN, CallMessage, ReadyMessage, ResultMessage, StartMessage, Unpacker, pack
from s2rl.types import Score

_PR_SET_PDEATHSIG = 1


def main(*, fd: int, parent: int) -> None:
    """Serve calls on the socket `fd` until it is closed. `parent` is the process id of the controller."""
    _be_a_good_child(parent)
    connection = socket.socket(fileno=fd)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _serve(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever threads or exit handlers a reward function left behind, this process ends now


def _serve(connection: socket.socket) -> None:
    unpacker = Unpacker()
    graders: list[Grader] = []
    while data := connection.recv(1 << 18):
        for message in unpacker.feed(data):
            if isinstance(message, StartMessage):
                refusal = None
                try:
                    graders = _load(message)
                except ConfigError as error:
                    refusal = str(error)
                connection.sendall(pack(ReadyMessage(refusal)))
            else:
                connection.sendall(pack(BEGAN))
                for call in message:
                    connection.sendall(pack(_grade(graders[call.function], call)))


def _load(message: StartMessage) -> list[Grader]:
    add_working_folder()
    return [
        load_function(name, args=args, key=f"rewards.functions[{i}].function")
        for i, (name, args) in enumerate(message.functions)
    ]


def _grade(grader: Grader, call: CallMessage) -> ResultMessage:
    began = time.perf_counter()
    total, parts, error = 0.0, dict[str, float](), None
    try:
        total, parts = _checked(grader(call.item))
    except BaseException as raised:  # noqa: BLE001 - a failed call is data, sys.exit() too
        error = _describe(raised)
    return ResultMessage(call.call_id, total, parts, error, time.perf_counter() - began)


def _checked(result: Any) -> tuple[float, dict[str, float]]:
    if isinstance(result, Score):
        total, parts = result.total, result.parts
    else:
        total, parts = result, {}
    if total is None or isinstance(total, (str, bytes, Mapping)):
        raise TypeError(f"a reward function returns a Score or a number, not {type(result).__name__}")
    total = float(total)
    values = {str(name): float(value) for name, value in parts.items()}
    if not all(map(math.isfinite, (total, *values.values()))):
        raise ValueError(f"the score is not finite: total {total}, parts {values}")
    return total, values


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:400]}{place}"


def _be_a_good_child(parent: int) -> None:
    """Die with the controller, go first when memory is short, leave Ctrl-C to the controller, dump no core."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if os.getppid() != parent:
        os._exit(0)  # the controller died before the line above took effect
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
