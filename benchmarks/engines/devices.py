"""Eager torch on a device against the same program on the CPU: forward, training, with replay.

Rows for a CUDA device where there is one, and for an accelerator that torch knows as PrivateUse1,
which is compiled from `tests/support/accelerator` where there is a C++ compiler. TF32 is off, as it
is on a CPU. The fault is a module whose result is 5 % too large.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import driftline
from benchmarks.engines.cases import Case, Measured, measured, seconds
from benchmarks.engines.compiled import FACTOR, MODELS, without_dropout
from driftline.diagnosis.experiments.replay import replay

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "tests" / "support" / "accelerator"
CHOSEN = ("BERT", "GPT-2", "T5", "Mixtral", "resnet, small")
LACKED = ("resnet, small", "Mixtral")
"""Models for which the compiled accelerator has no kernels: convolution, integer `histc`."""


class Device(NamedTuple):
    """A kind of device: its name for torch, its name in the table, and what makes torch know it."""

    name: str
    shown: str
    prepare: Callable[[], None]


def _use_float32() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@cache
def _register_accelerator() -> None:
    """Compile the backend, once for this process and those it starts, and register it."""
    for name in CHOSEN:
        MODELS[name].make()  # what it imports looks at torch.cuda, which the backend takes away
    sys.path.insert(0, str(BACKEND))
    if "HOSTNPU_LIBRARY" not in os.environ:
        home = Path(torch.__file__).parent
        folder = Path(tempfile.mkdtemp(prefix="driftline-accelerator-"))
        os.environ["HOSTNPU_LIBRARY"] = str(folder / "host_npu.so")
        headers = (f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include")
        words = ("g++", "-O0", "-std=c++20", "-fPIC", "-shared", "-w", *headers)
        libraries = (f"-L{home}/lib", "-lc10", "-ltorch_cpu")
        source, made = str(BACKEND / "host_npu.cpp"), os.environ["HOSTNPU_LIBRARY"]
        subprocess.run([*words, source, "-o", made, *libraries], check=True, timeout=280)
    __import__("hostnpu")


def _devices() -> list[Device]:
    devices = [Device("cuda", "CUDA", _use_float32)] if torch.cuda.is_available() else []
    if shutil.which("g++"):
        devices.append(Device("hostnpu", "PrivateUse1", _register_accelerator))
    return devices


DEVICES = {device.name: device for device in _devices()}


def network_on(name: str, device: str, *, training: bool, faulty: bool = False) -> nn.Module:
    torch.manual_seed(0)
    network: Any = without_dropout(MODELS[name].make().train(training)).to(device)
    if hasattr(network, "tie_weights"):
        network.tie_weights()  # torch makes new parameters on a PrivateUse1 device: none is shared
    if faulty:
        part = network.get_submodule(MODELS[name].faulty)
        forward: Any = part.forward
        part.forward = lambda *args, **more: forward(*args, **more) * FACTOR
    return network


def call(network: nn.Module, name: str, *, training: bool) -> None:
    """One forward pass, or two steps of training."""
    device = next(network.parameters()).device
    inputs = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in MODELS[name].inputs.items()
    }
    if not training:
        with torch.no_grad():
            network(**inputs)
        return
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        result = network(**inputs)
        first = result if isinstance(result, Tensor) else result[0]
        weights = torch.linspace(-9, 9, first.numel()).sin().view(first.shape).to(device)
        (first * weights).sum().backward()
        optimizer.step()


def run_program(name: str, device: str) -> None:
    """The program that a replay runs: the model on the device, without a fault."""
    DEVICES[device].prepare()
    call(network_on(name, device, training=False), name, training=False)


def measure(name: str, device: str, kind: str, folder: Path) -> Measured:
    """In a process of its own: autograd counts devices once, in the first backward pass."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(measure_here, name, device, kind, folder).result()


def measure_here(name: str, device: str, kind: str, folder: Path) -> Measured:
    DEVICES[device].prepare()
    training = kind == "training with AdamW"
    levels = ("modules", "gradients", "params") if training else ("modules",)

    def dumped(run: str, where: str, *, faulty: bool = False) -> None:
        network = network_on(name, where, training=training, faulty=faulty)
        with driftline.capture(network, folder / run, levels=levels, steps="*"):
            call(network, name, training=training)

    def plain() -> None:
        call(network_on(name, device, training=training), name, training=training)

    dumped("cpu", "cpu")
    # What a device and its kernels do once in a process is no part of either.
    plain()
    dumped("first", device)
    cost = seconds(lambda: dumped("clean", device)) / seconds(plain)
    dumped("faulty", device, faulty=True)
    evidence: dict[str, dict[str, Any]] = {"clean": {}, "faulty": {}}
    if kind == "replay":
        line = f"from benchmarks.engines.devices import *; run_program({name!r}, {device!r})"
        program = [sys.executable, "-c", line]
        without = seconds(lambda: subprocess.run(program, check=True, cwd=ROOT))
        for run, more in evidence.items():
            output = folder / f"{run}_replay"
            # Both are whole programs here, imports included.
            cost = seconds(partial(replay, folder / run, program, output)) / without
            more["replay"] = output
    clean, faulty = (
        driftline.compare(folder / "cpu", folder / run, **more) for run, more in evidence.items()
    )
    place = MODELS[name].faulty
    return measured(clean, faulty, f"result of {place} x {FACTOR:g}", (place,), cost)


CASES = tuple(
    Case(
        f"torch on a device, {kind}, {device.shown}",
        name,
        partial(measure, name, device.name, kind),
    )
    for device in DEVICES.values()
    for kind in ("eval", "training with AdamW", "replay")
    for name in CHOSEN
    if device.name == "cuda" or name not in LACKED
)
