"""What of Paddle's own state can change a number, for the record of a run."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
from typing import Any

import paddle
from paddle.base import core

from driftline.runs.sink import JSON

_core: Any = core
_DETERMINISTIC = "FLAGS_cudnn_deterministic"


def facts() -> dict[str, JSON]:
    """Asking draws no random number."""
    deterministic = False
    with contextlib.suppress(ValueError):  # a Paddle without CUDA has no such flag
        deterministic = bool(paddle.get_flags([_DETERMINISTIC])[_DETERMINISTIC])
    return {
        "framework": "paddle",
        "devices": [str(paddle.device.get_device())],
        "seed": int(_core.default_cpu_generator().initial_seed()),
        "default_dtype": str(paddle.get_default_dtype()),
        "deterministic": deterministic,
    }


def rank() -> tuple[int, int] | None:
    """Rank and world size, as Paddle's own distribution says; None in a program without it."""
    distributed: Any = paddle.distributed
    if not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())
