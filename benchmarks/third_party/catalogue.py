"""What a third-party program is, and the command line by which one is run.

A program is a function as a user would write it: a model of a package, built from a configuration
without any weights, and some calls of it. It asks `Use` for the few things that differ between the
runs: `use.ready(model)` plants the fault and casts, `use.drawn(...)` gives inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.clean_pairs.environment import ROOT, Environment, activate
from benchmarks.third_party.faults import Plant

PACKAGES = Environment(
    ROOT / ".third-party-venv",
    (
        "torchvision==0.28.0",
        *("timm", "diffusers", "peft", "open_clip_torch", "torch_geometric", "e3nn", "monai"),
        *("openai-whisper", "ultralytics", "x-transformers", "vit-pytorch", "lightning"),
        *("segmentation-models-pytorch", "sentence-transformers", "kornia", "neuraloperator"),
        *("conformer", "denoising-diffusion-pytorch", "rotary-embedding-torch", "spandrel"),
        *("tab-transformer-pytorch", "local-attention", "performer-pytorch", "einops"),
        *("vector-quantize-pytorch", "efficientnet_pytorch", "pytorch-tabnet", "accelerate"),
        "pytorch-metric-learning",
    ),
)
FORMATS = ("float32", "bfloat16", "autocast")
"""Of the candidate: float32 with other kernels, a model cast as a whole, automatic casts. The
reference is float32 with the usual kernels."""


class Program(NamedTuple):
    """One program and the fault that is planted in it.

    Attributes:
        name: What it is called.
        package: Where its model comes from.
        run: The program.
        fault: What is wrong, in words.
        plant: Makes it wrong.
        sites: Where the fault lies; the first is the module, others are as good an answer.
        format: The candidate's number format.
        dump: Options of `driftline dump`.
    """

    name: str
    package: str
    run: Callable[[Use], None]
    fault: str
    plant: Plant
    sites: tuple[str, ...]
    format: str
    dump: tuple[str, ...]


class Use:
    """One run of a program: right or faulty, the reference's or the candidate's arithmetic."""

    def __init__(self, plant: Plant | None, dtype: torch.dtype) -> None:
        self.plant, self.dtype = plant, dtype
        self.generator = torch.Generator().manual_seed(1)

    def ready(self, model: Any, root: nn.Module | None = None) -> Any:
        """The model with its fault, if it has one, in the format; `root` is what a fault's path
        begins at, if that is a part of the model."""
        if self.plant is not None:
            self.plant(model if root is None else root)
        return model if self.dtype == torch.float32 else model.to(self.dtype)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def numbers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator)


PROGRAMS: dict[str, Program] = {}
FILES = ("images", "generation", "language", "science", "training")


def program(
    package: str,
    fault: str,
    plant: Plant,
    sites: tuple[str, ...],
    format: str = "float32",
    dump: tuple[str, ...] = (),
) -> Callable[[Callable[[Use], None]], Callable[[Use], None]]:
    """Enter a program into the catalogue."""

    def enter(run: Callable[[Use], None]) -> Callable[[Use], None]:
        name = run.__name__
        PROGRAMS[name] = Program(name, package, run, fault, plant, sites, format, dump)
        return run

    return enter


def load() -> dict[str, Program]:
    """All programs, by name."""
    for name in FILES:
        importlib.import_module(f"benchmarks.third_party.programs.{name}")
    return PROGRAMS


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("name", choices=sorted(load()))
    asked.add_argument("--faulty", action="store_true")
    asked.add_argument("--format", choices=FORMATS, help="the candidate's; the reference without")
    chosen = asked.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    activate(PACKAGES)
    # The other kernels for float32, so that a clean pair differs in its last places.
    torch.backends.mkldnn.enabled = chosen.format != "float32"
    entry = PROGRAMS[chosen.name]
    dtype = torch.bfloat16 if chosen.format == "bfloat16" else torch.float32
    cast = contextlib.nullcontext()
    if chosen.format == "autocast":
        cast = torch.autocast("cpu", torch.bfloat16)
    # Some packages draw with Python's generator when they build a model.
    random.seed(0)
    torch.manual_seed(0)
    with cast:
        entry.run(Use(entry.plant if chosen.faulty else None, dtype))


if __name__ == "__main__":
    # By its own name: a module that is run as `__main__` would be loaded a second time by the
    # programs, with a catalogue of its own.
    from benchmarks.third_party.catalogue import main as run_program

    run_program()
