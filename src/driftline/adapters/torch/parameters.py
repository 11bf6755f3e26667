"""Parameters and buffers: whose they are, their values when asked for, the gradients they get.

Knows which module owns a parameter, when a root is called, when an optimizer steps. How a tensor is
copied, summarised or stored it does not know: the session's `emit` does that.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from driftline.adapters.backward import Contributions, Owner
from driftline.adapters.torch.dispatch import break_graphs, hide_from_compiler
from driftline.adapters.torch.names import class_name_of

_FLAT = "torch.distributed.fsdp._flat_param"


def _is_piece_of_flat(tensor: torch.Tensor) -> bool:
    """Whether FSDP1 has put this in the place of a parameter: a view of the one that holds all."""
    base = tensor._base if _FLAT in sys.modules else None
    return base is not None and bool(getattr(base, "_is_flat_param", False))


class ParameterNames:
    """From a parameter to its owner, for every root seen so far.

    A tied parameter has the first owner in `named_modules()` order. Parameters are held weakly: a
    model that the program drops is not kept.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Owner]] = {}

    def learn(self, root: nn.Module) -> list[tuple[torch.Tensor, Owner]]:
        """Parameters of `root` that were not known before, with their owners."""
        fresh: list[tuple[torch.Tensor, Owner]] = []
        known = self._known
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or is_lazy(parameter):
                    continue
                # The id of a dead parameter may be given to a new one: the reference decides.
                entry = known.get(id(parameter))
                if entry is not None and entry[0]() is parameter:
                    continue
                owner = Owner(self._session.site_of(module), name, class_name_of(module))
                known[id(parameter)] = (weakref.ref(parameter), owner)
                fresh.append((parameter, owner))
        return fresh

    def add(self, parameter: torch.Tensor, owner: Owner) -> None:
        """A tensor that stands in for a parameter."""
        self._known[id(parameter)] = (weakref.ref(parameter), owner)

    def owner(self, parameter: torch.Tensor) -> Owner | None:
        entry = self._known.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None


class ParameterTap:
    """Every parameter and buffer at the first call of its root, or at the first call in each step.

    Values are taken before the root runs, under the port `param`; the slot is the name inside the
    owning module. A tied tensor is written once, at its first owner.
    """

    def __init__(self, session: Any, *, every: Literal["run", "step"] = "run") -> None:
        self._session = session
        self._every = every
        self._done: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._written: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._active = False

    def install(self) -> None:
        self._active = True

    def remove(self) -> None:
        self._active = False

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """Called by `modules.py` around each call of a root module."""
        if self._active:
            try:
                self._write(module)
            except Exception as error:  # the user's program goes on whatever happens here
                self._session.event_once("parameters-lost", f"parameters not captured: {error}")
        yield

    def before_forward(self, frame: Any, inputs: Any) -> None:
        pass  # parameters belong to the whole call

    def on_forward(self, frame: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _write(self, root: nn.Module) -> None:
        session = self._session
        step: int = session.step
        last = self._done.get(root)
        if last is not None and (self._every == "run" or last == step):
            return
        waiting = False
        for module in root.modules():
            site: str = session.site_of(module)
            class_name = class_name_of(module)
            if not session.wants(site, class_name, "param"):
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None or self._is_written(tensor, step):
                    continue
                if is_lazy(tensor):  # has no values until the first call is over
                    waiting = True
                    continue
                self._written[id(tensor)] = (weakref.ref(tensor), step)
                session.emit(site, "param", name, tensor, class_name=class_name, step=step)
        if not waiting:
            self._done[root] = step

    def _is_written(self, tensor: torch.Tensor, step: int) -> bool:
        entry = self._written.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return False
        return self._every == "run" or entry[1] == step


class ParameterGradients:
    """`param_grad` at every backward pass, `optimizer_grad` at every optimizer step."""

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
        """Hook the parameters of `root` that are new; cheap when there are none."""
        if not self._active or torch.is_inference_mode_enabled():
            return
        try:
            fresh = self._names.learn(root)
            # A frozen parameter cannot carry a hook; it may be thawed between two calls.
            thawed = [(p, owner) for ref, owner in self._frozen if (p := ref()) is not None]
            self._frozen.clear()
            for parameter, owner in (*thawed, *fresh, *self._unsharded(root)):
                if not parameter.requires_grad:
                    self._frozen.append((weakref.ref(parameter), owner))
                elif parameter.is_leaf:
                    self._handles.append(self._hook(parameter, owner))
                elif _is_piece_of_flat(parameter):
                    self._hook(parameter, owner)  # made anew for every call, and gone with it
        except Exception as error:
            self._session.event_once("gradient-lost", f"parameter gradients not captured: {error}")

    def _unsharded(self, root: nn.Module) -> list[tuple[torch.Tensor, Owner]]:
        """What FSDP computes with in place of its shards: it is there that gradients arrive."""
        if "torch.distributed.fsdp" not in sys.modules:
            return []
        found: list[tuple[torch.Tensor, Owner]] = []
        for module in root.modules():
            state_of: Any = getattr(type(module), "_get_fsdp_state", None)
            state: Any = None if state_of is None else state_of(module)
            groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [
                getattr(state, "_fsdp_param_group", None)
            ]
            for each in (each for group in groups if group for each in group.fsdp_params):
                whole = getattr(each, "_unsharded_param", None)
                owner = self._names.owner(each.sharded_param)
                if whole is None or owner is None or self._names.owner(whole) is not None:
                    continue
                self._names.add(whole, owner)
                found.append((whole, owner))
        return found

    def _hook(self, parameter: torch.Tensor, owner: Owner) -> Any:
        reference = weakref.ref(self)

        def arrived(gradient: torch.Tensor | None) -> None:
            me = reference()
            # A custom function may pass on no gradient at all.
            if gradient is not None and me is not None and me._active:
                me._given.take("param_grad", owner, gradient)

        hide_from_compiler(arrived)
        # Without this mark, sharing the parameter between processes would print a warning.
        arrived.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return cast("Any", parameter.register_hook(arrived))

    def _owner(self, parameter: torch.Tensor) -> Owner | None:
        """Whose a parameter is. FSDP1 puts other tensors in their place while a model runs."""
        found = self._names.owner(parameter)
        if found is None and _FLAT in sys.modules:
            for root in self._session.names.roots:
                if (module := root.module()) is not None:
                    self._names.learn(module)
            found = self._names.owner(parameter)
        return found

    def _at_optimizer(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._active:
            return
        try:
            for index, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    gradient = parameter.grad
                    if gradient is not None:
                        owner = self._owner(parameter) or Owner(
                            "(optimizer)", f"{index}.{position}", type(optimizer).__name__
                        )
                        self._given.take("optimizer_grad", owner, gradient)
        except Exception as error:
            self._session.event_once("gradient-lost", f"optimizer gradients not captured: {error}")


break_graphs(ParameterGradients._at_optimizer)
