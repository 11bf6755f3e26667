# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Calls of a captured run, and calls of the running program, in the form that a replay needs.

Captured values are read on demand, each into memory of its own, because a module may change its
inputs in place. `likeness` says which calls run the same code, so that a proof for one holds for
the others. This file does not know what is done with the calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from driftline.captures.torch.device.accelerator import autocast_kinds
from driftline.captures.torch.layers import is_compiled
from driftline.diagnosis.experiments.live.repeat import same_bits
from driftline.errors import BadFile
from driftline.graphs.module_tree import ModuleTree
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files import mapped_file
from driftline.runs.records import Record
from driftline.runs.run import Memory, Run
from driftline.runs.sidecars.model_facts import read_model_facts

if TYPE_CHECKING:
    from driftline.captures.torch.session import Frame


Call = tuple[str, int, int]
"""Site, step and visit."""


class CandidateCall:
    """Inputs and outputs of one captured call of a site.

    Attributes:
        inputs: Records of the inputs before the call, by slot.
        outputs: Records of the outputs, by slot.
    """

    __slots__ = ("inputs", "outputs")

    def __init__(self) -> None:
        self.inputs: dict[str, Record] = {}
        self.outputs: dict[str, Record] = {}

    @property
    def has_values(self) -> bool:
        """Whether the values of all its tensors were kept."""
        return all(r.kept == "full" for r in (*self.inputs.values(), *self.outputs.values()))


class Candidate:
    """All captured module calls of one process of a run.

    Args:
        run: The run, whose inputs were captured before the calls, with all values.
        rank: The rank of the process.
        process: The number of the process among those of its rank.
    """

    def __init__(self, run: Run, rank: int = 0, process: int = 0) -> None:
        self.run = run
        self.calls: dict[Call, CandidateCall] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._formats: dict[str, set[torch.dtype]] = {}
        self._weights: dict[tuple[str, str, int], Record] = {}
        self.classes: dict[str, str] = {}
        for record in run.records:
            key = record.key
            if (key.rank, key.process, key.phase) != (rank, process, "forward"):
                continue
            if key.port == "param":
                self._weights[key.site, key.slot, key.step] = record
            # Sites with a slash are operators; only modules can be applied again.
            if "/" in key.site or key.port not in ("input", "output"):
                continue
            call = self.calls.setdefault((key.site, key.step, key.visit), CandidateCall())
            if key.port == "output":
                call.outputs[key.slot] = record
                self.classes.setdefault(key.site, record.class_name)
                dtype = torch_dtype(record.dtype)
                if dtype is not None and dtype.is_floating_point:
                    self.dtypes.setdefault(key.site, dtype)
                    self._formats.setdefault(key.site, set()).add(dtype)
            elif key.moment == "before":
                call.inputs[key.slot] = record
        self.called = {(site, step) for site, step, _ in self.calls}
        self._leave_out_summaries()
        self.parameters = _parameters(run.topology(rank, process))
        self.autocast = self._autocast()
        # The seed of its random numbers; None if the run has no facts about the process.
        self.seed = read_model_facts(run, rank, process, weights=False).process.get("seed")

    def _leave_out_summaries(self) -> None:
        """Leave out calls of which only summaries were kept, as a run may do in later steps."""
        valued = {call: its for call, its in self.calls.items() if its.has_values}
        sites = {site for site, _, _ in valued}
        # A site without any values is kept, so that the reason is reported.
        self.calls = {
            call: its for call, its in self.calls.items() if call in valued or call[0] not in sites
        }

    @functools.cached_property
    def wide(self) -> bool:
        """Whether the run computed only in 32 bits or more, so that its format costs nothing."""
        if self.autocast is not None:
            return False
        # Weights count as well: a run may compute in 16 bits and convert its outputs.
        held = {
            torch_dtype(d)
            for module_parameters in self.parameters.values()
            for d, _ in module_parameters.values()
        }
        dtypes = {*held, *(dtype for formats in self._formats.values() for dtype in formats)}
        return not any(d is not None and d.is_floating_point and d.itemsize < 4 for d in dtypes)

    @functools.cached_property
    def format(self) -> torch.dtype | None:
        """The 16-bit format that all its weights and buffers have; None if there is none."""
        held = {
            torch_dtype(dtype)
            for module_parameters in self.parameters.values()
            for dtype, _ in module_parameters.values()
        }
        single = next(iter(held)) if len(held) == 1 and self.autocast is None else None
        is_coarse = single is not None and single.is_floating_point and single.itemsize == 2
        return single if is_coarse else None

    @property
    def sites(self) -> Iterable[str]:
        """All sites that were called, in execution order."""
        return dict.fromkeys(site for site, _, _ in self.calls)

    @property
    def places(self) -> Iterable[str]:
        """All called sites, then the modules of the tree that were not called or not captured."""
        return dict.fromkeys([*self.sites, *self.parameters])

    def dtype_of(
        self, site: str, name: str, call: CandidateCall | None = None
    ) -> torch.dtype | None:
        """Element type of a weight or buffer; the site's output type if that is unknown.

        If a module was cast between its calls, the type is that of the call's outputs. Formats that
        need more than a cast (8 bits and less) count as unknown.
        """
        if call is not None and len(self._formats.get(site, ())) > 1:
            types = [torch_dtype(record.dtype) for record in call.outputs.values()]
            if floats := [
                dtype for dtype in types if dtype is not None and dtype.is_floating_point
            ]:
                return floats[0]
        parameter = self.parameters.get(site, {}).get(name)
        dtype = None if parameter is None else torch_dtype(parameter[0])
        # Rounding to 8 bits involves scales, which the dtype does not contain.
        if dtype is not None and dtype.itemsize < 2 and dtype is not torch.bool:
            dtype = None
        return dtype or self.dtypes.get(site)

    def has_weights(self, site: str, step: int, module: nn.Module) -> bool:
        """Whether the run captured the weights of a module in a step, and they equal these."""
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            record = self._weights.get((site, name, step))
            dtype = None if record is None else torch_dtype(record.dtype)
            if record is None or dtype is None or record.kept != "full":
                return False
            captured = self.tensor(record, tensor.device, own=False)
            if not same_bits(tensor.detach().to(dtype), captured):
                return False
        return True

    def tensor(
        self,
        record: Record,
        device: torch.device | str = "cpu",
        wide: torch.dtype | None = None,
        *,
        own: bool = True,
    ) -> torch.Tensor:
        """A captured tensor in memory of its own; floats are converted to `wide` if that is given.

        Without `own` the tensor may be the run's memory itself, which must not be written to.

        Raises:
            DriftlineError: The values were not kept, or are lost.
        """
        return tensor_of(self.run, record, device, wide, own=own)

    def shortened(self) -> str:
        """A message if a file of the run became shorter while it was read; empty otherwise."""
        if names := mapped_file.cut_files():
            return f"{names[0]} became shorter while it was read"
        cut_off = self.run.cut_off()
        reasons = map(cut_off, self.run.records) if cut_off is not None else ()
        return next(filter(None, reasons), "")

    def _autocast(self) -> torch.dtype | None:
        """The format of a run under autocast, in which layers with 32-bit weights give 16 bits.

        None if the run did not use autocast.
        """
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
    """A captured tensor of any run; in memory of its own or, without `own`, read-only."""
    dtype = torch_dtype(record.dtype)
    if dtype is None:
        raise ValueError(f"{record.key} has {record.dtype} elements, which torch has not")
    faults = mapped_file.faults()
    memory = run.memory(record) if record.kept == "full" else None
    # Sampled or compressed tensors cannot be mapped; they are decoded into a copy.
    if memory is None:
        raw = run.raw(record)
        memory, own = Memory(raw.ctypes.data, raw.nbytes, raw), True
    if not memory.length:
        return torch.empty(record.shape, dtype=dtype, device=device)
    # The tensor is made from the address, because torch warns about read-only arrays.
    window = (ctypes.c_uint8 * memory.length).from_address(memory.address)
    if not own:
        vars(window)["owner"] = memory.owner  # the tensor keeps the window alive, that the memory
    flat = torch.frombuffer(window, dtype=dtype).reshape(record.shape)
    value = flat.to(device, wide if wide is not None and dtype.is_floating_point else dtype)
    value = value.clone() if own and value.data_ptr() == flat.data_ptr() else value
    if own and mapped_file.faults() != faults:
        raise BadFile(f"{record.key} has no values: its file became shorter while it was read")
    return value


@functools.cache
def torch_dtype(name: str) -> torch.dtype | None:
    """torch's dtype of this name; None if torch has none, or packs the elements differently."""
    described = DTYPES.get(name)
    if described is None or described.bits < 8:
        return None
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _parameters(
    tree: Mapping[str, Any] | None,
) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """(dtype, shape) of the weights and buffers that each module itself holds, by site and name."""
    if tree is None:
        return {}
    return {
        node.site: {p.name: (p.dtype, p.shape) for p in node.parameters}
        for node in ModuleTree.from_json(tree).walk()
        if not node.shared
    }


# Calls of the running program.


Slots = list[tuple[str, str, torch.Tensor]]
# Layers that draw random numbers in training.
_RANDOM = ("Dropout", "RReLU", "FractionalMaxPool")


class NotReplayed(Exception):
    """A call cannot be replayed; raised and caught only within the replay."""


class OtherBorder(NotReplayed):
    """A module gives, or passes to a part, a tensor of another shape, or other integers."""


class WeightsUpdated(NotReplayed):
    """An optimizer changed the weights, and the captured run's are not known to equal them."""


class NotReproduced(NotReplayed):
    """A call that was repeated on its own inputs did not give its own output."""


class Part:
    """A call that a module made of one of its parts, and the result."""

    __slots__ = ("candidate", "module", "slots", "value")

    def __init__(
        self, module: nn.Module, value: Any, slots: Slots, candidate: CandidateCall | None
    ) -> None:
        self.module = module
        self.value = value
        self.slots = slots
        self.candidate = candidate


class OpenCall:
    """A call of the program that is in progress.

    Attributes:
        held: Its arguments before the call, in memory of their own; None if not needed.
        parts: The calls of parts that it made; None if they are not needed.
        reason: Why it cannot be replayed, if that is known before it runs; else empty.
        proven: The way in which a call like it was reproduced bit for bit; empty if none was yet.
    """

    __slots__ = (
        "args",
        "candidate",
        "frame",
        "held",
        "inputs",
        "kwargs",
        "parts",
        "proven",
        "reason",
        "site",
    )

    def __init__(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.frame = frame
        self.args = args
        self.kwargs = kwargs
        self.site = ""
        self.candidate: CandidateCall | None = None
        self.held: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.inputs: Slots = []
        self.parts: list[Part] | None = None
        self.reason = ""
        self.proven = ""


def bytes_of(slots: Slots) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, _, tensor in slots)


def in_bytes(size: int) -> str:
    """A size in words; a size below 1 MiB is shown in bytes, not as zero MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size} bytes"


def is_pure(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers and computes only from its inputs and weights."""
    kind = type(module)
    return (
        kind.__module__.startswith("torch.nn.modules.")
        and not module._modules
        and "forward" not in module.__dict__
        and not getattr(module, "inplace", False)
        # In training, layers with buffers change them and some draw random numbers.
        and not (module.training and (kind.__name__.startswith(_RANDOM) or module._buffers))
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def is_table(module: nn.Module) -> bool:
    """Whether a module only looks up rows, so that rounding its output replaces rounding it."""
    return type(module) is nn.Embedding and module.max_norm is None and is_pure(module)


def is_the_programs_own(opened: OpenCall, candidate: Candidate) -> bool:
    """Whether the captured call is the same as the program's, in the same wide format.

    The inputs are equal bit for bit, weights and buffers are float32, and no autocast is on.
    """
    call, module, inputs = opened.candidate, opened.frame.module, opened.inputs
    if call is None or any(torch.is_autocast_enabled(device) for device in autocast_kinds()):
        return False
    # Other inputs mean another call, even if all common ones agree.
    if {slot for slot, _, _ in inputs} != set(call.inputs):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    return all(
        t is None or not t.is_floating_point() or t.dtype is torch.float32 for t in tensors
    ) and all(
        same_bits(tensor, candidate.tensor(call.inputs[slot], tensor.device, own=False))
        for slot, _, tensor in inputs
    )


def why_never(module: nn.Module) -> str:
    """Why a module can never be applied again; empty if it can."""
    if is_compiled(module):
        return "it is compiled; run the program with TORCHDYNAMO_DISABLE=1"
    held = (*module._parameters.values(), *module._buffers.values())
    if any(type(tensor).__name__ == "DTensor" for tensor in held):
        return "its weights are sharded over ranks"
    return ""


def likeness(opened: OpenCall) -> Any:
    """A key of a call; calls with equal keys run the same code, so they need only one proof.

    For torch's own layers on a CPU the key has no shapes: whichever kernel a shape selects, no
    result depends on the order in which threads arrive. On other devices some do.
    """
    module = opened.frame.module
    weights = [p for p in module._parameters.values() if p is not None]
    if is_pure(module) and all(t.is_cpu for t in (*weights, *(t for _, _, t in opened.inputs))):
        kind = (type(module), module.training, len(weights))
        return *kind, tuple((slot, t.dtype) for slot, _, t in opened.inputs)
    return (
        type(module),
        getattr(module.forward, "__func__", module.forward),
        module.training,
        module.extra_repr(),
        tuple((name, type(child)) for name, child in module._modules.items()),
        tuple(sorted(name for name, value in opened.kwargs.items() if value is None)),
        tuple((tuple(p.shape), p.dtype, p.device) for p in weights),
        tuple((slot, tuple(t.shape), t.stride(), t.dtype) for slot, _, t in opened.inputs),
        bool(module._forward_hooks or module._forward_pre_hooks),
        torch.get_num_threads(),
    )


def in_short(problem: Exception) -> str:
    """An exception in one line of limited length."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:200]}" if lines else type(problem).__name__
