"""A small TCP proxy that can cut connections in their middle, refuse them, and count bytes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Hands connections on to a port of this machine.

    Attributes:
        cut_after: Bytes of an answer after which the next connections are cut; one entry each.
        down: Nobody is let through.
        received: Bytes that came from the other side.
        cuts: Connections that were cut.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._door = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._door.getsockname()[1]
        self.cut_after: list[int] = []
        self.cut_uploads_after: list[int] = []
        self.down = False
        self.received = 0
        self.cuts = 0
        self.connections = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def stop_all(self) -> None:
        """Cut whatever is under way."""
        with self._lock:
            for line in list(self._open):
                _hang_up(line)

    def close(self) -> None:
        self.stop_all()
        self._door.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:
                return
            self.connections += 1
            if self.down:
                _hang_up(line)
                continue
            try:
                there = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                _hang_up(line)
                continue
            with self._lock:
                self._open |= {line, there}
            for source, goal, answers in ((line, there, False), (there, line, True)):
                pump = threading.Thread(
                    target=self._pump, args=(source, goal, answers), daemon=True
                )
                pump.start()

    def _pump(self, source: socket.socket, goal: socket.socket, answers: bool) -> None:
        passed = 0
        limit: int | None = None
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if limit is None:
                    # Only what is large has a middle.
                    limits = self.cut_after if answers else self.cut_uploads_after
                    with self._lock:
                        limit = limits[0] if limits else -1
                passed += len(data)
                if answers:
                    self.received += len(data)
                limits = self.cut_after if answers else self.cut_uploads_after
                if limit >= 0 and passed > limit:
                    with self._lock:
                        mine = bool(limits) and limits[0] == limit
                        if mine:
                            limits.pop(0)
                            self.cuts += 1
                    if mine:
                        goal.sendall(data[: len(data) // 2])
                        break
                    limit = None
                goal.sendall(data)
        _hang_up(source)
        _hang_up(goal)
        with self._lock:
            self._open -= {source, goal}


def _hang_up(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        line.close()
