"""The saving hook for Paddle and torch: activations and gradients of chosen leaf layers.

    {path}/tensors/rank_{r}/tensor_idx_{i}_layer_class_{C}_layer_name_{n}_micro_step_{m}.npy
    {path}/grads/rank_{r}/grad_idx_{i}_of_param_name_{p}_micro_step_{m}.npy

`layer_name` is Paddle's own name of a layer (`linear_0`), or the path of a torch module. Tensors
are copied in the hook and written by a thread (`files`). Differences from the original, and their
reasons, are in docs/seed-differences.md.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

from driftline import settings
from driftline.captures.framework import Engine, Leaf, engine_for
from driftline.captures.recorder import Snapshot
from driftline.dialects.paddle_hook.files import SavedFiles
from driftline.errors import BadConfig, did_you_mean
from driftline.runs.files.owned_file import print_to_stderr
from driftline.runs.jobs import begin_run
from driftline.runs.records import Port, Record, TensorKey

Model = TypeVar("Model")
Layout = Literal["npy", "run"]

_UNSAFE = re.compile(r"[/\\\0\n\r]")
_LONGEST_NAME = 140
"""Most bytes of a layer's name in a file name; a file system allows 255 in total."""


def register_saving_hook(
    model: Model,
    path: str | Path = "./tmp_tensors",
    target_class_names: str | Sequence[str] | None = None,
    max_saved_tensors: int = 50,
    max_saved_grads: int = 100,
    *,
    layout: Layout = "npy",
) -> Model:
    """Save what the chosen leaf layers compute, and the gradients of their parameters.

    Args:
        model: A Paddle layer or a torch module.
        path: Folder of the tree; made when the first tensor is saved.
        target_class_names: Class name or names of the layers to save, as `type(layer).__name__`.
        max_saved_tensors: Stop after that many activations, over all micro steps; negative: never.
        max_saved_grads: The same for gradients.
        layout: `npy`, the tree above; or `run`, a run of Driftline's own.

    Returns:
        The model itself, hooked.

    Raises:
        ValueError: An argument has a wrong type or value.
        AlreadyThere: For a run: the folder holds something already.
    """
    names = _class_names(target_class_names)
    # Checked by hand, because True would pass for 1.
    for label, limit in (
        ("max_saved_tensors", max_saved_tensors),
        ("max_saved_grads", max_saved_grads),
    ):
        if not isinstance(cast(object, limit), int) or isinstance(limit, bool):
            raise BadConfig(f"{label} is a whole number, not {limit!r}")
    if not isinstance(cast(object, path), str | Path):
        raise BadConfig(f"path is a str, not {path!r}")
    if layout not in get_args(Layout):
        raise BadConfig(
            f"there is no layout {layout!r}", hint=did_you_mean(str(layout), get_args(Layout))
        )
    engine = engine_for(model)
    if engine is None:
        raise BadConfig(
            f"register_saving_hook needs a torch module or a Paddle layer, "
            f"not {type(model).__name__}"
        )
    # Nothing can be saved then; it is said, because it is most likely a mistake.
    if not names:
        print_to_stderr("register_saving_hook was given no target_class_names: nothing to save")
        return model
    store = (_Run if layout == "run" else _Tree)(Path(path).absolute(), engine)
    saver = _Saver(engine, store, names, _Cap(max_saved_tensors), _Cap(max_saved_grads))
    saver.attach(model)
    return model


def wait_until_saved() -> None:
    """Wait until everything saved so far is on disk; not needed at exit."""
    for store in list(_STORES):
        store.flush()


def _class_names(argument: object) -> frozenset[str]:
    if argument is None:
        return frozenset()
    names = (argument,) if isinstance(argument, str) else argument
    if not isinstance(names, Iterable):
        raise BadConfig(f"target_class_names is a str or a list of str, not {argument!r}")
    listed = list(cast(Iterable[object], names))
    if not all(isinstance(name, str) for name in listed):
        raise BadConfig(f"target_class_names is a str or a list of str, not {argument!r}")
    return frozenset(cast(list[str], listed))


class _Cap:
    """Counts up to a limit; a negative limit means no limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def reached(self) -> bool:
        return 0 <= self.limit <= self.used

    def take(self) -> int:
        self.used += 1
        return self.used - 1


class _Saver:
    """One registration, with its own counters: two models never share them."""

    def __init__(
        self, engine: Engine, store: _Store, names: frozenset[str], tensors: _Cap, grads: _Cap
    ) -> None:
        self.engine = engine
        self.store = store
        self.names = names
        self.tensors = tensors
        self.grads = grads
        self.micro_step = -1
        self._hooked: set[int] = set()
        self._refused = False

    def attach(self, model: Any) -> None:
        leaves = self.engine.leaves(model)
        # A micro step is one call of the first leaf that takes part in the forward pass.
        counter = next((leaf for leaf in leaves if leaf.called), None)
        if counter is None:
            # The leaves of a recurrent layer are never called, so the model's calls are counted.
            self.engine.after_forward(model, self._count_micro_step)
        for leaf in leaves:
            if leaf is counter:
                self.engine.after_forward(leaf.layer, self._count_micro_step)
            if type(leaf.layer).__name__ in self.names:
                self.engine.after_forward(leaf.layer, self._activation(leaf))
                self._watch_parameters(leaf)
        class_names = {type(leaf.layer).__name__ for leaf in leaves}
        for name in sorted(self.names - class_names):
            hint = did_you_mean(name, {type(leaf.layer).__name__ for leaf in leaves if leaf.called})
            print_to_stderr(
                f"no leaf layer is a {name!r}: nothing to save of it" + (f"; {hint}" * bool(hint))
            )

    def _count_micro_step(self, _output: object) -> None:
        # Recomputation for checkpointing runs layers again without a new step.
        if not self.engine.is_replay():
            self.micro_step += 1

    def _activation(self, leaf: Leaf) -> Callable[[Any], None]:
        class_name = type(leaf.layer).__name__

        def save(output: Any) -> None:
            if self.tensors.reached or self.engine.is_replay():
                return
            for slot, alias, tensor in self.engine.tensors(output):
                if self.tensors.reached:
                    break
                where = _Where("output", leaf.site, leaf.name, slot, class_name, alias)
                self._save(where, self.tensors, tensor)

        return save

    def _watch_parameters(self, leaf: Leaf) -> None:
        class_name = type(leaf.layer).__name__
        for short, name, parameter in self.engine.parameters(leaf):
            if id(parameter) not in self._hooked:  # tied: once, at its first layer
                self._hooked.add(id(parameter))
                where = _Where("param_grad", leaf.site, name, short, class_name)
                self.engine.at_gradient(parameter, self._gradient(where))

    def _gradient(self, where: _Where) -> Callable[[Any], None]:
        def save(gradient: Any) -> None:
            if not self.grads.reached:
                self._save(where, self.grads, gradient)

        return save

    def _save(self, where: _Where, cap: _Cap, tensor: Any) -> None:
        """Save a tensor; never raises, because the training run matters more than its tensors."""
        try:
            with self.engine.undisturbed():
                shot = self.engine.look(tensor)
            if isinstance(shot, Snapshot):
                self.store.put(where, cap.take(), self.micro_step, shot)
            elif not self._refused:
                self._refused = True
                reason = getattr(shot, "reason", "it is not there yet")
                print_to_stderr(f"saving hook leaves out a tensor of {where.name}: {reason}")
        except Exception as problem:
            self.store.stopped(where.name, problem)
        # Nothing more will be saved, so the thread may end.
        if self.tensors.reached and self.grads.reached:
            self.store.finish_behind()


class _Where:
    """The address of a tensor without its number and its micro step."""

    def __init__(
        self, port: Port, site: str, name: str, slot: str, class_name: str, alias: str = ""
    ) -> None:
        self.port: Port = port
        self.site = site
        self.name = name
        self.slot = slot
        self.class_name = class_name
        self.alias = alias


class _Store(Protocol):
    """The target that tensors are written to."""

    def put(self, where: _Where, index: int, micro_step: int, shot: Snapshot) -> None: ...

    def stopped(self, name: str, problem: Exception) -> None:
        """Report once that nothing more is saved."""
        ...

    def flush(self) -> None: ...

    def finish_behind(self) -> None:
        """Note that there will be no more tensors."""
        ...


_STORES: weakref.WeakSet[Any] = weakref.WeakSet()


class _Tree:
    """The original's tree of `.npy` files."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self.engine = engine
        self.files = SavedFiles(lambda path, problem: self.stopped(path.stem, problem))
        self._has_stopped = False
        self._seen: set[Path] = set()
        if any(isinstance(store, _Tree) and store.path == path for store in _STORES):
            print_to_stderr(
                f"another registration saves into {path} too: both count their tensors from 0"
            )
        _STORES.add(self)

    def put(self, where: _Where, index: int, micro_step: int, shot: Snapshot) -> None:
        data = shot.data
        assert data is not None
        name = short_name(where.name)
        if where.port == "output":
            kind = "tensors"
            stem = f"tensor_idx_{index}_layer_class_{where.class_name}_layer_name_{name}"
        else:
            kind = "grads"
            stem = f"grad_idx_{index}_of_param_name_{name}"
        folder = self.path / kind / f"rank_{_place(self.engine)[0]}"
        self._look_into(folder)
        file = folder / f"{stem}_micro_step_{micro_step}.npy"
        self.files.save(file, shot.dtype, shot.shape, data)

    def _look_into(self, folder: Path) -> None:
        """Warn once if there are files of another run; those that are not replaced stay."""
        if folder in self._seen:
            return
        first = not self._seen
        self._seen.add(folder)
        only_store = (
            sum(isinstance(store, _Tree) and store.path == self.path for store in _STORES) == 1
        )
        # Files of an earlier registration in the same process are expected.
        if first and only_store and next(folder.glob("*.npy"), None) is not None:
            print_to_stderr(
                f"{self.path} holds tensors of an earlier run: those of the same name are replaced,"
                " the others stay"
            )

    def stopped(self, name: str, problem: Exception) -> None:
        self.files.broken = True
        if not self._has_stopped:
            self._has_stopped = True
            print_to_stderr(f"saving hook stopped at {name}: {problem}")

    def flush(self) -> None:
        self.files.flush()

    def finish_behind(self) -> None:
        self.files.finish_behind()


class _Run:
    """A run: sites are paths in the model, steps are micro steps."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path = path
        self.engine = engine
        self._writer: Any = None
        self._has_stopped = False
        self._visits: dict[tuple[str, str, str, int], int] = {}
        begin_run(path)
        _STORES.add(self)

    def put(self, where: _Where, index: int, micro_step: int, shot: Snapshot) -> None:
        if self._has_stopped:
            return
        writer = self._writer or self._open()
        site, step = where.site or "(root)", max(micro_step, 0)
        place = (site, where.port, where.slot, step)
        visit = self._visits.get(place, -1) + 1
        self._visits[place] = visit
        key = TensorKey.of(site, where.port, where.slot, step=step, visit=visit)
        record = Record(
            key,
            0,
            shot.dtype,
            shot.shape,
            where.alias,
            where.class_name,
            shot.device,
            placement=shot.placement,
        )
        writer.put(record, shot.data)
        if writer.failure:
            self.stopped(where.name, OSError(writer.failure))

    def _open(self) -> Any:
        from driftline.runs.writer import RunWriter

        rank, world_size = _place(self.engine)
        # Late write errors must still be reported.
        atexit.register(self._ended)  # before the writer's own, so that it runs after it
        self._writer = RunWriter(self.path, rank=rank, world_size=world_size)
        self._writer.describe(**self.engine.facts())
        return self._writer

    def _ended(self) -> None:
        """Report a write that failed after the last tensor was queued."""
        if self._writer.failure:
            self.stopped("the end", OSError(self._writer.failure))

    def stopped(self, name: str, problem: Exception) -> None:
        if not self._has_stopped:
            self._has_stopped = True
            print_to_stderr(f"saving hook stopped at {name}: {problem}")

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()
            self._ended()

    def finish_behind(self) -> None:
        return  # sealing waits for the disk: at exit


def _place(engine: Engine) -> tuple[int, int]:
    # Once initialised, the framework knows its rank; before, the launcher's variables are used.
    return engine.rank() or settings.job_place()


def short_name(name: str) -> str:
    """A layer's name as part of a file name.

    >>> short_name("encoder/layer.0")
    'encoder_layer.0'
    """
    name = _UNSAFE.sub("_", name)
    text = name.encode("utf-8", "replace")
    if len(text) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(text).hexdigest()[:8]
    return f"{text[: _LONGEST_NAME - 9].decode('utf-8', 'ignore')}~{digest}"
