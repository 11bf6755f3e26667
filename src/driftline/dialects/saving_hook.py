"""The saving hook of seed 004: activations and gradients of chosen leaf layers, one `.npy` each.

    {path}/tensors/rank_{r}/tensor_idx_{i}_layer_class_{C}_layer_name_{n}_micro_step_{m}.npy
    {path}/grads/rank_{r}/grad_idx_{i}_of_param_name_{p}_micro_step_{m}.npy

For torch modules; `layer_name` is the module's path. Where it differs from the original, and why,
is in docs/seed-differences.md. It knows nothing of runs: its tree is read by the seed's checker.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from driftline import settings
from driftline.dialects.refusals import BadConfig, NoEngine

Model = TypeVar("Model")


def register_saving_hook(
    model: Model,
    path: str | Path = "./tmp_tensors",
    target_class_names: str | Sequence[str] | None = None,
    max_saved_tensors: int = 50,
    max_saved_grads: int = 100,
) -> Model:
    """Save what the chosen leaf layers compute, and the gradients of their parameters.

    Args:
        model: A torch module.
        path: Folder of the tree; made when the first tensor is saved.
        target_class_names: Class name or names of the layers to save, as `type(layer).__name__`.
        max_saved_tensors: Stop after that many activations, over all micro steps; negative: never.
        max_saved_grads: The same for gradients.

    Returns:
        The model itself, hooked.
    """
    names = _class_names(target_class_names)
    for label, limit in (
        ("max_saved_tensors", max_saved_tensors),
        ("max_saved_grads", max_saved_grads),
    ):
        if not isinstance(cast(object, limit), int) or isinstance(limit, bool):
            raise BadConfig(f"{label} is a whole number, not {limit!r}")
    if not names:
        print(
            "driftline: register_saving_hook was given no target_class_names: nothing to save",
            file=sys.stderr,
        )
        return model
    torch = _torch_for(model)
    saver = _Saver(Path(path), torch, names, _Cap(max_saved_tensors), _Cap(max_saved_grads))
    saver.attach(model)
    return model


def _class_names(given: object) -> frozenset[str]:
    if given is None:
        return frozenset()
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Iterable):
        raise BadConfig(f"target_class_names is a str or a list of str, not {given!r}")
    listed = list(cast(Iterable[object], names))
    if not all(isinstance(name, str) for name in listed):
        raise BadConfig(f"target_class_names is a str or a list of str, not {given!r}")
    return frozenset(cast(list[str], listed))


def _torch_for(model: object) -> Any:
    """The torch module if `model` is a torch model; anything else is refused in a sentence."""
    families = {cls.__module__.partition(".")[0] for cls in type(model).__mro__}
    if "torch" in families:
        return sys.modules["torch"]
    if "paddle" in families:
        raise NoEngine(
            "saving hooks for Paddle layers are not in this version of driftline",
            hint="for a torch model the same call works",
        )
    raise BadConfig(f"register_saving_hook needs a torch module, not {type(model).__name__}")


@dataclass(slots=True)
class _Cap:
    """Counts up to a limit; a negative limit is none."""

    limit: int
    used: int = 0

    def take(self) -> int | None:
        """The next index, or None when the limit is reached."""
        if 0 <= self.limit <= self.used:
            return None
        self.used += 1
        return self.used - 1


@dataclass(slots=True)
class _Saver:
    """One registration: its counters are its own, a second model never shares them."""

    path: Path
    torch: Any
    names: frozenset[str]
    tensors: _Cap
    grads: _Cap
    micro_step: int = -1
    broken: bool = False
    hooked: set[int] = field(default_factory=lambda: set[int]())

    def attach(self, model: Any) -> None:
        leaves = [
            (name, layer) for name, layer in model.named_modules() if not any(layer.children())
        ]
        for position, (name, layer) in enumerate(leaves):
            if position == 0:
                layer.register_forward_hook(self._count_micro_step)
            if type(layer).__name__ in self.names:
                layer.register_forward_hook(self._activation_hook(name, type(layer).__name__))
                self._watch_parameters(name, layer)

    def _count_micro_step(self, *_call: object) -> None:
        if not self._is_replay():
            self.micro_step += 1

    def _activation_hook(self, name: str, class_name: str) -> Any:
        def save(_layer: object, _inputs: object, output: object) -> None:
            if self._is_replay():
                return
            for tensor in _tensors_in(output, self.torch):
                index = self.tensors.take()
                if index is None:
                    return
                self._write(
                    "tensors",
                    f"tensor_idx_{index}_layer_class_{class_name}"
                    f"_layer_name_{name}_micro_step_{self.micro_step}",
                    tensor,
                )

        return save

    def _watch_parameters(self, name: str, layer: Any) -> None:
        for short, parameter in layer.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in self.hooked:
                continue
            self.hooked.add(id(parameter))
            full = f"{name}.{short}" if name else short
            parameter.register_hook(self._gradient_hook(full))

    def _gradient_hook(self, name: str) -> Any:
        def save(gradient: Any) -> None:
            index = self.grads.take()
            if index is not None:
                self._write(
                    "grads",
                    f"grad_idx_{index}_of_param_name_{name}_micro_step_{self.micro_step}",
                    gradient,
                )

        return save

    def _is_replay(self) -> bool:
        """A compiler looking at the model, or gradient checkpointing's second forward."""
        if self.torch.compiler.is_compiling():
            return True
        return self.torch._C._current_graph_task_id() != -1

    def _write(self, kind: str, name: str, tensor: Any) -> None:
        if self.broken:
            return
        try:
            folder = self.path / kind / f"rank_{self._rank()}"
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{name}.npy", _as_numpy(tensor, self.torch), allow_pickle=False)
        except (OSError, RuntimeError, TypeError) as problem:
            # The training run is worth more than its tensors: say it once, and stop saving.
            self.broken = True
            print(f"driftline: saving hook stopped at {name}: {problem}", file=sys.stderr)

    def _rank(self) -> int:
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return settings.job_place().rank


def _tensors_in(output: object, torch: Any) -> Iterator[Any]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from itertools.chain.from_iterable(
            _tensors_in(value, torch) for value in cast(Mapping[object, object], output).values()
        )
    elif isinstance(output, list | tuple):
        for value in cast(Sequence[object], output):
            yield from _tensors_in(value, torch)


def _as_numpy(tensor: Any, torch: Any) -> np.ndarray[Any, Any]:
    """numpy has no bfloat16 and no float8: both go up to float32, which holds all their values."""
    with torch.no_grad():
        plain = tensor.detach()
        if plain.is_floating_point() and plain.dtype not in (
            torch.float16,
            torch.float32,
            torch.float64,
        ):
            plain = plain.to(torch.float32)
        return cast("np.ndarray[Any, Any]", plain.cpu().resolve_conj().resolve_neg().numpy())
