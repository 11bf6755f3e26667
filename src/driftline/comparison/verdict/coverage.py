"""How much of two models a comparison has covered: calls of leaves, model borders, steps.

Rows are counted one by one, with one entry per site, however many steps there are. A call of a leaf
is covered if its output was compared, if it is in a container of less than a tenth of the model
whose input and output were, or in other cases that docs/verdicts.md lists. `decision` decides what
that means for the verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping

from driftline.alignment.plan import (
    LONE_NODE,
    NO_NODE,
    NO_TENSOR,
    NOT_KEPT,
    NOT_PLANNED,
    SAME_VALUE,
)
from driftline.alignment.sites.site_graph import ROOTS
from driftline.comparison.table.covered import Covered, LeafShare
from driftline.comparison.table.row import NO_THRESHOLD, Row
from driftline.comparison.table.table import Side
from driftline.comparison.verdict.dataflow import (
    SeenTensor,
    SiteCall,
    containers_around,
    in_short_stretches,
)
from driftline.graphs.sources.graph_files import PARAMETER
from driftline.runs.scope import RANKS

SMALL_CONTAINER = 0.1
"""A container with less than this fraction of the model's leaf calls covers what is inside it."""

# The tensors by which calls of a leaf are counted: outputs, or others if no output was kept.
_KINDS = {
    "output": 0,
    "grad_input": 1,
    "grad_output": 1,
    "param_grad": 1,
    "optimizer_grad": 1,
    "input": 2,
    "param": 3,
}
_OUTPUT, _INPUT = 0, 2
_OTHER_KIND = 3
_OUTSIDE = ("(program)/", "(backward)/")
"""Prefixes of sites of operators outside all modules: those of a loss, and of its gradient."""
_FEW_CALLS = 5
"""A module with fewer operators than this is small, whatever the size of the model."""
_Call = tuple[int, int, int, int]
_SAME_TENSOR = ("reference_l2", "candidate_l2", "relative_l2", "max_abs_error")
"""If two rows of one step agree in these figures, they are about the same tensor."""


class _Site:
    """The calls of one site, by the kind of tensor by which they are counted."""

    __slots__ = ("calls", "compared", "counted", "last")

    def __init__(self) -> None:
        self.calls = [0, 0, 0, 0]
        self.compared = [0, 0, 0, 0]
        self.last: list[_Call | None] = [None, None, None, None]
        self.counted = [False, False, False, False]

    def copied(self) -> _Site:
        site = _Site()
        site.calls, site.compared = list(self.calls), list(self.compared)
        site.last, site.counted = list(self.last), list(self.counted)
        return site

    def take(self, kind: int, call: _Call, compared: bool) -> None:
        # The tensors of one call follow each other among those of its site.
        if self.last[kind] != call:
            self.last[kind] = call
            self.calls[kind] += 1
            self.counted[kind] = compared
            self.compared[kind] += compared
        elif compared and not self.counted[kind]:
            self.counted[kind] = True
            self.compared[kind] += 1

    @property
    def leaf(self) -> tuple[int, float]:
        """The number of calls and of covered calls, if the site is a leaf."""
        kind = next((kind for kind in range(len(self.calls)) if self.calls[kind]), _OUTPUT)
        return self.calls[kind], float(self.compared[kind])

    @property
    def touched(self) -> float:
        """An upper bound of the calls of which any tensor was compared."""
        return float(min(max(self.compared), self.leaf[0]))

    @property
    def made_share(self) -> float:
        """The fraction of its calls whose output was compared."""
        return self.compared[_OUTPUT] / max(self.calls[_OUTPUT], 1)

    @property
    def bordered(self) -> float:
        """The fraction of its calls whose input and output were both compared."""
        if not self.calls[_INPUT] or not self.calls[_OUTPUT]:
            return 0.0
        return min(self.compared[kind] / self.calls[kind] for kind in (_INPUT, _OUTPUT))


class SideCalls:
    """The calls of one side, collected row by row."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Tensors without a partner, by step: they count only if the other side has that step.
        self._waiting: dict[int, list[tuple[str, str, _Call, bool]]] = {}
        self.sites: dict[str, _Site] = {}
        # Calls of the first step, by site and visit: the order of their outputs, and which of them
        # were compared. Rows have the reference's order; if tensors have no partner, that of the
        # candidate is stored with its side.
        self.order: dict[SiteCall, int] = {}
        self.compared_calls: set[SiteCall] = set()
        # The inputs of compared calls of the first step, and where each was first compared.
        self.sources: dict[SiteCall, list[SeenTensor]] = {}
        self.classes: dict[str, str] = {}
        self.partners: dict[str, str] = {}
        # Sites whose partner has another class.
        self.ported: set[str] = set()
        # Containers that the other side computes in one piece.
        self.pieces: set[str] = set()
        # Operators of the program around the model, which compiled graphs of the model do not have.
        self.outside_model: set[str] = set()
        self._containers: set[str] | None = None
        self._inside: dict[str, list[str]] | None = None
        self._by_module: dict[str, list[str]] | None = None
        self._lasts: dict[str, tuple[int, int]] | None = None

    def copied(self, name: str) -> SideCalls:
        """The same calls under another side's name; no tensor may be waiting."""
        other = SideCalls(name)
        other.sites = {site: entry.copied() for site, entry in self.sites.items()}
        other.classes = dict(self.classes)
        other.compared_calls = set(self.compared_calls)
        return other

    def wait(self, site: str, port: str, call: _Call, compared: bool) -> None:
        """Take a tensor without a partner; it counts if its step turns out to be compared."""
        self._waiting.setdefault(call[2], []).append((site, port, call, compared))

    def finish(self, steps: Container[int]) -> None:
        """All rows were taken; something was compared of these steps."""
        for step, lone in self._waiting.items():
            if step in steps:
                for site, port, call, compared in lone:
                    self.take(site, port, call, compared)
        self._waiting.clear()
        # In a program without modules every operator counts, because there is nothing else.
        if any(not site.startswith(_OUTSIDE) for site in self.sites):
            for site in self.outside_model:
                if site in self.sites and not any(self.sites[site].compared):
                    del self.sites[site]
            self._inside = self._by_module = self._containers = None
        self.outside_model.clear()

    def take(self, site: str, port: str, call: _Call, compared: bool) -> None:
        entry = self.sites.get(site)
        if entry is None:
            entry = self.sites[site] = _Site()
            self._inside = self._by_module = self._containers = None
        entry.take(_KINDS.get(port, _OTHER_KIND), call, compared)

    def _containing(self) -> set[str]:
        """The sites that contain other sites."""
        if self._containers is None:
            holders: set[str] = set()
            for site in self.sites:
                for around in containers_around(site):
                    if around in holders:
                        break
                    holders.add(around)
            self._containers = {site for site in holders if site in self.sites}
            if len(self.sites) > 1:
                self._containers.update(site for site in ROOTS if site in self.sites)
        return self._containers

    def _leaves_inside(self) -> dict[str, list[str]]:
        """The leaves inside every container, at any depth."""
        if self._inside is None:
            inside: dict[str, list[str]] = {site: [] for site in self._containing()}
            for leaf in self.leaves():
                for around in containers_around(leaf):
                    if around in inside:
                        inside[around].append(leaf)
            self._inside = inside
        return self._inside

    def leaves(self) -> Iterator[str]:
        containers = self._containing()
        return (site for site in self.sites if site not in containers)

    def set_pieces(self, other: SideCalls, compiled: Container[str]) -> None:
        """Find the containers that the other side computes in one piece, so that it has no parts.

        This is so if the partner is a leaf of another class. If the partner has the same class and
        no parts, its parts were only not captured.

        Args:
            other: The other side.
            compiled: The other side's modules inside compiled ones, whose parts are not captured.
        """
        leaves = set(other.leaves())
        self.pieces = {
            site
            for site in self.ported & self._containing()
            if (partner := self.partners.get(site)) in leaves
            and partner not in ROOTS
            and partner not in compiled
        }

    def calls_inside(self, site: str, *, operators: bool) -> tuple[int, float]:
        """The calls of leaves in a container, and how many of them were compared.

        Args:
            site: The container.
            operators: Whether operators count as leaves, and not only modules.
        """
        calls, covered = 0, 0.0
        for leaf in self._leaves_inside().get(site, ()):
            if operators or "/" not in leaf:
                count, compared = self.sites[leaf].leaf
                calls, covered = calls + count, covered + compared
        return calls, covered

    @property
    def has_operators(self) -> bool:
        return any("/" in site for site in self.sites)

    def share(self, *, modules: bool = True) -> LeafShare:
        """How many of its leaf calls are covered, including those that containers cover.

        Operators and nodes of graphs are fused and divided differently on each side. Therefore
        those that only move elements do not count, and if no output was kept, any tensor of a call
        is enough.

        Args:
            modules: Whether both sides called modules.
        """
        calls, covered = 0, 0.0
        missed: dict[str, float] = {}
        has_outputs = any(entry.calls[_OUTPUT] for entry in self.sites.values())
        for leaf in self.leaves():
            entry = self.sites[leaf]
            count, compared = entry.leaf
            if not modules or "/" in leaf:
                # The result of a node that is fused with the next one exists only there.
                if has_outputs and not entry.calls[_OUTPUT]:
                    continue
                if not has_outputs:
                    compared = entry.touched
                if self._is_moving(leaf):
                    continue
            calls, covered = calls + count, covered + compared
            if compared < count:
                missed[leaf] = count - compared
        between = self._in_stretches(missed, SMALL_CONTAINER * calls) if missed else {}
        for leaf, uncovered in missed.items():
            share = between.get(leaf, 0.0)
            if share < 1.0:
                share = max(share, self._container_share(leaf, calls))
            covered += uncovered * share
        return LeafShare(self.name, calls, covered)

    def _in_stretches(self, missed: Mapping[str, float], most: float) -> dict[str, float]:
        """The fraction of leaves' calls in short stretches of execution between compared calls."""
        return in_short_stretches(
            sorted(self.order, key=self.order.__getitem__),
            missed,
            self.compared_calls,
            self.sources,
            most,
            ends=(self._border_compared(_INPUT), self._border_compared(_OUTPUT)),
        )

    def by_modules(self) -> SideCalls:
        """The same calls, with operators and nodes merged into the modules in their names.

        With this a run of operators can be compared with one of modules, in which the code of
        containers has no calls.
        """
        merged = SideCalls(self.name)
        merged.classes, merged.partners, merged.ported = self.classes, self.partners, self.ported
        for site, entry in self.sites.items():
            if "/" not in site:
                merged.sites[site] = entry
        for site, entry in self.sites.items():
            module = site.rpartition("/")[0]
            is_computed = entry.calls[_OUTPUT] and not _moves_only(self.classes.get(site, ""))
            if "/" not in site or not (is_computed or entry.compared[_OUTPUT]):
                continue
            calls = merged.sites.get(module)
            if calls is None:
                calls = merged.sites[module] = _Site()
                calls.calls[_OUTPUT] = 1
            if entry.compared[_OUTPUT] and not calls.compared[_OUTPUT]:
                calls.compared[_OUTPUT] = 1
        for (site, visit), order in self.order.items():
            module = site.rpartition("/")[0] if "/" in site else site
            if (site, visit) in self.compared_calls:
                merged.compared_calls.add((module, 0))
            last = merged.order.get((module, 0), order)
            merged.order[module, 0] = max(last, order)
        for (site, _), sources in self.sources.items():
            module = site.rpartition("/")[0] if "/" in site else site
            outer = (
                SeenTensor((seen.call[0].rpartition("/")[0] or seen.call[0], 0), seen.is_given)
                for seen in sources
            )
            merged.sources.setdefault((module, 0), []).extend(outer)
        return merged

    def _border_compared(self, kind: int) -> bool:
        return any(self.sites[site].compared[kind] for site in ROOTS if site in self.sites)

    def _container_share(self, leaf: str, calls: int) -> float:
        """The fraction of a leaf's calls that a small container around it covers."""
        if "/" in leaf and self._in_compared_module(leaf, calls):
            return 1.0
        for around in containers_around(leaf):
            if around not in self._containing():
                continue
            # The other side computes the container in one piece, whose output may be compared.
            if around in self.pieces:
                return self.sites[around].made_share
            size, _ = self.calls_inside(around, operators=True)
            if size >= SMALL_CONTAINER * calls:
                return 0.0
            if (share := self.sites[around].bordered) > 0.0:
                return share
        return 0.0

    def _in_compared_module(self, operator: str, calls: int) -> bool:
        """Whether an operator is in a small module of which a later operator was compared.

        The operators of a module are computed from each other, and a fused kernel keeps only some
        of their results.
        """
        if self._by_module is None:
            self._by_module = {}
            for leaf in self.leaves():
                if "/" in leaf:
                    self._by_module.setdefault(leaf.rpartition("/")[0], []).append(leaf)
        in_module = self._by_module[operator.rpartition("/")[0]]
        size = sum(self.sites[leaf].leaf[0] for leaf in in_module if not self._is_moving(leaf))
        if size >= max(SMALL_CONTAINER * calls, _FEW_CALLS):
            return False
        made = self._last_calls()
        if not made:
            return any(self.sites[leaf].leaf[1] for leaf in in_module)
        return made.get(operator, (0, 0))[0] < max(made.get(leaf, (0, 0))[1] for leaf in in_module)

    def _is_moving(self, leaf: str) -> bool:
        return _moves_only(self.classes.get(leaf, ""))

    def _last_calls(self) -> dict[str, tuple[int, int]]:
        """The order of the last call of every site, and of its last compared call."""
        if self._lasts is None:
            self._lasts = {}
            for (site, visit), order in self.order.items():
                last, compared = self._lasts.get(site, (-1, -1))
                is_compared = (site, visit) in self.compared_calls
                self._lasts[site] = (
                    max(last, order),
                    max(compared, order) if is_compared else compared,
                )
        return self._lasts


def _moves_only(class_name: str) -> bool:
    """Whether an operator only rearranges or selects elements.

    >>> _moves_only("aten.view.default"), _moves_only("Split"), _moves_only("aten.addmm.default")
    (True, True, False)
    """
    words = class_name.lower().removeprefix("aten.").split(".")
    return words[0].strip("_") in _MOVING


_MOVING = frozenset(
    (
        *("view", "unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "t"),
        *("permute", "transpose", "split", "slice", "getitem", "select", "alias", "identity"),
        *("clone", "detach", "contiguous", "placeholder", "constant", "reorderinput"),
        *("reorderoutput", "cast", "unbind", "chunk", "split_with_sizes"),
    )
)


def _is_gradient_sum(row: Row) -> bool:
    """Whether a row is a sum of gradients that autograd computes for a value used twice.

    No call of the model computes it, and graphs have it in another module or in none.
    """
    return (
        row.status in ("missing", "extra")
        and row.key.phase == "backward"
        and row.class_name.startswith("aten.add.")
        and row.reason in (NO_NODE, NO_TENSOR, NOT_KEPT)
    )


def _port(row: Row) -> str:
    """The port of a row; `param` for a node of a graph that is a parameter."""
    is_parameter = "/" in row.key.site and row.class_name.startswith(PARAMETER)
    return "param" if is_parameter else row.key.port


def _is_apart(row: Row) -> bool:
    """Whether a row is about two different calls, or about one side only."""
    return bool(
        row.status in ("missing", "extra")
        or row.candidate_site
        or row.candidate_port
        or row.candidate_rank is not None
        or row.candidate_step is not None
        or row.candidate_visit is not None
    )


class CallCounts:
    """Counts of calls, steps and elements, collected row by row."""

    def __init__(self) -> None:
        self.reference = SideCalls("reference")
        self.candidate = SideCalls("candidate")
        self.steps: set[int] = set()
        self.lone_steps: tuple[set[int], set[int]] = (set(), set())
        self.elements = 0
        self._candidate_steps: set[int] = set()
        self._first_step: int | None = None
        # Until a row shows a difference, the candidate's calls are those of the reference.
        self._are_alike = True
        # Compared tensors of the first step, by their figures.
        self._seen: dict[tuple[object, ...], SeenTensor] = {}
        self._partners: dict[SiteCall, SiteCall] = {}
        self._first_process: tuple[int, int] | None = None

    def finish(self) -> None:
        """All rows were taken."""
        if self._are_alike:
            self.candidate = self.reference
        else:
            self.candidate.finish(self._candidate_steps)
            partner = self._partners.get
            self.candidate.sources = {
                partner(call, call): [
                    seen._replace(call=partner(seen.call, seen.call)) for seen in sources
                ]
                for call, sources in self.reference.sources.items()
            }
        self.reference.finish(self.steps)

    def _count_separately(self) -> None:
        """Count the candidate's calls separately from now on."""
        self._are_alike = False
        self.candidate = self.reference.copied("candidate")
        self._candidate_steps = set(self.steps)
        self.candidate.ported = set(self.reference.ported)
        for site, entry in self.reference.sites.items():
            if entry.compared[_OUTPUT]:
                self.reference.partners[site] = self.candidate.partners[site] = site

    def take(self, row: Row) -> None:
        key, status = row.key, row.status
        # What the user left out on purpose does not count.
        if NOT_PLANNED in row.reason or row.reason.startswith(NO_THRESHOLD):
            return
        if _is_gradient_sum(row):
            return
        # These were compared, too: a tensor inside a fusion, with the result of the fused node; a
        # tensor that is the same value as another one, with that; and a row that a metric decided,
        # even if rounding makes it neither right nor wrong.
        compared = (
            status in ("pass", "fail", "unjudged")
            or row.inside_fusion
            or row.reason.startswith(SAME_VALUE)
            or bool(row.decided_by)
        )
        if self._are_alike and _is_apart(row):
            self._count_separately()
        call, port = (key.rank, key.process, key.step, key.visit), _port(row)
        if self._first_step is None:
            self._first_step = key.step
        if status != "extra" and port == "output" and key.step == self._first_step:
            self.reference.order.setdefault((key.site, key.visit), row.order)
            if compared:
                self.reference.compared_calls.add((key.site, key.visit))
        self._see(row)
        if "/" in key.site and row.class_name:
            own = self.candidate if status == "extra" else self.reference
            own.classes.setdefault(key.site, row.class_name)
        if status in ("missing", "extra"):
            self._take_lone(row, port, call, compared)
            return
        self.reference.take(key.site, port, call, compared)
        if row.candidate_class and compared and port == "output":
            self.reference.ported.add(key.site)
        if not self._are_alike:
            self._take_candidate(row, compared)
        if compared:
            self.steps.add(key.step)
            self.elements += math.prod(row.reference_shape or ())

    def _see(self, row: Row) -> None:
        """Record which call of the first step computed or took a compared tensor."""
        key = row.key
        if not row.compared or key.port not in ("input", "output"):
            return
        if self._first_process is None:
            self._first_process = (key.rank, key.process)
        # One process suffices, because all ranks make the same calls.
        is_first = (*self._first_process, self._first_step) == (key.rank, key.process, key.step)
        if not is_first:
            return
        call = (key.site, key.visit)
        if row.candidate_site or row.candidate_visit is not None:
            visit = key.visit if row.candidate_visit is None else row.candidate_visit
            self._partners[call] = (row.candidate_site or key.site, visit)
        seen = SeenTensor(call, key.port == "output")
        figures = tuple(map(row.metrics.get, _SAME_TENSOR))
        # Tensors of zeros cannot be distinguished by their figures.
        first = self._seen.setdefault(figures, seen) if figures[0] else seen
        if key.port == "input":
            self.reference.sources.setdefault(call, []).append(first)

    def _take_lone(self, row: Row, port: str, call: _Call, compared: bool) -> None:
        """Take a row that only one side has."""
        key, is_extra = row.key, row.status == "extra"
        side = self.candidate if is_extra else self.reference
        self.lone_steps[is_extra].add(key.step)
        # Compared with a run of modules, such a node is code of the model, not a call of a leaf.
        if row.reason.startswith(LONE_NODE) and "/" not in key.site:
            return
        if row.reason == NO_NODE and key.site.startswith(_OUTSIDE):
            side.outside_model.add(key.site)
        side.wait(key.site, port, call, compared)
        if compared and port == "output":
            side.compared_calls.add((key.site, key.visit))

    def _take_candidate(self, row: Row, compared: bool) -> None:
        key = row.key
        site, port = row.candidate_site or key.site, _port(row)
        # The partner of a parameter is a parameter.
        if port != "param":
            port = row.candidate_port or port
        call = (
            key.rank if row.candidate_rank is None else row.candidate_rank,
            key.process,
            key.step if row.candidate_step is None else row.candidate_step,
            key.visit if row.candidate_visit is None else row.candidate_visit,
        )
        self.candidate.take(site, port, call, compared)
        if compared:
            self._candidate_steps.add(call[2])
            if port == "output" and key.step == self._first_step:
                self.candidate.compared_calls.add((site, call[3]))
        if compared and port == _port(row) == "output":
            self.reference.partners.setdefault(key.site, site)
            self.candidate.partners.setdefault(site, key.site)
            if row.candidate_class:
                self.candidate.ported.add(site)


def covered_by(counts: CallCounts, reference: Side, candidate: Side) -> Covered:
    """What a comparison covered, from the rows of its table and the facts about its two runs."""
    counts.finish()
    leaves, unseen = _deciding_leaves(counts, reference, candidate)
    sides = (("reference", reference), ("candidate", candidate))
    missing, extra = (
        tuple(sorted(lone - counts.steps)) if counts.steps else () for lone in counts.lone_steps
    )
    return Covered(
        leaves,
        unseen,
        tuple(_borders(counts)),
        tuple(sorted(counts.steps)),
        missing,
        extra,
        (reference.scope.steps_ran, candidate.scope.steps_ran),
        counts.elements,
        sum(part.elements for _, side in sides for part in side.left_out),
        tuple(f"{part.words} of the {name}" for name, side in sides for part in side.left_out),
        tuple(
            f"{', '.join(side.unseen)} of the {name}"
            for (name, side), other in zip(sides, (candidate, reference), strict=True)
            # Ranks that the other side's filters leave out were left out on purpose.
            if side.unseen and not any(word.startswith(RANKS) for word in other.scope.filters)
        ),
    )


def _deciding_leaves(counts: CallCounts, reference: Side, candidate: Side) -> tuple[LeafShare, str]:
    """The coverage that decides, and the first compiled region that hides many modules.

    Calls that only one side has must be parts of something that was compared, or be in a short
    stretch between two compared calls. So the side that is covered less decides. There are two
    exceptions: a side that was dumped with filters leaves out on purpose what only the other one
    has, and a dump of another tool, which may contain only a part of a model, is measured against
    its own contents.
    """
    sides = (reference, candidate)
    modules = all(side.scope.has_modules for side in sides)
    visits = Counter[str]()
    for number, site in enumerate(candidate.sequence):
        counts.candidate.order[site, visits[site]] = number
        visits[site] += 1
    own, other = counts.reference, counts.candidate
    # If one side has modules only, nothing finer than a module can be compared.
    if own.has_operators != other.has_operators and all(side.scope.captured for side in sides):
        own, other = (
            calls.by_modules() if calls.has_operators else calls for calls in (own, other)
        )
    if own is not other:
        own.set_pieces(other, {*candidate.scope.compiled, *dict(candidate.scope.hidden)})
        other.set_pieces(own, {*reference.scope.compiled, *dict(reference.scope.hidden)})
    first = _share_of(own, other, reference, modules=modules)
    # If both sides have the same calls, they have the same coverage.
    second = first if own is other else _share_of(other, own, candidate, modules=modules)
    shares = (first, second)
    partial = [share for share, side in zip(shares, sides, strict=True) if not side.scope.captured]
    # Of two such dumps, the one with fewer calls contains less of the same model.
    if partial:
        return min(partial, key=lambda entry: (entry[0].calls, entry[0].share))
    deciding = [
        share
        for share, other in zip(shares, reversed(sides), strict=True)
        if not other.scope.filters
    ]
    # If both were filtered, the one with fewer calls decides, for the same reason.
    if not deciding:
        return min(shares, key=lambda entry: (entry[0].calls, entry[0].share))
    return min(deciding, key=lambda entry: entry[0].share)


def _share_of(
    own: SideCalls, other: SideCalls, side: Side, *, modules: bool
) -> tuple[LeafShare, str]:
    """The coverage of one side; a compiled region counts as the many modules that it hides."""
    share = own.share(modules=modules)
    unseen = ""
    total = sum(other.sites[leaf].leaf[0] for leaf in other.leaves() if "/" not in leaf)
    hidden = dict(side.scope.hidden)
    for leaf in own.leaves() if modules else ():
        # If both sides have the same calls, every site is its own partner.
        partner = leaf if own is other else own.partners.get(leaf)
        # A module may be a leaf here and have many parts on the other side. If it is compiled, it
        # has them here, too.
        if partner is None or not (leaf in ROOTS or leaf in side.scope.compiled or leaf in hidden):
            continue
        calls, compared = other.calls_inside(partner, operators=False)
        counted, covered = own.sites[leaf].leaf
        # If the other side has not captured them either, the module tree tells their number.
        calls = max(calls, counted * hidden.get(leaf, 0))
        if calls > counted and calls >= SMALL_CONTAINER * total:
            unseen = unseen or leaf
            share = share._replace(
                calls=share.calls - counted + calls, covered=share.covered - covered + compared
            )
    return share, unseen


def _borders(counts: CallCounts) -> Iterator[str]:
    """Inputs and outputs of the model that both sides have, but that were not compared."""
    for kind, word in ((_INPUT, "inputs"), (_OUTPUT, "outputs")):
        held: list[bool] = []
        for side in (counts.reference, counts.candidate):
            roots = [side.sites[site] for site in ROOTS if site in side.sites]
            held.append(any(root.calls[kind] for root in roots))
            if any(root.compared[kind] for root in roots):
                break
        else:
            if all(held):
                yield word
