"""Apply a module of the program to captured inputs, in both number formats, and keep the results.

The captured run's own format comes first: where a call gives the captured results to the bit, wide
arithmetic is only asked how large the noise is. Which calls can be applied again, and how, is known
before.
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
from driftline.adapters.torch.replay_results import Handed, Results, is_a_plain_product
from driftline.runs.key import TensorKey
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
    """

    left_out: list[str]
    is_its_own: bool


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
        there, own = (
            self._in_one_format(again, check)
            if self._one_format
            else self._in_both_formats(again, check)
        )
        return Kept([slot for slot, _, _ in again.live if slot not in there], own)

    def _in_one_format(self, again: Again, check: Callable[[], None]) -> tuple[set[str], bool]:
        opened, results, outputs = again.opened, self._results, again.outputs
        handed = Handed(results, self._require_room, narrow=False)
        if again.way == "leaf" and is_the_programs_own(opened, self._candidate):
            made = {slot: tensor for slot, _, tensor in again.live}
        else:
            made = self._apply(again, handed, exact=True)
        check()
        there, own = self._told(again, made, handed)
        for record, tensor in handed.found.values():
            if tensor is None:
                results.mention_exact(record, record.class_name, record.alias, own=True)
            else:
                results.put_exact(record, record.class_name, record.alias, tensor)
        for slot, alias, _ in again.live:
            if slot not in there:
                continue
            if own:
                self._noise.nothing(opened.site, slot)
                results.mention_exact(outputs[slot], opened.frame.class_name, alias, own=True)
            else:
                results.put_exact(outputs[slot], opened.frame.class_name, alias, made[slot])
        return there, own

    def _in_both_formats(self, again: Again, check: Callable[[], None]) -> tuple[set[str], bool]:
        opened, results, outputs = again.opened, self._results, again.outputs
        first = Handed(results, self._require_room, narrow=True)
        native = self._apply(again, first, exact=False)
        check()
        there, own = self._told(again, native, first)
        handed: set[TensorKey] = set()
        exact: dict[str, torch.Tensor] = {}
        if own and is_a_plain_product(opened, again.way):
            module = opened.frame.module
            weights = self._recast.weights({"": module}, exact=False, cast=again.cast)
            with self._recast.arithmetic(module, exact=True):
                results.some_of_a_product(opened, weights, self._noise)
        else:
            exact = self._apply(again, self._exactly(opened.site, own, handed), exact=True)
            there = {slot for slot in there if slot in exact}
            _require(there)
        for key, (record, tensor) in first.found.items():
            if key not in handed:  # no more than a change of format
                continue
            if tensor is None:
                results.mention_native(record, record.class_name, record.alias)
            else:
                results.put_native(record, record.class_name, record.alias, tensor)
        for slot, alias, _ in again.live:
            if slot not in there:
                continue
            about = outputs[slot], opened.frame.class_name, alias
            if own:
                if slot in exact:
                    results.measure(opened.site, slot, outputs[slot], exact[slot], self._noise)
                results.mention_exact(*about, own=False)
                results.mention_native(*about)
            else:
                results.put_exact(*about, exact[slot])
                results.put_native(*about, native[slot])
        return there, own

    def _told(
        self, again: Again, made: dict[str, torch.Tensor], handed: Handed
    ) -> tuple[set[str], bool]:
        """The slots that can be set against the captured ones, and whether all is the captured."""
        there = {slot for slot in again.good if slot in made}
        _require(there)
        own = handed.is_its_own and all(
            self._results.is_its_own(again.outputs[slot], made[slot]) for slot in there
        )
        return there, own

    def _exactly(self, site: str, own: bool, handed: set[TensorKey]) -> Hand:
        """Takes what a module's own code hands to its parts in wide arithmetic."""

        def hand(record: Record, tensor: torch.Tensor) -> None:
            handed.add(record.key)
            about = record, record.class_name, record.alias
            if own:
                slot = f"{record.key.site}/input/{record.key.slot}"
                self._results.measure(site, slot, record, tensor, self._noise)
                self._results.mention_exact(*about, own=False)
            else:
                self._results.put_exact(*about, tensor)

        return hand

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
