# pyright: reportUnknownMemberType=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The torch adapter of capture and of the saving hook: models, leaf modules, sessions, facts, TF32.

It is the counterpart of `paddle/framework.py`; `captures.framework` describes the interface. The
facts are the parts of torch's own state that can change a number.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn

from driftline.captures.api import Capture, capture, step
from driftline.captures.framework import Leaf
from driftline.captures.naming import ROOT
from driftline.captures.options import Reduction
from driftline.captures.recorder import Pending, Refusal, Snapshot
from driftline.captures.selection import Selection
from driftline.captures.torch import layers as flatten
from driftline.captures.torch.device.accelerator import autocast_kinds, device_names
from driftline.captures.torch.distributed import job_facts
from driftline.captures.torch.layers import unwrapped
from driftline.captures.torch.session import CaptureSession, StepsBy
from driftline.captures.torch.tensors import snapshot, undisturbed
from driftline.runs.sidecars.calls import CALLS, GRAPHS
from driftline.runs.sinks import JSON, Sheets, Sink

__all__ = [
    "Capture",
    "capture",
    "check_graph",
    "check_levels",
    "facts",
    "is_model",
    "session_for",
    "step",
    "watch_graphs",
]


_is_autocast_enabled: Callable[..., bool] = torch.is_autocast_enabled


def tf32_allowed() -> list[str]:
    """The operations that CUDA may compute in TF32: `products`, `convolutions`."""
    return [
        name
        for name, of, switch, off in _tf32_switches()
        if getattr(of, switch) not in (off, "none")
    ]


@contextlib.contextmanager
def tf32_switched_off() -> Generator[None]:
    """Compute float32 in full precision inside, and restore the program's choice afterwards."""
    before = [(of, switch, getattr(of, switch)) for _, of, switch, _ in _tf32_switches()]
    try:
        for _, of, switch, off in _tf32_switches():
            setattr(of, switch, off)
        yield
    finally:
        for of, switch, value in before:
            setattr(of, switch, value)


def _tf32_switches() -> list[tuple[str, Any, str, Any]]:
    """(operation, object with its switch, attribute of the switch, value that means off)."""
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    try:
        # torch has older and newer switches. If a program has used the newer ones, reading the
        # older ones may raise.
        _ = products.allow_tf32, convolutions.allow_tf32
    except RuntimeError:
        return [
            ("products", products, "fp32_precision", "ieee"),
            ("convolutions", convolutions.conv, "fp32_precision", "ieee"),
        ]
    return [
        ("products", products, "allow_tf32", False),
        ("convolutions", convolutions, "allow_tf32", False),
    ]


# Facts about a run.


def facts() -> dict[str, JSON]:
    """Facts about torch's state; reading them draws no random number and initialises no device."""
    # TF32 exists on CUDA only, so a build without CUDA does not mention it.
    digits: dict[str, JSON] = {"tf32": list(tf32_allowed())} if torch.version.cuda else {}
    return {
        "framework": "torch",
        "devices": ["cpu", *device_names()],
        **digits,
        "seed": int(torch.initial_seed()),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": int(torch.get_num_threads()),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
        **job_facts(),
    }


def process_state() -> dict[str, Any]:
    """Switches of torch that can change a number.

    Reading them initialises no device and draws no random number.
    """
    cuda: Any = torch.backends.cuda
    state: dict[str, Any] = {
        "default_dtype": _plain(torch.get_default_dtype()),
        **{f"autocast_{kind}": _autocast(kind) for kind in autocast_kinds()},
        "inference_mode": torch.is_inference_mode_enabled(),
        "grad_enabled": torch.is_grad_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "seed": int(torch.initial_seed()),
        "mkldnn": bool(torch.backends.mkldnn.enabled),
    }
    if torch.version.cuda:
        state["tf32"] = tf32_allowed()
        state["cudnn_benchmark"] = bool(torch.backends.cudnn.benchmark)
        state["cudnn_deterministic"] = bool(torch.backends.cudnn.deterministic)
    backends = ("flash", "mem_efficient", "math", "cudnn")
    state["sdpa_allowed"] = [
        name
        for name in backends
        if (ask := getattr(cuda, f"{name}_sdp_enabled", None)) is not None and ask()
    ]
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ):
        value = getattr(cuda.matmul, name, None)
        if isinstance(value, bool):
            state[name] = value
    return state


def _autocast(device: str) -> str:
    return _plain(torch.get_autocast_dtype(device)) if _is_autocast_enabled(device) else "off"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The saving hook's interface.


class Engine:
    """The saving hook's interface to torch; see `captures.framework.Engine`."""

    def is_model(self, model: object) -> bool:
        return isinstance(model, nn.Module)

    def leaves(self, model: nn.Module) -> list[Leaf]:
        layers: list[tuple[str, nn.Module]] = list(unwrapped(model).named_modules())
        # An attention passes the weights of its projection to a function and never calls the layer.
        attention = [layer for _, layer in layers if isinstance(layer, nn.MultiheadAttention)]
        silent = {id(child) for layer in attention for child in layer.children()}
        return [
            Leaf(layer, name, name or ROOT, id(layer) not in silent)
            for name, layer in layers
            if not any(True for _ in layer.children())
        ]

    def after_forward(self, layer: nn.Module, look: Callable[[Any], None]) -> None:
        # The hook must return nothing, or torch would replace the output.
        def hook(_layer: object, _inputs: object, output: object) -> None:
            look(output)

        layer.register_forward_hook(hook)

    def parameters(self, leaf: Leaf) -> Iterator[tuple[str, str, torch.Tensor]]:
        for short, parameter in leaf.layer.named_parameters(recurse=False):
            if parameter.requires_grad:
                yield short, f"{leaf.name}.{short}", parameter

    def at_gradient(self, parameter: torch.Tensor, look: Callable[[Any], None]) -> None:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                look(gradient)

        parameter.register_hook(hook)

    def tensors(self, output: Any) -> list[tuple[str, str, Any]]:
        return flatten.outputs(output)

    def look(self, tensor: torch.Tensor) -> Snapshot | Refusal | Pending:
        return snapshot(tensor)

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed()

    def is_replay(self) -> bool:
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1

    def rank(self) -> tuple[int, int] | None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        return None

    def facts(self) -> dict[str, JSON]:
        return facts()


# Entry points for `captures.api`.


def is_model(thing: object) -> bool:
    return isinstance(thing, nn.Module)


def check_levels(levels: Sequence[str]) -> None:
    """Accept all levels: torch supports every one."""
    del levels


def session_for(
    sink: Sink,
    selection: Selection,
    reduction: Reduction,
    levels: Sequence[str],
    *,
    model: nn.Module,
    rank: int,
    steps_by: StepsBy,
    to_folder: bool,
) -> CaptureSession:
    """A session of one model, not started yet; a run in a folder may support operator replay."""
    session = CaptureSession(
        sink, selection, reduction, levels, model=model, rank=rank, steps_by=steps_by
    )
    # Operators can be executed again only from a run that keeps them in full.
    if to_folder and session.replayable and isinstance(sink, Sheets):
        from driftline.captures.torch.operators.call_list import CallTap

        session.taps.append(CallTap(session, functools.partial(sink.sheet, CALLS)))
        session.for_replay = True
    return session


def check_graph(graph: str | None, levels: Sequence[str], *, fusion: bool) -> None:
    """Check the user's options for compiled graphs.

    Raises:
        BadInput: There is no such graph option, or it cannot be combined with the levels.
    """
    from driftline.captures.torch.compile.tap import check_graph_engine

    check_graph_engine(graph, levels, fusion=fusion)


def watch_graphs(
    session: CaptureSession, sink: Sink, graph: Literal["auto", "fx", "inductor"], *, fusion: bool
) -> None:
    """Let a session capture the inside of the graphs that `torch.compile` makes."""
    from driftline.captures.torch.compile.tap import GraphTap

    write = functools.partial(sink.sheet, GRAPHS) if isinstance(sink, Sheets) else None
    session.taps.append(GraphTap(session, graph, write, fusion=fusion, afresh=True))
