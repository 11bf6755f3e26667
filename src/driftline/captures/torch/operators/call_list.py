# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The list of calls: every operator and module that ran, its arguments, and the data flow.

`MemoryWriters` remembers which operator was the last to fill a tensor's memory, or which parameter
of the model it is. References to memory are weak: the program can free it, and until then no other
memory can be mistaken for it. `CallTap` writes the lines of `calls.jsonl`. This file reads no
values.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from driftline.captures.torch.operators.build_phase import a_model_is_there
from driftline.captures.torch.operators.dispatch import (
    begin_watching,
    end_watching,
    hide_from_compiler,
    unwatch_mode_sensitive,
    watch_mode_sensitive,
    watching,
)
from driftline.captures.torch.operators.schema import Operator, memory_order, plain, with_tensors
from driftline.captures.torch.operators.schema import argument_tensors as tensors_in
from driftline.captures.torch.operators.sites import OperatorSite, SiteTracker
from driftline.captures.torch.session import Frame
from driftline.captures.torch.tensors import undisturbed
from driftline.runs.sidecars.calls import Call, CallTensor, Source

OUTSIDE = "(outside)"
"""Prefix of the names of tensors that no observed operator made, such as a program's inputs."""
# When tables exceed this size, entries of freed memory are removed.
_MOST = 100_000


class _Writer(NamedTuple):
    memory: StorageWeakRef
    step: int
    call: int
    slot: str


class MemoryWriters:
    """The operators that filled each piece of memory, and the names of other memory."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._makers: dict[int, _Writer] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._unknown = 0

    def described(
        self, slot: str, alias: str, tensor: torch.Tensor, *, step: int = 0
    ) -> CallTensor:
        """The description of a tensor that is an argument of a call in a step."""
        return CallTensor(
            slot,
            dtype_of(tensor),
            shape_of(tensor),
            alias,
            self.source(tensor, step),
            memory_order(tensor),
        )

    def source(self, tensor: torch.Tensor, step: int) -> Source:
        memory = _memory(tensor)
        if memory is None:
            return None
        with self._lock:
            maker, name = self._makers.get(memory._cdata), self._names.get(memory._cdata)
            # A parameter that was written in an earlier step, by an optimizer, is still named as a
            # parameter.
            if maker is not None and (maker.step == step or name is None):
                return maker.call, maker.slot
            if name is None:
                if len(self._names) > _MOST:
                    self._names = {k: n for k, n in self._names.items() if not n[0].expired()}
                # Memory that no observed operator filled gets a new name, as an input of the
                # program.
                name = (StorageWeakRef(memory), f"{OUTSIDE}.{self._unknown}")
                self._names[memory._cdata] = name
                self._unknown += 1
            return name[1]

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether old contents of the memory may matter when the tensor is overwritten."""
        memory = _memory(tensor)
        if memory is None:
            return False
        # If a tensor covers all of its memory, no old contents remain.
        partly = tensor.numel() * tensor.element_size() < memory.nbytes()
        return memory._cdata in self._makers or (partly and memory._cdata in self._names)

    def made_by(self, tensor: torch.Tensor, step: int, call: int, slot: str) -> None:
        memory = _memory(tensor)
        if memory is None:
            return
        with self._lock:
            if len(self._makers) > _MOST:
                self._makers = {k: m for k, m in self._makers.items() if not m.memory.expired()}
                # If all memory is alive, the table would be cleaned at every call from now on.
                if len(self._makers) > _MOST:
                    self._makers.clear()
            self._makers[memory._cdata] = _Writer(StorageWeakRef(memory), step, call, slot)

    def made_unseen(self, tensor: torch.Tensor) -> None:
        """Forget who filled a tensor's memory, because an operator not listed has filled it."""
        if self._makers:
            memory = _memory(tensor)
            if memory is not None:
                self._makers.pop(memory._cdata, None)

    def learn_weights(self, root: nn.Module, prefix: str) -> None:
        """Remember the parameters and buffers of a model by name."""
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            memory = _memory(tensor)
            if memory is None:
                continue
            named = self._names.get(memory._cdata)
            # A parameter's name replaces the number of an unknown tensor.
            if named is None or named[1].startswith(OUTSIDE):
                self._names[memory._cdata] = (StorageWeakRef(memory), f"{prefix}{name}")

    def forget_makers(self) -> None:
        with self._lock:
            self._makers.clear()

    def forget(self) -> None:
        with self._lock:
            self._makers.clear()
            self._names.clear()


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; empty for a nested tensor, which has none."""
    return () if tensor.is_nested else tuple(map(int, tensor.shape))


def dtype_of(tensor: torch.Tensor) -> str:
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(tensor: torch.Tensor) -> Any | None:
    """The storage of a tensor; None if it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper of other tensors
        return None


# The tap.


Named = Sequence[tuple[str, str, torch.Tensor]]

MOST_CALLS = 1_000_000
"""Largest number of listed calls, so that a program that runs for days does not fill the disk."""
MOST_WAITING = 20_000
# Lines are written in batches of this size; a kill loses at most one batch.
_WRITTEN_AT_ONCE = 256


class _Open(NamedTuple):
    """A module call in progress."""

    frame: Frame
    call: Call


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Open] = []


class CallTap:
    """Writes one line for each operator and each module that ran.

    Args:
        session: The capture to which it belongs, whose selection is used here too.
        write: Writes lines of `calls.jsonl`.
    """

    def __init__(self, session: Any, write: Callable[[str], None]) -> None:
        self.session = session
        self.active = False
        self._write = write
        self._where = SiteTracker(session)
        self._thread = _Thread()
        self._operators: dict[Any, tuple[Operator, dict[str, Any]]] = {}
        self._building = False
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._written = self._begun = 0
        # A whole program begins by building a model; a `with` block begins where the user wants it.
        self._held: list[str] | None = [] if self.session.global_scope else None
        self._memory = MemoryWriters()
        self._counts: dict[tuple[str, int], int] = {}
        self._children: dict[str, int] = {}
        self._full = False

    # --- Beginning and end.

    def install(self) -> None:
        self.active = True
        self._where.install()
        watch_mode_sensitive(self)
        begin_watching(self)

    def remove(self) -> None:
        self.active = False
        end_watching(self)
        unwatch_mode_sensitive(self)
        self._where.remove()
        with self._lock:
            self._same_process()
            if self._held:
                self._lines += self._held
            self._held = None
            self._flush()
            self._memory.forget()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """A context around each outermost module call."""
        if not self.active:
            yield
            return
        frame = self.session.current_frame()
        self._same_process()
        if frame is not None and not frame.place.root.helper:
            self._begin(frame)
            self._children.setdefault(frame.place.ids or "", len(frame.module._modules))
            self._learn_weights(module, frame.site)
        depth, open_ = self._where.depth(), len(self._thread.stack)
        try:
            with watching(self, lasting=self.session.global_scope):
                yield
        finally:
            self._where.back_to(depth)
            del self._thread.stack[open_:]
            self._flush()

    def _begin(self, frame: Frame) -> None:
        """At a model's first call, drop the operators that ran outside modules before it."""
        if self._held is not None or self._building:
            with self._lock:
                self._held, self._building = None, False
                self._memory.forget_makers()
                self._counts.clear()
                self._children.clear()
            self._where.count_anew()
        if not self.session.wants_step(frame.step):
            self._memory.forget_makers()  # operators of this step are not observed

    @contextmanager
    def around_backward(self) -> Generator[None]:
        self._where.enter_backward()
        with watching(self):
            yield

    def unseen(self, what: str) -> None:
        if "ops" in self.session.levels:
            return  # the operator tap reports it already
        self.session.event_once(
            "operators-unseen",
            f"the operators of {what} are not listed: torch computes it differently when it is "
            "watched",
        )

    # --- Modules.

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
                tuple(self._memory.described(*tensor, step=frame.step) for tensor in inputs),
            )
        self._thread.stack.append(_Open(frame, call))

    def on_forward(self, frame: Frame, inputs: Named, outputs: Named) -> None:
        self._where.leave(frame.site)
        stack = self._thread.stack
        # A call that raised has left an entry on the stack.
        while stack:
            opened = stack.pop()
            if opened.frame is frame:
                with undisturbed():
                    made = tuple(
                        self._memory.described(*tensor, step=frame.step) for tensor in outputs
                    )
                if self._wanted(frame.site, frame.class_name):
                    self._put(opened.call._replace(outputs=made), outside=False)
                return

    def _wanted(self, site: str, class_name: str) -> bool:
        wants = self.session.wants
        return wants(site, class_name, "output") or wants(site, class_name, "input")

    # --- Operators.

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and list its call."""
        if not self.active:
            return func(*args, **kwargs)
        begun: tuple[OperatorSite, Call] | None = None
        operator: Operator | None = None
        try:
            operator, defaults = self._operator(func)
            if operator.tensors:
                args = with_tensors(args, operator.tensors)
            if not operator.silent:
                operator_site = self._where.operator_site(func, operator)
                if operator_site is not None:
                    visit = operator_site.next_visit()
                    if (operator_site.input or operator_site.output) and not (
                        operator_site.outside and self._building
                    ):
                        with undisturbed():
                            begun = (
                                operator_site,
                                self._begun_call(
                                    operator_site, operator, defaults, visit, args, kwargs
                                ),
                            )
        except Exception as error:
            self._lost(func, error)
        result = func(*args, **kwargs)
        try:
            if begun is not None and operator is not None:
                with undisturbed():
                    self._end_call(*begun, operator, args, kwargs, result)
            # An operator that is not listed fills memory too, so the memory's earlier writer is
            # forgotten.
            elif operator is not None and not operator.silent:
                with undisturbed():
                    for _, tensor in tensors_in(result, ""):
                        self._memory.made_unseen(tensor)
        except Exception as error:
            self._lost(func, error)
        return result

    def _operator(self, func: Any) -> tuple[Operator, dict[str, Any]]:
        entry = self._operators.get(func)
        if entry is None:
            schema = getattr(func, "_schema", None)
            defaults = {
                argument.name: plain(argument.default_value)
                for argument in (schema.arguments if schema is not None else ())
                # Tensors are listed as inputs, other arguments as parameters.
                if argument.has_default_value() and "Tensor" not in str(argument.type)
            }
            entry = self._operators[func] = (Operator(func), defaults)
        return entry

    def _begun_call(
        self,
        operator_site: OperatorSite,
        operator: Operator,
        defaults: dict[str, Any],
        visit: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call:
        names = operator.arguments
        inputs: list[CallTensor] = []
        param = dict(defaults)
        described = self._memory.described
        for index, value in enumerate((*args, *kwargs.values())):
            if index < len(args):
                slot, alias = names[index] if index < len(names) else str(index), str(index)
            else:
                slot, alias = list(kwargs)[index - len(args)], ""
            if isinstance(value, torch.Tensor):
                tensors = [(slot, value)]
            elif isinstance(value, (list, tuple)):
                tensors = list(tensors_in(value, slot))
            else:
                tensors = []
            if tensors:
                inputs += [
                    described(name, alias, tensor, step=operator_site.step)
                    for name, tensor in tensors
                    # An argument that is completely overwritten is not an input of the call.
                    if slot not in operator.unread or self._memory.is_kept(tensor)
                ]
            else:
                param[slot] = plain(value)
        return Call(
            self._number(),
            "operator",
            operator_site.site,
            operator.full_name,
            self._ids(operator_site),
            operator_site.step,
            visit,
            operator_site.phase,
            # In a backward pass the module's call is already over.
            self._inside() if operator_site.phase != "backward" else None,
            tuple(inputs),
            (),
            param,
        )

    def _end_call(
        self,
        operator_site: OperatorSite,
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
                    made += tensors_in(value, str(index))
        for index, name in operator.written:
            value = args[index] if index < len(args) else kwargs.get(name)
            made += tensors_in(value, name)
        outputs = tuple(
            CallTensor(slot, dtype_of(tensor), shape_of(tensor)) for slot, tensor in made
        )
        with self._lock:
            for slot, tensor in made:
                self._memory.made_by(tensor, operator_site.step, call.number, slot)
            self._put(call._replace(outputs=outputs), outside=operator_site.outside)

    def _learn_weights(self, root: nn.Module, site: str) -> None:
        try:
            # The site `(root)` is not a prefix of parameters' names.
            self._memory.learn_weights(root, "" if site.startswith("(") else f"{site}.")
        except Exception as error:
            self.session.event_once("weights-unknown", f"parameters have no names: {error}")

    # --- Lines.

    def _number(self) -> int:
        with self._lock:
            self._begun += 1
            return self._begun - 1

    def _inside(self) -> int | None:
        stack = self._thread.stack
        return stack[-1].call.number if stack else None

    def _ids(self, operator_site: OperatorSite) -> str:
        """The id of an operator: that of its module, with a number after those of its children."""
        place = self.session.names.site(operator_site.site.rsplit("/", 1)[0])
        above = (place.ids or "") if place is not None else ""
        children = self._children.get(above)
        if children is None:  # read once, while the module is alive
            module = place.ref() if place is not None else None
            children = self._children[above] = len(module._modules) if module is not None else 0
        with self._lock:
            count = self._counts.get((above, operator_site.step), 0)
            self._counts[above, operator_site.step] = count + 1
        number = str(children + count)
        return f"{above}_{number}" if above else number

    def _put(self, call: Call, *, outside: bool) -> None:
        with self._lock:
            self._same_process()
            if self._full:
                return
            line = call.to_line()
            # Calls of the build phase are held until it is known whether a model is called.
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
                self.session.guarded("calls", self._write, "".join(lines))

    def _same_process(self) -> None:
        """Start anew in a forked child."""
        if self._process != os.getpid():
            self._forget()
            self._thread = _Thread()

    def _lost(self, func: Any, error: Exception) -> None:
        self.session.event_once("operator-lost", f"{func} not listed: {error}", operator=str(func))


hide_from_compiler(CallTap.around_backward)
