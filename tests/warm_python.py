"""A Python that has already imported torch, for tests that do not test the start of programs.

Importing torch takes two seconds of a core, and the suite starts some hundred programs. One server
process imports it, and each program is a fork of that process. A small script replaces `python`: it
sends its arguments, environment, folder and open files to the server, waits, and ends with the
program's status. The program is a separate process that is set up as by a normal start, including
PYTHONPATH and `sitecustomize`, so that launched programs are captured as usual. The only difference
is that torch is already imported.

Tests of how programs start, of what they import, or of signals must start a normal Python.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
def warm(*modules: str, start: str = sys.executable) -> Iterator[str]:
    """Start a server that has imported these modules; yields the path that replaces `python`.

    Args:
        modules: What the server imports.
        start: The Python that starts it. Another warm one has imported its modules already.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        place = Path(name)
        (place / "client.py").write_text(CLIENT)
        python = place / "python"
        python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -IS "{place}/client.py" "{place}/line" "$@"\n'
        )
        python.chmod(0o755)
        server = subprocess.Popen(
            [start, __file__, str(place / "line"), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Processes that a compiler starts at its import would not exist in the forks.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            start_new_session=True,
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            assert server.stdout.readline() == b"up\n"
            yield str(python)
        finally:
            # The server ends when its input is closed, even if this process is killed. It is also
            # killed, because a child that a test left running may keep the pipe open.
            server.stdin.close()
            server.kill()
            server.wait(timeout=60)
            server.stdout.close()


def serve(address: str, modules: list[str]) -> list[str] | None:
    """Fork a program for each request; returns its arguments in the program.

    In the server it returns None when the input is closed.
    """
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        print("up", flush=True)
        running: dict[int, tuple[int, socket.socket]] = {}
        while True:
            ready, _, _ = select.select([door, 0, *running], [], [])
            for ended in running.keys() & set(ready):
                program, line = running.pop(ended)
                os.close(ended)
                status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
                with line, contextlib.suppress(OSError):  # the client may have ended
                    line.sendall(str(status).encode())
            if 0 in ready:
                return None
            if door not in ready:
                continue
            line, _ = door.accept()
            files, said = asked(line)
            if (program := os.fork()) == 0:
                for other, (_, another) in running.items():
                    os.close(other)
                    another.close()
                door.close()
                line.close()
                return enter(files, said)
            for file in files:
                os.close(file)
            running[os.pidfd_open(program)] = (program, line)


def asked(line: socket.socket) -> tuple[list[int], dict[str, Any]]:
    """Receive the open files and the description of a program."""
    _, files, _, _ = socket.recv_fds(line, 1, 3)
    text = b""
    while part := line.recv(1 << 16):
        text += part
    return list(files), json.loads(text)


def enter(files: list[int], said: dict[str, Any]) -> list[str]:
    """Take over the files, folder and environment of the client; returns the arguments."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(said["folder"])
    os.environ.clear()
    os.environ.update(said["environment"])
    # The only state of driftline that depends on the start of a process.
    if owned_file := sys.modules.get("driftline.runs.files.owned_file"):
        owned_file._STDERR = owned_file._stderr_identity()
    return said["words"]


def become(words: list[str]) -> None:
    """Set up the process as an interpreter's start does, and run the program."""
    sys.orig_argv = [sys.executable, *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        # Streams remember the kind of file on which they were opened, so new ones are needed.
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
    """A new `__main__`; unlike runpy's, it still exists when the program's exit handlers run."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = __builtins__
    return main


def run(words: list[str]) -> int:
    """Run the program; returns the status with which an interpreter would end."""
    try:
        become(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as trouble:
        trace = trouble.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # only frames of the program, as after a normal start
        sys.last_type, sys.last_value, sys.last_traceback = type(trouble), trouble, trace
        sys.excepthook(type(trouble), trouble.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(trouble, KeyboardInterrupt) else 1
    return 0


def leave(status: int) -> None:
    """End the process as an interpreter does, but without clearing the modules.

    Clearing them would touch all objects of torch, whose memory pages would have to be copied
    first. That is more work than most of these programs do.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    if (main := sys.modules["__main__"].__dict__) is not globals():
        main.clear()  # closes files that the program left open
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    given = serve(sys.argv[1], sys.argv[2:])
    if given is not None:
        leave(run(given))
