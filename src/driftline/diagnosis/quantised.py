"""Sites of the candidate that compute with integers behind a float interface.

Their dtype says float32, their noise is that of eight bits. Told by what the two runs say of
themselves: class names, and weights that are gone from the module tree.
"""

from __future__ import annotations

from driftline.diagnosis.calls import ancestors
from driftline.runs.run import Run
from driftline.tolerance.defaults import QUANTISED
from driftline.topology.tree import ModuleTree

_WORDS = ("quant", "int8", "int4", "4bit", "8bit", "gptq", "awq")


def quantised_sites(reference: Run, candidate: Run) -> dict[str, float]:
    """Relative error that is allowed at each site that has integers in it; empty for most runs."""
    weighted = _weighted(reference)
    theirs = _weighted(candidate)
    found: set[str] = set()
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


def _weighted(run: Run) -> dict[str, int]:
    """How many parameters every module holds, by the module tree; empty without one."""
    tree = run.topology()
    if not tree:
        return {}
    try:
        nodes = list(ModuleTree.from_json(tree).walk())
    except (KeyError, TypeError, ValueError):
        return {}
    return {
        node.site: sum(parameter.name == "weight" for parameter in node.parameters)
        for node in nodes
    }
