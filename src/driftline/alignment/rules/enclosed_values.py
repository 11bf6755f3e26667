"""Pairs of values of an exported graph that lie between values which are paired already.

A rewriter that drops the exporter's notes leaves nodes of which only those with weights show to
which module they belong. The dataflow shows the others. A leaf with one input and one output
computes its output from that input alone, so the same holds for the graph's value: every path to
it leads through the value of the input, and every path from it to the value of a later leaf that
reads nothing else leads through it. If exactly one unpaired value of the output's shape lies there,
it is the partner.

Only digests, shapes and the graph are read, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.rules.module_borders import Draft, is_recurrent
from driftline.alignment.sites.kinds import kind_of, same_kind
from driftline.alignment.sites.site_graph import Call, calls_of, frames_of
from driftline.graphs.sources.exported import RECURRENT, ExportedGraph, Fusion, Tensor, place_of
from driftline.runs.json_values import list_of
from driftline.runs.records import Record

BETWEEN = 0.9
"""Confidence of a pair that the dataflow proves."""
# Reshapes keep the order of the elements, so their input holds the same bytes as their output.
_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
_RECTIFIERS = ("ReLU", "ReLU6")
_Value = tuple[str, tuple[int, ...]]
"""A value of the model: digest and shape."""


class _Leaf(NamedTuple):
    """A leaf of the model with one input and one output."""

    class_name: str
    source: Record
    output: Record


def pair_enclosed(draft: Draft, graph: ExportedGraph, *, exported_first: bool) -> list[Fusion]:
    """Pair unpaired tensors of the model with the only values of the graph that can be theirs.

    Returns:
        Recurrent nodes of the graph that compute the last states of a layer without giving them.
    """
    flow = _Flow(graph)
    fusions: list[Fusion] = []
    if not flow.makers:
        return fusions
    sides = (
        [*(pair.reference for pair in draft.pairs), *draft.missing.values()],
        [*(pair.candidate for pair in draft.pairs), *draft.extra.values()],
    )
    model, values = (sides[1], sides[0]) if exported_first else sides
    frames = frames_of({id(record): record for record in values}.values())
    for frame, records in frames_of({id(record): record for record in model}.values()).items():
        if frame in frames:
            in_frame = _InFrame(draft, flow, records, frames[frame], exported_first)
            in_frame.pair()
            fusions += [fusion for fusion in in_frame.hidden_states() if fusion not in fusions]
    return fusions


class _Flow:
    """The dataflow of an exported file."""

    def __init__(self, graph: ExportedGraph) -> None:
        self.graph = graph
        self.makers: dict[str, int] = {}
        self.inputs: list[tuple[str, ...]] = []
        self.readers: dict[str, list[int]] = {}
        self.outputs: list[tuple[str, ...]] = []
        for number, (inputs, outputs) in enumerate(graph.reads.values()):
            self.inputs.append(inputs)
            self.outputs.append(outputs)
            self.makers.update(dict.fromkeys(outputs, number))
            for value in inputs:
                self.readers.setdefault(value, []).append(number)
        self.site_of = graph.values()
        self.value_at = {site: value for value, site in self.site_of.items()}
        self.op_of = {
            str(value): str(node.get("class", ""))
            for node in graph.nodes.values()
            for value in list_of(node.get("values"))
        }

    def before(self, value: str) -> Iterator[str]:
        """The values through which every path to a value leads, nearest first."""
        # Nodes are in an order of execution, so the latest value of the front is never needed by
        # another one of the front that is still to come.
        front = {value}
        while front:
            latest = max(front, key=lambda name: self.makers.get(name, -1))
            if latest not in self.makers:
                return
            front.remove(latest)
            front.update(self.inputs[self.makers[latest]])
            if len(front) == 1:
                yield next(iter(front))

    def behind(self, value: str, stop: set[str]) -> Iterator[str]:
        """Values that are computed from a value alone, up to those at which to stop."""
        computed = {value}
        waiting = sorted(self.readers.get(value, ()))
        seen = set(waiting)
        while waiting:
            # In the order of execution, so that all that a node reads has been decided.
            number = waiting.pop(0)
            if not computed.issuperset(self.inputs[number]):
                continue
            for output in self.outputs[number]:
                if output in stop:
                    continue
                computed.add(output)
                yield output
                fresh = [n for n in self.readers.get(output, ()) if n not in seen]
                seen.update(fresh)
                waiting = sorted([*waiting, *fresh])

    def reshaped_from(self, value: str) -> Iterator[str]:
        """Values that a value repeats in another shape, nearest first."""
        while self.op_of.get(value) in _RESHAPES and len(inputs := self._inputs_of(value)) == 1:
            value = inputs[0]
            yield value

    def recurrent_before(self, value: str) -> str:
        """The site of the recurrent node whose result a value is, seen through layout changes."""
        while value and self.op_of.get(value) not in RECURRENT:
            inputs = self._inputs_of(value)
            value = inputs[0] if len(inputs) == 1 else ""
        return self.site_of.get(value, "")

    def _inputs_of(self, value: str) -> tuple[str, ...]:
        return self.inputs[self.makers[value]] if value in self.makers else ()


class _InFrame:
    """The pairs of one step of one process."""

    def __init__(
        self,
        draft: Draft,
        flow: _Flow,
        model: Sequence[Record],
        values: Sequence[Record],
        exported_first: bool,
    ) -> None:
        self._draft, self._flow, self._exported_first = draft, flow, exported_first
        self._model = [
            record
            for record in sorted(model, key=lambda record: record.order)
            if record.key.phase == "forward" and record.digest
        ]
        self._record_of: dict[str, Record] = {}
        # A module's output has no value's name, so it is identified by its bytes.
        by_bytes: dict[_Value, set[str]] = {}
        for record in sorted(values, key=lambda record: record.key.port != "output"):
            value = self._named(record)
            if value:
                self._record_of.setdefault(value, record)
                by_bytes.setdefault((record.digest, record.shape), set()).add(value)
        self._partner: dict[_Value, str] = {}
        self._taken: set[str] = set()
        self._compared_at: dict[str, Tensor] = {}
        self._shapes: dict[str, dict[tuple[int, ...], str]] = {}
        self._readers: dict[_Value, list[_Leaf]] = {}
        frame_ids = set(map(id, values))
        for pair in draft.pairs:
            own, other = pair.reference, pair.candidate
            if exported_first:
                own, other = other, own
            if pair.reference_recipe is not None or pair.candidate_recipe is not None:
                continue
            names = {self._named(other)} - {""} or by_bytes.get((other.digest, other.shape), set())
            if own.digest and len(names) == 1 and id(other) in frame_ids:
                self._learn(own, other, *names)

    def _named(self, record: Record) -> str:
        """The value of the file that a record of the graph holds; empty if it does not say."""
        key = record.key
        name = key.slot if key.port == "input" else ""
        if key.port == "output":
            name = self._flow.value_at.get(key.site, "")
        # What only the optimised graph has is one of these values in another layout.
        return name if name in self._flow.makers or name in self._flow.readers else ""

    def _learn(self, record: Record, other: Record, value: str) -> None:
        self._compared_at.setdefault(value, place_of(other))
        self._partner.setdefault((record.digest, record.shape), value)
        self._shapes.setdefault(record.digest, {}).setdefault(record.shape, value)
        self._taken.add(value)

    def pair(self) -> None:
        """Pair until nothing more follows."""
        leaves = list(_leaves(self._model))
        for leaf in leaves:
            self._readers.setdefault(_value(leaf.source), []).append(leaf)
        # Every round pairs something, so there are at most as many rounds as unpaired tensors.
        while any([*map(self._pair_output, leaves), *map(self._pair_input, leaves)]) or any(
            map(self._pair_reshaped, self._model)
        ):
            pass

    def hidden_states(self) -> Iterator[Fusion]:
        """Recurrent nodes without the unpaired last states of their layer among their results.

        Exporters omit results that nobody reads; the node computes them on the way to its sequence.
        """
        for call in calls_of(self._model):
            outputs = [record for record in call.records if record.key.port == "output"]
            if not call.leaf or not any(map(is_recurrent, outputs)):
                continue
            for record in outputs:
                value = self._partner.get(_value(record), "")
                site = self._flow.recurrent_before(value)
                if not site or len(list_of(self._flow.graph.nodes[site].get("values"))) > 1:
                    continue
                kind = str(self._flow.graph.nodes[site].get("class", ""))
                place = self._compared_at[value]
                yield Fusion(site, kind, ((call.site, call.visit, "output"),), (place,))

    def _pair_output(self, leaf: _Leaf) -> bool:
        """Pair the output of a leaf whose input is paired."""
        source = self._partner.get(_value(leaf.source), "")
        if not source or _value(leaf.output) in self._partner:
            return False
        if self._is_cut_off(source):
            return leaf.class_name in _RECTIFIERS and self._pair_same(leaf.output, source)
        later = [
            self._partner[_value(other.output)]
            for other in self._readers.get(_value(leaf.output), ())
            if _value(other.output) in self._partner
        ]
        if later:
            chains = [list(self._between(source, value)) for value in later]
            fitting = [value for value in chains[0] if all(value in chain for chain in chains)]
        else:
            # Without a later leaf nothing bounds the search, so the node itself must be of the
            # leaf's kind.
            kind = kind_of(leaf.class_name)
            fitting = [
                value
                for value in self._flow.behind(source, self._taken)
                if same_kind(kind, kind_of(self._flow.op_of.get(value, "").removeprefix("QLinear")))
                == 2
            ]
        return self._pair_only(leaf.output, fitting)

    def _pair_input(self, leaf: _Leaf) -> bool:
        """Pair the input of a leaf whose output is paired."""
        made = self._partner.get(_value(leaf.output), "")
        if not made or _value(leaf.source) in self._partner:
            return False
        return self._pair_only(leaf.source, list(self._between("", made)))

    def _between(self, first: str, last: str) -> Iterator[str]:
        """Values on every path to a value, back to a paired one; none if that is not `first`."""
        values: list[str] = []
        for value in self._flow.before(last):
            if value in self._taken or value == first:
                if first in ("", value):
                    yield from values
                return
            values.append(value)

    def _pair_reshaped(self, record: Record) -> bool:
        """Pair a tensor whose bytes are paired in another shape, if the graph reshapes it too."""
        if _value(record) in self._partner or id(record) not in self._alone():
            return False
        for value in self._shapes.get(record.digest, {}).values():
            fitting = [v for v in self._flow.reshaped_from(value) if v not in self._taken]
            if self._pair_only(record, fitting):
                return True
        return False

    def _pair_only(self, record: Record, values: Sequence[str]) -> bool:
        """Pair a tensor of the model with the only value of its shape, if there is one."""
        recorded = [value for value in dict.fromkeys(values) if value in self._record_of]
        # A value that was not recorded may be the one that is looked for.
        if len(recorded) < len(values) or id(record) not in self._alone():
            return False
        fitting = [v for v in recorded if self._record_of[v].shape == record.shape]
        if len(fitting) != 1 or fitting[0] in self._taken:
            return False
        return self._pair_same(record, fitting[0])

    def _pair_same(self, record: Record, value: str) -> bool:
        """Pair a tensor of the model with the tensor that holds a value of the graph."""
        other = self._record_of.get(value)
        if other is None or other.shape != record.shape or id(record) not in self._alone():
            return False
        ordered = (other, record) if self._exported_first else (record, other)
        self._draft.pair(*ordered, BETWEEN)
        self._learn(record, other, value)
        return True

    def _alone(self) -> Mapping[int, Record]:
        return self._draft.extra if self._exported_first else self._draft.missing

    def _is_cut_off(self, value: str) -> bool:
        """Whether integers hold a value without what is below zero.

        A quantiser drops a rectifier behind it then, whose output is the value itself.
        """
        places = {self._compared_at.get(value)}
        if (record := self._record_of.get(value)) is not None:
            places.add(place_of(record))
        return not self._flow.graph.rectified.isdisjoint(filter(None, places))


def _value(record: Record) -> _Value:
    return record.digest, record.shape


def _leaves(records: Sequence[Record]) -> Iterator[_Leaf]:
    """Leaves with one input and one output that differ."""
    for call in calls_of(records):
        ports = _ports(call)
        if ports is not None and _value(ports[0]) != _value(ports[1]):
            yield _Leaf(call.class_name, *ports)


def _ports(call: Call) -> tuple[Record, Record] | None:
    inputs = [record for record in call.records if record.key.port == "input"]
    outputs = [record for record in call.records if record.key.port == "output"]
    if not call.leaf or len(inputs) != 1 or len(outputs) != 1:
        return None
    return inputs[0], outputs[0]
