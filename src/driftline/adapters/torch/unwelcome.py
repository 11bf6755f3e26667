"""Module calls that are not to be looked at: it would be noise, or leave traces."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

PIPELINING = "torch.distributed.pipelining.stage"
_REHEARSALS = frozenset({"_forward_metadata_inference", "_shape_inference"})
_REHEARSAL_DEPTH = 12
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state


def is_unwelcome() -> bool:
    """Where looking would be noise or leave traces: data workers, scripts being traced."""
    if _tracing_state() is not None:
        return True
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker._worker_info is not None


def is_rehearsal() -> bool:
    """Whether a pipeline stage only finds out which shapes it gives: no call of the program's."""
    frame = sys._getframe(2)
    for _ in range(_REHEARSAL_DEPTH):
        if frame.f_code.co_name in _REHEARSALS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
