"""The execution order of the modules of an `ait llm` torch dump, derived from inputs and outputs.

`model_tree.json` lists modules in the order in which the program registered them, which need not be
the order in which it called them: transformers registers the norms of a block after its attention
and its mlp. Two facts determine the order among the modules of one container:

1. A module that reads another module's output, byte by byte, ran after it.
2. A module whose input no module made reads a value that was computed between modules (such as a
residual sum) from outputs that no module reads. So it ran after the modules that made those
outputs, unless it ran before them by 1.

Where these facts leave the order open, the order of registration stays. Values are compared within
one step of one dump only, so a fault on one side of a comparison cannot affect which tensors are
paired.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from driftline.errors import DriftlineError
from driftline.formats.dump_run import Leaf
from driftline.numerics import kernel

Call = tuple[str, int]
"""Site and visit."""
_ROOT = "(root)"
_SAMPLE = 1 << 12
"""Number of bytes at either end of a tensor that identify it within its step."""
_MOST_TENSORS = 50_000
"""Limit for one step.

Steps with more tensors keep the order of registration, so that they are not read twice.
"""


def in_order(leaves: Sequence[Leaf]) -> list[Leaf] | None:
    """Sort the leaves of one step of one process by execution; None if nothing shows the order.

    Args:
        leaves: Leaves in the order of registration.
    """
    if not leaves or len(leaves) > _MOST_TENSORS:
        return None
    step = _Step(leaves)
    if not step.can_be_ordered:
        return None
    moments = dict(step.moments())
    return sorted(leaves, key=lambda leaf: moments[_call(leaf)][leaf.record.key.port != "input"])


def _call(leaf: Leaf) -> Call:
    return leaf.record.key.site, leaf.record.key.visit


class _Step:
    """The inputs and outputs of every call of one step, and the nesting of the calls."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._reads: dict[Call, set[str]] = {}
        self._gives: dict[Call, set[str]] = {}
        for leaf in leaves:
            reads = self._reads.setdefault(_call(leaf), set())
            gives = self._gives.setdefault(_call(leaf), set())
            port = leaf.record.key.port
            if port in ("input", "output") and (text := _identity(leaf)):
                (reads if port == "input" else gives).add(text)
        self._given: dict[Call, set[str]] = {}
        self._needed: dict[Call, set[str]] = {}
        sites = {site for site, _ in self._reads}
        self._visits = [site for site, visit in self._reads if visit]
        self._inside: dict[str, list[Call]] = {}
        self._around: dict[str, str] = {}
        for call in self._reads:
            holder = self._around.setdefault(call[0], _container_of(call[0], sites))
            self._inside.setdefault(holder, []).append(call)
        self._readers: dict[str, set[str]] = {}
        self._makers: dict[str, set[str]] = {}
        for texts, table in ((self._reads, self._readers), (self._gives, self._makers)):
            for (site, _), own in texts.items():
                for text in own:
                    table.setdefault(text, set()).add(site)

    @property
    def can_be_ordered(self) -> bool:
        """Whether inputs were kept, and no container was called twice.

        For a container that was called twice, it is unknown which call contains which inner call.
        """
        return bool(self._readers) and not any(site in self._inside for site in self._visits)

    def moments(self) -> Iterator[tuple[Call, tuple[int, int]]]:
        """The times when each call began and ended, as counts."""
        clock = 0
        # An explicit stack instead of recursion, because the nesting comes from a file.
        stack: list[tuple[Call | None, int, Iterator[Call]]] = [(None, 0, self._sorted(""))]
        while stack:
            call, begun, below = stack[-1]
            child = next(below, None)
            clock += 1
            if child is not None:
                stack.append((child, clock, self._sorted(child[0])))
                continue
            stack.pop()
            if call is not None:
                yield call, (begun, clock)

    def _sorted(self, holder: str) -> Iterator[Call]:
        """The calls directly inside a container, in execution order."""
        calls = self._inside.get(holder, [])
        before: dict[Call, set[Call]] = {call: set() for call in calls}
        makers: dict[str, list[Call]] = {}
        for call in calls:
            for text in self._all_outputs(call):
                makers.setdefault(text, []).append(call)
        for call in calls:
            for text in sorted(self._outer_inputs(call)):
                for maker in makers.get(text, ()):
                    if maker != call:
                        _add(before, maker, call)
        unread = [call for call in calls if self._is_unread(call)]
        for call in calls:
            if self._has_no_maker(call):
                for other in unread:
                    if other != call:
                        _add(before, other, call)
        return _topological(calls, before)

    def _all_outputs(self, call: Call) -> set[str]:
        """Outputs of a call and of all calls inside it."""
        if call not in self._given:
            inner = (self._all_outputs(inner_call) for inner_call in self._inner_calls(call))
            self._given[call] = self._gives[call].union(*inner)
        return self._given[call]

    def _outer_inputs(self, call: Call) -> set[str]:
        """Inputs of a call and of all calls inside it, without those that are made inside it."""
        if call not in self._needed:
            inner = self._inner_calls(call)
            made_inside = set[str]().union(*(self._all_outputs(inner_call) for inner_call in inner))
            needed = set[str]().union(*(self._outer_inputs(inner_call) for inner_call in inner))
            self._needed[call] = self._reads[call] | (needed - made_inside)
        return self._needed[call]

    def _inner_calls(self, call: Call) -> list[Call]:
        return self._inside.get(call[0], [])

    def _is_unread(self, call: Call) -> bool:
        """Whether no call outside reads a call's outputs, and no container returns them."""
        gives = self._gives[call]
        above = set(self._enclosing(call[0]))
        return bool(gives) and all(
            all(_is_inside(reader, call[0]) for reader in self._readers.get(text, ()))
            and not above & self._makers[text]
            for text in gives
        )

    def _has_no_maker(self, call: Call) -> bool:
        """Whether no input of a call is an output of another call, or an input of a container."""
        above = set(self._enclosing(call[0]))
        return not any(
            any(not _is_inside(maker, call[0]) for maker in self._makers.get(text, ()))
            or above & self._readers.get(text, set())
            for text in self._outer_inputs(call)
        )

    def _enclosing(self, site: str) -> Iterator[str]:
        while site := self._around[site]:
            yield site


def _container_of(site: str, sites: set[str]) -> str:
    """The nearest enclosing container that was called; empty for the outermost module."""
    if site == _ROOT:
        return ""
    while "." in site:
        site = site.rpartition(".")[0]
        if site in sites:
            return site
    return _ROOT if _ROOT in sites else ""


def _is_inside(site: str, holder: str) -> bool:
    return site == holder or site.startswith(f"{holder}.")


def _add(before: dict[Call, set[Call]], earlier: Call, later: Call) -> None:
    """Record that one call runs before another, unless that contradicts earlier records."""
    waiting, seen = [earlier], {earlier}
    while waiting:
        for call in before[waiting.pop()]:
            if call == later:
                return
            if call not in seen:
                seen.add(call)
                waiting.append(call)
    before[later].add(earlier)


def _topological(calls: Sequence[Call], before: dict[Call, set[Call]]) -> Iterator[Call]:
    """All calls, each after those that run before it; otherwise in the order of registration."""
    place = {call: index for index, call in enumerate(calls)}
    after: dict[Call, list[Call]] = {call: [] for call in calls}
    waits = {call: len(before[call]) for call in calls}
    for call in calls:
        for earlier in before[call]:
            after[earlier].append(call)
    ready = [place[call] for call in calls if not waits[call]]
    while ready:
        call = calls[heapq.heappop(ready)]
        yield call
        for later in after[call]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, place[later])


def _identity(leaf: Leaf) -> str:
    """A text that is equal for equal tensors of a step; empty if many tensors may be equal."""
    record = leaf.record
    count = math.prod(record.shape)
    # Vectors and constants are equal too often to show which module made them.
    if leaf.fetch is None or record.lost or len(record.shape) < 2 or not count:
        return ""
    try:
        values = np.ascontiguousarray(leaf.fetch()).reshape(-1).view(np.uint8)
    except (DriftlineError, OSError, ValueError):
        return ""  # the reader of the tensor will get the reason
    ends = values
    if values.size > 2 * _SAMPLE:
        ends = np.concatenate((values[:_SAMPLE], values[-_SAMPLE:]))
    width = values.size // count
    if not width or not (ends[width:] != ends[:-width]).any():
        return ""
    # Only the number of elements counts, because a view with other axes is the same tensor.
    return f"{record.dtype} {count} {kernel.digest(ends)}"
