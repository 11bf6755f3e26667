# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Facts about how a Paddle program trains: optimizer, scheduler, scaler, clipping, loss, calls.

`captures.training_facts` defines what is written and when. Settings have torch's names (`lr`,
`betas`, `eps`, `weight_decay`), so that a training can be compared with one in torch. Paddle stores
some settings with each parameter, so parameters with equal settings form a group.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle
from paddle.amp.grad_scaler import GradScaler

from driftline.captures.model_facts import FactsFile, attributes_of
from driftline.captures.paddle import backward_graph, optimizers
from driftline.captures.paddle.backward_graph import node_of
from driftline.captures.paddle.layers import outputs
from driftline.captures.paddle.tensors import dtype_name, grad_enabled, snapshot, undisturbed
from driftline.captures.patching import PatchSet
from driftline.captures.recorder import Snapshot
from driftline.captures.step_states import NO_NUMBERS, figures_of
from driftline.captures.training_facts import Group, TrainingRecords, caller
from driftline.runs.sidecars.step_facts import SAMPLES, TensorState

if TYPE_CHECKING:
    from driftline.captures.calls import Frame
    from driftline.captures.paddle.session import PaddleSession

_MOST_NODES = 48
_LEAF = "GradNodeAccumulation"
_PASSED_BY = ("paddle.", "paddlenlp.", "decorator", "driftline.", "functools")
"""Prefixes of modules that are skipped to find the program's own line that calls `backward`."""
_TORCH_NAMES = {"epsilon": "eps", "use_nesterov": "nesterov"}
_TOLD_APART = frozenset(
    {
        *("params", "learning_rate", "weight_decay", "beta1", "beta2", "grad_clip"),
        *("regularization_method", "regularization_coeff", "parameters"),
    }
)
"""Entries of a group that are not written under their own names, but in another form or not."""
_PROGRESS = frozenset({"last_epoch", "last_lr", "verbose"})
"""Attributes of a schedule's progress, which are not settings.

Learning rates are written when the optimizer uses them.
"""


class PaddleReader:
    """Reads Paddle tensors; see `captures.step_states.TensorReader`."""

    def host(self, tensor: Any) -> Snapshot | None:
        if not isinstance(tensor, paddle.Tensor) or not tensor.place.is_cpu_place():
            return None
        shot = snapshot(tensor)
        return shot if isinstance(shot, Snapshot) else None

    def fetch(self, tensors: Sequence[Any]) -> list[TensorState | None]:
        return [_sampled(tensor) for tensor in tensors]

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        return dtype_name(tensor.dtype), tuple(int(size) for size in tensor.shape)


def _sampled(tensor: Any) -> TensorState | None:
    """Samples and norm of a tensor on a device."""
    shot = snapshot(tensor, values=False)
    if not isinstance(shot, Snapshot) or not shot.elements or not tensor._is_initialized():
        return None
    local = tensor._local_value() if tensor.is_dist() else tensor
    flat = local.detach().flatten()
    piece = flat[:: max(1, -(-shot.elements // SAMPLES))].astype("float64").numpy()
    norm = float(paddle.linalg.norm(flat.astype("float32")))
    samples = np.asarray(piece, np.float64)
    return TensorState("", (norm, *figures_of(samples)[1:]), NO_NUMBERS, samples)


class _Part(NamedTuple):
    """Parameters of an optimizer with equal settings.

    Attributes:
        factor: Factor of the learning rate.
        values: The other settings.
        parameters: The parameters.
    """

    factor: float
    values: dict[str, Any]
    parameters: list[Any]


class PaddleTraining(TrainingRecords):
    """Watches how the models of a session are trained.

    Args:
        session: The session, which counts the steps.
        file: The file to which lines are written.
        path_of: Returns `site.name` of a parameter.
    """

    def __init__(
        self, session: PaddleSession, file: FactsFile, path_of: Callable[[Any], str]
    ) -> None:
        super().__init__(session, file, path_of, PaddleReader())
        self._patches = PatchSet()
        self._begin()

    def _begin(self) -> None:
        self._results: set[int] = set()
        self._returned: tuple[weakref.ref[Any], str] | None = None
        self._factor: tuple[weakref.ref[Any], float] | None = None
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parts: dict[int, list[_Part]] = {}
        self._rates: dict[int, float] = {}
        self._undecayed: dict[int, set[str]] = {}
        self._state = ""
        self._seen_graph = False

    def restart(self, file: FactsFile) -> None:
        """Start anew in a forked child; see `after_fork`."""
        self.after_fork(file)
        self._begin()

    def install(self) -> None:
        me: weakref.ref[PaddleTraining] = weakref.ref(self)
        backward_graph.watch(self)
        optimizers.watch_updates(self)
        replace = self._patches.replace
        for kind in (paddle.optimizer.Optimizer, paddle.nn.Layer):
            for name in ("clear_grad", "zero_grad", "clear_gradients"):
                if name in vars(kind):
                    replace(kind, name, lambda f: _noticed(f, me, "_note", "zero_grad"))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            if hasattr(paddle.nn.utils, name):
                replace(paddle.nn.utils, name, lambda f, n=name: _noticed(f, me, "_clip", n))
        replace(GradScaler, "scale", lambda f: _noticed(f, me, "_scaled"))
        replace(GradScaler, "unscale_", lambda f: _noticed(f, me, "_note", "unscale"))
        replace(GradScaler, "update", lambda f: _noticed(f, me, "_note", "update_scale"))

    def remove(self) -> None:
        self._patches.restore()
        optimizers.unwatch_updates(self)
        backward_graph.unwatch(self)

    # --- Notifications by the session.

    def called(self, layer: Any, *, helper: bool) -> None:
        """Note that a model is about to be called."""
        if not helper and layer.training and grad_enabled():
            self.noted("forward")

    def returned(self, frame: Frame, result: Any) -> None:
        """Remember the nodes of a model's results, at which the functions of a loss end."""
        if not grad_enabled() or not self._session.watches_state(frame.step):
            return
        tensors = [tensor for _, _, tensor in outputs(result)]
        if not frame.place.root.helper:
            nodes = [node for node in map(node_of, tensors) if node is not None]
            self._results = {node.node_ptr() for node in nodes}
        if tensors and tensors[0].size == 1:
            self._returned = weakref.ref(tensors[0]), frame.site

    # --- Notifications by patches.

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
        if isinstance(result, paddle.Tensor) and result.place.is_cpu_place():
            norm = float(result)
        # If the parameters were an iterator, it is exhausted now.
        listed = list(parameters) if isinstance(parameters, (list, tuple)) else []
        self.clipped(values, norm, listed)

    def _scaled(self, args: Any, kwargs: Any, result: Any) -> None:
        """Note the factor by which a scaler has multiplied a loss."""
        del kwargs
        scaler = args[0]
        if scaler not in self._scalers:
            self._scalers.add(scaler)
            self._write_object("scaler", scaler)
        factor: Any = getattr(scaler, "_scale", None)
        if isinstance(factor, paddle.Tensor) and factor.place.is_cpu_place():
            self._factor = weakref.ref(result), float(factor)

    def _write_object(self, kind: str, thing: Any) -> None:
        about = attributes_of(thing.__dict__, _PROGRESS)
        name = f"{type(thing).__module__}.{type(thing).__qualname__}"
        values = {**about.scalars, **about.functions}
        step = self._session.clock.concluding
        self.write(kind, **{"class": name}, values=values, step=step)

    # --- Backward passes; see `backward_graph.Listener`.

    def begins(self, roots: list[Any], *, partial: bool) -> None:
        # A pass within a pass, or for some inputs only, does not begin at a loss.
        if self._session.running and not partial and not optimizers.in_backward():
            self._session.guarded("training facts", self._backward, roots)

    def over(self) -> None:
        """Do nothing; nothing is written at the end of a pass."""

    def _backward(self, roots: list[Any]) -> None:
        self.noted("backward")
        loss = next(iter(roots), None)
        if not isinstance(loss, paddle.Tensor) or self.is_full:
            return
        with undisturbed():
            self._loss(loss)

    def _loss(self, loss: Any) -> None:
        step = self._session.clock.concluding
        fields: dict[str, Any] = {
            "step": step,
            "dtype": dtype_name(loss.dtype),
            "shape": [int(size) for size in loss.shape],
        }
        # In steps that are not captured only the value is written.
        if self._session.watches_state(step):
            fields |= {"functions": self._graph_of(loss), "caller": caller(_PASSED_BY)}
        scale = 1.0
        if self._factor is not None and self._factor[0]() is loss:
            scale = fields["scale"] = self._factor[1]
        if self._returned is not None and self._returned[0]() is loss:
            fields["site"] = self._returned[1]
        # A loss of several numbers is represented by their sum.
        value = float(loss.detach().astype("float64").sum()) / scale
        self.write("loss", value=repr(value), **fields)

    def _graph_of(self, loss: Any) -> list[str]:
        """Names of the functions between the model's results and the loss, nearest the loss first.

        If the model itself returned the loss, they are the last functions of the model.
        """
        names: list[str] = []
        seen: set[int] = set()
        waiting = [node_of(loss)]
        while waiting and len(names) < _MOST_NODES:
            node = waiting.pop(0)
            if node is None or (pointer := node.node_ptr()) in seen:
                continue
            seen.add(pointer)
            if (names and pointer in self._results) or node.name() == _LEAF:
                continue
            names.append(str(node.name()))
            waiting += list(node.next_functions)
        return names

    # --- Updates; see `optimizers.Updates`.

    @contextmanager
    def around_update(self, optimizer: Any) -> Generator[None]:
        number = self.number_of(optimizer)
        if not self._session.running:
            yield
            return
        guarded = self._session.guarded
        guarded("training facts", self._before_update, optimizer, number)
        with _asked(optimizer, self._undecayed.setdefault(number, set())):
            yield
        guarded("training facts", self._after_update, optimizer, number)

    def given(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        """Record the gradients that an update uses."""
        if self._session.running:
            self._session.guarded("training facts", self._gradients, optimizer, pairs)

    def _likeness(self, name: str) -> dict[str, str]:
        return {"like": "SGD"} if name == "Momentum" else {}

    def _before_update(self, optimizer: Any, number: int) -> None:
        self._updating = step = self._session.clock.concluding
        if number not in self._parts:
            held: Any = getattr(optimizer, "_accumulators", {})
            self._state = ", ".join(sorted(str(name) for name, table in held.items() if table))
        clip: Any = getattr(optimizer, "_grad_clip", None)
        if clip is not None:
            self.noted("clip")
            scalars = attributes_of(getattr(clip, "__dict__", {})).scalars
            values = {"function": type(clip).__name__, **scalars}
            self.clipped(values, None, _flat(optimizer))
        weights = self.weights_of([_flat(optimizer)], number)
        self.states.before_update(weights, f"optimizer {number}", step)

    def _gradients(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        number = self.number_of(optimizer)
        places = {id(tensor): path for path, tensor in self.weights_of([_flat(optimizer)], number)}
        gradients = [
            (places[id(parameter)], gradient)
            for parameter, gradient in pairs
            if id(parameter) in places
        ]
        self.states.gradients(gradients, f"optimizer {number}", self._updating)

    def _after_update(self, optimizer: Any, number: int) -> None:
        step = self._updating
        rate = _rate(optimizer)
        # Reading the settings of every parameter takes some time, so it is done only in captured
        # steps; the learning rate is read in every step.
        watched = number not in self._parts or self._session.watches_state(step)
        groups = None
        if watched or rate != self._rates.get(number):
            if watched:
                self._parts[number] = _parts(optimizer, self._undecayed.get(number, set()))
            self._rates[number] = rate
            groups = [
                Group({"lr": rate * part.factor, **part.values}, part.parameters)
                for part in self._parts[number]
            ]
        schedule: Any = getattr(optimizer, "_learning_rate", None)
        is_schedule = isinstance(schedule, paddle.optimizer.lr.LRScheduler)
        if is_schedule and schedule not in self._schedulers:
            self._schedulers.add(schedule)
            self._write_object("scheduler", schedule)
        self.updated(optimizer, step, groups, self._state)
        weights = self.weights_of([_flat(optimizer)], number)
        self.states.after_update(weights, f"optimizer {number}", step)


# Settings of optimizers.


def _tables(optimizer: Any) -> list[dict[str, Any]]:
    """An optimizer's groups; an optimizer that was made with a plain list has one group."""
    held: list[Any] = list(getattr(optimizer, "_param_groups", None) or ())
    if held and isinstance(held[0], dict):
        return held
    return [{"params": list(getattr(optimizer, "_parameter_list", None) or held)}]


def _flat(optimizer: Any) -> list[Any]:
    return [parameter for table in _tables(optimizer) for parameter in table["params"]]


def _rate(optimizer: Any) -> float:
    rate: Any = getattr(optimizer, "_learning_rate", None)
    # A schedule stores its current rate.
    rate = getattr(rate, "last_lr", rate)
    return float(rate) if isinstance(rate, (int, float)) else float("nan")


def _parts(optimizer: Any, undecayed: set[str]) -> list[_Part]:
    parts: dict[str, _Part] = {}
    for table in _tables(optimizer):
        shared = _shared_values(optimizer, table)
        for parameter in table["params"]:
            about: Any = getattr(parameter, "optimize_attr", None) or {}
            factor = about.get("learning_rate", 1.0)
            factor = float(factor) if isinstance(factor, (int, float)) else 1.0
            decay = _decay(optimizer, table, parameter)
            if parameter.name in undecayed:
                decay = {"weight_decay": 0.0}
            values = {**shared, **decay}
            part = parts.setdefault(repr((factor, values)), _Part(factor, values, []))
            part.parameters.append(parameter)
    return list(parts.values())


def _shared_values(optimizer: Any, table: dict[str, Any]) -> dict[str, Any]:
    """Settings of a group, without its learning rate and weight decay."""
    usual: dict[str, Any] = getattr(optimizer, "_default_dict", {})

    def value_of(name: str) -> Any:
        return table[name] if name in table else getattr(optimizer, f"_{name}", usual.get(name))

    values = {
        _TORCH_NAMES.get(name, name): value_of(name) for name in usual if name not in _TOLD_APART
    }
    if "beta1" in usual:
        values["betas"] = (value_of("beta1"), value_of("beta2"))
    return attributes_of(values).scalars


def _decay(optimizer: Any, table: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """The weight decay of a parameter; its own regularizer precedes that of the optimizer."""
    own: Any = getattr(parameter, "regularizer", None)
    # AdamW applies its decay to the weight, not to the gradient, and ignores regularizers.
    if hasattr(optimizer, "_apply_decay_param_fun"):
        decay = table.get("weight_decay", getattr(optimizer, "_weight_decay", None))
    elif own is not None:
        decay = own
    elif getattr(optimizer, "_regularization_method", "") == "l2_decay":
        decay = table.get("regularization_coeff", optimizer._regularization_coeff)
    else:
        decay = getattr(optimizer, "regularization", None)
    if decay is None or isinstance(decay, (int, float)):
        return {"weight_decay": float(decay or 0.0)}
    coefficient = getattr(decay, "_coeff", getattr(decay, "_regularization_coeff", None))
    kind = type(decay).__name__
    name = "weight_decay" if "L2" in kind else kind
    return {name: coefficient if isinstance(coefficient, (int, float)) else kind}


@contextmanager
def _asked(optimizer: Any, undecayed: set[str]) -> Generator[None]:
    """Find, during an update, the parameters that the program excludes from weight decay."""
    decays: Any = vars(optimizer).get("_apply_decay_param_fun")
    if decays is None:
        yield
        return

    @functools.wraps(decays)
    def asked(name: Any) -> Any:
        answer = decays(name)
        (undecayed.discard if answer else undecayed.add)(name)
        return answer

    optimizer._apply_decay_param_fun = asked
    try:
        yield
    finally:
        optimizer._apply_decay_param_fun = decays


def _noticed(function: Any, me: weakref.ref[PaddleTraining], method: str, *words: str) -> Any:
    """Wrap a function to notify the watcher after each call."""

    @functools.wraps(function)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        watcher = me()
        if watcher is not None and watcher._session.running and paddle.in_dynamic_mode():
            tell = getattr(watcher, method)
            watcher._session.guarded("training facts", tell, args, kwargs, result, *words)
        return result

    return noticed
