# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The accelerator of this process, which is never initialised here.

It may be CUDA, or what torch calls PrivateUse1, XPU or MTIA. `torch.accelerator` names it; its own
module (`torch.cuda`, `torch.npu`) has its random generators. As long as the program has not used
the accelerator, `accelerator` returns None, because initialising some of them prevents a later
fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def accelerator() -> tuple[str, Any] | None:
    """Type and module of the accelerator that the program uses; None if it uses none."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    try:
        module: Any = torch.get_device_module(device.type)
    except RuntimeError:  # a backend need not have one
        return None
    awake = getattr(module, "is_initialized", None)
    return None if awake is not None and not awake() else (device.type, module)


def device_names() -> list[str]:
    """The name of every visible device, such as `cuda:0 NVIDIA H200`."""
    used = accelerator()
    if used is None:
        return []
    kind, module = used
    name_of = getattr(module, "get_device_name", None)
    indices = range(torch.accelerator.device_count())
    return [f"{kind}:{n} {name_of(n)}" if name_of is not None else f"{kind}:{n}" for n in indices]


def autocast_kinds() -> list[str]:
    """Device types whose autocast can change a number in this process."""
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "cuda":
        return ["cpu", "cuda"]
    return ["cpu", "cuda", device.type]


def random_states() -> list[torch.Tensor]:
    """The state of the random generator of each device."""
    used = accelerator()
    ask = getattr(used[1], "get_rng_state", None) if used is not None else None
    return [ask(n) for n in range(torch.accelerator.device_count())] if ask is not None else []


def set_random_states(states: Sequence[torch.Tensor]) -> None:
    """Restore the states that `random_states` returned."""
    used = accelerator()
    if used is not None:
        for index, state in enumerate(states):
            used[1].set_rng_state(state, index)


def current_stream() -> Any:
    """This thread's current stream, for use in another thread; None without an accelerator."""
    if accelerator() is None:
        return None
    try:
        return torch.accelerator.current_stream()
    except (RuntimeError, NotImplementedError):  # not every backend has streams
        return None
