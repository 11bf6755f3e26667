# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Apply a module of the program to captured inputs, in both number formats, and keep the results.

The module's calls of its parts are either executed or answered with the outputs of the captured
run's parts. Code that sorts tokens by their expert may pass rows to a part in any order, which
differs between devices. If the part processes each row separately, it is answered in the order of
the repeated code. Only rows that equal the captured ones to within rounding are reordered; wrong
rows keep their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from driftline.captures.torch import layers
from driftline.captures.torch.layers import unwrapped
from driftline.diagnosis.experiments.live.captured_calls import (
    Candidate,
    NotReplayed,
    OpenCall,
    OtherBorder,
    Part,
    Slots,
    is_pure,
    is_table,
    is_the_programs_own,
)
from driftline.diagnosis.experiments.live.number_formats import Recast, SuppliedTensors
from driftline.diagnosis.experiments.live.repeat import Script, copied, itself, repeat
from driftline.diagnosis.experiments.live.report import Report
from driftline.diagnosis.experiments.live.results import (
    About,
    Keep,
    Native,
    PassedToParts,
    Results,
    is_a_plain_product,
    some_rows,
)
from driftline.runs.records import Record, TensorKey

# Number of random directions by which rows are sorted; each leaves fewer rows without a partner.
_ROUNDS = 12
_OTHER_CODES, _OTHER_FLAGS = 0.25, 0.01
"""Shares of integers and of booleans that may differ: a choice at a tie may go either way."""
_FEW_UNITS, _SHARE = 4.0, 0.25
"""Two limits on the cost of a format.

An error of at most this many units of roundoff is normal in the captured run's format. A larger one
is attributed to the rounding of buffers if that rounding alone causes more than this share of it.
"""
_UNITS = 32.0
"""Largest difference between a row and its partner, in units of roundoff relative to its size.

The difference between unrelated rows is about as large as the rows themselves.
"""


def works_by_row(module: nn.Module) -> bool:
    """Whether a part processes each row separately: it has no weights, buffers or parts."""
    return not (module._modules or module._parameters or module._buffers)


def order_of(made: torch.Tensor, captured: torch.Tensor) -> torch.Tensor | None:
    """Index of the row of `made` that equals each captured row; None if the order is the same.

    >>> rows = torch.eye(4) + 1
    >>> order_of(rows[[0, 3, 1, 2]], rows)
    tensor([0, 2, 3, 1])
    >>> order_of(rows + 1, rows) is None
    True
    """
    if made.dim() != 2 or made.shape != captured.shape or not made.numel():
        return None
    coarse = max((made.dtype, captured.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    most = _UNITS * torch.finfo(coarse).eps / 2.0
    # Usually no row has moved, and a sample is enough to see that. All rows are compared only
    # otherwise.
    if bool(_alike(some_rows(made).float(), some_rows(captured).float(), most).all()):
        return None
    made_rows, captured_rows = made.detach().float(), captured.float()
    identity = torch.arange(len(made_rows), device=made_rows.device)
    apart = ~_alike(made_rows, captured_rows, most)
    order, left, free = identity.clone(), identity[apart], identity[apart]
    chance = torch.Generator().manual_seed(0)
    # Equal rows have equal projections on a random direction, so sorting pairs them.
    for _ in range(_ROUNDS):
        along = torch.randn(made_rows.shape[1], generator=chance).to(made_rows.device)
        left = left[torch.argsort(captured_rows[left] @ along, stable=True)]
        free = free[torch.argsort(made_rows[free] @ along, stable=True)]
        same = _alike(made_rows[free], captured_rows[left], most)
        order[left[same]] = free[same]
        left, free = left[~same], free[~same]
        if not len(left):
            break
    if bool((order == identity).all()):
        return None
    # Rows without a partner keep their places if these are free, so that an error is seen in its
    # own row.
    stay = torch.isin(left, free)
    order[left[stay]] = left[stay]
    order[left[~stay]] = free[~torch.isin(free, left)]
    return order


def _alike(rows: torch.Tensor, other_rows: torch.Tensor, most: float) -> torch.Tensor:
    return (rows - other_rows).norm(dim=1) <= most * other_rows.norm(dim=1)


def reordered(tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A tensor with its rows in another order; unchanged if it has another number of rows."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor
    return rows[order].reshape(tensor.shape) if len(rows) == len(order) else tensor


# Which modules run when a call is repeated, and whose calls are answered.


Answer = Callable[[Any, Any], Any]
Hand = Callable[[Record, torch.Tensor], None]


class Parts:
    """Decides which modules run when a call is repeated.

    Args:
        recast: Gives the outputs of the captured run's parts.
        is_called: Whether the captured run calls a module anywhere. The weights of other modules
            (an attention's output projection) may be used without a call.
    """

    def __init__(self, recast: Recast, is_called: Callable[[nn.Module], bool]) -> None:
        self._recast = recast
        self._is_called = is_called
        self._orders: dict[TensorKey, torch.Tensor] = {}

    def own(self, opened: OpenCall, way: str) -> Script:
        """A script that answers the calls of parts with their outputs in the program itself."""
        parts: dict[int, list[Answer | None]] = {}
        for held in opened.parts or () if way == "own code" else ():
            parts.setdefault(id(held.module), []).append(
                lambda args, kwargs, held=held: copied(held.value, itself)
            )
        return Script(opened.frame.module, parts)

    def captured(
        self, opened: OpenCall, way: str, supplied: SuppliedTensors, hand: Hand, *, exact: bool
    ) -> Script:
        """A script that answers the calls of parts with the outputs of the captured run's parts.

        Args:
            opened: The call that is repeated.
            way: leaf, own code or whole.
            supplied: The tensors supplied so far; the outputs of the parts are added.
            hand: Called with the captured record and the tensor that the module's own code computed
                and passes to a part. A wrong attention, for example, is visible only in the input
                of its output projection.
            exact: Whether wide arithmetic is used.
        """
        # Wide arithmetic uses the row orders found in the captured run's format. A row without a
        # partner would otherwise get different places in the two formats, and the two results
        # would be far apart.
        before = self._orders if exact else {}
        self._orders = {}
        parts: dict[int, list[Answer | None]] = {}
        for held in opened.parts or () if way == "own code" else ():
            answer = None
            if self._recast.can_answer(held.candidate, held.slots):
                answer = self._answer(held, supplied, hand, before, exact=exact)
            parts.setdefault(id(held.module), []).append(answer)
        return Script(opened.frame.module, parts)

    def _answer(
        self,
        held: Part,
        supplied: SuppliedTensors,
        hand: Hand,
        before: Mapping[TensorKey, torch.Tensor],
        *,
        exact: bool,
    ) -> Answer:
        call = held.candidate
        assert call is not None
        value = self._recast.answer(call, held.slots, held.value, supplied, exact=exact)
        binding = layers.binding_of(unwrapped(held.module).forward)

        by_row = works_by_row(held.module)

        def answer(args: Any, kwargs: Any) -> Any:
            order = None
            for slot, alias, tensor in layers.inputs(binding, args, kwargs, layers.NO_CACHE):
                record = call.inputs.get(slot) or (call.inputs.get(alias) if alias else None)
                if record is not None and not supplied.has(tensor):
                    self._require_same_border(record, tensor)
                # Supplied tensors are the captured ones themselves; only tensors that the code
                # computed are compared.
                if (
                    record is not None
                    and tensor.is_floating_point()
                    and tuple(tensor.shape) == record.shape
                    and not supplied.has(tensor)
                ):
                    if by_row and order is None:
                        order = before.get(record.key)
                        if order is None:
                            order = order_of(tensor, self._recast.captured(record, tensor))
                        if order is not None and not exact:
                            self._orders[record.key] = order
                    hand(record, tensor if order is None else reordered(tensor, order))
            made = value()
            if order is None:
                return made
            # The rows of the answer must have the order in which the code passed them.
            back = torch.argsort(order)
            return copied(made, lambda tensor: reordered(tensor, back))

        return answer

    def _require_same_border(self, record: Record, tensor: torch.Tensor) -> None:
        """Raise if the code passes another shape or other integers to a part than were captured.

        Raises:
            OtherBorder: The shape or too many integers differ. Some may differ, because integers
                that result from comparing numbers are arbitrary at near ties.
        """
        key = record.key
        if tuple(tensor.shape) != record.shape:
            raise OtherBorder(
                f"on the candidate's inputs it passes '{key.slot}' of shape {tuple(tensor.shape)} "
                f"to '{key.site}', the candidate passed {record.shape}"
            )
        if tensor.is_floating_point() or tensor.is_complex() or record.kept != "full":
            return
        captured = self._recast.captured(record, tensor)
        if captured.is_floating_point() or not tensor.numel():
            return
        share = float((captured != tensor).float().mean())
        if share > (_OTHER_FLAGS if tensor.dtype is torch.bool else _OTHER_CODES):
            raise OtherBorder(
                f"on the candidate's inputs it passes other integers as '{key.slot}' to "
                f"'{key.site}': {share:.0%} of them differ"
            )

    def real(self, opened: OpenCall, way: str, *, own: bool) -> dict[str, nn.Module]:
        """The modules that run when a call is repeated this way, by path."""
        module = opened.frame.module
        if way != "own code":
            return dict(module.named_modules(remove_duplicate=False))
        called = {id(held.module) for held in opened.parts or ()}
        # A part whose captured output is incomplete cannot be answered and has to run.
        running = {
            id(held.module)
            for held in opened.parts or ()
            if not own and not self._recast.can_answer(held.candidate, held.slots)
        }
        answered = called - running
        modules: dict[str, nn.Module] = {}
        waiting = [("", module)]
        while waiting:
            path, current = waiting.pop()
            modules[path] = current
            waiting += [
                (f"{path}.{name}" if path else name, child)
                for name, child in current._modules.items()
                if child is not None
                and id(child) not in answered
                and (id(child) in called or not self._is_called(child))
            ]
        return modules


# Applying one call again.


class RepeatedCall(NamedTuple):
    """A call that is applied again.

    Attributes:
        opened: The program's call.
        way: leaf, own code or whole.
        part: Index of the part of a cache that belongs to the module.
        live: The outputs of the program's call that the captured run has too.
        good: Slots that were reproduced from the program's own inputs.
        cast: Weights in the captured run's format, kept from one repetition to the next.
    """

    opened: OpenCall
    way: str
    part: int
    live: Slots
    good: set[str]
    cast: dict[int, torch.Tensor]

    @property
    def outputs(self) -> dict[str, Record]:
        assert self.opened.candidate is not None
        return self.opened.candidate.outputs


class ApplyOutcome(NamedTuple):
    """The outcome of applying a call again.

    Attributes:
        left_out: Slots that could not be compared.
        is_its_own: Whether it gave the captured results bit for bit.
        near: Digests of captured results that are as good as the replayed ones, and the distance
            between the two in units of noise.
    """

    left_out: list[str]
    is_its_own: bool
    near: dict[str, float]


class CallApplier:
    """Applies calls again, one at a time.

    Args:
        candidate: The captured run.
        recast: Decides formats.
        parts: Answers the calls that modules make of their parts.
        results: Receives the outputs.
        report: Receives the noise of the captured run's format and the cost of its buffers' format.
        require_room: Raises if that many more bytes cannot be held.
        one_format: Whether only wide arithmetic is used: the captured run is wide, or no other
            format is wanted.
    """

    def __init__(
        self,
        candidate: Candidate,
        recast: Recast,
        parts: Parts,
        results: Results,
        report: Report,
        require_room: Callable[[int], None],
        *,
        one_format: bool,
    ) -> None:
        self._candidate = candidate
        self._recast = recast
        self._parts = parts
        self._results = results
        self._report = report
        self._noise = report.noise
        self._require_room = require_room
        self._one_format = one_format

    def __call__(self, again: RepeatedCall, check: Callable[[], None]) -> ApplyOutcome:
        """Apply a call again and keep what is informative.

        Args:
            again: The call.
            check: Called after the first repetition; raises if that is not valid.

        Raises:
            NotReplayed: The call gives no output that the captured run has.
        """
        self._recast.begin()
        near: dict[str, float] = {}
        if self._one_format:
            comparable, own, near = self._in_one_format(again, check)
        elif is_a_plain_product(again.opened, again.way):
            comparable, own, near = self._as_a_product(again, check)
        else:
            comparable, own, near = self._in_both_formats(again, check)
        return ApplyOutcome(
            [slot for slot, _, _ in again.live if slot not in comparable], own, near
        )

    def _in_one_format(
        self, again: RepeatedCall, check: Callable[[], None]
    ) -> tuple[set[str], bool, dict[str, float]]:
        opened, results, outputs = again.opened, self._results, again.outputs
        handed = PassedToParts(results, self._require_room, narrow=False)
        if again.way == "leaf" and is_the_programs_own(opened, self._candidate):
            made = {slot: tensor for slot, _, tensor in again.live}
        else:
            made = self._apply(again, handed, exact=True)
        check()
        comparable, same = self._comparable_slots(again, made)
        own = handed.is_its_own and comparable == same
        all_: list[tuple[str, About, Native]] = [
            (f"{key.site}/input/{key.slot}", (record, record.class_name, record.alias), tensor)
            for key, (record, tensor) in handed.tensors.items()
        ]
        all_ += [
            (slot, (outputs[slot], opened.frame.class_name, alias), made[slot])
            for slot, alias, _ in again.live
            if slot in comparable
        ]
        near = None if own else self._wide_nearness(again, all_, same)
        for slot, about, tensor in all_:
            if tensor is None or own or (near is not None and slot in same):
                if slot in comparable:
                    self._noise.nothing(opened.site, slot)
                results.mention_exact(*about, own=True)
            elif near is not None:
                results.measure(opened.site, slot, about[0], tensor, self._noise)
                results.mention_exact(*about, own=False)
            else:
                results.put_exact(*about, tensor)
        return comparable, own, near or {}

    def _wide_nearness(
        self, again: RepeatedCall, all_: list[tuple[str, About, Native]], same: set[str]
    ) -> dict[str, float] | None:
        """Distances of the results from captured ones that are not equal; None if one is far.

        Only linear layers and own code of containers are measured, as for 16-bit results.
        """
        if again.way == "leaf" and not is_a_plain_product(again.opened, again.way):
            return None
        near: dict[str, float] = {}
        for slot, (record, _, _), tensor in all_:
            if tensor is None or slot in same:
                continue
            apart = self._results.wide_nearness(record, tensor)
            if apart is None:
                return None
            near[record.digest] = apart
        return near

    def _as_a_product(
        self, again: RepeatedCall, check: Callable[[], None]
    ) -> tuple[set[str], bool, dict[str, float]]:
        """Replay a linear layer, measuring the noise by wide arithmetic on some rows.

        The whole product is computed in wide arithmetic only if the captured one neither equals the
        trusted one bit for bit nor is as good.
        """
        opened, results, module = again.opened, self._results, again.opened.frame.module
        nothing = PassedToParts(results, self._require_room, narrow=True)
        native = self._apply(again, nothing, exact=False)
        check()
        comparable, same = self._comparable_slots(again, native)
        own = comparable == same
        weights = self._recast.weights({"": module}, opened.candidate, exact=False, cast=again.cast)
        with self._recast.arithmetic(module, exact=True):
            some = results.some_of_a_product(opened, weights)
        ((slot, record),) = again.outputs.items()
        apart = None if own else results.nearness(record, native[slot], some)
        about = record, opened.frame.class_name, again.live[0][1]
        # A value that overflows in the captured run's format is finite in wide arithmetic.
        is_finite = bool(torch.isfinite(native[slot]).all())
        if is_finite and (own or apart is not None):
            self._noise.add(opened.site, slot, some.exact, some.captured)
            results.mention_exact(*about, own=False)
            results.mention_native(*about, own=own)
            return comparable, own, {} if apart is None else {record.digest: apart}
        results.put_exact(*about, self._apply(again, nothing, exact=True)[slot])
        results.put_native(*about, native[slot])
        return comparable, own, {}

    def _in_both_formats(
        self, again: RepeatedCall, check: Callable[[], None]
    ) -> tuple[set[str], bool, dict[str, float]]:
        opened, outputs = again.opened, again.outputs
        first = PassedToParts(self._results, self._require_room, narrow=True)
        # The captured format comes first, because wide arithmetic uses its row orders.
        native = self._apply(again, first, exact=False)
        check()
        comparable, same = self._comparable_slots(again, native)
        near: dict[str, float] = {}
        keep: Keep = "unless same" if again.way == "leaf" else "unless near"
        if own_buffers := self._format_cost(again, native, first):
            keep = "always"

        def settle(slot: str, about: About, tensor: torch.Tensor, other: Native) -> None:
            apart = self._results.settle(
                opened.site, slot, about, tensor, other, self._noise, keep=keep
            )
            if apart is not None:
                near[about[0].digest] = apart

        def hand(record: Record, tensor: torch.Tensor) -> None:
            native_entry = first.tensors.get(record.key)
            about = record, record.class_name, record.alias
            if native_entry is not None:
                slot = f"{record.key.site}/input/{record.key.slot}"
                settle(slot, about, tensor, native_entry[1])

        exact = self._apply(again, hand, exact=True, own_buffers=own_buffers)
        comparable = {slot for slot in comparable if slot in exact}
        _require(comparable)
        for slot, alias, _ in again.live:
            if slot in comparable:
                about = outputs[slot], opened.frame.class_name, alias
                settle(slot, about, exact[slot], None if slot in same else native[slot])
        return comparable, first.is_its_own and comparable <= same, near

    def _format_cost(
        self, again: RepeatedCall, native: dict[str, torch.Tensor], first: PassedToParts
    ) -> bool:
        """Whether rounding the buffers to the captured run's format changes the result too much.

        Rounded weights are accepted. Buffers hold frequencies and statistics, some of which lose
        essential digits. If that changes the result by more than a few roundings, the exact result
        is computed with the program's own buffers, and the difference is the candidate's error.

        Args:
            again: The call.
            native: Its outputs in the captured run's format.
            first: The tensors that its own code passed to its parts in that format.
        """
        real = self._parts.real(again.opened, again.way, own=False)
        if not self._recast.rounds_buffers(real, again.opened.candidate):
            return False
        exact, rounded = (self._all_of(again, exact=True, own_buffers=own) for own in (True, False))
        try:
            kept = self._all_of(again, exact=False, own_buffers=True)
        except Exception:  # the two formats cannot be mixed, so `by_format` is not measured
            kept = {}
        narrow: dict[str | TensorKey, torch.Tensor] = {**native}
        for key, (record, tensor) in first.tensors.items():
            if key in exact:
                own = self._recast.captured(record, exact[key])
                narrow[key] = own if tensor is None else tensor
        costs: list[float] = []
        for name, right in exact.items():
            if name not in narrow or not _is_inexact(narrow[name]):
                continue
            cost = _apart(right, narrow[name])
            # The cost is caused by the rounded values of the buffers, or by computing in their
            # format.
            by_values = _apart(right, rounded[name]) > _SHARE * cost if name in rounded else False
            by_format = _apart(right, kept[name]) < _SHARE * cost if name in kept else False
            unit = torch.finfo(narrow[name].dtype).eps / 2.0
            if cost > _FEW_UNITS * unit and (by_values or by_format):
                costs.append(cost)
        if not costs:
            return False
        self._report.format_cost(again.opened.site, max(costs))
        return True

    def _all_of(
        self, again: RepeatedCall, *, exact: bool, own_buffers: bool
    ) -> dict[str | TensorKey, torch.Tensor]:
        """Outputs of a call by slot, and tensors that its own code passes to its parts by key."""
        tensors: dict[str | TensorKey, torch.Tensor] = {}

        def keep(record: Record, tensor: torch.Tensor) -> None:
            tensors[record.key] = tensor.detach().clone()

        made = self._apply(again, keep, exact=exact, own_buffers=own_buffers)
        return {**tensors, **made}

    def from_end_to_end(self, again: RepeatedCall) -> tuple[float, float, int] | None:
        """Errors of a whole module: in the captured run, and of the module in its format.

        Both errors are relative. They are those of the output whose captured error is the largest
        in units of the error in its format. The third value is its number of elements. None if no
        output can be compared.
        """
        self._recast.begin()
        as_whole = again._replace(way="whole")
        exact, native = (
            self._all_of(as_whole, exact=wide, own_buffers=False) for wide in (True, False)
        )
        ends: list[tuple[float, float, int]] = []
        for slot, right in exact.items():
            record = again.outputs.get(slot) if isinstance(slot, str) else None
            made = native.get(slot)
            if record is None or made is None or record.kept != "full":
                continue
            if not _is_inexact(right) or tuple(right.shape) != record.shape:
                continue
            error = _apart(right, self._recast.captured(record, right))
            ends.append((error, _apart(right, made), right.numel()))
        return max(ends, key=lambda end: end[0] / max(end[1], 1e-12), default=None)

    def _comparable_slots(
        self, again: RepeatedCall, made: dict[str, torch.Tensor]
    ) -> tuple[set[str], set[str]]:
        """The slots that can be compared with captured ones, and those of them that are equal."""
        comparable = {slot for slot in again.good if slot in made}
        _require(comparable)
        return comparable, {
            s for s in comparable if self._results.is_its_own(again.outputs[s], made[s])
        }

    def _apply(
        self, again: RepeatedCall, hand: Hand, *, exact: bool, own_buffers: bool = False
    ) -> dict[str, torch.Tensor]:
        """Outputs by slot of the module applied to the captured inputs.

        Args:
            again: The call.
            hand: Receives the tensors that its own code passes to its parts.
            exact: Whether to use wide arithmetic.
            own_buffers: Whether buffers keep the program's format instead of the captured run's.
        """
        opened, module = again.opened, again.opened.frame.module
        source = opened.held or (opened.args, opened.kwargs)
        supplied = SuppliedTensors()
        give = self._recast.inputs(
            *(opened.candidate, opened.inputs, opened.site, supplied),
            exact=exact,
            own=not is_pure(module),
        )
        args, kwargs = copied(source, give)
        if is_table(module):  # only the looked-up rows are cast, because the table may be huge
            rows = repeat(Script(module), module, {"": module}, {}, args, kwargs)
            return {"0": self._recast.looked_up(module, rows, opened.candidate, exact=exact)}
        real = self._parts.real(opened, again.way, own=False)
        with self._recast.arithmetic(module, exact=exact):
            result = repeat(
                self._parts.captured(opened, again.way, supplied, hand, exact=exact),
                module,
                real,
                self._recast.weights(
                    *(real, opened.candidate),
                    exact=exact,
                    cast={} if own_buffers else again.cast,
                    own_buffers=own_buffers,
                ),
                args,
                kwargs,
            )
        # An output that is also an input belongs to the program: a cache that the parts filled.
        foreign = {tensor.data_ptr() for tensor in supplied.strangers if tensor.numel()}
        return {
            slot: tensor
            for slot, _, tensor in layers.outputs(result, again.part)
            if tensor.data_ptr() not in foreign
        }


def _apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """Distance of the second tensor from the first, relative to the first."""
    if not _is_inexact(first) or first.shape != second.shape:
        return 0.0
    wide = torch.complex128 if first.is_complex() else torch.float64
    right = first.to(wide)
    size = float(right.norm())
    return float((right - second.to(wide)).norm()) / size if size > 0.0 else 0.0


def _is_inexact(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds rounded numbers, real or complex; rotations are often complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def _require(comparable: set[str]) -> None:
    if not comparable:
        raise NotReplayed("on the candidate's inputs it gives nothing that the candidate gave")
