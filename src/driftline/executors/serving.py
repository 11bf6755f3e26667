"""A worker process: `python -m driftline.executors.serving`, started by `local`, fed through pipes.

Frames of plain values come in on standard input and go out on what was standard output; what the
work itself prints goes to standard error. It ends when its input does, in the middle of whatever it
is doing: nobody is there any more to take the result.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

from driftline.executors import wire
from driftline.executors.work import done, failed, open_workshop


def main() -> int:
    """Serve one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who asked; he ends us
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    sys.stdout = sys.stderr
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(incoming, tasks), daemon=True).start()
    name, about = tasks.get()
    try:
        workshop = open_workshop(name, about)
    except Exception as trouble:
        wire.send(outgoing, failed(trouble))
        return 0
    wire.send(outgoing, ["ready"])
    while True:
        work = tasks.get()
        wire.send(outgoing, done(workshop, work, lambda line: wire.send(outgoing, ["said", line])))


def _listen(incoming: BinaryIO, tasks: queue.SimpleQueue[Any]) -> None:
    """Take what comes as it comes: a full pipe would keep the other side from reading ours."""
    try:
        while True:
            tasks.put(wire.receive(incoming))
    except (EOFError, OSError, ValueError):
        os._exit(0)


if __name__ == "__main__":
    try:
        code = main()
    except (BrokenPipeError, KeyboardInterrupt):
        code = 1
    sys.exit(code)
