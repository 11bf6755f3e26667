# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Connect to a Ray cluster, or refuse in one sentence.

Before Ray is used, the address is checked directly: does a server listen there, is it a Ray
cluster, and does it require a token? Ray itself would wait for minutes and print many lines. This
file does not know which work is done.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import sys
import threading
from collections.abc import Generator
from typing import Any, TextIO, cast

from driftline import settings
from driftline.errors import BadInput, DriftlineError
from driftline.registry import require

_CONNECT_SECONDS = 5.0
"""Seconds in which a server must accept a connection."""
_ANSWER_SECONDS = 8.0
"""Seconds in which a server must answer as Ray's servers do."""
_PORT = "10001 is the usual port of Ray's client server; on a machine of the cluster itself, "
HINT = _PORT + "say --executor ray"
_QUESTIONS = ("/ray.rpc.NodeInfoGcsService/GetClusterId", "/ray.rpc.RayletDriver/ClusterInfo")
"""Calls that a cluster and its client server answer, or refuse if there is no token."""

_TOKEN_WANTED = "wants a token"
_NO_GRPC = "http2 header with status"
"""Text of gRPC's error for web servers and proxies that use HTTP/2 but not gRPC."""
_TOKEN = (
    "on its head `ray get-auth-token` prints it; put it into ~/.ray/auth_token here, and set "
    f"{settings.RAY_TOKENS}=token"
)


def check_reachable(place: str, address: str) -> None:
    """Check that a server accepts connections; Ray itself would wait for minutes.

    Raises:
        BadInput: The text is not an address.
        DriftlineError: No server answers at the address, or it is no Ray cluster.
    """
    host, colon, port = place.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(
            f"'{address}' is no address of a Ray cluster",
            hint="write --executor ray://HOST:PORT, such as ray://head:10001",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as trouble:
        why = trouble.strerror or str(trouble) or "no answer"
        raise DriftlineError(
            f"there is no Ray cluster at {address}: {why[0].lower()}{why[1:]}",
            hint=HINT if address.startswith("ray://") else "is RAY_ADDRESS of another cluster?",
        ) from None
    _check_http2(place, address)


def _check_http2(place: str, address: str) -> None:
    """Check that a server uses HTTP/2, as Ray does. With TLS, only Ray can check that.

    Raises:
        DriftlineError: The server does not use HTTP/2.
    """
    try:
        import grpc
    except ImportError:
        return
    if settings.ray_uses_tls():
        return
    # An insecure channel is enough: only HTTP/2 is checked, and no secret is sent.
    channel = grpc.insecure_channel(place)
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        raise DriftlineError(
            f"what is at {address} does not answer as a Ray cluster: waited "
            f"{_ANSWER_SECONDS:.0f} s",
            hint=HINT,
        ) from None
    finally:
        channel.close()


def asks_for_token(place: str) -> bool:
    """Whether a Ray cluster, or its client server, requires a token."""
    return _answers(place) == _TOKEN_WANTED


def _answers(place: str) -> str:
    """`_TOKEN_WANTED` or `_NO_GRPC` if a server answers Ray's calls that way; otherwise empty."""
    try:
        import grpc
    except ImportError:
        return ""
    if settings.ray_uses_tls():
        return ""
    channel = grpc.insecure_channel(place)
    try:
        for question in _QUESTIONS:
            try:
                channel.unary_unary(question)(b"", timeout=_ANSWER_SECONDS)
            except grpc.RpcError as answer:
                if answer.code() == grpc.StatusCode.UNAUTHENTICATED:
                    return _TOKEN_WANTED
                if _NO_GRPC in (answer.details() or ""):
                    return _NO_GRPC
    finally:
        channel.close()
    return ""


def use_token(place: str, address: str) -> str:
    """Let Ray use this machine's token if the cluster requires one and the settings allow it.

    Returns:
        A hint to print if the cluster refuses nevertheless.

    Raises:
        DriftlineError: The server is not a Ray cluster, or it requires a token that is missing
            here or must not be used.
    """
    answer = _answers(place)
    if answer == _NO_GRPC:
        raise DriftlineError(
            f"what is at {address} does not answer as a Ray cluster: it is a web server", hint=HINT
        )
    if answer != _TOKEN_WANTED:
        return HINT
    chosen = settings.ray_token_mode()
    # Ray decides at import whether it uses tokens; after that nothing can be changed.
    if not chosen and "ray" not in sys.modules and settings.ray_has_token():
        settings.ray_uses_token()
    elif chosen != "token":
        raise DriftlineError(f"the Ray cluster at {address} asks for a token", hint=_TOKEN)
    return "it asks for a token: is it the same here? " + _TOKEN


_PATIENCE = 90.0
"""Seconds in which Ray must open a session: on a busy machine its client server took 30."""
_TRIES = 3
"""Number of attempts to open a session.

The process that Ray's client server starts for a session may die at its start, because it forks
while gRPC's threads run; seen on busy machines.
"""


class _FilteredOutput:
    """Standard output without Ray's own messages about lost machines and workers.

    Driftline prints such messages on standard error, because a program may read the results on
    standard output. This is not a subclass of Python's streams: those close the underlying stream
    when they are deleted.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.leaving: threading.Thread | None = None

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if thread.name == "ray_listen_error_messages" or thread is self.leaving:
            return len(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Session:
    """A connection to Ray. A connection that the program itself had opened stays open."""

    def __init__(self, ray: Any, owned: bool) -> None:
        self.ray = ray
        self._owned = owned

    def nodes(self) -> list[dict[str, Any]]:
        """The machines that are alive."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Context in which work is done; at its end, a connection that we opened is closed."""
        filtered = _FilteredOutput(sys.stdout)
        sys.stdout = cast(TextIO, filtered)
        try:
            yield
        finally:
            filtered.leaving = threading.current_thread()  # shutdown prints held-back messages here
            try:
                if self._owned:
                    self.ray.shutdown()
            finally:
                filtered.leaving = None
                if cast(Any, sys.stdout) is filtered:
                    sys.stdout = filtered.stream


def connect(address: str, jobs: int | None) -> Session:
    """Connect to a cluster.

    Args:
        address: `ray://HOST:PORT`; empty for the cluster of this machine, or a local one.
        jobs: Number of cores of a local cluster.

    Raises:
        DriftlineError: There is no cluster, or it does not answer.
    """
    # A connection that the program opened is used, and left open.
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return Session(sys.modules["ray"], owned=False)
    settings.disable_ray_usage_reports()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    wanted = address or settings.ray_address()
    elsewhere = wanted if wanted not in ("auto", "local") else ""
    hint = HINT
    if elsewhere and importlib.util.find_spec("ray") is not None:
        # Before Ray is imported, because it decides at import whether it uses tokens.
        if elsewhere.startswith("ray://"):
            require("grpc", install="ray[client]")
        check_reachable(elsewhere.removeprefix("ray://"), elsewhere)
        hint = use_token(elsewhere.removeprefix("ray://"), elsewhere)
    ray = require("ray", install="ray[client]")
    if elsewhere:
        _bounded(lambda: ray.init(elsewhere, **quiet), elsewhere, hint)
    elif wanted == "local" or not _joined(ray, quiet):
        ray.init("local", num_cpus=jobs, include_dashboard=False, **quiet)
    return Session(ray, owned=True)


def _joined(ray: Any, quiet: dict[str, Any]) -> bool:
    """Join the cluster that this machine belongs to; returns False if there is none.

    Raises:
        DriftlineError: Ray would use a token, but the cluster was started without one, so that
            workers would die.
    """
    chosen = settings.ray_token_mode()
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        return False
    if not chosen and settings.ray_token_mode() == "token":  # Ray found a token and uses it
        place = str(ray.get_runtime_context().gcs_address)
        if not asks_for_token(place):
            ray.shutdown()
            raise DriftlineError(
                f"the Ray cluster at {place} was started without a token, and Ray has one here now",
                hint=f"set {settings.RAY_TOKENS}=disabled, or start the cluster again",
            )
    return True


def _bounded(init: Any, address: str, hint: str = HINT) -> None:
    """Connect with a time limit, because another kind of server may never answer.

    Raises:
        DriftlineError: Ray refused, or did not answer in time.
    """
    trouble: BaseException | None = None
    for _ in range(_TRIES):
        trouble = _attempt(init, address)
        # Any other refusal would only be repeated.
        if not isinstance(trouble, ConnectionAbortedError):
            break
    if trouble is not None:
        raise DriftlineError(
            f"Ray at {address} refuses: {one_line(trouble)}", hint=hint
        ) from trouble


def _attempt(init: Any, address: str) -> BaseException | None:
    """Try to open a session once; returns the exception, or None after success.

    Raises:
        DriftlineError: There was no answer in time.
    """
    outcome: list[BaseException | None] = []

    def connect() -> None:
        try:
            init()
            outcome.append(None)
        except BaseException as trouble:
            outcome.append(trouble)

    # A daemon thread, because there is no way to make Ray give up.
    thread = threading.Thread(target=connect, name="driftline-ray", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if not outcome:
        raise DriftlineError(
            f"what is at {address} does not answer as a Ray cluster: waited {_PATIENCE:.0f} s",
            hint=HINT,
        )
    return outcome[0]


def one_line(trouble: BaseException) -> str:
    """An error of Ray in one line; the last line of a traceback is the exception itself."""
    lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error:" in line and not line.startswith("ray::"):
            return line[:300]
    return (lines[0] if lines else type(trouble).__name__)[:300]
