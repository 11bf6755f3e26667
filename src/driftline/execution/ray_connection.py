# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""What is asked of the address of a Ray cluster before Ray is: is it one, and does it want a token?

Ray itself would wait for minutes, and say it in many lines.
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

_DOOR = 5.0
"""Seconds in which an address must take a connection at all."""
_GREETING = 8.0
"""Seconds in which whoever takes the connection must answer as Ray's servers do."""
_PORT = "10001 is the usual port of Ray's client server; on a machine of the cluster itself, "
HINT = _PORT + "say --executor ray"
_QUESTIONS = ("/ray.rpc.NodeInfoGcsService/GetClusterId", "/ray.rpc.RayletDriver/ClusterInfo")
"""Calls that a cluster and its client server answer, or refuse without a token."""

_TOKEN_WANTED = "wants a token"
_NO_GRPC = "http2 header with status"
"""gRPC says this of servers and proxies of the web that speak HTTP/2, but not gRPC."""
_TOKEN = (
    "on its head `ray get-auth-token` prints it; put it into ~/.ray/auth_token here, and set "
    f"{settings.RAY_TOKENS}=token"
)


def knock(place: str, address: str) -> None:
    """See whether anybody is there at all: Ray itself would wait for minutes.

    Raises:
        BadInput: It is no address.
        DriftlineError: Nobody is.
    """
    host, colon, port = place.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(
            f"'{address}' is no address of a Ray cluster",
            hint="write --executor ray://HOST:PORT, such as ray://head:10001",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_DOOR).close()
    except OSError as trouble:
        why = trouble.strerror or str(trouble) or "no answer"
        raise DriftlineError(
            f"there is no Ray cluster at {address}: {why[0].lower()}{why[1:]}",
            hint=HINT if address.startswith("ray://") else "is RAY_ADDRESS of another cluster?",
        ) from None
    _greet(place, address)


def _greet(place: str, address: str) -> None:
    """See whether whoever is there speaks HTTP/2, as Ray does; with TLS only Ray can tell.

    Raises:
        DriftlineError: It does not.
    """
    try:
        import grpc
    except ImportError:
        return
    if settings.ray_uses_tls():
        return
    channel = grpc.insecure_channel(place)
    try:
        grpc.channel_ready_future(channel).result(timeout=_GREETING)
    except grpc.FutureTimeoutError:
        raise DriftlineError(
            f"what is at {address} does not answer as a Ray cluster: waited {_GREETING:.0f} s",
            hint=HINT,
        ) from None
    finally:
        channel.close()


def asks_for_token(place: str) -> bool:
    """Whether a Ray cluster, or its client server, refuses those who come without a token."""
    return _answers(place) == _TOKEN_WANTED


def _answers(place: str) -> str:
    """How whoever is there answers what Ray's servers are asked; empty: nothing special."""
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
                channel.unary_unary(question)(b"", timeout=_GREETING)
            except grpc.RpcError as answer:
                if answer.code() == grpc.StatusCode.UNAUTHENTICATED:
                    return _TOKEN_WANTED
                if _NO_GRPC in (answer.details() or ""):
                    return _NO_GRPC
    finally:
        channel.close()
    return ""


def unlock(place: str, address: str) -> str:
    """Have Ray use the token of this machine if that is asked for, and not forbidden here.

    Returns:
        What to do if Ray is refused all the same.

    Raises:
        DriftlineError: It is no Ray. Or a token is asked for, and there is none, or it is not to be
            used.
    """
    found = _answers(place)
    if found == _NO_GRPC:
        raise DriftlineError(
            f"what is at {address} does not answer as a Ray cluster: it is a web server", hint=HINT
        )
    if found != _TOKEN_WANTED:
        return HINT
    chosen = settings.ray_token_mode()
    if not chosen and "ray" not in sys.modules and settings.ray_has_token():
        settings.ray_uses_token()
    elif chosen != "token":
        raise DriftlineError(f"the Ray cluster at {address} asks for a token", hint=_TOKEN)
    return "it asks for a token: is it the same here? " + _TOKEN


# The connection to a Ray cluster: found quickly, or refused in a sentence.


_PATIENCE = 90.0
"""Seconds in which Ray must give a session: on a busy machine its client server took 30."""
_TRIES = 3
"""How often a session is asked for: the process that Ray's client server starts for one may die as
it is made (it forks while gRPC's threads run; seen on busy machines), and the next one lives."""


class _Hushed:
    """Standard output without what Ray prints there by itself when a machine or worker is lost.

    We say that, on standard error; results on standard output may be read by a program. No stream
    of Python's own kinds: those close what they stand for when they go.
    """

    def __init__(self, whole: TextIO) -> None:
        self.whole = whole
        self.leaving: threading.Thread | None = None

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if thread.name == "ray_listen_error_messages" or thread is self.leaving:
            return len(text)
        return self.whole.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


class Session:
    """A connection. One that the program had already is left as it is when we are done."""

    def __init__(self, ray: Any, owned: bool) -> None:
        self.ray = ray
        self._owned = owned

    def nodes(self) -> list[dict[str, Any]]:
        """The machines that are alive."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """While work is done; the connection is let go at the end if it is ours."""
        hushed = _Hushed(sys.stdout)
        sys.stdout = cast(TextIO, hushed)
        try:
            yield
        finally:
            hushed.leaving = threading.current_thread()  # who prints what was held back
            try:
                if self._owned:
                    self.ray.shutdown()
            finally:
                hushed.leaving = None
                if cast(Any, sys.stdout) is hushed:
                    sys.stdout = hushed.whole


def connect(address: str, jobs: int | None) -> Session:
    """Connect to a cluster.

    Args:
        address: `ray://HOST:PORT`; empty: the cluster this machine is in, or one of its own.
        jobs: Cores of one of its own.

    Raises:
        DriftlineError: There is none, or it does not answer.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return Session(sys.modules["ray"], owned=False)
    settings.disable_ray_usage_reports()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    wanted = address or settings.ray_address()
    elsewhere = wanted if wanted not in ("auto", "local") else ""
    hint = HINT
    if elsewhere and importlib.util.find_spec("ray") is not None:
        # Before Ray is imported: that is when it settles whether it uses tokens.
        if elsewhere.startswith("ray://"):
            require("grpc", install="driftline[ray]")
        knock(elsewhere.removeprefix("ray://"), elsewhere)
        hint = unlock(elsewhere.removeprefix("ray://"), elsewhere)
    ray = require("ray", install="driftline[ray]")
    if elsewhere:
        _bounded(lambda: ray.init(elsewhere, **quiet), elsewhere, hint)
    elif wanted == "local" or not _joined(ray, quiet):
        ray.init("local", num_cpus=jobs, include_dashboard=False, **quiet)
    return Session(ray, owned=True)


def _joined(ray: Any, quiet: dict[str, Any]) -> bool:
    """Join the cluster that this machine is in, if it is in one.

    Raises:
        DriftlineError: Ray joins it with a token, and it was started without: workers would die.
    """
    chosen = settings.ray_token_mode()
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        return False
    if not chosen and settings.ray_token_mode() == "token":  # Ray has found a token, and takes it
        place = str(ray.get_runtime_context().gcs_address)
        if not asks_for_token(place):
            ray.shutdown()
            raise DriftlineError(
                f"the Ray cluster at {place} was started without a token, and Ray has one here now",
                hint=f"set {settings.RAY_TOKENS}=disabled, or start the cluster again",
            )
    return True


def _bounded(init: Any, address: str, hint: str = HINT) -> None:
    """Connect, or give up: somebody may be there who does not speak as Ray does.

    Raises:
        DriftlineError: Ray refused, or did not answer in time.
    """
    trouble: BaseException | None = None
    for _ in range(_TRIES):
        trouble = _attempt(init, address)
        if not isinstance(trouble, ConnectionAbortedError):
            break
    if trouble is not None:
        raise DriftlineError(f"Ray at {address} refuses: {told(trouble)}", hint=hint) from trouble


def _attempt(init: Any, address: str) -> BaseException | None:
    """Ask for a session once; what came of it, if not a session.

    Raises:
        DriftlineError: Nothing did.
    """
    outcome: list[BaseException | None] = []

    def connect() -> None:
        try:
            init()
            outcome.append(None)
        except BaseException as trouble:
            outcome.append(trouble)

    # Not waited for at the end: there is no way to have Ray give up.
    thread = threading.Thread(target=connect, name="driftline-ray", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if not outcome:
        raise DriftlineError(
            f"what is at {address} does not answer as a Ray cluster: waited {_PATIENCE:.0f} s",
            hint=HINT,
        )
    return outcome[0]


def told(trouble: BaseException) -> str:
    """What Ray has to say, in one line: the last of a traceback is the exception itself."""
    lines = [line.strip() for line in str(trouble).splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error:" in line and not line.startswith("ray::"):
            return line[:300]
    return (lines[0] if lines else type(trouble).__name__)[:300]
