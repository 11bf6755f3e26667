"""What is kept of a replay: values where they say something, how small the noise is where not.

A module that gives the captured run's own results in its own format, to the bit, does what the
trusted module does: its error is that format's noise, whatever its values are. Of such a call the
noise is measured on some rows, and the values need not be kept. So it is with results that differ
by less than that noise everywhere (`replay_nearness`): of linear layers and of the own code of
modules with parts. Of functions and norms small differences say more, and all values are kept, as
of every other call. Who is to blame for what is not known here.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from driftline.adapters.torch import snapshot as snapshots
from driftline.adapters.torch.candidate import Candidate, torch_dtype
from driftline.adapters.torch.recasting import widened
from driftline.adapters.torch.repeating import clone, same_bits
from driftline.adapters.torch.replay_calls import NotReplayed, Open, is_pure
from driftline.adapters.torch.replay_nearness import Some, nearness, wide_nearness
from driftline.adapters.torch.replay_noise import Noise, some_rows
from driftline.runs.key import TensorKey
from driftline.runs.record import Kept, Record
from driftline.runs.sink import Sink

_CHANNELS = 128
"""Of a linear layer's outputs, as many are looked at to measure noise."""


About = tuple[Record, str, str]
"""The captured record, the class of the module, another name of the slot."""
Native = torch.Tensor | None


class Results:
    """Takes what modules gave, and decides how much of it is kept.

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
        """Whether a result is what the captured run has, to the bit, and that suffices."""
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
        may_be_near: bool,
    ) -> float | None:
        """Keep a result in both formats, or only its noise where it is as good as the captured one.

        Args:
            site: Whose.
            slot: Which, for the noise.
            about: The captured record, and what it is called.
            exact: What came of wide arithmetic.
            native: What came of the captured run's format; None where that is the captured one.
            noise: Where to.
            may_be_near: Whether it suffices to be near.

        Returns:
            How far the two are apart, where they are near and not the same.
        """
        record = about[0]
        apart = None
        if native is not None:
            if may_be_near and exact.dim() > 1 and exact.shape == record.shape:
                captured = self._candidate.tensor(record, exact.device, own=False)
                some = Some(some_rows(exact), some_rows(captured), 1)
                apart = self.nearness(record, native, some)
            if apart is None:
                self.put_exact(*about, exact)
                self.put_native(*about, native)
                return None
        self.measure(site, slot, record, exact, noise)
        self.mention_exact(*about, own=False)
        self.mention_native(*about, own=apart is None)
        return apart

    def nearness(self, record: Record, native: torch.Tensor, some: Some) -> float | None:
        """How far a captured product is from a trusted one, as `replay_nearness` has it."""
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
        """Whether the captured result is all there and has a name, so that it can stand alone."""
        return (
            not self._keep_all
            and record.kept == "full"
            and bool(record.digest)
            and not self._candidate.run.lost(record)
        )

    def some_of_a_product(self, opened: Open, weights: Mapping[str, torch.Tensor]) -> Some:
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
        if type(module) is not nn.Linear:
            weight = weight.t()
        bias = weights.get("bias") if module.bias is None else weights.get("bias", module.bias)
        with torch.no_grad():
            made = nn.functional.linear(
                widened(x),
                widened(weight[::every]),
                None if bias is None else widened(bias[::every]),
            )
        return Some(made, y[:, ::every], every)

    def measure(self, site: str, slot: str, like: Record, exact: torch.Tensor, to: Noise) -> None:
        """Measure the noise of a call on some rows of what it gave."""
        own = self._candidate.tensor(like, exact.device, own=False)
        if own.is_floating_point() and own.shape == exact.shape and own.numel():
            to.add(site, slot, some_rows(exact), some_rows(own))


class Handed:
    """What a module's own code made for its parts in one repetition.

    Args:
        results: Tells what is the captured run's own.
        require_room: Raises where as many bytes cannot be held.
        narrow: In the captured run's format.

    Attributes:
        found: Key → the captured record, and what was handed; None where that is the captured one.
    """

    def __init__(
        self, results: Results, require_room: Callable[[int], None], *, narrow: bool
    ) -> None:
        self._results = results
        self._require_room = require_room
        self._narrow = narrow
        self._held = 0
        self.found: dict[TensorKey, tuple[Record, torch.Tensor | None]] = {}

    def __call__(self, record: Record, tensor: torch.Tensor) -> None:
        if self._narrow and (low := torch_dtype(record.dtype)) is not None:
            tensor = tensor.to(low)  # code may ask a part's weights for their format
        own = self._results.is_its_own(record, tensor)
        if not own:
            self._held += tensor.numel() * tensor.element_size()
            self._require_room(self._held)
            tensor = clone(tensor)  # the code may go on to work in place
        self.found[record.key] = record, None if own else tensor

    @property
    def is_its_own(self) -> bool:
        return all(tensor is None for _, tensor in self.found.values())


def is_a_plain_product(opened: Open, way: str) -> bool:
    """Whether a call is a linear layer's, every row of which can be computed by itself."""
    call, module = opened.candidate, opened.frame.module
    return (
        way == "leaf"
        and (_is_transposed(module) if type(module) is not nn.Linear else is_pure(module))
        and call is not None
        and len(call.inputs) == len(call.outputs) == len(opened.inputs) == 1
        and all(map(_has_rows, (*call.inputs.values(), *call.outputs.values())))
    )


def _is_transposed(module: nn.Module) -> bool:
    """The linear layer of GPT-2, which holds its weight the other way round."""
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
        raise NotReplayed(
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
