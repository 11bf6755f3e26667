"""What a tensor's axes are likely to mean, in words a reader knows: guesses from shape and name."""

from __future__ import annotations

from driftline.numerics.dtypes import DTYPES
from driftline.runs.record import Record

_AXES = {
    1: ("channel",),
    2: ("token", "channel"),
    3: ("batch", "token", "channel"),
    4: ("batch", "head", "token", "channel"),
}


def axes_of(shape: tuple[int, ...], record: Record) -> tuple[str, ...]:
    """What each axis of a tensor is likely to be, in a word; a guess from its rank and port."""
    if record.key.port.startswith(("param", "optimizer")):
        usual = {1: ("channel",), 2: ("out", "in")}.get(len(shape))
    elif DTYPES[record.dtype].kind in ("int", "uint") and len(shape) == 2:
        usual = ("batch", "token")  # ids and positions have no channels
    else:
        usual = _AXES.get(len(shape))
    return usual or tuple(f"axis {at}" for at in range(len(shape))) or ("value",)


def attends(record: Record) -> bool:
    """Whether a tensor is one of an attention, by its class and the end of its path.

    >>> from driftline.runs.key import TensorKey
    >>> attends(Record(TensorKey.of("layers.0.self_attn.q_proj", "output"), 0, "float32", (1,)))
    True
    """
    last = ".".join(record.key.site.replace("/", ".").split(".")[-2:])
    words = f"{last} {record.class_name}".lower()
    return "attn" in words or "attention" in words
