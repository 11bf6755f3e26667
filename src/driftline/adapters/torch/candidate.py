"""The calls that another run holds, as tensors a live module can be given.

Values are read when they are asked for, each into memory of its own: a module may work on its
inputs in place. Knows nothing of what is done with them.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from driftline.numerics.dtypes import DTYPES
from driftline.runs.record import Record
from driftline.runs.run import Memory, Run
from driftline.topology.tree import ModuleTree

Call = tuple[str, int, int]
"""Site, step and visit."""


class CandidateCall:
    """What one call of a site took and gave.

    Attributes:
        inputs: Slot to record, as they were before the call.
        outputs: Slot to record.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs: dict[str, Record] = {}
        self.outputs: dict[str, Record] = {}


class Candidate:
    """All module calls of one process of a run.

    Args:
        run: Its inputs were taken before the calls, in full.
        rank: Whose calls.
        process: The same.
    """

    def __init__(self, run: Run, rank: int = 0, process: int = 0) -> None:
        self.run = run
        self.calls: dict[Call, CandidateCall] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.classes: dict[str, str] = {}
        for record in run.records:
            key = record.key
            if (key.rank, key.process, key.phase) != (rank, process, "forward"):
                continue
            if "/" in key.site or key.port not in ("input", "output"):
                continue
            call = self.calls.setdefault((key.site, key.step, key.visit), CandidateCall())
            if key.port == "output":
                call.outputs[key.slot] = record
                self.classes.setdefault(key.site, record.class_name)
                dtype = torch_dtype(record.dtype)
                if dtype is not None and dtype.is_floating_point:
                    self.dtypes.setdefault(key.site, dtype)
            elif key.moment == "before":
                call.inputs[key.slot] = record
        self.parameters = _parameters(run.topology(rank, process))
        self.autocast = self._autocast()

    @functools.cached_property
    def wide(self) -> bool:
        """Whether it computed in 32 bits or more throughout: its format costs nothing then."""
        if self.autocast is not None:
            return False
        held = {torch_dtype(d) for each in self.parameters.values() for d, _ in each.values()}
        found = {*self.dtypes.values(), *held}
        return not any(d is not None and d.is_floating_point and d.itemsize < 4 for d in found)

    @property
    def sites(self) -> Iterable[str]:
        """Every site that was called, in execution order."""
        return dict.fromkeys(site for site, _, _ in self.calls)

    @property
    def places(self) -> Iterable[str]:
        """Those, and the modules of its tree that were not called, or not captured."""
        return dict.fromkeys([*self.sites, *self.parameters])

    def dtype_of(self, site: str, name: str) -> torch.dtype | None:
        """The element type of a weight or buffer there; what the site gives where that is unknown.

        Weights in formats that are more than a cast (8 bits and less) count as unknown.
        """
        found = self.parameters.get(site, {}).get(name)
        dtype = None if found is None else torch_dtype(found[0])
        if dtype is not None and dtype.itemsize < 2 and dtype is not torch.bool:
            dtype = None
        return dtype or self.dtypes.get(site)

    def tensor(
        self,
        record: Record,
        device: torch.device | str = "cpu",
        wide: torch.dtype | None = None,
        *,
        own: bool = True,
    ) -> torch.Tensor:
        """A captured tensor in memory of its own; floats as `wide` where that is given.

        Without `own` it may be the run's memory itself, which nobody may write into.

        Raises:
            DriftlineError: Its values were not kept, or are lost.
        """
        return tensor_of(self.run, record, device, wide, own=own)

    def _autocast(self) -> torch.dtype | None:
        """The format of a run under autocast: 16 bits come out of linear maps of 32-bit weights."""
        for site, dtype in self.dtypes.items():
            held = self.parameters.get(site, {}).get("weight")
            if (
                held is not None
                and held[0] == "float32"
                and dtype in (torch.bfloat16, torch.float16)
                and self.classes.get(site) in ("Linear", "Conv1D", "Conv2d")
            ):
                return dtype
        return None


def tensor_of(
    run: Run,
    record: Record,
    device: torch.device | str = "cpu",
    wide: torch.dtype | None = None,
    *,
    own: bool = True,
) -> torch.Tensor:
    """A captured tensor of any run, in memory of its own or, without `own`, only to be read."""
    dtype = torch_dtype(record.dtype)
    if dtype is None:
        raise ValueError(f"{record.key} has {record.dtype} elements, which torch has not")
    memory = run.memory(record) if record.kept == "full" else None
    if memory is None:
        raw = run.raw(record)
        memory, own = Memory(raw.ctypes.data, raw.nbytes, raw), True
    if not memory.length:
        return torch.empty(record.shape, dtype=dtype, device=device)
    # Through its address: torch warns of arrays that are read-only, and this one is copied.
    window = (ctypes.c_uint8 * memory.length).from_address(memory.address)
    if not own:
        vars(window)["owner"] = memory.owner  # the tensor holds the window, and that the memory
    flat = torch.frombuffer(window, dtype=dtype).reshape(record.shape)
    value = flat.to(device, wide if wide is not None and dtype.is_floating_point else dtype)
    return value.clone() if own and value.data_ptr() == flat.data_ptr() else value


@functools.cache
def torch_dtype(name: str) -> torch.dtype | None:
    """torch's type for one of ours; None where it has none, or packs it otherwise."""
    known = DTYPES.get(name)
    if known is None or known.bits < 8:
        return None
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _parameters(
    tree: Mapping[str, Any] | None,
) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Site → name → (dtype, shape) of the weights and buffers a module holds itself."""
    if tree is None:
        return {}
    return {
        node.site: {p.name: (p.dtype, p.shape) for p in node.parameters}
        for node in ModuleTree.from_json(tree).walk()
        if not node.shared
    }
