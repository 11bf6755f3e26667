"""`driftline bisect`: find the block whose replacement by the reference's repairs the result.

The called modules of the reference form a tree. From the model down to a leaf, a binary search over
the parts of a block finds the first part that must be replaced; each trial is one execution of the
candidate program. Only the error of the final output is measured; diagnosis interprets it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.selection import Selection
from driftline.comparison.metrics.catalogue import find
from driftline.comparison.options import CompareOptions
from driftline.comparison.pipeline import prepare
from driftline.diagnosis.experiments.run_program import Ended, run_with
from driftline.errors import BadInput, did_you_mean
from driftline.formats.registry import open_run
from driftline.runs.run import Run
from driftline.runs.views import only

ROOT = "(root)"


@dataclass(slots=True)
class Node:
    """A called module and the called modules inside it, in the order in which their calls end."""

    site: str
    parts: list[Node] = field(default_factory=list["Node"])


def site_tree(run: Run) -> Node:
    """The tree of called modules of a run's first model.

    Raises:
        BadInput: The run holds no outputs of modules.
    """
    sites = list(
        dict.fromkeys(
            record.key.site
            for record in run.records
            if record.key.port == "output"
            and record.key.phase == "forward"
            # Operators have a slash in their site; only modules can be replaced.
            and "/" not in record.key.site
        )
    )
    if not sites:
        raise BadInput(
            f"run '{run.name}' holds no outputs of modules",
            hint='driftline dump -o REF --exec "..." keeps them',
        )
    nodes = {site: Node(site) for site in sites}
    root = nodes.get(ROOT) or Node(ROOT)
    for site, node in nodes.items():
        if node is not root:
            _holder(site, nodes, root).parts.append(node)
    # If the root was not captured, a single top module is the model.
    if ROOT not in nodes and len(root.parts) == 1:
        return root.parts[0]
    return root


def _holder(site: str, nodes: dict[str, Node], root: Node) -> Node:
    above = site
    while "." in above:
        above = above.rpartition(".")[0]
        if above in nodes:
            return nodes[above]
    return root


# The search.


SCHEMA = 1
HIGHER_IS_BETTER = ("cosine",)
ENOUGH = 0.5
"""Smallest share of the final error that a single block must explain."""


class Try(NamedTuple):
    """One execution with the outputs up to a site replaced; `value` is the remaining error."""

    upto: str
    replaced: int
    value: float


class Bisection(NamedTuple):
    """The result of the search.

    Attributes:
        verdict: found, spread (no single block explains the error) or same (there is no error).
        site: The block; empty without one.
        own_code: Whether the fault is in the block's own code, because its parts are right.
        metric: Name of the error.
        slot: The output tensor whose error it is.
        baseline: The error without any replacement.
        before: The error with everything before the block replaced.
        after: The error with the block replaced as well.
        path: The blocks that the search entered below the root, outermost first, up to the block.
        tries: All executions, in order.
    """

    verdict: str
    site: str
    own_code: bool
    metric: str
    slot: str
    baseline: float
    before: float
    after: float
    path: tuple[str, ...]
    tries: tuple[Try, ...]

    @property
    def explains(self) -> float:
        """The share of the final output's error that the block causes."""
        # Equal programs have no error.
        if not self.baseline:
            return 0.0
        return max(0.0, min(1.0, (self.before - self.after) / self.baseline))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "site": self.site,
            "own_code": self.own_code,
            "metric": self.metric,
            "slot": self.slot,
            "baseline": self.baseline,
            "before": self.before,
            "after": self.after,
            "explains": self.explains,
            "path": list(self.path),
            "executions": len(self.tries),
            "tries": [attempt._asdict() for attempt in self.tries],
        }


def bisect(
    argv: Sequence[str],
    reference: Path,
    *,
    metric: str = "relative_l2",
    output_site: str = "",
    slot: str = "",
    tell: Callable[[Try], None] | None = None,
) -> Bisection:
    """Search for the block that causes the error of the final output.

    Args:
        argv: The candidate program.
        reference: A dump of the reference with whole outputs.
        metric: The metric of `compare` that measures the final output's error.
        output_site: The module that gives the final output; the model itself by default.
        slot: Which tensor of that output; the first one of floating point by default.
        tell: Called after each execution.

    Raises:
        DriftlineError: The reference has no outputs, the metric does not exist, the program cannot
            be run, or its modules have other names.
    """
    run = open_run(reference)
    tree = site_tree(run)
    end = output_site or tree.site
    wanted = _end_of(run, end, slot)
    search = _Search(argv, reference, run, metric, end, wanted, tell)
    baseline = search.error([], "")
    if not baseline > 0:
        return search.found("same", "", False, baseline, baseline, baseline, ())
    return _descend(search, tree, end, baseline)


def _descend(search: _Search, tree: Node, end: str, baseline: float) -> Bisection:
    """Descend from the model to a leaf: in each block find the first part that must be replaced."""
    node, done, path = tree, list[str](), list[str]()
    above: Node | None = None
    before, after = baseline, 0.0
    own_code = False
    goal = ENOUGH * baseline
    while node.parts:
        # Replacing the final output itself would always succeed and prove nothing.
        parts = [part for part in node.parts if part.site != end]
        if not parts:
            break
        low, high = 0, len(parts)  # replacing `low` parts is not enough, `high` parts are enough
        low_value, high_value = before, after
        while high - low > 1:
            middle = (low + high) // 2
            value = search.error([*done, *(p.site for p in parts[:middle])], parts[middle - 1].site)
            if value > goal:
                low, low_value = middle, value
            else:
                high, high_value = middle, value
        if high == len(parts):
            value = search.error([*done, *(p.site for p in parts)], parts[-1].site)
            if value > goal:  # all parts are replaced, and the block is still wrong
                own_code, before = True, value
                break
            high_value = value
        done += [part.site for part in parts[:low]]
        before, after = low_value, high_value
        node, above = parts[high - 1], node
        path.append(node.site)
    if above is not None and (before - after) / baseline >= ENOUGH:
        # One last execution distinguishes a wrong module from a correct one whose caller passes a
        # wrong input.
        value = search.error(done, node.site, inputs=(node.site,))
        if value <= goal:  # with the correct input the module is right, so its caller is wrong
            node, own_code, after = above, True, value
            path.pop()
    share = (before - after) / baseline
    single_block = share >= ENOUGH
    return search.found(
        "found" if single_block else "spread",
        node.site,
        own_code,
        baseline,
        before,
        after,
        tuple(path),
    )


class _Search:
    """Runs the candidate with replaced outputs and measures its error; repeats no execution."""

    def __init__(
        self,
        argv: Sequence[str],
        reference: Path,
        run: Run,
        metric: str,
        end: str,
        slot: str,
        tell: Callable[[Try], None] | None,
    ) -> None:
        self._argv = argv
        self._reference = reference
        self._options = CompareOptions.of(metrics=[metric])
        self._metric = find(metric).name
        self._end = end
        self._slot = slot
        self._tell = tell
        self._ends = only(
            run,
            lambda r: r.key.site == end and r.key.port == "output" and r.key.slot == slot,
        )
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}
        self.tries: list[Try] = []

    def error(self, sites: Sequence[str], upto: str, inputs: tuple[str, ...] = ()) -> float:
        """Error of the final output if outputs of `sites` and inputs of `inputs` are replaced."""
        # The result depends on the set of replaced modules, not on their order.
        replaced = tuple(sorted(set(sites)))
        key = (replaced, inputs)
        if key not in self._known:
            self._known[key] = self._run(replaced, inputs)
            what = f"the input of {upto}" if inputs else upto
            self.tries.append(Try(what, len(replaced), self._known[key]))
            if self._tell is not None:
                self._tell(self.tries[-1])
        return self._known[key]

    def found(
        self,
        verdict: str,
        site: str,
        own_code: bool,
        baseline: float,
        before: float,
        after: float,
        path: tuple[str, ...],
    ) -> Bisection:
        return Bisection(
            verdict,
            site if verdict == "found" else "",
            own_code and verdict == "found",
            self._metric,
            self._slot,
            baseline,
            before,
            after,
            path,
            tuple(self.tries),
        )

    def _run(self, sites: tuple[str, ...], inputs: tuple[str, ...]) -> float:
        with tempfile.TemporaryDirectory(prefix="driftline-bisect-") as folder:
            place = Path(folder) / "run"
            plan = CapturePlan(
                output=str(place),
                # Only the final output is captured: each further tensor would cost time in every
                # execution.
                selection=Selection(ports=("output",), sites=(_literal(self._end),)),
                command=tuple(self._argv),
                experiment={
                    "kind": "substitute",
                    "run": str(self._reference.absolute()),
                    "sites": list(sites),
                    "inputs": list(inputs),
                },
            )
            # The program is run many times, so its own output goes to standard error.
            self._require(run_with(self._argv, plan, to_stderr=True), sites)
            if not (place / "run.json").is_file():
                raise BadInput(
                    f"the program called no module '{self._end}'",
                    hint="name the module whose output counts: --output-site",
                )
            return self._measured(open_run(place))

    def _require(self, ended: Ended, sites: tuple[str, ...]) -> None:
        if ended.status:
            raise BadInput(
                f"the candidate program ended with status {ended.status}",
                hint="its own messages above say why",
            )
        called = [report for report in ended.reports if report.get("called")]
        if not called:
            raise BadInput(
                f"nothing can be searched: {ended.why_not or 'no module was called'}",
                hint="driftline dump with the same program shows which modules are seen",
            )
        # If nothing was replaced, the measured error is that of the unchanged program and means
        # nothing.
        if sites and not any(report["replaced"] for report in called):
            trouble = [text for report in called for text in report["trouble"].values()]
            why = trouble[0] if trouble else "it calls none of the reference's modules"
            raise BadInput(
                f"nothing of the reference fits into the program: {why}",
                hint="--reference-run takes a dump of the same model, with whole outputs",
            )

    def _measured(self, run: Run) -> float:
        candidate_end = only(run, lambda r: r.key.slot == self._slot and r.key.site == self._end)
        measured = prepare(self._ends, candidate_end, self._options).measure()
        values = [row.metrics.get(self._metric) for row in measured.rows]
        errors = [float(value) for value in values if value is not None]
        if not errors:
            raise BadInput(
                f"the end results cannot be compared by {self._metric}",
                hint="are they of one shape in both programs?",
            )
        # All metrics are converted to errors, so that smaller is always better.
        if self._metric in HIGHER_IS_BETTER:
            return max(1.0 - value for value in errors)
        return max(errors)


def _end_of(run: Run, site: str, slot: str) -> str:
    """The slot of the final output; raises if it does not exist or its values were not kept."""
    records = [r for r in run.records if r.key.site == site and r.key.port == "output"]
    if not records:
        raise BadInput(
            f"run '{run.name}' has no output of '{site}'",
            hint=did_you_mean(site, {r.key.site for r in run.records})
            or "dump the reference with its outputs",
        )
    complete = [r for r in records if r.kept == "full" and not run.lost(r)]
    if not complete:
        raise BadInput(
            f"run '{run.name}' holds only the {records[0].kept} of its tensors",
            hint="bisect needs a reference dumped with --keep full",
        )
    if slot:
        if not any(r.key.slot == slot for r in complete):
            raise BadInput(
                f"'{site}' has no output '{slot}'",
                hint=did_you_mean(slot, {r.key.slot for r in complete}),
            )
        return slot
    return next((r.key.slot for r in complete if "float" in r.dtype), complete[0].key.slot)


def _literal(site: str) -> str:
    """A glob that matches only this name."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in site)
