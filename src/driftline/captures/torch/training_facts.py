# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Facts about how a torch program trains: optimizer, scheduler, scaler, clipping, loss, calls.

`captures.training_facts` decides what is written, and when. The loss is the tensor at which a
backward pass begins; it is described with the functions that computed it.
"""

from __future__ import annotations

import functools
import gc
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from driftline.captures.model_facts import EXIT_THREAD, FactsFile, attributes_of
from driftline.captures.patching import PatchSet
from driftline.captures.torch.operators.dispatch import break_graphs
from driftline.captures.torch.step_states import Averages, Move, TorchReader
from driftline.captures.torch.tensors import undisturbed
from driftline.captures.training_facts import Group, TrainingRecords, caller

if TYPE_CHECKING:
    from driftline.captures.torch.session import CaptureSession

_MOST_NODES = 48
_SHARE = 200
"""Later searches through all objects may take 1/200 of the time since the start."""
# Two rates of an average that differ by less than this fraction are the same setting.
_SAME_RATE = 0.02
# Losses on devices are read in groups, because each reading waits for the device.
_MOST_WAITING = 64
_SKIPPED_MODULES = ("torch.", "accelerate.", "lightning.", "driftline.", "functools")
"""Modules that may lie between a program's own line and the call of `backward`."""
_SAVED = (
    "_saved_ignore_index",
    "_saved_reduction",
    "_saved_label_smoothing",
    "_saved_beta",
    "_saved_delta",
    "_saved_margin",
    "_saved_dim",
)
"""Numbers that the nodes of losses keep. Saved tensors are not read, because unpacking them may run
hooks of the program."""
_autograd: Any = torch.autograd
_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class TrainingFacts(TrainingRecords):
    """Watches how the models of a session are trained.

    Args:
        session: The session, which counts the steps.
        file: The file to which lines are written.
        path_of: Returns `site.name` of a parameter; empty if it belongs to no described model.
        wait: Returns when no thread reads weights any more. It is called before an optimizer
            changes them.
    """

    def __init__(
        self,
        session: CaptureSession,
        file: FactsFile,
        path_of: Callable[[Any], str],
        wait: Callable[[], None],
    ) -> None:
        super().__init__(session, file, path_of, TorchReader())
        self._patches = PatchSet()
        self._handles: list[Any] = []
        self._begin(wait)

    def _begin(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._returned: tuple[weakref.ref[Any], str] | None = None
        self._first_node = 0
        self._losses: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self._averages = Averages(self._watched)
        self._begun = time.monotonic()
        # Updates so far, the number of them at which averages are searched for next, and the
        # seconds that the last search took.
        self._updates, self._next_search, self._took = 0, 1, 0.0
        self._looked = -1
        # Identities of the optimizers whose step is running.
        self._running: list[int] = []
        self._rates: dict[int, float] = {}
        self._settings: dict[int, list[Any] | None] = {}
        self._states_at_first: dict[int, list[str]] = {}
        self._factor: tuple[weakref.ref[Any], float] | None = None

    def restart(self, file: FactsFile, wait: Callable[[], None]) -> None:
        """This is a forked child; see `after_fork`."""
        self.after_fork(file)
        self._begin(wait)

    def install(self) -> None:
        pre = functools.partial(_guarded, weakref.ref(self), "_before_step")
        post = functools.partial(_guarded, weakref.ref(self), "_after_step")
        self._handles = [
            register_optimizer_step_pre_hook(_hook_of(pre)),
            register_optimizer_step_post_hook(_hook_of(post)),
        ]
        me: weakref.ref[TrainingFacts] = weakref.ref(self)
        replace = self._patches.replace
        replace(torch.autograd, "backward", lambda f: _noticed(f, me, "_backward"))
        for owner in (nn.utils, nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                replace(owner, name, lambda f, name=name: _listing(_noticed(f, me, "_clip", name)))
        for owner in (torch.optim.Optimizer, nn.Module):
            replace(owner, "zero_grad", lambda f: _noticed(f, me, "_note", "zero_grad"))
        scaler = torch.amp.GradScaler
        replace(scaler, "scale", lambda f: _noticed(f, me, "_scaled"))
        replace(scaler, "unscale_", lambda f: _noticed(f, me, "_note", "unscale"))
        replace(scaler, "update", lambda f: _noticed(f, me, "_note", "update_scale"))

    def remove(self) -> None:
        self._patches.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> None:
        self._read_losses()
        # A program that leaves at once has no time for a last look.
        if threading.current_thread().name != EXIT_THREAD:
            step = self._session.clock.now
            if self._updates == 1:
                self._search(step, averages=False)
            # Averages are compared with the weights of the step before. If that step was not
            # looked at, there is nothing to compare with.
            elif self._looked == step - 1:
                self._observe_averages(step)
        super().finish()

    # --- calls of the session

    def called(self, module: nn.Module, *, helper: bool) -> None:
        """A model is about to be called."""
        if not helper and module.training and torch.is_grad_enabled():
            self.noted("forward")

    def returned(self, result: Any, site: str, *, helper: bool) -> None:
        """A model was called: its result may be the loss, or a loss may be computed from it."""
        if not torch.is_grad_enabled():
            return
        if not helper:
            self._first_node = _sequence_number()
        loss = result
        if issubclass(type(result), dict):
            loss = result.get("loss")
        elif issubclass(type(result), (tuple, list)) and len(result):
            loss = result[0]
        if issubclass(type(loss), torch.Tensor) and loss.numel() == 1:
            self._returned = weakref.ref(loss), site

    # --- calls of the patched functions

    def _note(self, args: Any, kwargs: Any, result: Any, word: str) -> None:
        del args, kwargs, result
        self.noted(word)

    def _clip(self, args: Any, kwargs: Any, result: Any, name: str) -> None:
        self.noted("clip")
        words = ("parameters", "max_norm" if "norm" in name else "clip_value", "norm_type")
        arguments = {**dict(zip(words, args, strict=False)), **kwargs}
        parameters = arguments.pop("parameters", ())
        values = {"function": name, **attributes_of(arguments).scalars}
        norm = None
        if issubclass(type(result), torch.Tensor) and result.device.type == "cpu":
            norm = float(result.detach())
        is_one = issubclass(type(parameters), torch.Tensor)
        self.clipped(values, norm, [parameters] if is_one else list(parameters))

    def _scaled(self, args: Any, kwargs: Any, result: Any) -> None:
        """A scaler multiplied a loss so that small gradients do not underflow."""
        del kwargs
        factor: Any = getattr(args[0], "_scale", None) if args else None
        on_host = issubclass(type(factor), torch.Tensor) and factor.device.type == "cpu"
        if on_host and issubclass(type(result), torch.Tensor):
            self._factor = weakref.ref(result), float(factor)

    def _backward(self, args: Any, kwargs: Any, result: Any) -> None:
        del result
        # Reentrant checkpoints call `backward` inside a backward pass.
        tensors = args[0] if args else kwargs.get("tensors")
        if _graph_task() != -1 or tensors is None:
            return
        self.noted("backward")
        loss: Any = tensors
        if not issubclass(type(tensors), torch.Tensor):
            loss = next(iter(tensors), None)
        if not issubclass(type(loss), torch.Tensor) or self.is_full:
            return
        with undisturbed():
            self._loss(loss)

    def _loss(self, loss: torch.Tensor) -> None:
        fields: dict[str, Any] = {
            "step": self._session.clock.concluding,
            "dtype": str(loss.dtype).removeprefix("torch."),
            "shape": list(loss.shape),
        }
        # In the other steps the value is enough: walking the graph takes as long as a small step.
        if self._session.watches_state(fields["step"]):
            fields |= {"functions": self._graph_of(loss), "caller": caller(_SKIPPED_MODULES)}
        scale = 1.0
        if self._factor is not None and self._factor[0]() is loss:
            scale = fields["scale"] = self._factor[1]
        if self._returned is not None and self._returned[0]() is loss:
            fields["site"] = self._returned[1]
        if loss.device.type == "cpu" and loss.numel() == 1:
            self.write("loss", value=repr(float(loss.detach()) / scale), **fields)
            return
        # A loss of several numbers is written as their sum. The value is fetched from a device
        # later.
        self._losses.append((loss.detach().double().sum() / scale, fields))
        if len(self._losses) >= _MOST_WAITING:
            self._read_losses()

    def _read_losses(self) -> None:
        waiting, self._losses = self._losses, []
        for value, fields in waiting:
            self.write("loss", value=repr(float(value)), **fields)

    def _graph_of(self, loss: torch.Tensor) -> list[str]:
        """Names of the functions between the model's results and the loss, the last one first.

        If the model itself returned the loss, only its last function is named.
        """
        names: list[str] = []
        waiting, seen = [loss.grad_fn], set[int]()
        while waiting and len(names) < _MOST_NODES:
            node = waiting.pop(0)
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            # Nodes of the model itself were made before its result.
            if names and node._sequence_nr() < self._first_node:
                continue
            names.append(_node_text(node))
            waiting += [following for following, _ in node.next_functions]
        return names

    def _before_step(self, optimizer: Any, *, has_closure: bool) -> None:
        """An optimizer is about to change weights: wait for the thread that reads them."""
        self._wait()
        # A closure calls the model, so the step that this update ends begins only now.
        clock = self._session.clock
        step = clock.now if has_closure else clock.concluding
        if step != self._updating:
            self._running.clear()  # a step that raised never ended
        self._running.append(id(optimizer))
        # A subclass calls the step of its base class within its own: this is one update.
        if self._running.count(id(optimizer)) > 1:
            return
        self._updating = step
        # Guarded separately: if the search fails, weights and gradients are still written.
        self._session.guarded("averages of weights", self._observe_averages, step)
        number = self.number_of(optimizer)
        if number not in self._settings:
            self._states_at_first[number] = _state_names(optimizer)
        weights, owner = self._weights(optimizer, number)
        self.states.before_update(weights, owner, step)
        if not has_closure:
            self._write_gradients(weights, owner, step)

    def _write_gradients(self, weights: list[Any], owner: str, step: int) -> None:
        gradients = [(path, parameter.grad) for path, parameter in weights]
        self.states.gradients(gradients, owner, step)

    @property
    def is_updating(self) -> bool:
        """Whether an optimizer's step is running. If it has a closure, it may call models."""
        return bool(self._running)

    def _weights(self, optimizer: Any, number: int) -> tuple[list[Any], str]:
        groups = [group["params"] for group in optimizer.param_groups]
        return self.weights_of(groups, number), f"optimizer {number}"

    def _after_step(self, optimizer: Any, *, has_closure: bool) -> None:
        if id(optimizer) in self._running:
            self._running.remove(id(optimizer))
        if id(optimizer) in self._running:
            return
        step, number = self._updating, self.number_of(optimizer)
        with undisturbed():
            settings = _settings(optimizer)
            groups = None
            if settings is None or settings != self._settings.get(number):
                self._settings[number] = settings
                groups = [
                    Group(_group_values(group), list(group["params"]))
                    for group in optimizer.param_groups
                ]
            state = ", ".join(self._states_at_first.get(number, ()))
            self.updated(optimizer, step, groups, state)
            self._updates += 1
        weights, owner = self._weights(optimizer, number)
        self.states.after_update(weights, owner, step)
        if has_closure:
            # The closure computes the gradients within the step, as in Lightning. It may also be
            # the first call of the model, so that its parameters have names only now.
            self._write_gradients(weights, owner, step)

    # --- objects that torch keeps no register of: schedulers, scalers, averages of weights

    def _observe_averages(self, step: int) -> None:
        """Look at averages once a step.

        They are updated after an optimizer's step, so the time to look is before the next one.
        """
        if self._looked == step:
            return
        self._looked = step
        wanted = self._session.watches_state(step)
        with undisturbed():
            moves = self._averages.look(step) if wanted else []
            if self._updates >= self._next_search:
                self._search(step, averages=wanted)
        if moves:
            self._note_rates(moves, step)
            named = [(_average_path(move), move.tensor) for move in moves]
            self.states.averages(named, step)

    def _search(self, step: int, *, averages: bool) -> None:
        """Search all living objects, for schedulers and scalers only after the first update.

        Averages may begin late: they are searched for again as long as that takes little time.
        """
        begun = time.monotonic()
        first, self._next_search = self._next_search == 1, 2 * self._updates
        averages = averages and (first or self._took * _SHARE <= begun - self._begun)
        scheduler: Any = torch.optim.lr_scheduler.LRScheduler
        settings: Any = (scheduler, torch.amp.GradScaler) if first else ()
        kinds = [*_subclasses(*settings), *((torch.Tensor, nn.Parameter) if averages else ())]
        # An object refers to its class, so the referrers of a class contain its instances. They are
        # kept in a tuple, because the search for averages would take a list for one of tensors.
        living = tuple(gc.get_referrers(*kinds)) if kinds else ()
        for thing in [thing for thing in living if issubclass(type(thing), settings)][:16]:
            kind = type(thing)
            about = attributes_of(thing.__dict__, frozenset({"optimizer"}))
            self.write(
                "scheduler" if issubclass(kind, scheduler) else "scaler",
                **{"class": f"{kind.__module__}.{kind.__qualname__}"},
                values={**about.scalars, **about.functions},
                step=step,
            )
        if averages:
            optimizers = [entry.reference() for entry in self._optimizers.values()]
            others = {id(value) for optimizer in optimizers for value in _states_of(optimizer)}
            self._averages.search(living, others, step)
            self._took = time.monotonic() - begun

    def _watched(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters of the models that were called."""
        roots = [root.module() for root in list(self._session.names.roots)]
        return [
            (path, parameter)
            for model in roots
            if model is not None
            for parameter in model.parameters()
            if type(parameter) in (torch.Tensor, nn.Parameter)
            and (path := self._path_of(parameter))
        ]

    def _note_rates(self, moves: list[Move], step: int) -> None:
        """Write the rate at which averages follow their weights when it has changed."""
        rates: dict[int, list[float]] = {}
        for move in moves:
            if move.rate is not None:
                rates.setdefault(move.number, []).append(move.rate)
        for number, own in sorted(rates.items()):
            before, rate = self._rates.get(number), statistics.median(own)
            if before is None or abs(rate - before) > _SAME_RATE * before:
                self._rates[number] = rate
                names = [move.path for move in moves if move.number == number]
                self.write("average", number=number, step=step, rate=rate, names=names)


def _average_path(move: Move) -> str:
    number = f" {move.number}" if move.number else ""
    return f"(average{number}).{move.path}"


def _subclasses(*kinds: type) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _subclasses(*kind.__subclasses__())


def _states_of(optimizer: Any) -> Iterator[Any]:
    """The values in an optimizer's state, such as momenta."""
    state: Any = getattr(optimizer, "state", None)
    for entry in list(state.values()) if issubclass(type(state), dict) else ():
        yield from list(entry.values()) if type(entry) is dict else ()


def _state_names(optimizer: Any) -> list[str]:
    """The names of an optimizer's states: before its first step, those that were loaded."""
    state: Any = getattr(optimizer, "state", None)
    entries = list(state.values()) if issubclass(type(state), dict) else []
    return sorted(
        {
            name
            for entry in entries
            if type(entry) is dict
            for name, value in entry.items()
            if type(name) is str and value is not None
        }
    )


def _settings(optimizer: Any) -> list[Any] | None:
    """The settings of all groups, for comparison; None if any of them is not a plain value."""
    settings = [
        (name, value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ("params", "param_names")
    ]
    # Comparing tensors would run kernels, and comparing a program's own objects its own code.
    plain = all(type(value) in (int, float, bool, str, tuple, type(None)) for _, value in settings)
    return settings if plain else None


def _group_values(group: dict[str, Any]) -> dict[str, Any]:
    """Values of a parameter group; a learning rate may be a tensor."""
    plain = {
        name: float(value.detach())
        if issubclass(type(value), torch.Tensor)
        and value.numel() == 1
        and value.device.type == "cpu"
        else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
    return attributes_of(plain).scalars


def _node_text(node: Any) -> str:
    text = node.name()
    saved: list[str] = []
    for name in _SAVED:
        value: Any = getattr(node, name, None)
        if type(value) in (int, float, bool):
            saved.append(f"{name.removeprefix('_saved_')}={_signed(value)}")
    if span := _span_of(node):
        saved.append(span)
    return f"{text}({', '.join(saved)})" if saved else text


def _signed(value: Any) -> Any:
    # torch shows negative numbers as the unsigned ones of the same bits.
    return value - (1 << 64) if value >= 1 << 63 else value


def _span_of(node: Any) -> str:
    """The range that a slice keeps, as `1:` or `0:-1`, in one spelling; empty for other nodes."""
    names = ("_saved_start", "_saved_end", "_saved_dim", "_saved_self_sym_sizes")
    start, end, dim, sizes = (getattr(node, name, None) for name in names)
    if type(sizes) is not tuple or not all(type(value) is int for value in (start, end, dim)):
        return ""
    size: Any = cast("tuple[Any, ...]", sizes)[_signed(dim)]
    if type(size) is not int:
        return ""
    first, after, _ = slice(_signed(start), _signed(end)).indices(size)
    # The end is counted from the end of the axis, because batches differ in length.
    return f"{first}:{after - size or ''}"


def _noticed(function: Any, me: weakref.ref[TrainingFacts], method: str, *words: str) -> Any:
    """A function that notifies the watcher of each call: before it, unless the result is needed."""

    @functools.wraps(function)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        # While a graph is compiled, only the plain function may be traced.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if method not in ("_clip", "_scaled"):
            _notify(me, method, args, kwargs, None, *words)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        _notify(me, method, args, kwargs, result, *words)
        return result

    return noticed


def _listing(function: Any) -> Any:
    """The function, called with a list in place of an iterator, which could be read only once."""

    @functools.wraps(function)
    def listing(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        again = list(parameters) if issubclass(type(parameters), Iterator) else parameters
        return function(again, *args, **kwargs)

    return listing


def _notify(me: weakref.ref[TrainingFacts], method: str, *args: Any) -> None:
    watcher = me()
    if watcher is not None and watcher._session.running:
        watcher._session.guarded("training facts", getattr(watcher, method), *args)


def _guarded(
    me: weakref.ref[TrainingFacts], method: str, optimizer: Any, *, has_closure: bool
) -> None:
    watcher = me()
    if watcher is not None and watcher._session.running:
        act = functools.partial(getattr(watcher, method), has_closure=has_closure)
        watcher._session.guarded("training facts", act, optimizer)


def _hook_of(act: Callable[..., None]) -> Any:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        act(optimizer, has_closure=closure is not None)

    break_graphs(hook)  # a step may be compiled together with its hooks
    return hook
