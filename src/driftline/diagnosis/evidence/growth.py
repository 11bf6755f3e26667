"""Evidence from two runs alone: does more error come out of a site than its input explains?

Compares every site with its siblings in other layers and with the rounding of its format. Sites
that compute with integers behind a float interface are recognised first, because their noise is
that of eight bits: by class names, packed or integer weights, and weights that have disappeared
from the module tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from driftline.comparison.tolerance.defaults import QUANTISED
from driftline.diagnosis.sites import FINE, Call, Place, Site, ancestors, parts_of
from driftline.graphs.module_tree import ModuleNode, ModuleTree
from driftline.runs.run import Run

# Parts of class names and module names that quantisation libraries use.
_WORDS = ("quant", "int8", "int4", "4bit", "8bit", "gptq", "awq")
_PACKED = ("packed", *_WORDS)
_WEIGHTS = ("weight", "qweight", "weight_packed", "codes")
_NARROW = ("int", "uint", "float8", "float4")


def quantised_sites(reference: Run, candidate: Run) -> dict[str, float]:
    """Relative error allowed at each site that computes with integers; empty for most runs."""
    reference_weights = _weighted(reference)
    candidate_weights = _weighted(candidate)
    quantised = _packed(candidate) - _packed(reference)
    for record in candidate.records:
        name = record.class_name.lower()
        if any(word in name for word in _WORDS):
            quantised.add(record.key.site)
    if candidate_weights:
        gone = {
            site
            for site, count in reference_weights.items()
            if count and candidate_weights.get(site) == 0
        }
        # A tied or lazily built weight may be missing too; packed ones go missing together.
        if len(gone) >= 2:
            quantised |= gone
    allowed: dict[str, float] = {}
    for site in quantised:
        allowed[site] = QUANTISED["int8"]
        for outer in ancestors(site):
            # A container adds up the errors of several such parts.
            allowed[outer] = 2.0 * QUANTISED["int8"]
    return allowed


def _packed(run: Run) -> set[str]:
    """Modules that hold their weight as codes, or in a part that packs it."""
    sites: set[str] = set()
    for node in _nodes(run):
        holds = any(
            parameter.name in _WEIGHTS and parameter.dtype.startswith(_NARROW)
            for parameter in node.parameters
        )
        packs = any(
            any(word in f"{name} {part.class_name}".lower() for word in _PACKED)
            and not part.children
            for name, part in node.children
        )
        if holds or packs:
            sites.add(node.site)
    return sites


def _weighted(run: Run) -> dict[str, int]:
    """How many parameters every module holds, by the module tree; empty without one."""
    return {
        node.site: sum(parameter.name == "weight" for parameter in node.parameters)
        for node in _nodes(run)
    }


def _nodes(run: Run) -> list[ModuleNode]:
    """Every module of the first process; none if the tree cannot be read."""
    tree = run.topology()
    if not tree:
        return []
    try:
        return list(ModuleTree.from_json(tree).walk())
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


# The growth of the error from input to output.


_SIBLINGS = 3
"""Members a role needs before its median means anything."""
_APART = 8.0
"""Units by which right implementations of one function differ, without any sum."""
# Growth allowed at most, without siblings to compare with, and beyond the usual growth of siblings.
_ABSOLUTE = 12.0
_ALONE = 8.0
_AMONG = 3.0


class Growth(NamedTuple):
    """A site's error compared with what its input lets expect.

    Attributes:
        call: The call that is furthest out.
        expected: Relative error that was to be expected there.
        excess: Error over its limit; above 1 is outside.
        siblings: How many others the expectation rests on.
    """

    call: Call
    expected: float
    excess: float
    siblings: int


def rounding(unit: float, parts: int, length: int = 1) -> float:
    """Relative error that the arithmetic of a format explains in a site.

    A leaf rounds its result once. Sums of n terms in two right orders differ by about the root of
    n / 3 units (each partial sum is rounded); right functions differ by some units besides. Formats
    of 16 bits and less add up in float32. Roundings of parts add up like a random walk.

    Args:
        unit: Unit roundoff of the coarsest format that takes part.
        parts: How many sites lie in it.
        length: Terms of its longest sum.
    """
    sums = min(unit, 2.0**-24) * math.sqrt(_APART**2 + length)
    once = unit if unit > FINE else 0.0
    return math.hypot(once, sums) * math.sqrt(1.0 + parts)


def growths(
    sites: Mapping[Place, Site], allowed: Mapping[str, float] | None = None
) -> dict[Place, Growth]:
    """For every site, its worst call against what was to be expected.

    Args:
        sites: All of them.
        allowed: Relative error that a site may have whatever its dtype says.
    """
    parts = parts_of(place.site for place in sites)
    roles: dict[tuple[str, str, str], list[float]] = {}
    # By identity, because calls are mutable and cannot be keys themselves.
    logs: dict[int, float] = {}
    for site in sites.values():
        for call in site.calls:
            grown = _log_growth(call, parts.get(site.name, 0))
            logs[id(call)] = grown
        finite = [logs[id(call)] for call in site.calls if math.isfinite(logs[id(call)])]
        if finite:
            roles.setdefault(site.role, []).append(median(finite))
    # The median of a site's calls stands for it, so that a site called often has no more weight
    # than others.
    usual = {role: _usual(values) for role, values in roles.items()}
    worst: dict[Place, Growth] = {}
    for place, site in sites.items():
        middle, spread, count = usual.get(site.role, (0.0, 0.0, 0))
        inside = parts.get(site.name, 0)
        best: Growth | None = None
        for call in site.calls:
            growth = _judged(call, logs[id(call)], middle, spread, count, inside)
            least = (allowed or {}).get(place.site, 0.0)
            # Integer arithmetic excuses an error up to its own size, but never NaN.
            if least and math.isfinite(growth.excess):
                growth = growth._replace(excess=min(growth.excess, call.error / least))
            if best is None or growth.excess > best.excess:
                best = growth
        assert best is not None
        worst[place] = best
    return worst


def _base(call: Call, parts: int) -> float:
    """Error that is there without a fault: what came in, and the site's own rounding."""
    own = 0.5 * rounding(call.unit, parts, call.length)
    went_in = 0.0 if math.isnan(call.error_in) else call.error_in
    return math.hypot(went_in, own)


def _log_growth(call: Call, parts: int) -> float:
    base = _base(call, parts)
    if not base > 0.0 or not math.isfinite(base):
        return math.inf if call.error > 0.0 and math.isfinite(base) else 0.0
    return math.log(max(call.error, 1e-300) / base) if call.error > 0.0 else -math.inf


def _usual(values: Sequence[float]) -> tuple[float, float, int]:
    """Median and spread of a role's growth, in logarithms."""
    middle = median(values)
    # 1.4826 turns a median absolute deviation into the standard deviation of a normal distribution.
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return middle, spread, len(values)


def _judged(
    call: Call, grown: float, middle: float, spread: float, count: int, parts: int
) -> Growth:
    base = _base(call, parts)
    if count >= _SIBLINGS:
        # A role that always grows a lot is no excuse beyond the absolute limit.
        usual = min(middle, math.log(_ABSOLUTE / _AMONG))
        # A large spread among siblings must not excuse everything, hence its bound.
        limit = usual + math.log(_AMONG) + 3.0 * min(spread, 0.5)
    else:
        usual, limit = 0.0, math.log(_ALONE)
    expected = base * math.exp(max(usual, -20.0))
    least = 4.0 * rounding(call.unit, parts, call.length)
    most = max(base * math.exp(max(limit, -20.0)), least)
    # NaN or Inf that did not come in was made here, whatever the sizes are.
    if call.one_sided and not call.one_sided_in:
        return Growth(call, expected, math.inf, count - 1)
    if not grown > -math.inf:
        return Growth(call, expected, 0.0, max(count - 1, 0))
    excess = call.error / most if most > 0.0 else (math.inf if call.error > 0.0 else 0.0)
    return Growth(call, expected, excess, max(count - 1, 0))


class Jump(NamedTuple):
    """Where along the depth of a model the error of one kind of module jumps.

    Attributes:
        site: The first one after the jump.
        before: Relative error of the one before it.
        after: Its own.
        usual: By how much the error grows from one to the next elsewhere, as a factor.
    """

    site: str
    before: float
    after: float
    usual: float


def jump_along_depth(sites: Mapping[Place, Site]) -> Jump | None:
    """The clearest jump among the outputs of repeated containers; None if there is none."""
    chains: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites.values():
        if site.place.direction == "forward" and "*" in site.role[1]:
            chains.setdefault(site.role, []).append(site)
    best: tuple[float, Jump] | None = None
    for chain in chains.values():
        # Three layers have two steps, too few for a usual one.
        if len(chain) < 4:
            continue
        logs = [math.log(max(site.error, 1e-12)) for site in chain if math.isfinite(site.error)]
        if len(logs) != len(chain):
            continue
        steps = [b - a for a, b in pairwise(logs)]
        middle = median(steps)
        steepest = max(range(len(steps)), key=steps.__getitem__)
        strength = steps[steepest] - middle
        if strength > math.log(3.0) and (best is None or strength > best[0]):
            before, after = chain[steepest].error, chain[steepest + 1].error
            best = strength, Jump(chain[steepest + 1].name, before, after, math.exp(middle))
    return best[1] if best else None
