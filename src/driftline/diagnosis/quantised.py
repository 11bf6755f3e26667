"""Sites of the candidate that compute with integers behind a float interface.

Their dtype says float32, their noise is that of eight bits. Told by what the two runs say of
themselves: class names, packed or integer weights, and weights that are gone from the module tree.
"""

from __future__ import annotations

from driftline.diagnosis.calls import ancestors
from driftline.runs.run import Run
from driftline.tolerance.defaults import QUANTISED
from driftline.topology.tree import ModuleNode, ModuleTree

_WORDS = ("quant", "int8", "int4", "4bit", "8bit", "gptq", "awq")
_PACKED = ("packed", *_WORDS)
_WEIGHTS = ("weight", "qweight", "weight_packed", "codes")
_NARROW = ("int", "uint", "float8", "float4")


def quantised_sites(reference: Run, candidate: Run) -> dict[str, float]:
    """Relative error that is allowed at each site that has integers in it; empty for most runs."""
    weighted = _weighted(reference)
    theirs = _weighted(candidate)
    found = _packed(candidate) - _packed(reference)
    for record in candidate.records:
        name = record.class_name.lower()
        if any(word in name for word in _WORDS):
            found.add(record.key.site)
    if theirs:
        gone = {site for site, count in weighted.items() if count and theirs.get(site) == 0}
        # A tied or lazily built weight may be missing too; packed ones go missing together.
        if len(gone) >= 2:
            found |= gone
    allowed: dict[str, float] = {}
    for site in found:
        allowed[site] = QUANTISED["int8"]
        for outer in ancestors(site):
            allowed[outer] = 2.0 * QUANTISED["int8"]
    return allowed


def _packed(run: Run) -> set[str]:
    """Modules that hold their weight as codes, or in a part that packs it."""
    found: set[str] = set()
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
            found.add(node.site)
    return found


def _weighted(run: Run) -> dict[str, int]:
    """How many parameters every module holds, by the module tree; empty without one."""
    return {
        node.site: sum(parameter.name == "weight" for parameter in node.parameters)
        for node in _nodes(run)
    }


def _nodes(run: Run) -> list[ModuleNode]:
    """Every module of the first process; none where no tree can be read."""
    tree = run.topology()
    if not tree:
        return []
    try:
        return list(ModuleTree.from_json(tree).walk())
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
