# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""Results of a replay: which values are kept, how large the noise is, when two results are near.

Values are kept if they are informative. If a captured result equals the trusted one, or is as good,
only the noise is recorded: the error of the number format, measured on some rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from driftline.captures.torch import tensors as snapshots
from driftline.diagnosis.experiments.live.captured_calls import (
    Candidate,
    NotReplayed,
    OpenCall,
    OtherBorder,
    is_pure,
    torch_dtype,
)
from driftline.diagnosis.experiments.live.number_formats import widened
from driftline.diagnosis.experiments.live.repeat import clone, same_bits
from driftline.runs.records import Kept, Record, TensorKey
from driftline.runs.sinks import Sink

# Number of rows that are enough to measure noise; a sample keeps the cost of a call small.
_ROWS = 32


def some_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An even sample of rows, [rows, channels]; the channels are the last axis of the tensor.

    >>> some_rows(torch.zeros(4, 32, 5)).shape
    torch.Size([32, 5])
    """
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    return rows[:: max(1, -(-rows.shape[0] // _ROWS))]


class _Sums:
    """Sums of products of exact values r and errors e, over rows treated as independent."""

    __slots__ = ("ee", "elements", "er", "er_er", "er_rr", "rows", "rr", "rr_rr")

    def __init__(self) -> None:
        self.rows = self.elements = 0
        self.rr = self.er = self.ee = self.er_er = self.er_rr = self.rr_rr = 0.0

    def add(self, exact: torch.Tensor, made: torch.Tensor) -> None:
        r, e = exact, made.to(exact.dtype) - exact
        sums = _by_row(r, e)
        # Elements with NaN or Inf are left out here; the comparison counts them. A sum of squares
        # is not finite if one of its elements is not.
        if not all(map(math.isfinite, sums[2])):
            finite = torch.isfinite(e)
            sums = _by_row(torch.where(finite, r, 0.0), torch.where(finite, e, 0.0))
        self.elements += r.numel()
        for rr, er, ee in zip(*sums, strict=True):
            self.rows += 1
            self.rr += rr
            self.er += er
            self.ee += ee
            self.er_er += er * er
            self.er_rr += er * rr
            self.rr_rr += rr * rr

    @property
    def error(self) -> float:
        return math.sqrt(self.ee / self.rr) if self.rr > 0.0 else 0.0

    def to_json(self) -> dict[str, Any]:
        p = self.er / self.rr if self.rr > 0.0 else 0.0
        size = {"rows": self.rows, "elements": self.elements}
        document: dict[str, Any] = {**size, "error": self.error, "projection": p}
        if self.rr > 0.0 and self.rows > 1:
            spread = self.er_er - 2.0 * p * self.er_rr + p * p * self.rr_rr
            spread = max(spread, 0.0) * self.rows / (self.rows - 1)
            document["projection_se"] = math.sqrt(spread) / self.rr
        return document


def _by_row(r: torch.Tensor, e: torch.Tensor) -> list[list[float]]:
    """The inner products <r,r>, <e,r> and <e,e> of each row."""
    dot = torch.linalg.vecdot
    return torch.stack((dot(r, r), dot(e, r), dot(e, e))).tolist()


class Noise:
    """The noise of each site, by output slot."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, _Sums]] = {}

    def add(self, site: str, slot: str, exact: torch.Tensor, made: torch.Tensor) -> None:
        """Add some rows of a result, in wide arithmetic and in the captured run's format."""
        if exact.numel():
            self._sums.setdefault(site, {}).setdefault(slot, _Sums()).add(exact, made)

    def nothing(self, site: str, slot: str) -> None:
        """Note a result without noise."""
        self._sums.setdefault(site, {}).setdefault(slot, _Sums())

    def of(self, site: str) -> dict[str, Any] | None:
        """The slot with the most noise, as JSON; None if none was measured."""
        by_slot = self._sums.get(site)
        if not by_slot:
            return None
        slot, sums = max(by_slot.items(), key=lambda item: item[1].error)
        return {"slot": slot, **sums.to_json()}


# Nearness: whether a captured result is as good as the trusted one, although not equal bit for bit.


_WHOLE, _ROW = 0.75, 1.4
"""Largest difference of near results, as a share of the noise and of the noise in its worst row.

Combined with the noise itself they stay below the limits of a diagnosis: 1.35 times for independent
errors, 2.5 times for errors that add up.
"""
_SIZE = 1.25
"""Largest noise of the captured result on the sample, as a factor on that of the trusted result."""
_LEAN, _OFFSET = 0.004, 0.02
"""Largest bias and offset in units of roundoff; a diagnosis allows 0.05 and 0.3."""

_WIDE_ROW, _WIDE_WORST = 4.0, 8.0
"""Largest difference in units of roundoff, relative to each row and to the typical row.

A diagnosis allows an error of 32, a bias of 8, an offset of 48, and 64 in the worst row. If each
row is off by at most 4 of its size, no selection of rows has more than 4 of the first three.
"""
_SMALLEST = 1e-10
"""Rows of a smaller size are not judged, because squares of their differences underflow."""


class Sample(NamedTuple):
    """Some rows and channels of a result.

    Attributes:
        exact: The sample in wide arithmetic.
        captured: The same elements of the captured run.
        every: The sample has every n-th channel; this is n.
    """

    exact: torch.Tensor
    captured: torch.Tensor
    every: int


def nearness(captured: torch.Tensor, native: torch.Tensor, some: Sample) -> float | None:
    """The difference of two results in units of noise; None if they are not near.

    Args:
        captured: The captured result, which has 16 bits.
        native: The result of the trusted module in that format.
        some: A sample of the result in wide arithmetic.
    """
    if captured.dtype != native.dtype or captured.shape != native.shape or not captured.numel():
        return None
    if captured.element_size() != 2 or not captured.is_floating_point():
        return None
    # The sample must be as good as the trusted result before the expensive comparison of all bits.
    trusted = some_rows(native)[:, :: some.every].to(some.exact.dtype) - some.exact
    noise = float(trusted.norm())
    if not float((some.captured.to(some.exact.dtype) - some.exact).norm()) <= _SIZE * noise:
        return None
    channels = native.shape[-1]
    differing = _apart(captured, native)
    made = native.reshape(-1)[differing].float()
    d = captured.reshape(-1)[differing].float() - made
    size = float(torch.linalg.vector_norm(native.float())) ** 2
    rows = torch.zeros(native.numel() // channels, device=native.device)
    rows.index_add_(0, differing // channels, d * d)
    typical = noise / math.sqrt(some.exact.numel())
    worst = float(trusted.square().sum(-1).max()) / some.exact.shape[-1]
    unit = torch.finfo(native.dtype).eps / 2.0
    overall = math.sqrt(float(rows.sum()) / native.numel()) / typical if typical else math.inf
    offset = abs(float(d.sum())) / math.sqrt(native.numel() * size) if size else math.inf
    lean = abs(float(d @ made)) / size if size else math.inf
    # The comparisons are written such that NaN is not near.
    near = (
        overall <= _WHOLE
        and float(rows.max()) / channels <= _ROW**2 * worst
        and lean <= _LEAN * unit
        and offset <= _OFFSET * unit
    )
    return overall if near else None


def wide_nearness(captured: torch.Tensor, made: torch.Tensor) -> float | None:
    """The difference of two wide results in the worst row, as a share of the limit for nearness.

    Args:
        captured: The captured result, which has 32 or 64 bits.
        made: The result of the trusted module.

    Returns:
        None if they are not near.
    """
    if captured.dtype != made.dtype or captured.shape != made.shape or not captured.numel():
        return None
    if made.dtype not in (torch.float32, torch.float64) or made.dim() < 2:
        return None
    with torch.no_grad():
        unit = torch.finfo(made.dtype).eps / 2.0
        size = torch.linalg.vector_norm(made, dim=-1)
        apart = torch.linalg.vector_norm(captured - made, dim=-1)
        typical = torch.linalg.vector_norm(size) / math.sqrt(size.numel())
        allowed = unit * torch.minimum(_WIDE_ROW * size, _WIDE_WORST * typical)
        most, least, total = torch.stack(((apart / allowed).max(), size.min(), typical)).tolist()
    # The comparisons are written such that NaN is not near.
    near = most <= 1.0 and least >= _SMALLEST and math.isfinite(total)
    return most if near else None


def _apart(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Flat positions at which two 16-bit tensors differ in their bits."""
    first_bits, second_bits = (
        t.detach().contiguous().reshape(-1).view(torch.int16) for t in (first, second)
    )
    if not first.is_cpu:
        return (first_bits != second_bits).nonzero().reshape(-1)
    # torch takes several times as long as numpy for 16-bit elements.
    return torch.from_numpy(np.flatnonzero(first_bits.numpy() != second_bits.numpy()))


# Keeping results.


_CHANNELS = 128
"""Number of output channels of a linear layer that are used to measure noise."""


About = tuple[Record, str, str]
"""The captured record, the class of the module, and another name of the slot."""
Native = torch.Tensor | None
Keep = Literal["always", "unless same", "unless near"]
"""When a result is kept, depending on its relation to the captured one."""


class Results:
    """Receives results of modules and decides which values are kept.

    Args:
        candidate: The captured run.
        exact: Receives results in wide arithmetic.
        native: Receives results in the captured run's format; None if they are not needed.
        keep_all: Whether to keep all values, even those equal to the captured run's.
    """

    def __init__(
        self, candidate: Candidate, exact: Sink, native: Sink | None, *, keep_all: bool
    ) -> None:
        self._candidate = candidate
        self._exact = exact
        self._native = native
        self._keep_all = keep_all or native is None

    def is_its_own(self, record: Record, tensor: torch.Tensor) -> bool:
        """Whether a result equals the captured one bit for bit and need not be kept."""
        return self._may_be_left_out(record) and same_bits(
            tensor, self._candidate.tensor(record, tensor.device, own=False)
        )

    def put_exact(self, like: Record, class_name: str, alias: str, tensor: torch.Tensor) -> None:
        """Keep a result of wide arithmetic."""
        _put(self._exact, like, class_name, alias, tensor)

    def put_native(self, like: Record, class_name: str, alias: str, tensor: torch.Tensor) -> None:
        """Keep a result in the captured run's format."""
        if self._native is not None:
            _put(self._native, like, class_name, alias, tensor)

    def mention_native(
        self, like: Record, class_name: str, alias: str, *, own: bool = True
    ) -> None:
        """Note, without values, a result in the captured run's format.

        It equals the captured one (`own`), or is as good.
        """
        if self._native is not None:
            kept = "digest" if own else "describe"
            _mention(self._native, like, class_name, alias, like.dtype, kept)

    def mention_exact(self, like: Record, class_name: str, alias: str, *, own: bool) -> None:
        """Note, without values, a result of wide arithmetic.

        It equals the captured one (`own`), or differs from it only by noise.
        """
        # 16-bit results are stored wide: their exact values do not fit the captured format.
        dtype = torch_dtype(like.dtype)
        wide = own or dtype is None or not dtype.is_floating_point or dtype.itemsize >= 4
        name = like.dtype if wide else "float32"
        _mention(self._exact, like, class_name, alias, name, "digest" if own else "describe")

    def settle(
        self,
        site: str,
        slot: str,
        about: About,
        exact: torch.Tensor,
        native: Native,
        noise: Noise,
        *,
        keep: Keep,
    ) -> float | None:
        """Keep a result in both formats, or only its noise if the captured one is as good.

        Args:
            site: Site of the noise.
            slot: Slot of the noise.
            about: The captured record and its names.
            exact: The result of wide arithmetic.
            native: The result in the captured run's format; None if it equals the captured one.
            noise: Receives the noise.
            keep: When the values are kept.

        Returns:
            The distance between the two, if they are near and not equal; otherwise None.
        """
        record = about[0]
        apart = None
        # If `native` is None, it equals the captured result. Then only the noise is recorded,
        # unless the format itself makes the result wrong.
        if native is None and (keep == "always" or self.overflows(record, exact)):
            native = self._candidate.tensor(record, exact.device, own=False)
            self.put_exact(*about, exact)
            self.put_native(*about, native)
            return None
        if native is not None:
            if keep == "unless near" and exact.dim() > 1 and exact.shape == record.shape:
                captured = self._candidate.tensor(record, exact.device, own=False)
                some = Sample(some_rows(exact), some_rows(captured), 1)
                apart = self.nearness(record, native, some)
            if apart is None:
                self.put_exact(*about, exact)
                self.put_native(*about, native)
                return None
        self.measure(site, slot, record, exact, noise)
        self.mention_exact(*about, own=False)
        self.mention_native(*about, own=apart is None)
        return apart

    def overflows(self, record: Record, exact: torch.Tensor) -> bool:
        """Whether a captured result has NaN or Inf where that of wide arithmetic is finite."""
        captured = self._candidate.tensor(record, exact.device, own=False)
        if not captured.is_floating_point() or captured.shape != exact.shape:
            return False
        return bool((~torch.isfinite(captured) & torch.isfinite(exact)).any())

    def nearness(self, record: Record, native: torch.Tensor, some: Sample) -> float | None:
        """The function `nearness` for a captured result; None if it must be kept anyway."""
        if not self._may_be_left_out(record):
            return None
        captured = self._candidate.tensor(record, native.device, own=False)
        return nearness(captured, native, some)

    def wide_nearness(self, record: Record, made: torch.Tensor) -> float | None:
        """The function `wide_nearness` for a captured result; None if it must be kept anyway."""
        if not self._may_be_left_out(record):
            return None
        captured = self._candidate.tensor(record, made.device, own=False)
        return wide_nearness(captured, made)

    def _may_be_left_out(self, record: Record) -> bool:
        """Whether the captured result is complete and has a digest, so it can replace another."""
        return (
            not self._keep_all
            and record.kept == "full"
            and bool(record.digest)
            and not self._candidate.run.lost(record)
        )

    def some_of_a_product(self, opened: OpenCall, weights: Mapping[str, torch.Tensor]) -> Sample:
        """Some rows and channels of a linear layer, in wide arithmetic.

        Args:
            opened: The call of the layer.
            weights: Weights in the captured run's format, if it differs from the program's.
        """
        call, module = opened.candidate, opened.frame.module
        assert call is not None
        x, y = (
            some_rows(self._candidate.tensor(record, module.weight.device, own=False))
            for record in (*call.inputs.values(), *call.outputs.values())
        )
        every = max(1, -(-y.shape[1] // _CHANNELS))
        weight = weights.get("weight", module.weight)
        # GPT-2's layer stores its weight transposed.
        if type(module) is not nn.Linear:
            weight = weight.t()
        bias = weights.get("bias") if module.bias is None else weights.get("bias", module.bias)
        with torch.no_grad():
            made = nn.functional.linear(
                widened(x),
                widened(weight[::every]),
                None if bias is None else widened(bias[::every]),
            )
        return Sample(made, y[:, ::every], every)

    def measure(self, site: str, slot: str, like: Record, exact: torch.Tensor, to: Noise) -> None:
        """Measure the noise of a call on some rows of its result."""
        own = self._candidate.tensor(like, exact.device, own=False)
        if own.is_floating_point() and own.shape == exact.shape and own.numel():
            to.add(site, slot, some_rows(exact), some_rows(own))


class PassedToParts:
    """Collects the tensors that a module's own code passes to its parts in one repetition.

    Args:
        results: Says which tensors equal the captured ones.
        require_room: Raises if that many bytes cannot be held.
        narrow: Whether to convert the tensors to the captured run's format.

    Attributes:
        tensors: The captured record and the tensor that was passed, by key; instead of a tensor
            equal to the captured one, None.
    """

    def __init__(
        self, results: Results, require_room: Callable[[int], None], *, narrow: bool
    ) -> None:
        self._results = results
        self._require_room = require_room
        self._narrow = narrow
        self._held = 0
        self.tensors: dict[TensorKey, tuple[Record, torch.Tensor | None]] = {}

    def __call__(self, record: Record, tensor: torch.Tensor) -> None:
        if self._narrow and (low := torch_dtype(record.dtype)) is not None:
            tensor = tensor.to(low)  # code may choose a format by the dtype of a part's weights
        own = self._results.is_its_own(record, tensor)
        # A tensor equal to the captured one need not be held.
        if not own:
            self._held += tensor.numel() * tensor.element_size()
            self._require_room(self._held)
            tensor = clone(tensor)  # the code may change it in place later
        self.tensors[record.key] = record, None if own else tensor

    @property
    def is_its_own(self) -> bool:
        return all(tensor is None for _, tensor in self.tensors.values())


def is_a_plain_product(opened: OpenCall, way: str) -> bool:
    """Whether a call is one of a linear layer, whose rows can be computed separately."""
    call, module = opened.candidate, opened.frame.module
    return (
        way == "leaf"
        and (_is_transposed(module) if type(module) is not nn.Linear else is_pure(module))
        and call is not None
        and len(call.inputs) == len(call.outputs) == len(opened.inputs) == 1
        and all(map(_has_rows, (*call.inputs.values(), *call.outputs.values())))
    )


def _is_transposed(module: nn.Module) -> bool:
    """Whether a module is the linear layer of GPT-2, which stores its weight transposed."""
    kind = type(module)
    return (
        (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def _has_rows(record: Record) -> bool:
    dtype = torch_dtype(record.dtype)
    return dtype is not None and dtype.is_floating_point and len(record.shape) > 1


def _mention(sink: Sink, like: Record, class_name: str, alias: str, dtype: str, kept: Kept) -> None:
    digest = like.digest if kept == "digest" else ""
    sink.put(
        Record(like.key, 0, dtype, like.shape, alias, class_name, like.device, kept, digest), None
    )


def _put(sink: Sink, like: Record, class_name: str, alias: str, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != like.shape:
        raise OtherBorder(
            f"on the candidate's inputs it gives shape {tuple(tensor.shape)}, "
            f"the candidate gave {like.shape}"
        )
    with snapshots.undisturbed():
        shot = snapshots.snapshot(tensor)
        if isinstance(shot, snapshots.Refusal):
            raise NotReplayed(shot.reason)
        if isinstance(shot, snapshots.Pending):
            raise NotReplayed("it is the result of a collective that is still under way")
        sink.put(
            Record(like.key, 0, shot.dtype, shot.shape, alias, class_name, shot.device), shot.data
        )
