# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""Results of a replay: what is kept of them, how large the noise is, and when two results are near.

Values are kept where they are informative. Where a captured result equals the trusted one, or is as
good, only the size of the noise is recorded: how far the number format is from exact, measured on
some rows.
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

# Rows that are enough to measure noise with; a sample keeps the cost of a call small.
_ROWS = 32


def some_rows(tensor: torch.Tensor) -> torch.Tensor:
    """An even sample of rows, [rows, channels]; the last axis are the channels.

    >>> some_rows(torch.zeros(4, 32, 5)).shape
    torch.Size([32, 5])
    """
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    return rows[:: max(1, -(-rows.shape[0] // _ROWS))]


class _Sums:
    """Sums of exact values r and errors e, over rows that are independent of each other."""

    __slots__ = ("ee", "elements", "er", "er_er", "er_rr", "rows", "rr", "rr_rr")

    def __init__(self) -> None:
        self.rows = self.elements = 0
        self.rr = self.er = self.ee = self.er_er = self.er_rr = self.rr_rr = 0.0

    def add(self, exact: torch.Tensor, made: torch.Tensor) -> None:
        r, e = exact, made.to(exact.dtype) - exact
        sums = _by_row(r, e)
        # Rows with NaN or Inf are measured without them; the comparison itself counts those.
        if not all(map(math.isfinite, sums[2])):  # no sum of squares is, where an element is not
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
    """<r,r>, <e,r> and <e,e> of every row."""
    dot = torch.linalg.vecdot
    return torch.stack((dot(r, r), dot(e, r), dot(e, e))).tolist()


class Noise:
    """The noise of every site, by output slot."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, _Sums]] = {}

    def add(self, site: str, slot: str, exact: torch.Tensor, made: torch.Tensor) -> None:
        """Some rows of one result, in wide arithmetic and in the captured run's format."""
        if exact.numel():
            self._sums.setdefault(site, {}).setdefault(slot, _Sums()).add(exact, made)

    def nothing(self, site: str, slot: str) -> None:
        """A result that is exact."""
        self._sums.setdefault(site, {}).setdefault(slot, _Sums())

    def of(self, site: str) -> dict[str, Any] | None:
        """The slot with the most noise, as JSON; None if none was measured."""
        by_slot = self._sums.get(site)
        if not by_slot:
            return None
        slot, sums = max(by_slot.items(), key=lambda item: item[1].error)
        return {"slot": slot, **sums.to_json()}


# Nearness: whether a captured result is as good as the trusted one, though not equal to the bit.


_WHOLE, _ROW = 0.75, 1.4
"""Share of the noise, and of that in its worst row: together with the noise itself less than the
1.35 times (of independent errors) and the 2.5 times (of errors that add up) which a diagnosis
allows."""
_SIZE = 1.25
"""Factor on the noise of the trusted result that the captured one may have on the sample."""
_LEAN, _OFFSET = 0.004, 0.02
"""Units of roundoff; a diagnosis allows 0.05 of the first and 0.3 of the second."""

_WIDE_ROW, _WIDE_WORST = 4.0, 8.0
"""Units of roundoff, of the size of each row and of the typical row. A diagnosis allows an error of
32, a bias of 8, an offset of 48, and 64 in the worst row; if every row is off by 4 of its size at
most, no selection of rows has more than 4 of the first three."""
_SMALLEST = 1e-10
"""Rows below this size are not judged: squares of their differences are no numbers any more."""


class Sample(NamedTuple):
    """Some rows and channels of a result.

    Attributes:
        exact: In wide arithmetic.
        captured: What the captured run has there.
        every: Each how many-th channel it is.
    """

    exact: torch.Tensor
    captured: torch.Tensor
    every: int


def nearness(captured: torch.Tensor, native: torch.Tensor, some: Sample) -> float | None:
    """The difference of two results in units of noise; None if they are not near.

    Args:
        captured: What the captured run has, of 16 bits.
        native: What the trusted module gives in that format.
        some: Some of it, exactly.
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
    # Written so that what is no number is not near.
    near = (
        overall <= _WHOLE
        and float(rows.max()) / channels <= _ROW**2 * worst
        and lean <= _LEAN * unit
        and offset <= _OFFSET * unit
    )
    return overall if near else None


def wide_nearness(captured: torch.Tensor, made: torch.Tensor) -> float | None:
    """The difference of two wide results in its worst row, as a share of what counts as near.

    Args:
        captured: What the captured run has, of 32 or 64 bits.
        made: What the trusted module gives.

    Returns:
        None where they are not near.
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
    # Written so that what is no number is not near.
    near = most <= 1.0 and least >= _SMALLEST and math.isfinite(total)
    return most if near else None


def _apart(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Positions in a flat 16-bit tensor at which two tensors differ in their bits."""
    first_bits, second_bits = (
        t.detach().contiguous().reshape(-1).view(torch.int16) for t in (first, second)
    )
    if not first.is_cpu:
        return (first_bits != second_bits).nonzero().reshape(-1)
    # torch takes several times as long for elements of 16 bits.
    return torch.from_numpy(np.flatnonzero(first_bits.numpy() != second_bits.numpy()))


# Keeping results.


_CHANNELS = 128
"""Output channels of a linear layer that are used to measure noise."""


About = tuple[Record, str, str]
"""The captured record, the class of the module, another name of the slot."""
Native = torch.Tensor | None
Keep = Literal["always", "unless same", "unless near"]
"""When a result is kept, as it relates to the captured one."""


class Results:
    """Receives what modules gave, and decides how much of it is kept.

    Args:
        candidate: The captured run.
        exact: Takes what modules give in wide arithmetic.
        native: Takes what they give in the captured run's format; None where nobody wants it.
        keep_all: Keep all values, also where they are the captured run's own.
    """

    def __init__(
        self, candidate: Candidate, exact: Sink, native: Sink | None, *, keep_all: bool
    ) -> None:
        self._candidate = candidate
        self._exact = exact
        self._native = native
        self._keep_all = keep_all or native is None

    def is_its_own(self, record: Record, tensor: torch.Tensor) -> bool:
        """Whether a result equals the captured one to the bit, and the latter can stand for it."""
        return self._may_be_left_out(record) and same_bits(
            tensor, self._candidate.tensor(record, tensor.device, own=False)
        )

    def put_exact(self, like: Record, class_name: str, alias: str, tensor: torch.Tensor) -> None:
        """Keep what came of wide arithmetic."""
        _put(self._exact, like, class_name, alias, tensor)

    def put_native(self, like: Record, class_name: str, alias: str, tensor: torch.Tensor) -> None:
        """Keep what came of the captured run's format."""
        if self._native is not None:
            _put(self._native, like, class_name, alias, tensor)

    def mention_native(
        self, like: Record, class_name: str, alias: str, *, own: bool = True
    ) -> None:
        """What came of the captured run's format is its `own` result, or as good as that."""
        if self._native is not None:
            kept = "digest" if own else "describe"
            _mention(self._native, like, class_name, alias, like.dtype, kept)

    def mention_exact(self, like: Record, class_name: str, alias: str, *, own: bool) -> None:
        """What came of wide arithmetic is not kept: it is the `own`, or differs by noise alone."""
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
        """Keep a result in both formats, or only its noise where it is as good as the captured one.

        Args:
            site: Whose.
            slot: Which, for the noise.
            about: The captured record, and what it is called.
            exact: What came of wide arithmetic.
            native: What came of the captured run's format; None where that is the captured one.
            noise: Where to.
            keep: When to keep it.

        Returns:
            How far the two are apart, where they are near and not the same.
        """
        record = about[0]
        apart = None
        # Native is None if it equals the captured result: then only the noise is worth recording,
        # unless the format itself is what makes it wrong.
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
        """Whether a captured result has NaN or Inf where wide arithmetic has a number."""
        captured = self._candidate.tensor(record, exact.device, own=False)
        if not captured.is_floating_point() or captured.shape != exact.shape:
            return False
        return bool((~torch.isfinite(captured) & torch.isfinite(exact)).any())

    def nearness(self, record: Record, native: torch.Tensor, some: Sample) -> float | None:
        """Distance of a captured product from a trusted one, as the function `nearness` has it."""
        if not self._may_be_left_out(record):
            return None
        captured = self._candidate.tensor(record, native.device, own=False)
        return nearness(captured, native, some)

    def wide_nearness(self, record: Record, made: torch.Tensor) -> float | None:
        """The same of a wide result."""
        if not self._may_be_left_out(record):
            return None
        captured = self._candidate.tensor(record, made.device, own=False)
        return wide_nearness(captured, made)

    def _may_be_left_out(self, record: Record) -> bool:
        """Whether the captured result is complete and has a digest, so that it can stand alone."""
        return (
            not self._keep_all
            and record.kept == "full"
            and bool(record.digest)
            and not self._candidate.run.lost(record)
        )

    def some_of_a_product(self, opened: OpenCall, weights: Mapping[str, torch.Tensor]) -> Sample:
        """Some rows and channels of a linear layer, in wide arithmetic.

        Args:
            opened: Its call.
            weights: Its weights in the captured run's format, where that is not their own.
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
        """Measure the noise of a call on some rows of what it gave."""
        own = self._candidate.tensor(like, exact.device, own=False)
        if own.is_floating_point() and own.shape == exact.shape and own.numel():
            to.add(site, slot, some_rows(exact), some_rows(own))


class PassedToParts:
    """What a module's own code made for its parts in one repetition.

    Args:
        results: Tells what is the captured run's own.
        require_room: Raises where as many bytes cannot be held.
        narrow: In the captured run's format.

    Attributes:
        tensors: Key → the captured record, and what was passed; None if equal to the captured one.
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
            tensor = tensor.to(low)  # code may ask a part's weights for their format
        own = self._results.is_its_own(record, tensor)
        # A tensor equal to the captured one need not be held.
        if not own:
            self._held += tensor.numel() * tensor.element_size()
            self._require_room(self._held)
            tensor = clone(tensor)  # the code may go on to work in place
        self.tensors[record.key] = record, None if own else tensor

    @property
    def is_its_own(self) -> bool:
        return all(tensor is None for _, tensor in self.tensors.values())


def is_a_plain_product(opened: OpenCall, way: str) -> bool:
    """Whether a call is a linear layer's, each row of which can be computed by itself."""
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
