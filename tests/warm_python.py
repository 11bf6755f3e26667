"""A Python that has imported torch already, for tests to which a program's start means nothing.

Importing torch takes two seconds of a core, and the suite starts some hundred programs. One process
imports it; each program is then a copy of that process. What stands in for `python` is a small
script: it hands its words, environment, folder and open files over, waits, and ends as the program
ended. The program is a process of its own that is set up as Python's start would have set it up:
PYTHONPATH, `sitecustomize` and all, so a launched one is woken as by any start, except that torch
is there before.

Not for tests of how programs start, of what they import, or of signals: those start a Python.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    said = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(line, [b" "], [0, 1, 2])
    line.sendall(json.dumps(said).encode())
    line.shutdown(socket.SHUT_WR)
    answer = line.recv(16)
status = int(answer) if answer else 70
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextlib.contextmanager
def warm(*modules: str) -> Iterator[str]:
    """What to write for `python`, with these modules imported already."""
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        place = Path(name)
        (place / "client.py").write_text(CLIENT)
        python = place / "python"
        python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -IS "{place}/client.py" "{place}/line" "$@"\n'
        )
        python.chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, __file__, str(place / "line"), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Processes that a compiler starts at its import would be lost to the copies.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            start_new_session=True,
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            assert server.stdout.readline() == b"up\n"
            yield str(python)
        finally:
            # Its input ends also when this process is killed: nothing stays behind. Killed all the
            # same, because a child that a test forked and left holds the pipe open.
            server.stdin.close()
            server.kill()
            server.wait(timeout=60)
            server.stdout.close()


def serve(address: str, modules: list[str]) -> list[str] | None:
    """Returns in the programs only, with their words; the server ends when its input does."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        print("up", flush=True)
        running: set[int] = set()
        while True:
            ready, _, _ = select.select([door, 0], [], [], 0.2 if running else None)
            while running and (ended := os.waitpid(-1, os.WNOHANG)[0]):
                running.discard(ended)
            if 0 in ready:
                return None
            if door not in ready:
                continue
            line, _ = door.accept()
            if (watcher := os.fork()) == 0:
                door.close()
                return attend(line)
            running.add(watcher)
            line.close()


def attend(line: socket.socket) -> list[str]:
    """One program and who waits for it; returns in the program."""
    _, files, _, _ = socket.recv_fds(line, 1, 3)
    text = b""
    while part := line.recv(1 << 16):
        text += part
    said = json.loads(text)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if program := os.fork():
        for number in range(3):
            os.close(number)  # a reader of the program's output waits for its end, not for ours
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        with contextlib.suppress(OSError):  # whoever asked is gone
            line.sendall(str(status).encode())
        os._exit(0)
    line.close()
    os.chdir(said["folder"])
    os.environ.clear()
    os.environ.update(said["environment"])
    return said["words"]


def become(words: list[str]) -> None:
    """Set up what an interpreter's start sets up, and run the program."""
    sys.orig_argv = [sys.executable, *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        # Streams remember what kind of file they were opened on.
        stream = open(number, mode, buffering=1 if number == 2 else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    own = sys.path[0]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in sys.path if path != own and path not in before]
    sys.path[:] = [str(Path(path).absolute()) for path in before if path] + kept
    importlib.invalidate_caches()
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), fresh_main().__dict__)  # noqa: S102
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        path = Path(words[0]).absolute()
        sys.path.insert(0, str(path.resolve().parent))
        main = fresh_main()
        main.__file__ = str(path)
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)  # noqa: S102


def fresh_main() -> ModuleType:
    """Not runpy's: what a program registered for its end must find its names then."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = __builtins__
    return main


if __name__ == "__main__":
    given = serve(sys.argv[1], sys.argv[2:])
    if given is not None:
        become(given)
