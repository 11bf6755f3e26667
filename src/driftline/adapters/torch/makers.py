"""Who filled the memory of a tensor: the last operator that did, or a parameter of the model.

Every operator that fills memory is seen by whoever asks here, so what was filled last is what is
read. Memory is held weakly: it goes when the program lets it go, and until this file lets go of it
too no other memory can be taken for it. Reads no values, and knows no operators.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from driftline.adapters.torch.arguments import memory_order
from driftline.runs.calls import CallTensor, Source

OUTSIDE = "(outside)"
"""Begins the names of tensors that no operator made that was seen: a program's inputs."""
_MOST = 100_000


class _Maker(NamedTuple):
    memory: StorageWeakRef
    step: int
    call: int
    slot: str


class Makers:
    """Memory and who filled it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._makers: dict[int, _Maker] = {}
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._strangers = 0

    def described(
        self, slot: str, alias: str, tensor: torch.Tensor, *, step: int = 0
    ) -> CallTensor:
        """A tensor that goes into a call of a step."""
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
            # A parameter that an earlier step wrote (its optimizer did) is a parameter.
            if maker is not None and (maker.step == step or name is None):
                return maker.call, maker.slot
            if name is None:
                if len(self._names) > _MOST:
                    self._names = {k: n for k, n in self._names.items() if not n[0].expired()}
                name = (StorageWeakRef(memory), f"{OUTSIDE}.{self._strangers}")
                self._names[memory._cdata] = name
                self._strangers += 1
            return name[1]

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether something of what was there stays when the tensor is overwritten."""
        memory = _memory(tensor)
        if memory is None:
            return False
        partly = tensor.numel() * tensor.element_size() < memory.nbytes()
        return memory._cdata in self._makers or (partly and memory._cdata in self._names)

    def made_by(self, tensor: torch.Tensor, step: int, call: int, slot: str) -> None:
        memory = _memory(tensor)
        if memory is None:
            return
        with self._lock:
            if len(self._makers) > _MOST:
                self._makers = {k: m for k, m in self._makers.items() if not m.memory.expired()}
                if len(self._makers) > _MOST:
                    self._makers.clear()
            self._makers[memory._cdata] = _Maker(StorageWeakRef(memory), step, call, slot)

    def made_unseen(self, tensor: torch.Tensor) -> None:
        """Somebody who is not listed filled it: who did so before no longer counts."""
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
            known = self._names.get(memory._cdata)
            if known is None or known[1].startswith(OUTSIDE):
                self._names[memory._cdata] = (StorageWeakRef(memory), f"{prefix}{name}")

    def forget_makers(self) -> None:
        with self._lock:
            self._makers.clear()

    def forget(self) -> None:
        with self._lock:
            self._makers.clear()
            self._names.clear()


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its extents; a nested tensor has none."""
    return () if tensor.is_nested else tuple(map(int, tensor.shape))


def dtype_of(tensor: torch.Tensor) -> str:
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(tensor: torch.Tensor) -> Any | None:
    """The memory behind a tensor; None for those that have none of their own."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # wrappers around other tensors
        return None
