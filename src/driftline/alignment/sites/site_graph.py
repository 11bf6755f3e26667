"""A run as calls: each call of a site with its class, inputs and outputs, in execution order.

Structural alignment works on these calls. Only records are read, no tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from driftline.alignment.sites.kinds import WHOLE, is_known, is_whole, kind_of, role_of
from driftline.runs.records import Record

ROOTS = ("(root)", "")


class Call:
    """One call of one site.

    Attributes:
        site: The site that was called.
        visit: Number of the call of the site in the step.
        class_name: The class of the site.
        kind: The kind of work (`kinds.kind_of`).
        role: The role of a projection (q, k, v, gate, up), from its name or the dataflow.
        records: Its tensors, in order.
        out: Shape of its main output; None if no output was kept.
        into: Shape of its main input; None if no input was kept.
        input_value: Identifies its main input: the digest, or its maker; empty if unknown.
        output_value: Identifies its main output, likewise.
        layout: For a fused projection: role, first column and end column of each part, if the
            dataflow shows them.
        inner: Whether it is inside a call that counts as one leaf, such as an adapted Linear.
        leaf: Whether it contains no other calls, or counts as one leaf.
        called: Whether it has tensors of a call, and not only parameters or gradients.
        order: Position of its first tensor in the run.
        ended: Position of its last tensor in the run.
        parts: For a fused family (q, k and v as one): its calls.
    """

    __slots__ = (
        "called", "class_name", "ended", "inner", "input_value", "into", "kind", "layout", "leaf",
        "order", "out", "output_value", "parts", "records", "role", "site", "visit",
    )  # fmt: skip

    def __init__(self, site: str, visit: int, records: list[Record]) -> None:
        self.site = site
        self.visit = visit
        self.records = records
        self.class_name = next((r.class_name for r in records if r.class_name), "")
        self.kind = kind_of(self.class_name)
        self.role = role_of(site)
        # Parameters are recorded before the first call and gradients after the last, so neither
        # shows when a site was called.
        moments = [
            record.order
            for record in records
            if record.key.port in ("input", "output") and record.key.phase == "forward"
        ]
        self.called = bool(moments)
        self.order = min(moments) if moments else records[0].order
        self.ended = max(moments) if moments else records[-1].order
        self.inner = False
        self.leaf = True
        self.parts: tuple[Call, ...] = ()
        self.layout: tuple[tuple[str, int, int], ...] = ()
        output = main_tensor(records, "output")
        source = main_tensor(records, "input")
        self.out = None if output is None else output.shape
        self.into = None if source is None else source.shape
        self.output_value = "" if output is None else output.digest
        self.input_value = "" if source is None else source.digest
        # The kind is guessed from shapes only for unknown classes; a known class is better
        # evidence.
        if not is_known(self.kind) and output is not None and source is not None:
            self.kind = _by_shape(source, output) or self.kind

    @property
    def features(self) -> int:
        """Size of the output's last axis; -1 for a scalar or if unknown."""
        shape = self.out if self.out is not None else self.into
        return shape[-1] if shape else -1

    @property
    def width(self) -> int:
        """Size of the input's last axis; -1 if unknown."""
        return self.into[-1] if self.into else -1

    def __repr__(self) -> str:
        visit = f"#{self.visit}" if self.visit else ""
        return f"<{self.site}{visit} {self.class_name} {self.into}->{self.out}>"


class Frame(NamedTuple):
    """One step of one process: the unit of structural alignment."""

    rank: int
    process: int
    step: int


def main_tensor(records: Iterable[Record], port: str) -> Record | None:
    """The main tensor of a port in the forward pass: floats and codes before ids and masks.

    Vectors come last, because operators that take weights as inputs also take scales and biases.
    """
    first: Record | None = None
    matrix: Record | None = None
    for record in records:
        if record.key.port == port and record.key.phase == "forward":
            first = first or record
            if len(record.shape) > 1:
                # Quantised activations are int8 or int4 matrices and count like floats.
                if "float" in record.dtype or record.dtype in ("int8", "int4"):
                    return record
                matrix = matrix or record
    return matrix or first


def _by_shape(source: Record, output: Record) -> str:
    """The kind of a leaf of unknown class: ids become vectors, or vectors change their size."""
    if "float" not in output.dtype or not output.shape or not source.shape:
        return ""
    if "int" in source.dtype and output.shape[:-1] == source.shape:
        return "embedding"
    same_rows = "float" in source.dtype and output.shape[:-1] == source.shape[:-1]
    return "linear" if same_rows and output.shape[-1] != source.shape[-1] else ""


def frames_of(records: Iterable[Record]) -> dict[Frame, list[Record]]:
    """Records by frame, in their given order."""
    frames: dict[Frame, list[Record]] = {}
    for record in records:
        key = record.key
        frames.setdefault(Frame(key.rank, key.process, key.step), []).append(record)
    return frames


def calls_of(records: Sequence[Record]) -> list[Call]:
    """The calls of one frame in execution order, with `leaf` and `inner` set."""
    by_call: dict[tuple[str, int], list[Record]] = {}
    # Grouped by call first, because a run lists tensors in the order in which they were written.
    for record in records:
        by_call.setdefault((record.key.site, record.key.visit), []).append(record)
    calls = [Call(site, visit, group) for (site, visit), group in by_call.items()]
    _place(calls)
    calls.sort(key=lambda call: call.order)
    return calls


def with_bias(calls: list[Call]) -> None:
    """Give a matrix product the output of the next operator if that only adds a bias.

    `LinearOperation` followed by `ElewiseOperation` is one Linear elsewhere. A residual is added in
    the same way, but it is not a vector.
    """
    leaves = [call for call in calls if call.leaf]
    for call, after in itertools.pairwise(leaves):
        # The bias must be the only other operand and a vector; a residual has the full shape.
        if call.kind != "linear" or not after.class_name.startswith("Elewise"):
            continue
        shapes = sorted(
            (record.shape for record in after.records if record.key.port == "input"), key=len
        )
        if after.out == call.out and shapes == [(call.features,), call.out]:
            operands = [record for record in call.records if record.key.port != "output"]
            made = [record for record in after.records if record.key.port == "output"]
            raw = [record for record in call.records if record.key.port == "output"]
            # The raw product keeps its tensor, now under the operator that adds the bias, so that
            # the plan loses nothing.
            after.records = [r for r in after.records if r.key.port != "output"] + raw
            call.records = operands + made
            call.output_value = after.output_value
            after.inner, after.leaf = True, False


def enclosing(site: str) -> Iterable[str]:
    """The sites around a site, nearest first, without the root."""
    while True:
        # Operators follow a slash, modules follow dots; both nest.
        cut = max(site.rfind("."), site.rfind("/"))
        if cut <= 0:
            return
        site = site[:cut]
        yield site


def _place(calls: list[Call]) -> None:
    """Set which calls are leaves, and which are inside a leaf."""
    kinds = {call.site: kind_of(call.class_name) for call in calls}
    # Sites that only have parameters do not make a container: an attention may be one call that
    # uses the parameters of sites below it.
    counted = dict.fromkeys(call.site for call in calls if call.called) or kinds
    around: set[str] = set()
    within: dict[str, list[str]] = {}
    for site in counted:
        for parent in enclosing(site):
            # Only sites with records count as parents, because names may contain levels that were
            # not captured.
            if parent in kinds:
                around.add(parent)
                if kinds[parent] in WHOLE and parent not in ROOTS:
                    within.setdefault(parent, []).append(site)
    if len(kinds) > 1:
        around.update(root for root in ROOTS if root in kinds)
    classes = {call.site: call.class_name for call in calls}
    single = {
        parent
        for parent, sites in within.items()
        if is_whole(classes[parent], [kinds[site] for site in sites])
    }
    inside = {site for parent in single for site in within[parent]}
    for call in calls:
        call.inner = call.site in inside
        if call.site in around:
            call.kind = kinds[call.site]  # guesses by shape are for leaves only
        call.leaf = not call.inner and (call.site not in around or call.site in single)
