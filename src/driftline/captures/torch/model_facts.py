# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Facts about torch models: modules, parameters, buffers, configurations, state of the process.

A model is described before its first call. It is described again when its mode or the number of
modules has changed, and at steps 1, 2, 4, 8, ...; only lines that differ are written then. Only
`__dict__` and registered state of a module are read. A thread reads the values of parameters
(`captures.weight_facts`). Values of buffers are read at once, up to a limit, because a forward pass
may change them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from driftline.captures.calls import Frame
from driftline.captures.model_facts import (
    EXIT_THREAD,
    FactOptions,
    FactsFile,
    attributes_of,
    class_line,
    config_lines,
    qualified,
)
from driftline.captures.naming import ROOT, Place, Root
from driftline.captures.patching import PatchSet
from driftline.captures.recorder import Pending, Refusal, Snapshot
from driftline.captures.step_states import CallDigests
from driftline.captures.torch.device.accelerator import autocast_kinds
from driftline.captures.torch.framework import process_state
from driftline.captures.torch.layers import children, class_of, unwrapped
from driftline.captures.torch.step_states import TorchReader
from driftline.captures.torch.tensors import (
    dtype_name,
    order_free_sum,
    recording,
    snapshot,
    undisturbed,
)
from driftline.captures.torch.training_facts import TrainingFacts
from driftline.captures.weight_facts import (
    MOST_BYTES,
    Samples,
    Weight,
    WeightReader,
    order_free_text,
)
from driftline.runs.sidecars.model_facts import (
    MODEL,
    MOST_SAMPLES,
    WEIGHTS,
    grid_indices,
    line_of,
    tensor_path,
)
from driftline.runs.sinks import Sheets

if TYPE_CHECKING:
    from driftline.captures.torch.session import CaptureSession

_OWN_TABLES = frozenset(nn.Module().__dict__) | {"forward", "_compiled_call_impl"}
"""Attributes that every module may have: tables of hooks and children, and its compiled call."""
_HOOKS = {
    "forward": "_forward_hooks",
    "forward_pre": "_forward_pre_hooks",
    "backward": "_backward_hooks",
    "backward_pre": "_backward_pre_hooks",
}
_MOST_MODULES = 200_000
_MOST_MODELS = 64
"""Of a program that makes hundreds of models, only the first ones are described."""
_AT_ONCE = 4 << 20
"""Bytes of buffers that are read before the first call, because a forward pass may change them."""
_LAST_SECONDS = 1.0
"""Seconds to wait for the values of weights when the program exits by `os._exit`."""
_LAST_LOOK = 0.1
"""A model whose last look took fewer seconds is always looked at again when the capture ends."""
_SHARE = 50
"""Looking at a model again may take 1/50 of the time since the last look."""


class _Described:
    """What was written about one model.

    Attributes:
        revision: How many times the model had changed.
        training: The mode of its root at the last look.
        places: The number of known modules in the process at the last look.
        lines: The line of each module and tensor, by its place in the model.
        looked: The time of the last look.
        took: The seconds that the last look took.
    """

    __slots__ = ("lines", "looked", "places", "revision", "took", "training")

    def __init__(self) -> None:
        self.revision = 0
        self.training: bool | None = None
        self.places = 0
        self.lines: dict[str, str] = {}
        self.looked = 0.0
        self.took = 0.0


class TorchFacts:
    """Describes the models of one session; see `Session.model_facts` for when it is called."""

    def __init__(self, session: CaptureSession, options: FactOptions) -> None:
        self._session = session
        self._options = options
        self.file = FactsFile(self._write, self._has_run)
        self._weights = WeightReader(self.file.add, _to_half, undisturbed)
        self._training = TrainingFacts(session, self.file, self.path_of, self._weights.wait)
        self._calls = CallDigests(session, self.file, TorchReader())
        self._attention = _AttentionBackends(session)
        self._reset()

    def _reset(self) -> None:
        self._described: dict[int, tuple[Root, _Described]] = {}
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._classes: set[type] = set()
        self._configs: set[int] = set()
        self._mode: tuple[Any, ...] = ()
        self._state: dict[str, Any] = {}

    # --- called by the session

    def install(self) -> None:
        self._training.install()
        self._attention.install()

    def remove(self) -> None:
        self._attention.remove()
        self._training.remove()

    def after_fork(self) -> None:
        """This is a forked child: the lines written so far and the thread belong to the parent."""
        self._weights.forget()
        self.file = FactsFile(self._write, self._has_run)
        self._weights = WeightReader(self.file.add, _to_half, undisturbed)
        self._training.restart(self.file, self._weights.wait)
        self._calls = CallDigests(self._session, self.file, TorchReader())
        self._reset()

    def before_root(self, place: Place, module: nn.Module) -> None:
        """A model is about to be called: describe it if it is new or may have changed."""
        # The cheap checks come first, because this runs for every call of a model.
        mode = _mode()
        if mode != self._mode:
            self._mode = mode
            self._write_process()
        self._training.called(module, helper=place.root.helper)
        root = place.root
        entry = self._described.get(id(root))
        described = entry[1] if entry is not None else None
        if described is None:
            if len(self._described) >= _MOST_MODELS:
                return
            described = _Described()
            self._described[id(root)] = root, described
            self._describe(root, described)
        elif (
            (place.is_root and module.training is not described.training)
            or self._session.names.count != described.places
            # Other changes cannot be seen from outside: look at steps 1, 2, 4, 8, ...
            or not (root.step == 0 or root.step & (root.step - 1) or self._is_costly(described))
        ):
            self._describe(root, described)
        if not root.helper and place.is_root:
            self._training.states.model_called(module.parameters, place.site, root.step)

    def after_root(self, frame: Frame, result: Any) -> None:
        """A model was called: its result may be the loss."""
        if frame.digests is not None:
            self._calls.returned(frame)
        self._training.returned(result, frame.site, helper=frame.place.root.helper)

    def digests_call(self, frame: Frame) -> bool:
        return self._calls.begins(frame)

    def note_tensors(self, frame: Frame, port: str, tensors: Any) -> None:
        self._calls.note(frame, port, tensors)

    def flush(self) -> None:
        self.file.flush(at_once=False)

    def finish(self) -> None:
        """The capture ends: look once more, wait for the weights, and write what is left."""
        for root, described in list(self._described.values()):
            # With a single step, the first look was recent enough.
            quick = described.took < _LAST_LOOK
            if root.step > 0 and (quick or not self._is_costly(described)):
                describe = functools.partial(self._describe, root, described, at_end=True)
                self._session.guarded("model facts", describe)
        self._training.finish()
        if any(recompute for _, recompute in self._session._visits):
            text = line_of("process", values={"recomputes_forward": True}, step=0)
            self.file.add(MODEL, text)
        if used := sorted(self._attention.used):
            self.file.add(MODEL, line_of("process", values={"sdpa_used": used}, step=0))
        # When a program exits by `os._exit`, the capture has two seconds in all.
        leaving = threading.current_thread().name == EXIT_THREAD
        self._weights.wait(_LAST_SECONDS if leaving else None)
        self.file.flush()

    def path_of(self, tensor: Any) -> str:
        """`site.name` of a parameter; empty if it belongs to no described model."""
        entry = self._paths.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else ""

    def _has_run(self) -> bool:
        # A session without levels captures no tensors, so facts are all it writes.
        return self._session.recorder.tensors > 0 or not self._session.levels

    def _write(self, name: str, text: str) -> None:
        sink = self._session.recorder.sink
        if isinstance(sink, Sheets):
            sink.sheet(name, text)

    # --- models

    def _is_costly(self, described: _Described) -> bool:
        """Whether looking at a model again now would take too much of the program's time."""
        return time.monotonic() - described.looked <= _SHARE * described.took

    def _describe(self, root: Root, described: _Described, *, at_end: bool = False) -> None:
        model = root.module()
        if model is None:
            return
        begun = time.monotonic()
        first = not described.lines
        new_weights: list[tuple[str, str, torch.Tensor, bool]] = []
        lines: dict[str, str] = {}
        self._write_process()
        with undisturbed():
            number = list(self._described).index(id(root))
            if first:
                text = line_of("model", model=number, framework="torch", site=root.prefix or ROOT)
                self.file.add(MODEL, text)
            step = self._session.clock.now
            revision = {"revision": described.revision + 1, "model": number, "step": step}
            revision = {} if first else revision
            for key, line in self._lines(model, root, new_weights, revision):
                lines[key] = line
            self._write_lines(described, lines, revision)
            if not first:
                # Written even if nothing has changed, because the other run's model may have.
                self.file.add(MODEL, line_of("looked", model=number, step=step, at_end=at_end))
            if first:
                # Only initial values are read here. `step_states` describes what training does.
                self._read_weights(new_weights)
        described.training = model.training
        described.places = self._session.names.count
        described.looked = time.monotonic()
        described.took = described.looked - begun

    def _write_lines(
        self, described: _Described, lines: dict[str, str], revision: dict[str, int]
    ) -> None:
        """Write all lines the first time, and only new, changed and removed ones later."""
        plain = {key: _without_revision(line) for key, line in lines.items()}
        if not revision:
            self.file.add(MODEL, "".join(lines.values()))
        else:
            changed = [
                lines[key] for key, line in plain.items() if described.lines.get(key) != line
            ]
            gone = [key for key in described.lines if key not in plain]
            for key in gone:
                site, _, name = key.partition("\0")
                changed.append(line_of("gone", site=site, name=name, **revision))
            if changed:
                described.revision += 1
                self.file.add(MODEL, "".join(changed))
        described.lines = plain

    def _lines(
        self,
        model: nn.Module,
        root: Root,
        weights: list[tuple[str, str, torch.Tensor, bool]],
        revision: dict[str, int],
    ) -> Iterator[tuple[str, str]]:
        names = self._session.names
        seen: set[int] = set()
        memory: dict[Any, str] = {}
        waiting: list[tuple[nn.Module, str]] = [(model, root.prefix or ROOT)]
        while waiting and len(seen) < _MOST_MODULES:
            module, path = waiting.pop()
            module = unwrapped(module)
            # A module that is used twice, or contains itself, is described once.
            if id(module) in seen:
                continue
            seen.add(id(module))
            place = names.known(module)
            site = place.site if place is not None else path
            yield site, self._module_line(module, site, revision)
            for name, tensor, is_buffer, note in _held(module):
                owned = site, name, is_buffer
                yield (
                    f"{site}\0{name}",
                    self._tensor_line(tensor, owned, note, memory, weights, revision),
                )
            base = "" if site == ROOT else site + "."
            below = [
                (child, base + name)
                for name, child in list(children(module))
                if name != "parametrizations"
            ]
            waiting.extend(reversed(below))
        if waiting:
            text = f"only the first {_MOST_MODULES} modules are described"
            self.file.add(MODEL, line_of("note", text=text))

    def _module_line(self, module: nn.Module, site: str, revision: dict[str, int]) -> str:
        kind, table = class_of(module), module.__dict__
        if kind not in self._classes:
            self._classes.add(kind)
            self._session.guarded(site, lambda: self.file.add(MODEL, class_line(kind)))
        attributes = attributes_of(table, _OWN_TABLES)
        for line in config_lines(table, _OWN_TABLES, site, self._configs):
            self.file.add(MODEL, line)
        own_forward = table.get("forward")
        return line_of(
            "module",
            site=site,
            **{"class": f"{kind.__module__}.{kind.__qualname__}"},
            mode="train" if table.get("training") else "eval",
            attributes=attributes.scalars,
            functions=attributes.functions,
            hooks=_hooks(table),
            forward="" if own_forward is None else qualified(own_forward),
            **revision,
        )

    def _tensor_line(
        self,
        tensor: torch.Tensor,
        owned: tuple[str, str, bool],
        note: str,
        memory: dict[Any, str],
        weights: list[tuple[str, str, torch.Tensor, bool]],
        revision: dict[str, int],
    ) -> str:
        site, name, is_buffer = owned
        path = tensor_path(site, name)
        about = _described(tensor)
        tied = ""
        if not note and not about.get("unreadable"):
            key = _memory_of(tensor)
            tied = memory.setdefault(key, path) if key is not None else path
            tied = "" if tied == path else tied
            if not tied:
                weights.append((site, name, tensor, is_buffer))
        if not is_buffer:
            self._paths.setdefault(id(tensor), (weakref.ref(tensor), path))
        # The original of a parametrization is not the parameter, whose values are computed from it
        # at each access.
        unreadable = note or about.pop("unreadable", "")
        fields = {**about, "buffer": is_buffer, "tied": tied, "unreadable": unreadable}
        return line_of("tensor", site=site, name=name, **fields, **revision)

    # --- weights

    def _read_weights(self, tensors: list[tuple[str, str, torch.Tensor, bool]]) -> None:
        if not self._options.weights:
            return
        later: list[Weight] = []
        at_once = 0
        grids: _Grids = {}
        readings = [_Reading(tensor) for _, _, tensor, _ in tensors]
        # Start all work on the device before waiting for the first result.
        hashed = 0
        for (_, _, tensor, _), reading in zip(tensors, readings, strict=True):
            hashed += tensor.numel() * tensor.element_size()
            begin = functools.partial(reading.begin, grids, hashes=hashed <= MOST_BYTES)
            self._session.guarded("model facts", begin)
        for (site, name, tensor, is_buffer), reading in zip(tensors, readings, strict=True):
            size = tensor.numel() * tensor.element_size()
            weight = Weight(site, name, reading, size)
            on_host = tensor.device.type == "cpu"
            if not on_host or (is_buffer and at_once + size <= _AT_ONCE):
                # Of a device's tensor only samples are copied, and nothing changes it meanwhile.
                at_once += size if on_host else 0
                full = on_host or tensor.numel() <= MOST_SAMPLES
                line = self._weights.line(weight, full=full)
                self.file.add(WEIGHTS, line)
            else:
                later.append(weight)
        if later:
            self._weights.begin(later)
        if self._training.is_updating:
            # The optimizer's step that called this model changes its weights next.
            self._weights.wait()

    # --- the process

    def _write_process(self) -> None:
        """Write the state of the process if it has changed."""
        state = process_state()
        if state != self._state:
            self._state = state
            step = self._session.clock.now
            self.file.add(MODEL, line_of("process", values=state, step=step))


def _without_revision(line: str) -> str:
    head, mark, _ = line.rpartition(',"revision":')
    return head + "}\n" if mark else line


_Grids = dict[tuple[torch.Size, torch.device], tuple[torch.Tensor, ...]]
"""Indices of the samples, by shape and device. Most layers of a model share a few shapes."""


class _Reading:
    """Reads one tensor later, unless it has been changed or freed by then."""

    __slots__ = ("_samples", "_sums", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A weak reference, because the capture must not keep a model alive.
        self._tensor = weakref.ref(tensor)
        self._version = _version(tensor)
        self._samples: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}

    def begin(self, grids: _Grids, *, hashes: bool) -> None:
        """Start gathering the samples of a device's tensor there, without waiting for them.

        Args:
            grids: Indices of the samples of earlier tensors.
            hashes: Also hash all of its elements, so that a permutation can be recognised.
        """
        tensor = self._tensor()
        if tensor is None or tensor.device.type == "cpu" or not _is_sampled(tensor):
            return
        if isinstance(snapshot(tensor, values=False), Refusal | Pending):
            return
        local = _local(tensor)
        place = local.shape, local.device
        if place not in grids:
            indices = [torch.from_numpy(index) for index in grid_indices(tuple(local.shape))]
            mesh = torch.meshgrid(*indices, indexing="ij")
            grids[place] = tuple(index.to(local.device) for index in mesh)
        self._samples = local[grids[place]]
        # Only tensors that need no copy of their own are hashed: the memory is the program's.
        if hashes and local.is_contiguous() and not local.is_complex():
            # A device may lack some of torch's operators; its samples are still of use.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self._sums["own"] = order_free_sum(local)
                if local.dtype in (torch.float16, torch.float32, torch.float64):
                    self._sums["bfloat16"] = order_free_sum(local, as_bfloat16=True)

    def __call__(self) -> Snapshot | Samples | Refusal:
        tensor = self._tensor()
        if tensor is None:
            return Refusal("the model was freed before its weights were read")
        if _version(tensor) != self._version:
            return Refusal("it was changed before it was read")
        if tensor.device.type == "cpu":
            return _read(tensor)
        if self._samples is None:
            self.begin({}, hashes=False)
        samples, self._samples = self._samples, None
        sums, self._sums = self._sums, {}
        return _from_device(tensor, samples, sums)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # tensors of inference mode keep no count
        return -1


def _is_sampled(tensor: torch.Tensor) -> bool:
    """Whether only samples of a tensor on a device are fetched."""
    local = _local(tensor)
    return local.numel() > MOST_SAMPLES and local.dim() > 0 and not (tensor.is_cuda and recording())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def _from_device(
    tensor: torch.Tensor, samples: torch.Tensor | None, sums: Mapping[str, torch.Tensor]
) -> Snapshot | Samples | Refusal:
    """The values of a tensor on a device, or what was gathered there: samples, sums of hashes."""
    shot = snapshot(tensor, values=False)
    if isinstance(shot, Refusal | Pending):
        return shot if isinstance(shot, Refusal) else Refusal("its values are under way")
    if tensor.is_cuda and recording():
        return Refusal("a CUDA graph is being recorded")
    values = _read((_local(tensor) if samples is None else samples).cpu())
    if samples is None or isinstance(values, Refusal):
        return values
    count = math.prod(shot.shape)
    unordered = {name: order_free_text(count, int(total)) for name, total in sums.items()}
    return Samples(shot.dtype, shot.shape, values, unordered)


def _read(tensor: torch.Tensor) -> Snapshot | Refusal:
    shot = snapshot(tensor)
    if isinstance(shot, Pending):
        return Refusal("it is the result of a collective that is under way")
    return shot


def _to_half(values: npt.NDArray[np.float32], out: npt.NDArray[np.float16]) -> None:
    # torch copies pieces of this size in the calling thread. Larger ones would occupy its worker
    # threads, which the program needs.
    source, target = torch.from_numpy(values), torch.from_numpy(out)
    for start in range(0, len(values), 32768):
        target[start : start + 32768].copy_(source[start : start + 32768])


def _hooks(table: dict[str, Any]) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    for kind, attribute in _HOOKS.items():
        functions = table.get(attribute)
        if functions:
            names = [
                qualified(function) or type(function).__name__
                for function in list(functions.values())
            ]
            # Driftline's own hooks are not part of the model.
            if names := [name for name in names if not name.startswith("driftline.")]:
                hooks[kind] = names
    return hooks


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool, str]]:
    """A module's own tensors: name, tensor, whether it is a buffer, and why it cannot be read."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            yield name, parameter, False, ""
    for name, buffer in list(module._buffers.items()):
        if buffer is not None:
            yield name, buffer, True, ""
    # Tensors that are plain attributes: torch does not move, train or save them with the model.
    for name, value in list(module.__dict__.items()):
        if issubclass(type(value), torch.Tensor):
            yield name, value, not issubclass(type(value), nn.Parameter), ""
    # A scripted module's own table of parts has no `get`.
    made = dict(children(module)).get("parametrizations")
    for name, parametrization in list(children(made)) if made is not None else ():
        for original in list(parametrization._parameters.values()):
            if original is not None:
                steps = ", ".join(class_of(step).__name__ for _, step in children(parametrization))
                yield name, original, False, f"not readable: computed by {steps}"
                break


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, dtype and device of a parameter or buffer; of a DTensor, those of the local shard."""
    lazy = nn.parameter.is_lazy(tensor)
    if lazy:
        return {"dtype": dtype_name(tensor.dtype), "unreadable": "not readable: lazy"}
    requires_grad = bool(tensor.requires_grad)
    shot = snapshot(tensor, values=False)
    if isinstance(shot, Snapshot):
        about = {
            "dtype": shot.dtype,
            "shape": list(shot.shape),
            "device": shot.device,
            "placement": shot.placement,
            "requires_grad": requires_grad,
        }
        if tensor.is_meta:
            about["unreadable"] = "not readable: on the meta device"
        return about
    reason = shot.reason if isinstance(shot, Refusal) else "under way"
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "requires_grad": requires_grad,
        "unreadable": f"not readable: {reason}",
    }


def _memory_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for two tensors that share their memory; None for an empty tensor."""
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(tensor)
    if not address or not tensor.numel():
        return id(tensor) if tensor.numel() else None
    return address, tuple(tensor.shape), tensor.dtype, tuple(tensor.stride())


# Attention.


class _AttentionBackends:
    """Records which back ends `scaled_dot_product_attention` chooses in the watched models.

    torch is asked which back end it would choose for the same arguments, and the call itself is not
    changed. Calls inside compiled graphs, and direct calls of the function in `torch._C`, are not
    observed.

    Attributes:
        used: Names of the back ends chosen so far.
    """

    def __init__(self, session: CaptureSession) -> None:
        self._session = session
        self._patches = PatchSet()
        self._left = _MOST_ATTENTIONS
        self.used: set[str] = set()

    def install(self) -> None:
        me: weakref.ref[_AttentionBackends] = weakref.ref(self)
        self._patches.replace(nn.functional, _ATTENTION, lambda plain: _watched(plain, me))

    def remove(self) -> None:
        self._patches.restore()

    def called(self, args: Any, kwargs: Any) -> None:
        session = self._session
        thread = session.thread
        if self._left <= 0 or thread.quiet or not session.running or not thread.stack:
            return
        query = args[0] if args else kwargs.get("query")
        traced = _tracing_state() is not None or _interpreters() is not None
        if traced or type(query) not in (torch.Tensor, nn.Parameter):
            return
        self._left -= 1
        session.guarded("attention", self._look, query, args, kwargs)

    def _look(self, query: torch.Tensor, args: Any, kwargs: Any) -> None:
        # A dispatch mode of the program would observe even a query for a tensor's device.
        with undisturbed():
            if not query.is_meta:
                choice = _chosen_backend(*args, **kwargs)
                self.used.add(_BACKENDS.get(choice, str(choice)))


_ATTENTION = "scaled_dot_product_attention"
_MOST_ATTENTIONS = 1000
"""At most this many calls are looked at. Later calls of a model rarely choose another back end."""
_BACKENDS = {-1: "none", 0: "math", 1: "flash", 2: "mem_efficient", 3: "cudnn", 4: "overrideable"}
_torch: Any = torch
_chosen_backend: Callable[..., int] = _torch._fused_sdp_choice
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state
_interpreters: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def _watched(plain: Callable[..., Any], me: weakref.ref[_AttentionBackends]) -> Callable[..., Any]:
    """The function, which notifies the watcher before each call."""

    @functools.wraps(plain)
    def attention(*args: Any, **kwargs: Any) -> Any:
        # While a graph is compiled, only the plain function may be traced.
        if not torch.compiler.is_compiling() and (watcher := me()) is not None:
            watcher.called(args, kwargs)
        return plain(*args, **kwargs)

    # TorchScript recognises built-in functions by identity.
    torch.jit._builtins._register_builtin(attention, f"aten::{_ATTENTION}")
    return attention


# The state of the process.


_autocast_enabled: Callable[..., bool] = torch.is_autocast_enabled
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
# These run for every call of a model, and looking them up in torch takes longer than calling them.
_is_inference: Callable[[], bool] = torch.is_inference_mode_enabled
_is_grad: Callable[[], bool] = torch.is_grad_enabled
_default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype


def _mode() -> tuple[Any, ...]:
    """The modes of torch that may change between calls.

    Outside of autocast this takes a quarter of a microsecond.
    """
    autocast: tuple[Any, ...] = ()
    if _any_autocast():
        kinds = autocast_kinds()
        autocast = tuple(_autocast_enabled(k) and torch.get_autocast_dtype(k) for k in kinds)
    return autocast, _is_inference(), _is_grad(), _default_dtype()
