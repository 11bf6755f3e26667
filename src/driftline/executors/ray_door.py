"""What is asked of the address of a Ray cluster before Ray is: is it one, and does it want a token?

Ray itself would wait for minutes, and say it in many lines.
"""

# gRPC's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import socket
import sys

from driftline import settings
from driftline.errors import BadInput, DriftlineError

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
