"""The viewer's HTTP server: which requests are accepted, and how each is answered.

Listens on 127.0.0.1 only. Every address begins with a random token; other host names, other origins
and other methods are refused before anything is done. No part of an address ever becomes a path:
`ENDPOINTS` lists everything that is answered.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from driftline import settings
from driftline.errors import BadInput, DriftlineError
from driftline.reporting.html.page import pack, remote_page
from driftline.reporting.html.tensors.pair import Region
from driftline.reporting.html.tensors.pair_statistics import Scale
from driftline.reporting.viewer.session import RunsChanged, Session
from driftline.runs.files import mapped_file

# Tensors of a model are confidential: no other machine may connect.
HOST = "127.0.0.1"
PORT = 8412
_PORTS = 100
"""Ports that are tried one after the other before the system is asked for any."""
_READERS = 32
"""Connections at a time; a browser takes six."""
_MOST_WORKING = 4
"""Answers that are made at a time."""
_READ_TIMEOUT = 10.0
"""Seconds that a connection may be idle, and seconds it may take to send one request."""
_ROOM_TIMEOUT = 0.5
"""Seconds to wait until a closed connection has made room for another one."""
# No other page may frame, read or cache what the viewer sends.
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_BINARY = "application/octet-stream"
_JSON = "application/json; charset=utf-8"
_HTML = "text/html; charset=utf-8"

Query = Mapping[str, str]
Answer = Callable[[Session, Query], Any]


def _number(query: Query, name: str, default: int | None = None) -> int:
    text = query.get(name)
    if text is None and default is not None:
        return default
    # `isdigit` accepts digits of other scripts, and a long number would cost time to parse.
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BadInput(f"'{name}' must be a whole number")
    return int(text)


def _region(query: Query) -> Region | None:
    if "top" not in query:
        return None
    return Region(*(_number(query, name) for name in ("top", "bottom", "left", "right")))


def _row(query: Query) -> tuple[int, int]:
    return _number(query, "row"), _number(query, "page")


def _scale(query: Query) -> Scale:
    scale = query.get("scale", "auto")
    if scale == "auto" or scale == "even" or scale == "symlog":
        return scale
    raise BadInput("'scale' is auto, even or symlog")


def _values(session: Session, query: Query) -> Any:
    region = _region(query)
    if region is None:
        raise BadInput("'top', 'bottom', 'left' and 'right' say which values")
    return session.values(*_row(query), region)


# Addresses are looked up here and never become paths of files.
ENDPOINTS: dict[str, Answer] = {
    "api/sheet": lambda session, query: session.sheet(*_row(query)),
    "api/pictures": lambda session, query: session.pictures(*_row(query)),
    "api/map": lambda session, query: session.map(
        *_row(query),
        _region(query),
        max(1, _number(query, "height", 64)),
        max(1, _number(query, "width", 64)),
    ),
    "api/region": lambda session, query: session.region(
        *_row(query), _region(query), max(1, _number(query, "bins", 64)), _scale(query)
    ),
    "api/values": _values,
    "api/worst": lambda session, query: session.worst(*_row(query)),
}
"""All requests that are answered, except those for the page and its data."""


class Server(ThreadingHTTPServer):
    """Answers questions about a session; made by `open_server`.

    Attributes:
        token: The first part of every address that is answered.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = _READERS

    def __init__(self, session: Session, port: int) -> None:
        self.session = session
        # Other users of this machine can reach the port, but cannot guess this.
        self.token = secrets.token_urlsafe(24)
        self.readers = threading.BoundedSemaphore(_READERS)
        self.working = threading.BoundedSemaphore(_MOST_WORKING)
        # Connections that wait for their next request, the longest waiting first.
        self._waiting: dict[socket.socket, float] = {}
        self._waiting_lock = threading.Lock()
        super().__init__((HOST, port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    @property
    def names(self) -> tuple[str, ...]:
        """The host names that a browser may use."""
        return (f"{HOST}:{self.port}", f"localhost:{self.port}")

    def server_bind(self) -> None:
        # The base class looks up its own host name, which may take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = HOST, self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        # Idle connections must not block new ones: the longest idle one is closed. If all
        # connections are being answered, a new one is refused.
        free = self.readers.acquire(blocking=False)
        if not free and self._end_waiting(older_than=0.0, most=1):
            free = self.readers.acquire(timeout=_ROOM_TIMEOUT)
        if not free:
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def waits(self, connection: socket.socket) -> None:
        """Note that this connection waits for a request."""
        with self._waiting_lock:
            self._waiting.pop(connection, None)
            self._waiting[connection] = time.monotonic()

    def waits_no_more(self, connection: socket.socket) -> None:
        """Note that the connection has its request, or is closed."""
        with self._waiting_lock:
            self._waiting.pop(connection, None)

    def service_actions(self) -> None:
        # A socket's timeout restarts with every byte, so a very slow client would never time out.
        self._end_waiting(older_than=_READ_TIMEOUT, most=_READERS)

    def _end_waiting(self, *, older_than: float, most: int) -> int:
        """Close connections that have waited longer than a time; returns how many."""
        with self._waiting_lock:
            until = time.monotonic() - older_than
            ended = [connection for connection, since in self._waiting.items() if since <= until][
                :most
            ]
            for connection in ended:
                del self._waiting[connection]
                # Its thread, which reads it, sees its end; only the thread closes it.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            return len(ended)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.waits_no_more(request)
            self.readers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignored: a closed connection is no error, and our own errors were answered already."""


def check_port(port: int | None) -> int:
    """The port that is tried first.

    Raises:
        BadInput: It is none.
    """
    first = PORT if port is None else port
    if not 0 <= first <= 65535:
        raise BadInput(f"{first} is no port", hint="give a number from 1024 to 65535, or 0")
    return first


def open_server(session: Session, port: int | None = None) -> Server:
    """A server at a port, or at the next free one; it answers after `serve_forever`.

    Args:
        session: The page and its tensors.
        port: The first port to try. Default: `PORT`; 0 for any free one.

    Raises:
        BadInput: The port is not a port number.
    """
    first = check_port(port)
    tried = range(first, min(first + _PORTS, 65536)) if first else range(0)
    for number in tried:
        try:
            return Server(session, number)
        except OSError as trouble:
            # Ports that are in use or privileged are skipped; other errors are raised.
            if trouble.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    # Port 0 lets the system choose a free one.
    return Server(session, 0)


def _error_page(sentence: str, hint: str) -> bytes:
    """A page that says why there is no report; the user can reload it when that is fixed."""
    text = escape(sentence) + (f"<br><small>{escape(hint)}</small>" if hint else "")
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Driftline</title>'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<h1>There is no page to show</h1><p>{text}</p><p>Reload to try again.</p></html>"
    )
    return page.encode("utf-8", "replace")


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride] - only ours makes it
    protocol_version = "HTTP/1.1"
    timeout = _READ_TIMEOUT
    server_version = "driftline"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        # Small answers must not wait for the next packet.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)

    def handle_one_request(self) -> None:
        self.server.waits(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        complete = super().parse_request()  # reads the headers
        self.server.waits_no_more(self.connection)
        return complete

    def do_GET(self) -> None:
        address, _, query_string = self.path.partition("?")
        refusal = self._refusal(address)
        if refusal is not None:
            self._send_problem(*refusal)
            return
        _, _, place = address[1:].partition("/")
        try:
            self._answer(place, query_string)
        except DriftlineError as trouble:
            status = HTTPStatus.CONFLICT if isinstance(trouble, RunsChanged) else 422
            # The page itself is read by a person, everything else by the front end.
            if place:
                self._send_problem(status, str(trouble), trouble.hint)
            else:
                self._send(status, _HTML, _error_page(str(trouble), trouble.hint))
        except (ConnectionError, TimeoutError):
            raise  # the reader went away
        except (OSError, MemoryError) as trouble:
            self._send_problem(500, f"it could not be read: {trouble or type(trouble).__name__}")
        except Exception as bug:
            # A bug in one answer is reported, and must not end the server.
            if settings.debug():
                traceback.print_exception(bug)
            what = f"{type(bug).__name__}: {bug}".splitlines()[0][:200]
            self._send_problem(500, f"this is a bug in driftline, not in your data: {what}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Refuse: nothing can be changed here. Preflight requests of other pages get this too."""
        self.close_connection = True  # whatever follows is not read
        self._send_problem(HTTPStatus.METHOD_NOT_ALLOWED, "there are only questions here, with GET")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _refusal(self, address: str) -> tuple[int, str] | None:
        """Why a request is refused; None if it is accepted."""
        names = self.server.names
        hosts = self.headers.get_all("Host") or []
        # Against DNS rebinding: a foreign name that leads to 127.0.0.1 is refused.
        if len(hosts) != 1 or hosts[0].strip().lower() not in names:
            return HTTPStatus.FORBIDDEN, "this is not the host that was asked for"
        allowed = [f"http://{name}" for name in names]
        if any(origin not in allowed for origin in self.headers.get_all("Origin") or []):
            return HTTPStatus.FORBIDDEN, "another page has no business here"
        # An unread body would be taken for the next request on this connection.
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a question has no body"
        token, slash, place = address[1:].partition("/") if address[:1] == "/" else ("", "", "")
        # Compared in constant time, so that the time does not reveal how much of it is right.
        presented = token.encode("utf-8", "replace")
        if not hmac.compare_digest(presented, self.server.token.encode()) or not slash:
            return HTTPStatus.FORBIDDEN, "the address lacks the token that was printed with it"
        # Browsers state which page a request comes from; following a link to the page is
        # allowed.
        came = self.headers.get("Sec-Fetch-Site", "none")
        navigates = self.headers.get("Sec-Fetch-Dest") == "document" and not place
        if came not in ("none", "same-origin") and not navigates:
            return HTTPStatus.FORBIDDEN, "another page has no business here"
        return None

    def _answer(self, place: str, query_string: str) -> None:
        session = self.server.session
        if place == "":
            self._send(
                200, _HTML, remote_page(session.refreshed().document).encode("utf-8", "replace")
            )
            return
        if place == "api/page":
            self._send(200, _BINARY, session.content())
            return
        endpoint = ENDPOINTS.get(place)
        if endpoint is None:
            self._send_problem(HTTPStatus.NOT_FOUND, "there is nothing of that name here")
            return
        try:
            words = parse_qs(query_string, max_num_fields=16)
        except ValueError:
            raise BadInput("that is too much for one question") from None
        query = {name: texts[-1] for name, texts in words.items()}
        # Few at a time: each answer may read millions of elements.
        with self.server.working:
            faults = mapped_file.faults()
            content = pack(endpoint(session, query))
        if faults != mapped_file.faults():
            raise RunsChanged("a file became shorter while it was read", hint="reload the page")
        self._send(200, _BINARY, content)

    def _send_problem(self, status: int, sentence: str, hint: str = "") -> None:
        """Send an error as a page for people, or as JSON for the front end."""
        answer: dict[str, str] = {"error": sentence, **({"hint": hint} if hint else {})}
        self._send(status, _JSON, json.dumps(answer).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send what the base class refuses: other methods, overlong lines, invalid HTTP."""
        del message, explain
        self.close_connection = True
        if not hasattr(self, "command"):
            self.command = ""
        self._send_problem(code, HTTPStatus(code).phrase.lower())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses contain the token, and logs are kept."""
