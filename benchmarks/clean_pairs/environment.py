"""Packages of models that the development environment has not, in environments of their own.

A package brings what it needs, but nothing that the Python running the benchmark has already:
torch, transformers and numpy stay those of that Python, whose folder the new environment looks into
and whose versions pip is held to. `--install` of a benchmark makes its environment once; without
it, what needs the packages is left out, and a sentence says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import site
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_operators: list[object] = []


class Environment(NamedTuple):
    """A folder with packages.

    Attributes:
        folder: Where it is made.
        packages: What pip is asked for.
    """

    folder: Path
    packages: tuple[str, ...]

    @property
    def library(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    @property
    def is_ready(self) -> bool:
        return (self.folder / ".ready").exists()


# torchvision is built for one release of torch; the others take any.
MODELS = Environment(ROOT / ".models-venv", ("torchvision==0.28.0", "timm", "diffusers"))


def install(environment: Environment = MODELS) -> None:
    """Make an environment, unless it is there."""
    if environment.is_ready:
        return
    subprocess.run([sys.executable, "-m", "venv", str(environment.folder)], check=True)
    present = [path for path in sys.path if path.endswith("site-packages")]
    (environment.library / "present.pth").write_text("\n".join(present) + "\n")
    versions = {
        package.metadata["Name"].lower(): package.version.partition("+")[0]
        for package in importlib.metadata.distributions()
    }
    kept = [f"{name}=={version}" for name, version in sorted(versions.items()) if name != "pip"]
    constraints = environment.folder / "constraints.txt"
    constraints.write_text("\n".join(kept) + "\n")
    pip = [str(environment.folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "-c", str(constraints), *environment.packages], check=True)
    (environment.folder / ".ready").touch()


def activate(environment: Environment = MODELS) -> None:
    """Let the packages be imported, where the environment has been made."""
    folder = environment.library
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
