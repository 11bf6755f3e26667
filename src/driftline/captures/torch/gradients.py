# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Gradients and parameters of torch modules, read without changing what autograd computes.

This file knows which module owns a parameter, when a model is called and when an optimizer steps.
It searches the graph of a call for the edges that carry the gradients of the call's inputs. The
session's `emit` copies, summarises or stores the tensors.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from driftline.captures.gradients import (
    CallGradients,
    Contributions,
    GradientSum,
    Owner,
    PassedCall,
)
from driftline.captures.recorder import TensorAddress
from driftline.captures.torch.layers import class_name_of
from driftline.captures.torch.operators.dispatch import break_graphs, hide_from_compiler
from driftline.captures.torch.tensors import stored_parts

_FLAT = "torch.distributed.fsdp._flat_param"


def _is_piece_of_flat(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 made this view of its flat parameter to replace a parameter."""
    # If FSDP1 is not loaded, the base need not be examined.
    base = tensor._base if _FLAT in sys.modules else None
    return base is not None and bool(getattr(base, "_is_flat_param", False))


class ParameterNames:
    """The owners of the parameters of every model seen so far.

    The owner of a tied parameter is the first one in the order of `named_modules()`. References to
    parameters are weak, so that a model can be freed when the program drops it.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Owner]] = {}

    def learn(self, root: nn.Module) -> list[tuple[torch.Tensor, Owner]]:
        """Remember the new parameters of `root`, and return them with their owners."""
        fresh: list[tuple[torch.Tensor, Owner]] = []
        owners = self._known
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or is_lazy(parameter):
                    continue
                # A new parameter may have the id of a dead one, so the reference is compared.
                entry = owners.get(id(parameter))
                if entry is not None and entry[0]() is parameter:
                    continue
                owner = Owner(self._session.site_of(module), name, class_name_of(module))
                owners[id(parameter)] = (weakref.ref(parameter), owner)
                fresh.append((parameter, owner))
        return fresh

    def add(self, parameter: torch.Tensor, owner: Owner) -> None:
        """Remember a tensor that replaces a parameter."""
        self._known[id(parameter)] = (weakref.ref(parameter), owner)

    def owner(self, parameter: torch.Tensor) -> Owner | None:
        entry = self._known.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def owner_at_update(self, parameter: torch.Tensor) -> Owner | None:
        """The owner of a parameter that an optimizer updates.

        FSDP1 replaces parameters by other tensors while a model runs, so after it the models are
        searched again.
        """
        owner = self.owner(parameter)
        if owner is None and _FLAT in sys.modules:
            for root in self._session.names.roots:
                if (module := root.module()) is not None:
                    self.learn(module)
            owner = self.owner(parameter)
        return owner


class ParameterTap:
    """Captures parameters and buffers at the first call of their model, or once in each step.

    Values are taken before the model runs, with the port `param`; the slot is the name in the
    module. A tied tensor is written once, for its first owner. Parameters that an optimizer has
    updated are taken again after its step, with the moment `after`.
    """

    only_wanted_steps = True

    def __init__(self, session: Any, *, every: Literal["run", "step"] = "run") -> None:
        self._session = session
        self._every = every
        self._done: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._written: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._names = ParameterNames(session)
        self._active = False
        self._handles: list[Any] = []
        self._updating = 0

    def install(self) -> None:
        self._active = True
        self._handles = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def remove(self) -> None:
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        # The step is read before the update, because the update may end it.
        self._updating = self._session.clock.concluding

    def _after_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._active or not self._session.wants_step(self._updating):
            return
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owner = self._names.owner_at_update(parameter)
                    if owner is None:
                        continue
                    site, name, class_name = owner
                    if not self._session.wants(site, class_name, "param"):
                        continue
                    step = self._updating
                    self._session.emit(
                        TensorAddress(
                            site, "param", name, step, moment="after", class_name=class_name
                        ),
                        parameter,
                    )
        except Exception as error:  # the user's program must continue in any case
            self._session.event_once("parameters-lost", f"parameters not captured: {error}")

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """A context around each outermost module call."""
        if self._active:
            try:
                self._write(module)
            except Exception as error:  # the user's program must continue in any case
                self._session.event_once("parameters-lost", f"parameters not captured: {error}")
        yield

    def before_forward(self, frame: Any, inputs: Any) -> None:
        pass  # parameters are taken once for the whole model

    def on_forward(self, frame: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _write(self, root: nn.Module) -> None:
        session = self._session
        step: int = session.step
        last = self._done.get(root)
        # The model's parameters are already captured, for the run or for this step.
        if last is not None and (self._every == "run" or last == step):
            return
        waiting = False
        self._names.learn(root)
        for module in root.modules():
            site: str = session.site_of(module)
            class_name = class_name_of(module)
            if not session.wants(site, class_name, "param"):
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or self._is_written(tensor, step):
                    continue
                if is_lazy(tensor):  # it has no values before the end of the first call
                    waiting = True
                    continue
                self._written[id(tensor)] = (weakref.ref(tensor), step)
                for slot, part in stored_parts(name, tensor):
                    session.emit(
                        TensorAddress(site, "param", slot, step, class_name=class_name), part
                    )
        # A model with lazy parameters is tried again at its next call.
        if not waiting:
            self._done[root] = step

    def _is_written(self, tensor: torch.Tensor, step: int) -> bool:
        entry = self._written.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return False
        return self._every == "run" or entry[1] == step


# The step of an optimizer may be compiled, together with its hooks.
break_graphs(ParameterTap._before_update)
break_graphs(ParameterTap._after_update)


class ParameterGradients:
    """Captures `param_grad` in every backward pass and `optimizer_grad` in every optimizer step."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names = ParameterNames(session)
        self._active = False
        self._handles: list[Any] = []
        self._frozen: list[tuple[weakref.ref[torch.Tensor], Owner]] = []
        self._given = Contributions(session)

    def install(self) -> None:
        self._active = True
        self._handles.append(register_optimizer_step_pre_hook(self._at_optimizer))

    def remove(self) -> None:
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, root: nn.Module) -> None:
        """Hook the parameters of `root` that are new."""
        # Tensors made in inference mode cannot have hooks.
        if not self._active or torch.is_inference_mode_enabled():
            return
        try:
            fresh = self._names.learn(root)
            # A frozen parameter cannot have a hook, but may be made trainable between two calls.
            thawed = [(p, owner) for ref, owner in self._frozen if (p := ref()) is not None]
            self._frozen.clear()
            for parameter, owner in (*thawed, *fresh, *self._unsharded(root)):
                if not parameter.requires_grad:
                    self._frozen.append((weakref.ref(parameter), owner))
                elif parameter.is_leaf:
                    self._handles.append(self._hook(parameter, owner))
                elif _is_piece_of_flat(parameter):
                    # Such a view is made anew for every call and freed after it, with its hook.
                    self._hook(parameter, owner)
        except Exception as error:
            self._session.event_once("gradient-lost", f"parameter gradients not captured: {error}")

    def _unsharded(self, root: nn.Module) -> list[tuple[torch.Tensor, Owner]]:
        """The full parameters that FSDP2 uses instead of its shards, which get the gradients."""
        if "torch.distributed.fsdp" not in sys.modules:
            return []
        unsharded: list[tuple[torch.Tensor, Owner]] = []
        for module in root.modules():
            state_of: Any = getattr(type(module), "_get_fsdp_state", None)
            state: Any = None if state_of is None else state_of(module)
            # FSDP2 has one group per module, or several in newer versions of torch.
            groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [
                getattr(state, "_fsdp_param_group", None)
            ]
            for fsdp_param in (
                fsdp_param for group in groups if group for fsdp_param in group.fsdp_params
            ):
                full_parameter = getattr(fsdp_param, "_unsharded_param", None)
                owner = self._names.owner(fsdp_param.sharded_param)
                if (
                    full_parameter is None
                    or owner is None
                    or self._names.owner(full_parameter) is not None
                ):
                    continue
                self._names.add(full_parameter, owner)
                unsharded.append((full_parameter, owner))
        return unsharded

    def _hook(self, parameter: torch.Tensor, owner: Owner) -> Any:
        reference = weakref.ref(self)

        def arrived(gradient: torch.Tensor | None) -> None:
            me = reference()
            # A custom function may send no gradient at all.
            if gradient is not None and me is not None and me._active:
                me._given.take("param_grad", owner, gradient)

        hide_from_compiler(arrived)
        # Without this mark, sharing the parameter between processes would print a warning.
        arrived.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return cast("Any", parameter.register_hook(arrived))

    def _at_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._active:
            return
        try:
            for index, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    gradient = parameter.grad
                    if gradient is not None:
                        # A tensor of no watched model is named by its position in the optimizer.
                        owner = self._names.owner_at_update(parameter) or Owner(
                            "(optimizer)", f"{index}.{position}", type(optimizer).__name__
                        )
                        self._given.take("optimizer_grad", owner, gradient)
        except Exception as error:
            self._session.event_once("gradient-lost", f"optimizer gradients not captured: {error}")


break_graphs(ParameterGradients._at_optimizer)


# The tap, which hooks the graphs of a session's calls.


Named = Sequence[tuple[str, str, torch.Tensor]]
"""(slot, alias, tensor) of each tensor, as `module_calls` passes them to taps."""
Gradients = tuple[torch.Tensor | None, ...]
_Entry = tuple[Any, int, list[tuple[int, int]]]
"""A call in progress: its frame, the autograd sequence number at its beginning, and the sequence
and output number of each input's node."""

# Private parts of torch, which are not in its type stubs.
_C: Any = torch._C
_autograd: Any = torch.autograd

_LEAF = 2**64 - 1
"""Sequence number of every AccumulateGrad node; other nodes are counted in their thread."""


class GradientTap(CallGradients):
    """Captures gradients of modules and of parameters, and the gradients that optimizers use.

    `module_calls` enters `around_root` around an outermost call, and calls `before_forward` before
    and `on_forward` after each module call. Between these two only numbers are stored, so that an
    exception in between keeps no graph alive.
    """

    only_wanted_steps = True

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._calls = _CallStack()
        self._parameters = ParameterGradients(session)
        self._lock = threading.Lock()
        self._open: dict[int, list[GradientSum[Any]]] = {}

    def install(self) -> None:
        self.active = True
        self._parameters.install()

    def remove(self) -> None:
        self.active = False
        self._parameters.remove()
        with self._lock:
            self._open.clear()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """A context around each outermost module call."""
        calls = self._calls.items
        depth = len(calls)
        self._parameters.watch(module)
        try:
            yield
        finally:
            del calls[depth:]  # entries that an exception left
            self._parameters.watch(module)  # lazy parameters exist only now

    def before_forward(self, frame: Any, inputs: Named) -> None:
        """Remember the nodes of the inputs, because an in-place operation would replace them."""
        if not (self.active and torch.is_grad_enabled() and self.session.wants_step(frame.step)):
            return
        origins: list[tuple[int, int]] = []
        try:
            for _, _, tensor in inputs:
                # Only numbers are stored: if the call raised, a node would keep the graph alive.
                node = tensor.grad_fn if tensor.requires_grad else None
                origins.append((-1, 0) if node is None else (node._sequence_nr(), tensor.output_nr))
        except Exception as error:
            self.lost(frame.site, error)
            return
        self._calls.items.append((frame, _autograd._get_sequence_nr(), origins))

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        if not self.active:
            return
        entry = self._calls.take(frame)
        if entry is None:
            return
        try:
            self._hook(entry, inputs, outputs)
        except Exception as error:
            self.lost(frame.site, error)

    def _hook(self, entry: _Entry, inputs: Named, outputs: Named) -> None:
        frame, first, origins = entry
        ends: dict[Any, list[tuple[int, str, str]]] = {}
        for slot, alias, tensor in outputs:
            if not tensor.requires_grad or _is_transformed(tensor):
                continue
            # Hooks on a node that outlives this call's graph would accumulate. Such nodes are those
            # of leaves (DDP keeps them; their gradient is a `param_grad`) and of cached tensors.
            node, output = tensor.grad_fn, tensor.output_nr
            if node is None:
                continue
            number = node._sequence_nr()
            # The output was made by this call, or is an input that was returned.
            if number >= first or (number, output) in origins:
                ends.setdefault(node, []).append((output, slot, alias))
        if not ends:
            return
        wants = self.session.wants
        site, class_name = frame.site, frame.class_name
        want_output: bool = wants(site, class_name, "grad_output")
        want_input: bool = wants(site, class_name, "grad_input")
        if not (want_output or want_input):
            return
        call = PassedCall[GradientTap](self, frame)
        if want_output:
            for node, slots in ends.items():
                node.register_prehook(_OutputHook(call, slots))
        if want_input:
            self._hook_inputs(call, entry, inputs, [*ends])

    def _hook_inputs(
        self, call: PassedCall[GradientTap], entry: _Entry, inputs: Named, ends: list[Any]
    ) -> None:
        _, first, origins = entry
        sources: dict[tuple[Any, int], GradientSum[Any]] = {}
        for (slot, alias, tensor), (number, output) in zip(inputs, origins, strict=True):
            if number >= 0:
                # A tensor that is passed twice has one gradient.
                sources.setdefault((number, output), GradientSum(call, slot, alias))
            elif tensor.is_leaf and tensor.requires_grad:
                sources.setdefault(
                    (get_gradient_edge(tensor).node, 0), GradientSum(call, slot, alias)
                )
        if not sources:
            return
        for node, edges in _edges_into(sources, ends, first):
            for _, gradient_sum in edges:
                gradient_sum.expected += 1
            node.register_hook(_InputHook(edges))

    def expect(self, gradient_sum: GradientSum[Any], task: int) -> None:
        with self._lock:
            waiting = self._open.get(task)
            if waiting is not None:
                waiting.append(gradient_sum)
                return
            self._open[task] = [gradient_sum]
        # The engine calls this at the end of this pass, even if some edges never send a gradient.
        engine = _autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._finish(task))

    def _finish(self, task: int) -> None:
        with self._lock:
            waiting = self._open.pop(task, [])
        for gradient_sum in waiting:
            gradient_sum.finish(task)

    def task(self) -> int:
        return _C._current_graph_task_id()


class _CallStack(threading.local):
    """The current calls of this thread."""

    def __init__(self) -> None:
        self.items: list[_Entry] = []

    def take(self, frame: Any) -> _Entry | None:
        """The entry of `frame`; entries above it belong to calls that ended in an exception."""
        items = self.items
        for index in range(len(items) - 1, -1, -1):
            if items[index][0] is frame:
                entry = items[index]
                del items[index:]
                return entry
        return None


class _OutputHook:
    """A hook before a node runs, which captures the gradients of a call's outputs."""

    __slots__ = ("_call", "_slots")

    def __init__(self, call: PassedCall[GradientTap], slots: list[tuple[int, str, str]]) -> None:
        self._call = call
        self._slots = slots

    def __call__(self, gradients: Gradients) -> None:
        tap = self._call.tap()
        if tap is None or not tap.active:
            return
        try:
            task = _C._current_graph_task_id()
            for number, slot, alias in self._slots:
                gradient = gradients[number]
                if gradient is not None:
                    tap.emit(self._call, "grad_output", slot, alias, gradient, task)
        except Exception as error:
            tap.lost(self._call.site, error)


class _InputHook:
    """A hook after a node has run, which adds what it sends to gradients of a call's inputs."""

    __slots__ = ("_edges",)

    def __init__(self, edges: list[tuple[int, GradientSum[Any]]]) -> None:
        self._edges = edges

    def __call__(self, gradients: Gradients, _: Gradients) -> None:
        for index, gradient_sum in self._edges:
            try:
                gradient_sum.arrived(gradients[index])
            except Exception as error:
                tap = gradient_sum.call.tap()
                if tap is not None:
                    tap.lost(gradient_sum.call.site, error)


hide_from_compiler(_OutputHook.__call__, _InputHook.__call__)


def _edges_into(
    sources: dict[tuple[Any, int], GradientSum[Any]], ends: list[Any], first: int
) -> list[tuple[Any, list[tuple[int, GradientSum[Any]]]]]:
    """Nodes between `ends` and `sources` that have an edge into a source, with those edges.

    Sources are identified by sequence number and output number, leaves by node. Nodes with numbers
    below `first` were made before the module was called. The walk stops at them, so it visits only
    nodes that the module itself made.
    """
    nodes_with_edges: list[tuple[Any, list[tuple[int, GradientSum[Any]]]]] = []
    seen = {node for node in ends if first <= node._sequence_nr() != _LEAF}
    stack = [*seen]
    while stack:
        node = stack.pop()
        hits: list[tuple[int, GradientSum[Any]]] | None = None
        for index, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            number = following._sequence_nr()
            # All leaves have the same number, so they are identified by their node.
            if number == _LEAF:
                gradient_sum = sources.get((following, output))
            elif number >= first:
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
                continue
            else:
                gradient_sum = sources.get((number, output))
            if gradient_sum is not None:
                hits = hits or []
                hits.append((index, gradient_sum))
        if hits:
            nodes_with_edges.append((node, hits))
    return nodes_with_edges


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper of a `torch.func` transform, which has no values of its own."""
    return bool(_C._functorch.is_functorch_wrapped_tensor(tensor))
