# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Facts about Paddle models: layers with their attributes and code, parameters and buffers.

It is the counterpart of `torch/model_facts.py`. Everything is written before a model's first call.
The values of weights are read then too, and not in a thread, because Paddle has no hook in which
the program could wait for the thread before an update.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import paddle

from driftline.captures.calls import Frame
from driftline.captures.model_facts import (
    FactOptions,
    FactsFile,
    attributes_of,
    class_line,
    config_lines,
    qualified,
)
from driftline.captures.naming import ROOT, Place, Root, unwrapped
from driftline.captures.paddle.layers import STRUCTURE
from driftline.captures.paddle.tensors import dtype_name, snapshot, undisturbed
from driftline.captures.paddle.training_facts import PaddleReader, PaddleTraining
from driftline.captures.recorder import Refusal, Snapshot
from driftline.captures.step_states import CallDigests
from driftline.captures.weight_facts import Weight, WeightReader
from driftline.runs.sidecars.model_facts import MODEL, WEIGHTS, line_of, tensor_path
from driftline.runs.sinks import Sheets

if TYPE_CHECKING:
    from driftline.captures.paddle.session import PaddleSession

_OWN_TABLES = frozenset(paddle.nn.Layer().__dict__) | {"forward"}
_MOST_LAYERS = 200_000
_MOST_MODELS = 64
_AT_ONCE = 256 << 20
"""Largest size of a model whose weights are read in full; of a larger model, samples are read."""


class PaddleFacts:
    """Writes facts about the models of one session; see `Session.model_facts`."""

    def __init__(self, session: PaddleSession, options: FactOptions) -> None:
        self._session = session
        self._options = options
        self._reset()
        self._training = PaddleTraining(session, self._file, self._path_of)

    def install(self) -> None:
        self._training.install()

    def remove(self) -> None:
        self._training.remove()

    def after_fork(self) -> None:
        self._reset()
        self._training.restart(self._file)

    def _reset(self) -> None:
        self._file = FactsFile(self._write, lambda: self._session.recorder.tensors > 0)
        self._calls = CallDigests(self._session, self._file, PaddleReader())
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._weights = WeightReader(self._file.add)
        # Whether each model was in training mode when it was last described.
        self._modes: dict[int, bool] = {}
        self._classes: set[type] = set()
        self._configs: set[int] = set()

    def digests_call(self, frame: Frame) -> bool:
        return self._calls.begins(frame)

    def note_tensors(self, frame: Frame, port: str, tensors: Any) -> None:
        self._calls.note(frame, port, tensors)

    def before_root(self, place: Place, module: Any) -> None:
        root = place.root
        self._training.called(module, helper=root.helper)
        mode = self._modes.get(id(root))
        if mode is None and len(self._modes) < _MOST_MODELS:
            self._modes[id(root)] = bool(module.training)
            with undisturbed():
                self._describe(root)
        elif mode is not None and place.is_root and mode != module.training:
            self._modes[id(root)] = bool(module.training)
            step = self._session.clock.now
            with undisturbed():
                for line in self._lines(root, [], {"revision": 1, "step": step}):
                    self._file.add(MODEL, line)
        if not root.helper and place.is_root:
            self._training.states.model_called(module.parameters, place.site, root.step)

    def after_root(self, frame: Frame, result: Any) -> None:
        """Note the result of a model's call, which may be the loss."""
        if frame.digests is not None:
            self._calls.returned(frame)
        self._training.returned(frame, result)

    def flush(self) -> None:
        self._file.flush(at_once=False)

    def finish(self) -> None:
        self._training.finish()
        self._file.flush()

    def _path_of(self, tensor: Any) -> str:
        """`site.name` of a parameter; empty if it belongs to no described model."""
        entry = self._paths.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else ""

    def _write(self, name: str, text: str) -> None:
        sink = self._session.recorder.sink
        if isinstance(sink, Sheets):
            sink.sheet(name, text)

    def _describe(self, root: Root) -> None:
        number = len(self._modes) - 1
        site = root.prefix or ROOT
        self._file.add(MODEL, line_of("model", model=number, framework="paddle", site=site))
        if number == 0:
            self._file.add(MODEL, line_of("process", values=process_state(), step=0))
        weights: list[Weight] = []
        for line in self._lines(root, weights, {}):
            self._file.add(MODEL, line)
        if self._options.weights:
            full = sum(weight.nbytes for weight in weights) <= _AT_ONCE
            if not full:
                text = "the weights take more than 256 MB: an even sample of each was looked at"
                self._file.add(WEIGHTS, line_of("note", text=text))
            for weight in weights:
                self._file.add(WEIGHTS, self._weights.line(weight, full=full))

    def _lines(self, root: Root, weights: list[Weight], revision: dict[str, int]) -> Iterator[str]:
        model = root.module()
        seen: set[int] = set()
        memory: dict[int, str] = {}
        waiting: list[tuple[Any, str]] = [] if model is None else [(model, root.prefix or ROOT)]
        while waiting and len(seen) < _MOST_LAYERS:
            layer, path = waiting.pop()
            layer = unwrapped(STRUCTURE, layer)
            # A layer that is used twice, or contains itself, is described once.
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            place = self._session.names.known(layer)
            site = place.site if place is not None else path
            yield self._layer_line(layer, site, revision)
            for name, tensor, is_buffer in _held(layer):
                yield _tensor_line(tensor, (site, name, is_buffer), memory, weights, revision)
                if not is_buffer and not self._path_of(tensor):
                    path = tensor_path(site, name)
                    self._paths[id(tensor)] = weakref.ref(tensor), path
            base = "" if site == ROOT else site + "."
            below = [(child, base + name) for name, child in STRUCTURE.children(layer)]
            waiting.extend(reversed(below))

    def _layer_line(self, layer: Any, site: str, revision: dict[str, int]) -> str:
        kind, table = type(layer), layer.__dict__
        if kind not in self._classes:
            self._classes.add(kind)
            self._session.guarded(site, lambda: self._file.add(MODEL, class_line(kind)))
        for line in config_lines(table, _OWN_TABLES, site, self._configs):
            self._file.add(MODEL, line)
        attributes = attributes_of(table, _OWN_TABLES)
        own_forward = table.get("forward")
        return line_of(
            "module",
            site=site,
            **{"class": f"{kind.__module__}.{kind.__qualname__}"},
            mode="train" if table.get("training") else "eval",
            attributes=attributes.scalars,
            functions=attributes.functions,
            forward="" if own_forward is None else qualified(own_forward),
            **revision,
        )


def _held(layer: Any) -> Iterator[tuple[str, Any, bool]]:
    for table, is_buffer in ((layer._parameters, False), (layer._buffers, True)):
        for name, tensor in list(table.items()):
            if tensor is not None:
                yield name, tensor, is_buffer


def _tensor_line(
    tensor: Any,
    owned: tuple[str, str, bool],
    memory: dict[int, str],
    weights: list[Weight],
    revision: dict[str, int],
) -> str:
    site, name, is_buffer = owned
    path = tensor_path(site, name)
    tied = memory.setdefault(id(tensor), path)
    tied = "" if tied == path else tied
    shot = snapshot(tensor, values=False)
    about: dict[str, Any] = {"dtype": dtype_name(tensor.dtype)}
    if isinstance(shot, Snapshot):
        about = {"dtype": shot.dtype, "shape": list(shot.shape), "device": shot.device}
        if not tied:
            size = shot.elements * max(1, int(tensor.element_size()))
            weights.append(Weight(site, name, _Reading(tensor), size))
    else:
        about["unreadable"] = f"not readable: {shot.reason}"
    trained = not is_buffer and not tensor.stop_gradient
    return line_of(
        "tensor",
        site=site,
        name=name,
        **about,
        buffer=is_buffer,
        requires_grad=trained,
        tied=tied,
        **revision,
    )


class _Reading:
    """A function that reads one tensor when it is called."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __call__(self) -> Snapshot | Refusal:
        return snapshot(self._tensor)


def process_state() -> dict[str, Any]:
    """The settings of Paddle that can change a number."""
    flags = ("FLAGS_cudnn_deterministic", "FLAGS_use_mkldnn", "FLAGS_conv_workspace_size_limit")
    state: dict[str, Any] = {"default_dtype": str(paddle.get_default_dtype())}
    for flag in flags:
        try:
            state[flag] = paddle.get_flags(flag)[flag]
        except ValueError:  # this build of Paddle lacks the flag
            continue
    return state
