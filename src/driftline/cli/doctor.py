"""`driftline doctor`: what this machine and environment offer, to paste into a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from typing import Literal

from driftline import __version__
from driftline.cli import script

PACKAGES = ("numpy", "ml_dtypes", "pyarrow", "msgspec")
ENGINES = {
    "torch": ("torch",),
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
}
"""What can be captured, by the name of its extra, and the packages it may come in."""


def doctor(*, format: Literal["table", "json"] = "table") -> int:
    """Print versions, the kernel path and the devices of this machine.

    torch is asked about its devices only if it is installed.

    Args:
        format: How to print it.
    """
    facts = script.step("facts", environment_facts)
    script.end(facts)
    if format == "json":
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        print(f"{name:<14}{value}")
    return 0


def environment_facts() -> dict[str, str]:
    """Name and value of everything that can change a result, each as one short text."""
    facts = {
        "driftline": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
    }
    facts |= {package: _version(package) or "not installed" for package in PACKAGES}
    for engine, packages in ENGINES.items():
        known = [version for package in packages if (version := _version(package))]
        facts[engine] = known[0] if known else f"not installed: pip install 'driftline[{engine}]'"
    facts |= _kernel_facts()
    if importlib.util.find_spec("torch") is not None:
        facts |= _torch_facts()
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _kernel_facts() -> dict[str, str]:
    from driftline.numerics import kernel

    return {"kernel": f"{kernel.active()} (available: {', '.join(kernel.available())})"}


def _torch_facts() -> dict[str, str]:
    import torch

    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(cuda)]
    return {
        "torch threads": str(torch.get_num_threads()),
        "devices": ", ".join(["cpu", *names]),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }
