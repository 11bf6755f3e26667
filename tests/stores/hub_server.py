"""A hub of models and data sets on loopback: what its client asks for to list, read and commit.

The client is the real one. The hub itself is no program one can install; this keeps one repository
of data sets in memory, and takes whole files, not the parts in which it is sent large ones.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "me/run"
_API = f"/api/datasets/{REPOSITORY}"
_RESOLVE = f"/datasets/{REPOSITORY}/resolve/main/"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two packets
    files: ClassVar[dict[str, bytes]]
    ranges: ClassVar[list[tuple[str, int, int]]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        path = unquote(asked.path)
        if path in (_API, f"{_API}/revision/main"):
            self._answer(200, {"id": REPOSITORY, "sha": "0" * 40, "private": False, "tags": []})
        elif path.startswith(f"{_API}/tree/main"):
            self._tree(path.removeprefix(f"{_API}/tree/main").strip("/"))
        elif path.startswith(_RESOLVE) and path.removeprefix(_RESOLVE) in self.files:
            self._content(path.removeprefix(_RESOLVE))
        else:
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._body()
        path = urlsplit(self.path).path
        if path == f"{_API}/paths-info/main":
            known = map(self._entry, parse_qs(body.decode())["paths"])
            self._answer(200, [entry for entry in known if entry])
        elif path == f"{_API}/preupload/main":
            names = [each["path"] for each in json.loads(body)["files"]]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer(200, {"files": [{"path": name, **how} for name in names]})
        elif path == f"{_API}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del self.files[value["path"]]
            there = f"http://{self.headers['Host']}/datasets/{REPOSITORY}/commit/{'1' * 40}"
            self._answer(200, {"commitOid": "1" * 40, "commitUrl": there})
        else:
            self._answer(404, {})

    def _body(self) -> bytes:
        if (length := self.headers.get("Content-Length")) is not None:
            return self.rfile.read(int(length))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _tree(self, folder: str) -> None:
        begin = f"{folder}/" if folder else ""
        names = {
            begin + name.removeprefix(begin).partition("/")[0]
            for name in self.files
            if name.startswith(begin)
        }
        if folder and not names:
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound"})
        else:
            self._answer(200, [self._entry(name) for name in sorted(names)])

    def _entry(self, name: str) -> dict[str, Any] | None:
        if (content := self.files.get(name)) is not None:
            digest = hashlib.sha1(content).hexdigest()
            return {"type": "file", "path": name, "size": len(content), "oid": digest}
        if any(each.startswith(f"{name}/") for each in self.files):
            return {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
        return None

    def _content(self, name: str) -> None:
        content = self.files[name]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(found[1]), int(found[2])) if found else (0, len(content) - 1)
        if found:
            self.ranges.append((name, first, last))
        place = {"Content-Range": f"bytes {first}-{last}/{len(content)}"} if found else {}
        self._answer(206 if found else 200, content[first : last + 1], place)

    def _answer(self, code: int, body: object, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class Hub:
    """What it has, and what was read of it: name, first and last byte."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges: list[tuple[str, int, int]] = []
        facts = {"files": self.files, "ranges": self.ranges}
        self.handler = type("Handler", (_Handler,), facts)


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address at which a hub answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
