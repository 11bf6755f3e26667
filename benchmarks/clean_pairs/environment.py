"""Packages of models that the development environment has not: torchvision, timm and diffusers.

They go into `.models-venv`, without what they depend on: torch and transformers are those of the
Python that runs the benchmark. `python -m benchmarks.clean_pairs --install` makes it once; without
it the architectures of these packages are left out, and a sentence says so.
"""

from __future__ import annotations

import importlib.util
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".models-venv"
PACKAGES = ("torchvision", "timm", "diffusers")
# torchvision is built for one release of torch; the other two take any.
_INSTALLED = ("torchvision==0.28.0", "timm", "diffusers", "importlib_metadata", "zipp")
_operators: list[object] = []


def install() -> None:
    """Make the environment, unless it is there."""
    if (VENV / ".ready").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *_INSTALLED], check=True)
    (VENV / ".ready").touch()


def activate() -> None:
    """Let the packages be imported, where the environment has been made."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = VENV / "lib" / version / "site-packages"
    if folder.is_dir() and str(folder) not in sys.path:
        site.addsitedir(str(folder))
    # Also where the path is there already: a worker process inherits it, but no operators.
    _declare_operators()


def available(package: str) -> bool:
    """Whether a package can be imported here."""
    return importlib.util.find_spec(package) is not None


def _declare_operators() -> None:
    """Name two operators of torchvision, which are in a library that is built for CUDA.

    That library cannot be loaded beside a torch for CPUs, and the package then fails at its import,
    where it describes these two. No model here calls them.
    """
    import torch

    if not _operators and available("torchvision"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _operators.append(library)  # what it defines goes with it
