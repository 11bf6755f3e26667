"""Switch capture on inside a program that does not know Driftline.

`wake` is called while the interpreter starts: by `driftline-launch.pth` of an installed Driftline,
and by the `sitecustomize` that `environment` puts in front of the program's PYTHONPATH for
environments where Driftline is not installed. Both may call it, and `site` may read a folder of
`.pth` files twice; the second call does nothing.

It only leaves a message ("a Python process was reached") and watches for `import torch` and
`import paddle`. It imports nothing that is not loaded at interpreter start, reads no plan and never
imports a framework, so that a process without one only creates one empty file. The syntax is also
valid in Python versions older than Driftline supports, so that such a process is reported instead
of being silently missed.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # importing `typing` would take longer than everything else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

OLDEST_PYTHON = (3, 11)
FRAMEWORKS = ("torch", "paddle")

_armed: list[ImportWatch] = []


def wake(plan_path: str) -> None:
    """Watch for frameworks in this process, for the plan at `plan_path`.

    It never raises and never prints.
    """
    if _armed or not plan_path:
        return
    # A message that cannot be written must not stop the program.
    try:
        if sys.version_info < OLDEST_PYTHON:
            send_message(plan_path, "too-old", "Python " + ".".join(map(str, sys.version_info[:3])))
            return
        send_message(plan_path, "reached", "")
        watch = ImportWatch(plan_path)
        _armed.append(watch)
        sys.meta_path.insert(0, watch)
        # Another `.pth` file may have imported the framework before this one ran.
        for framework in FRAMEWORKS:
            if framework in sys.modules:
                watch.is_here(framework)
    except OSError:
        # The folder of the plan is gone, because this process has outlived the launcher.
        return


def send_message(plan_path: str, kind: str, text: str) -> None:
    """Write a small file next to the plan, which the launcher reads when the program has ended."""
    folder = plan_path.rpartition("/")[0]
    name = f"{folder}/messages/{kind}.{os.getpid()}.{time.time_ns():x}"
    # O_EXCL, because the folder is private to the launch and a name is never used twice.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        file = os.open(name, flags, 0o600)
    except OSError:
        if not _give_up_spare():
            raise
        file = os.open(name, flags, 0o600)
    os.close(file)
    if text:
        # `OwnedFile` is used because threads of the program may open and close files meanwhile. It
        # is imported here because most processes write only empty messages.
        from driftline.runs.files.owned_file import OwnedFile

        with OwnedFile(name) as file:
            file.append_all(text.encode("utf-8", "replace"))


_spare: list[tuple[int, int, int]] = []
_SPARE_FROM = 40
"""Smallest number of the spare descriptor.

It is above fixed numbers that a program may use, and below any usual limit.
"""


def keep_spare(plan_path: str) -> None:
    """Reserve a file descriptor, so that messages can be sent when the program has used up all.

    The descriptor refers to the plan, a file that nothing else opens, so that we can check whether
    the descriptor is still ours.
    """
    import fcntl  # does not exist on every system

    file = os.open(plan_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        about = os.fstat(file)
        spare = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _SPARE_FROM)
        _spare.append((spare, about.st_dev, about.st_ino))
    finally:
        os.close(file)


def _give_up_spare() -> bool:
    """Close the reserved descriptor; return False if there is none or it is no longer ours."""
    if not _spare:
        return False
    file, device, inode = _spare.pop()
    try:
        about = os.fstat(file)
        if (about.st_dev, about.st_ino) != (device, inode):
            return False
        os.close(file)
    except OSError:  # the program has closed it
        return False
    return True


class ImportWatch:
    """A meta path finder that starts a capture when a framework is imported.

    It finds no modules by itself, but asks the other finders. Libraries call `find_spec("torch")`
    without importing torch, so the capture starts only when the found module has been executed. A
    program may import several frameworks, each of which has its own capture.
    """

    def __init__(self, plan_path: str) -> None:
        self.plan_path = plan_path
        self.waiting = list(FRAMEWORKS)
        self.absent: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        # All other finders are asked, so that editable installs and zip imports are found as usual.
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(name, spec)
                return spec
        self._is_absent(name)
        return None

    def _is_absent(self, framework: str) -> None:
        """Report that the program looked for a framework that is not installed.

        It may be the reason why nothing is captured.
        """
        if framework not in self.absent:
            self.absent.append(framework)
            try:
                send_message(self.plan_path, "absent", framework)
            except OSError:
                return

    def is_here(self, framework: str) -> None:
        """Start the capture of a framework; failures are reported to the launcher only."""
        if framework not in self.waiting:
            return
        self.waiting.remove(framework)
        # A finder that waits for nothing more would slow down every later import.
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            # Imported only now, so that a process without a framework never loads it.
            from driftline.captures.launch.process import begin

            begin(self.plan_path, framework)
        except Exception as problem:
            try:
                send_message(self.plan_path, "failed", f"{type(problem).__name__}: {problem}")
            except OSError:
                return

    def _follow(self, framework: str, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:  # not the framework but a namespace package of that name
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.is_here(framework)

        try:
            # Every spec has its own loader, so no other import is affected.
            loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        except AttributeError:
            send_message(
                self.plan_path,
                "failed",
                f"the loader of {framework}, {loader!r}, cannot be followed",
            )
