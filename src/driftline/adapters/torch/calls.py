"""A list of everything that ran: operators and modules, with parameters, and who feeds whom.

Beside the tensors of a capture, and without their values: `dump --type op` and the graphs of
`--type onnx` are made of it. A tensor is known by its memory: every operator that fills memory is
seen, so the last one that did is the maker of whatever is read there. Memory is held weakly, and as
long as it is known no other takes its place. Views have no memory of their own and are left out,
as in the operator level, whose sites, visits and rules for what runs outside of modules hold here
too. How the lines are kept is not known here.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from driftline.adapters.torch.dispatch import (
    begin_watching,
    end_watching,
    hide_from_compiler,
    unwatch_delicate,
    watch_delicate,
    watching,
)
from driftline.adapters.torch.held import a_model_is_there
from driftline.adapters.torch.ops import _NUMBERS, _with_tensor
from driftline.adapters.torch.schemas import Operator
from driftline.adapters.torch.snapshot import undisturbed
from driftline.adapters.torch.taps import Frame
from driftline.adapters.torch.whereabouts import Spot, Whereabouts
from driftline.runs.calls import Call, CallTensor, Source

Named = Sequence[tuple[str, str, torch.Tensor]]

MOST_CALLS = 2_000_000
"""A program that runs for days must not fill the disk with a list."""
MOST_WAITING = 20_000
OUTSIDE = "(outside)"
"""Begins the names of tensors that no operator made that was seen: a program's inputs."""
_WRITTEN_AT_ONCE = 256
_KNOWN_MEMORY = 100_000
_LONGEST_TEXT = 200
_LONGEST_LIST = 1000


class _Maker(NamedTuple):
    """What filled some memory last."""

    memory: StorageWeakRef
    step: int
    call: int
    slot: str


class _Open(NamedTuple):
    """A module call under way."""

    frame: Frame
    call: Call


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Open] = []


class CallTap:
    """Writes one line for each operator and each module that ran.

    Args:
        session: The capture that it belongs to; its selection holds here too.
        write: Takes lines of `calls.jsonl`.
    """

    def __init__(self, session: Any, write: Callable[[str], None]) -> None:
        self.session = session
        self.active = False
        self._write = write
        self._where = Whereabouts(session)
        self._thread = _Thread()
        self._operators: dict[Any, tuple[Operator, dict[str, Any]]] = {}
        self._building = False
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._written = self._begun = 0
        # A whole program begins with its building; a `with` block says itself where it begins.
        self._held: list[str] | None = [] if self.session.global_scope else None
        self._makers: dict[int, _Maker] = {}
        self._weights: dict[int, tuple[StorageWeakRef, str]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._strangers = 0
        self._full = False

    # --- life

    def install(self) -> None:
        self.active = True
        self._where.install()
        watch_delicate(self)
        begin_watching(self)

    def remove(self) -> None:
        self.active = False
        end_watching(self)
        unwatch_delicate(self)
        self._where.remove()
        with self._lock:
            self._same_process()
            if self._held:
                self._lines += self._held
            self._held = None
            self._flush()
            self._makers.clear()
            self._weights.clear()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """Called by `modules.py` around each call of a root module."""
        if not self.active:
            yield
            return
        frame = self.session.current_frame()
        self._same_process()
        if frame is not None and not frame.place.root.helper:
            self._begin(frame)
            self._learn_weights(module, frame)
        depth, open_ = self._where.depth(), len(self._thread.stack)
        try:
            if self.session.global_scope:
                begin_watching(self)
                yield
            else:
                with watching(self):
                    yield
        finally:
            self._where.back_to(depth)
            del self._thread.stack[open_:]
            self._flush()

    def _begin(self, frame: Frame) -> None:
        """A model is called: what ran outside before the first call was its building."""
        if self._held is not None or self._building:
            with self._lock:
                self._held, self._building = None, False
                self._makers.clear()
                self._counts.clear()
            self._where.count_anew()
        if not self.session.wants_step(frame.step):
            self._makers.clear()  # what fills memory now is not seen

    @contextmanager
    def around_backward(self) -> Generator[None]:
        self._where.enter_backward()
        with watching(self):
            yield

    def unseen(self, what: str) -> None:
        self.session.event_once(
            "operators-unseen",
            f"the operators of {what} are not listed: torch computes it differently when it is "
            "watched",
        )

    # --- modules

    def before_forward(self, frame: Frame, inputs: Named) -> None:
        self._where.enter(frame.site)
        if not self.session.wants_step(frame.step):
            return
        with undisturbed():
            call = Call(
                self._number(),
                "module",
                frame.site,
                frame.class_name,
                frame.place.ids or "",
                frame.step,
                frame.visit,
                frame.phase,
                self._inside(),
                tuple(self._described(*one, step=frame.step) for one in inputs),
            )
        self._thread.stack.append(_Open(frame, call))

    def on_forward(self, frame: Frame, inputs: Named, outputs: Named) -> None:
        self._where.leave(frame.site)
        stack = self._thread.stack
        while stack:
            opened = stack.pop()
            if opened.frame is frame:
                with undisturbed():
                    made = tuple(self._described(*one, step=frame.step) for one in outputs)
                if self._wanted(frame.site, frame.class_name):
                    self._put(opened.call._replace(outputs=made), outside=False)
                return

    def _wanted(self, site: str, class_name: str) -> bool:
        wants = self.session.wants
        return wants(site, class_name, "output") or wants(site, class_name, "input")

    # --- operators

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and note it."""
        if not self.active:
            return func(*args, **kwargs)
        begun: tuple[Spot, Call] | None = None
        operator: Operator | None = None
        try:
            operator, defaults = self._operator(func)
            for index in operator.tensors:
                if index < len(args) and type(args[index]) in _NUMBERS:
                    args = _with_tensor(args, index)
            if not operator.silent:
                spot = self._where.spot(func, operator)
                if spot is not None:
                    visit = spot.next_visit()
                    if (spot.input or spot.output) and not (spot.outside and self._building):
                        with undisturbed():
                            begun = (
                                spot,
                                self._begun_call(spot, operator, defaults, visit, args, kwargs),
                            )
        except Exception as error:
            self._lost(func, error)
        result = func(*args, **kwargs)
        try:
            if begun is not None and operator is not None:
                with undisturbed():
                    self._end_call(*begun, operator, args, kwargs, result)
            elif operator is not None and not operator.silent and self._makers:
                with undisturbed():
                    self._overwritten(result)
        except Exception as error:
            self._lost(func, error)
        return result

    def _operator(self, func: Any) -> tuple[Operator, dict[str, Any]]:
        found = self._operators.get(func)
        if found is None:
            schema = getattr(func, "_schema", None)
            defaults = {
                argument.name: _plain(argument.default_value)
                for argument in (schema.arguments if schema is not None else ())
                if argument.has_default_value() and "Tensor" not in str(argument.type)
            }
            found = self._operators[func] = (Operator(func), defaults)
        return found

    def _begun_call(
        self,
        spot: Spot,
        operator: Operator,
        defaults: dict[str, Any],
        visit: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call:
        names = operator.arguments
        inputs: list[CallTensor] = []
        param = dict(defaults)
        positional = [
            (names[index] if index < len(names) else str(index), str(index), value)
            for index, value in enumerate(args)
        ]
        for slot, alias, value in (*positional, *((name, "", v) for name, v in kwargs.items())):
            tensors = list(_tensors_in(value, slot))
            if tensors:
                inputs += [
                    self._described(one, alias, tensor, step=spot.step)
                    for one, tensor in tensors
                    if slot not in operator.unread or self._maker(tensor) is not None
                ]
            elif not isinstance(value, torch.Tensor):
                param[slot] = _plain(value)
        return Call(
            self._number(),
            "operator",
            spot.site,
            operator.full_name,
            self._ids(spot),
            spot.step,
            visit,
            spot.phase,
            self._inside() if spot.phase != "backward" else None,
            tuple(inputs),
            (),
            param,
        )

    def _end_call(
        self,
        spot: Spot,
        call: Call,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        made: list[tuple[str, torch.Tensor]] = []
        if isinstance(result, torch.Tensor):
            made.append(("0", result))
        elif isinstance(result, (list, tuple)):
            for index, value in enumerate(cast("Sequence[Any]", result)):
                if index not in operator.scratch:
                    made += _tensors_in(value, str(index))
        for index, name in operator.written:
            value = args[index] if index < len(args) else kwargs.get(name)
            made += _tensors_in(value, name)
        outputs = tuple(
            CallTensor(slot, _dtype(tensor), tuple(tensor.shape)) for slot, tensor in made
        )
        with self._lock:
            for slot, tensor in made:
                self._made_by(tensor, spot.step, call.number, slot)
            self._put(call._replace(outputs=outputs), outside=spot.outside)

    # --- whose memory it is

    def _described(
        self, slot: str, alias: str, tensor: torch.Tensor, *, step: int = 0
    ) -> CallTensor:
        shape = tuple(int(size) for size in tensor.shape)
        return CallTensor(slot, _dtype(tensor), shape, alias, self._source(tensor, step))

    def _source(self, tensor: torch.Tensor, step: int) -> Source:
        memory = _memory(tensor)
        if memory is None:
            return None
        maker, weight = self._makers.get(memory._cdata), self._weights.get(memory._cdata)
        if maker is not None and (maker.step == step or weight is None):
            return maker.call, maker.slot
        if weight is None:
            with self._lock:
                if len(self._weights) > _KNOWN_MEMORY:
                    self._weights = {k: w for k, w in self._weights.items() if not w[0].expired()}
                weight = (StorageWeakRef(memory), f"{OUTSIDE}.{self._strangers}")
                self._weights[memory._cdata] = weight
                self._strangers += 1
        return weight[1]

    def _maker(self, tensor: torch.Tensor) -> _Maker | None:
        memory = _memory(tensor)
        return self._makers.get(memory._cdata) if memory is not None else None

    def _made_by(self, tensor: torch.Tensor, step: int, call: int, slot: str) -> None:
        memory = _memory(tensor)
        if memory is None:
            return
        if len(self._makers) > _KNOWN_MEMORY:
            self._makers = {k: m for k, m in self._makers.items() if not m.memory.expired()}
            if len(self._makers) > _KNOWN_MEMORY:
                self._makers.clear()
        self._makers[memory._cdata] = _Maker(StorageWeakRef(memory), step, call, slot)

    def _overwritten(self, result: Any) -> None:
        """An operator that is not listed filled memory: who did so before no longer counts."""
        for _, tensor in _tensors_in(result, ""):
            memory = _memory(tensor)
            if memory is not None:
                self._makers.pop(memory._cdata, None)

    def _learn_weights(self, root: nn.Module, frame: Frame) -> None:
        try:
            site = frame.site
            before = "" if site.startswith("(") else f"{site}."
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                memory = _memory(tensor)
                known = self._weights.get(memory._cdata) if memory is not None else None
                if memory is not None and (known is None or known[1].startswith(OUTSIDE)):
                    self._weights[memory._cdata] = (StorageWeakRef(memory), f"{before}{name}")
        except Exception as error:
            self.session.event_once("weights-unknown", f"parameters have no names: {error}")

    # --- lines

    def _number(self) -> int:
        with self._lock:
            self._begun += 1
            return self._begun - 1

    def _inside(self) -> int | None:
        stack = self._thread.stack
        return stack[-1].call.number if stack else None

    def _ids(self, spot: Spot) -> str:
        """The place of an operator: that of its module, and a number beyond its children."""
        place = self.session.names.site(spot.site.rsplit("/", 1)[0])
        above = (place.ids or "") if place is not None else ""
        if place is None and self.session.names.roots:
            module = self.session.names.roots[0].module()
        else:
            module = place.ref() if place is not None else None
        children = len(module._modules) if module is not None else 0
        with self._lock:
            count = self._counts.get((above, spot.step), 0)
            self._counts[above, spot.step] = count + 1
        number = str(children + count)
        return f"{above}_{number}" if above else number

    def _put(self, call: Call, *, outside: bool) -> None:
        with self._lock:
            self._same_process()
            if self._full:
                return
            line = call.to_line()
            if outside and self._held is not None:
                self._held.append(line)
                if len(self._held) > MOST_WAITING:
                    self._building = a_model_is_there()
                    if not self._building:
                        self._lines += self._held
                    self._held = None
                return
            self._lines.append(line)
            self._written += 1
            if len(self._lines) >= _WRITTEN_AT_ONCE:
                self._flush()
            if self._written >= MOST_CALLS:
                self._full = True
                self.session.event_once(
                    "calls-limit",
                    f"{MOST_CALLS} calls are listed; what ran after them is not",
                )

    def _flush(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            if lines:
                self.session.shielded("calls", self._write, "".join(lines))

    def _same_process(self) -> None:
        """In a forked child: what was seen was its parent's."""
        if self._process != os.getpid():
            self._forget()
            self._thread = _Thread()

    def _lost(self, func: Any, error: Exception) -> None:
        self.session.event_once("operator-lost", f"{func} not listed: {error}", operator=str(func))


hide_from_compiler(CallTap.around_backward)


def _tensors_in(value: Any, slot: str) -> Generator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield slot, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            if isinstance(part, torch.Tensor):
                yield f"{slot}.{index}", part


def _memory(tensor: torch.Tensor) -> Any | None:
    """The memory behind a tensor; None for those that have none of their own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # wrappers around other tensors
        return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    """An argument that is no tensor, as JSON; what JSON has no word for in torch's words."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in cast("Sequence[Any]", value)[:_LONGEST_LIST]]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return f"<{type(value).__name__}>"
