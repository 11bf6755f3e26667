"""What of torch's own state can change a number, for the record of a run."""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import torch

from driftline.adapters.torch import tf32
from driftline.adapters.torch.placed import job_facts
from driftline.runs.sink import JSON


def facts() -> dict[str, JSON]:
    """Asking neither draws a random number nor wakes a device."""
    devices = ["cpu"]
    if torch.cuda.is_initialized():
        devices += [
            f"cuda:{index} {torch.cuda.get_device_name(index)}"
            for index in range(torch.cuda.device_count())
        ]
    digits: dict[str, JSON] = {"tf32": list(tf32.allowed())} if torch.version.cuda else {}
    return {
        "framework": "torch",
        "devices": devices,
        **digits,
        "seed": int(torch.initial_seed()),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": int(torch.get_num_threads()),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        **job_facts(),
    }
