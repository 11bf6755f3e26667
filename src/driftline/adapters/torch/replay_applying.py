"""Apply a module of the program to captured inputs, in both number formats, and keep the results.

The captured run's own format comes first: where a call gives the captured results to the bit, or as
good as these, wide arithmetic is only asked how large the noise is. Which
calls can be applied again, and how, is known before.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from driftline.adapters.torch import flatten
from driftline.adapters.torch.candidate import Candidate
from driftline.adapters.torch.recasting import Given, Recast
from driftline.adapters.torch.repeating import Script, copied, repeat
from driftline.adapters.torch.replay_calls import (
    NotReplayed,
    Open,
    Slots,
    is_pure,
    is_table,
    is_the_programs_own,
)
from driftline.adapters.torch.replay_noise import Noise
from driftline.adapters.torch.replay_parts import Hand, Parts
from driftline.adapters.torch.replay_results import (
    About,
    Handed,
    Native,
    Results,
    is_a_plain_product,
)
from driftline.runs.record import Record


class Again(NamedTuple):
    """A call that is applied again.

    Attributes:
        opened: The program's call.
        way: leaf, own code or whole.
        part: Which part of a cache is its own.
        live: What the program's call gave, of what the captured run has, too.
        good: Slots that come out again from the program's own inputs.
        cast: Weights in the captured run's format, kept from one repetition to the next.
    """

    opened: Open
    way: str
    part: int
    live: Slots
    good: set[str]
    cast: dict[int, torch.Tensor]

    @property
    def outputs(self) -> dict[str, Record]:
        assert self.opened.candidate is not None
        return self.opened.candidate.outputs


class Kept(NamedTuple):
    """What came of one.

    Attributes:
        left_out: Slots of which nothing is known.
        is_its_own: Whether it gave the captured results to the bit.
        near: Digests of captured results that are as good as what it gave, and how far the two
            are apart in units of noise.
    """

    left_out: list[str]
    is_its_own: bool
    near: dict[str, float]


class Applying:
    """Applies calls again, one at a time.

    Args:
        candidate: The captured run.
        recast: Decides formats.
        parts: Answers the calls that modules make of others.
        results: Takes what they give.
        noise: Takes how far the captured run's format is from exact.
        require_room: Raises where as many bytes cannot be held besides.
        one_format: Wide arithmetic alone: it is the captured run's, or the only one wanted.
    """

    def __init__(
        self,
        candidate: Candidate,
        recast: Recast,
        parts: Parts,
        results: Results,
        noise: Noise,
        require_room: Callable[[int], None],
        *,
        one_format: bool,
    ) -> None:
        self._candidate = candidate
        self._recast = recast
        self._parts = parts
        self._results = results
        self._noise = noise
        self._require_room = require_room
        self._one_format = one_format

    def __call__(self, again: Again, check: Callable[[], None]) -> Kept:
        """Apply a call again and keep what says something.

        Args:
            again: The call.
            check: Called after the first repetition; raises if it does not count.

        Raises:
            NotReplayed: It gives nothing that the captured run has.
        """
        self._recast.begin()
        near: dict[str, float] = {}
        if self._one_format:
            there, own, near = self._in_one_format(again, check)
        elif is_a_plain_product(again.opened, again.way):
            there, own, near = self._as_a_product(again, check)
        else:
            there, own, near = self._in_both_formats(again, check)
        return Kept([slot for slot, _, _ in again.live if slot not in there], own, near)

    def _in_one_format(
        self, again: Again, check: Callable[[], None]
    ) -> tuple[set[str], bool, dict[str, float]]:
        opened, results, outputs = again.opened, self._results, again.outputs
        handed = Handed(results, self._require_room, narrow=False)
        if again.way == "leaf" and is_the_programs_own(opened, self._candidate):
            made = {slot: tensor for slot, _, tensor in again.live}
        else:
            made = self._apply(again, handed, exact=True)
        check()
        there, same = self._told(again, made)
        own = handed.is_its_own and there == same
        all_: list[tuple[str, About, Native]] = [
            (f"{key.site}/input/{key.slot}", (record, record.class_name, record.alias), tensor)
            for key, (record, tensor) in handed.found.items()
        ]
        all_ += [
            (slot, (outputs[slot], opened.frame.class_name, alias), made[slot])
            for slot, alias, _ in again.live
            if slot in there
        ]
        near = None if own else self._wide_nearness(again, all_, same)
        for slot, about, tensor in all_:
            if tensor is None or own or (near is not None and slot in same):
                if slot in there:
                    self._noise.nothing(opened.site, slot)
                results.mention_exact(*about, own=True)
            elif near is not None:
                results.measure(opened.site, slot, about[0], tensor, self._noise)
                results.mention_exact(*about, own=False)
            else:
                results.put_exact(*about, tensor)
        return there, own, near or {}

    def _wide_nearness(
        self, again: Again, all_: list[tuple[str, About, Native]], same: set[str]
    ) -> dict[str, float] | None:
        """How far each result is from the captured one that is not the same; None if one is far.

        Only of what may be near in 16 bits, too: linear layers and the own code of others.
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
        self, again: Again, check: Callable[[], None]
    ) -> tuple[set[str], bool, dict[str, float]]:
        """A linear layer: wide arithmetic on some rows says how large the noise is.

        Only where the captured product is neither the trusted one to the bit nor as good as that
        is all of it computed once more.
        """
        opened, results, module = again.opened, self._results, again.opened.frame.module
        nothing = Handed(results, self._require_room, narrow=True)
        native = self._apply(again, nothing, exact=False)
        check()
        there, same = self._told(again, native)
        own = there == same
        weights = self._recast.weights({"": module}, exact=False, cast=again.cast)
        with self._recast.arithmetic(module, exact=True):
            some = results.some_of_a_product(opened, weights)
        ((slot, record),) = again.outputs.items()
        apart = None if own else results.nearness(record, native[slot], some)
        about = record, opened.frame.class_name, again.live[0][1]
        if own or apart is not None:
            self._noise.add(opened.site, slot, some.exact, some.captured)
            results.mention_exact(*about, own=False)
            results.mention_native(*about, own=own)
            return there, own, {} if apart is None else {record.digest: apart}
        results.put_exact(*about, self._apply(again, nothing, exact=True)[slot])
        results.put_native(*about, native[slot])
        return there, own, {}

    def _in_both_formats(
        self, again: Again, check: Callable[[], None]
    ) -> tuple[set[str], bool, dict[str, float]]:
        opened, outputs = again.opened, again.outputs
        first = Handed(self._results, self._require_room, narrow=True)
        native = self._apply(again, first, exact=False)
        check()
        there, same = self._told(again, native)
        near: dict[str, float] = {}

        def settle(slot: str, about: About, tensor: torch.Tensor, other: Native) -> None:
            apart = self._results.settle(
                *(opened.site, slot, about, tensor, other, self._noise),
                may_be_near=again.way != "leaf",
            )
            if apart is not None:
                near[about[0].digest] = apart

        def hand(record: Record, tensor: torch.Tensor) -> None:
            found = first.found.get(record.key)
            about = record, record.class_name, record.alias
            if found is not None:
                slot = f"{record.key.site}/input/{record.key.slot}"
                settle(slot, about, tensor, found[1])

        exact = self._apply(again, hand, exact=True)
        there = {slot for slot in there if slot in exact}
        _require(there)
        for slot, alias, _ in again.live:
            if slot in there:
                about = outputs[slot], opened.frame.class_name, alias
                settle(slot, about, exact[slot], None if slot in same else native[slot])
        return there, first.is_its_own and there <= same, near

    def _told(self, again: Again, made: dict[str, torch.Tensor]) -> tuple[set[str], set[str]]:
        """The slots that can be set against the captured ones, and those that are the captured."""
        there = {slot for slot in again.good if slot in made}
        _require(there)
        return there, {s for s in there if self._results.is_its_own(again.outputs[s], made[s])}

    def _apply(self, again: Again, hand: Hand, *, exact: bool) -> dict[str, torch.Tensor]:
        """The module on the captured inputs; slot to tensor."""
        opened, module = again.opened, again.opened.frame.module
        source = opened.held or (opened.args, opened.kwargs)
        given = Given()
        give = self._recast.inputs(
            *(opened.candidate, opened.inputs, opened.site, given),
            exact=exact,
            own=not is_pure(module),
        )
        args, kwargs = copied(source, give)
        if is_table(module):  # which may be huge, to look up a few rows
            rows = repeat(Script(module), module, {"": module}, {}, args, kwargs)
            return {"0": self._recast.looked_up(module, rows, exact=exact)}
        real = self._parts.real(opened, again.way, own=False)
        with self._recast.arithmetic(module, exact=exact):
            result = repeat(
                self._parts.captured(opened, again.way, given, hand, exact=exact),
                module,
                real,
                self._recast.weights(real, exact=exact, cast=again.cast),
                args,
                kwargs,
            )
        # What comes out as it went in is the program's own: a cache that the parts have filled.
        foreign = {tensor.data_ptr() for tensor in given.strangers if tensor.numel()}
        return {
            slot: tensor
            for slot, _, tensor in flatten.outputs(result, again.part)
            if tensor.data_ptr() not in foreign
        }


def _require(there: set[str]) -> None:
    if not there:
        raise NotReplayed("on the candidate's inputs it gives nothing that the candidate gave")
