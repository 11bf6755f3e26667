"""One capture of an ONNX model: optimise it, execute it in portions, record its values.

The outputs are compared with those of the session without capture, bit by bit: capture must not
change the computation. This file knows sessions and the recorder; which values exist and what they
stand for is decided in `graph`, `scopes` and `recorder`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.captures.onnxruntime import model_file, sessions
from driftline.captures.onnxruntime.graph import Graph, lineage_of
from driftline.captures.onnxruntime.inputs import Feed, Wanted, wanted_by
from driftline.captures.onnxruntime.model_file import Weights
from driftline.captures.onnxruntime.quantised import FloatView, float_view
from driftline.captures.onnxruntime.recorder import (
    Observation,
    TracedGraph,
    observations_of,
    portions,
    sizes_of,
    wanted,
)
from driftline.captures.onnxruntime.scopes import ROOT, Names
from driftline.captures.onnxruntime.sessions import SessionPlan
from driftline.captures.onnxruntime.stored_forms import (
    Stored,
    block_size,
    blocked_values,
    flat_values,
    integer_values,
    usual,
    weight_rounding,
    widened_values,
    without_reorders,
)
from driftline.captures.onnxruntime.tensors import HostTensor, look
from driftline.captures.onnxruntime.topology import (
    Integers,
    Meanings,
    MisreadNode,
    Tensor,
    ids_of,
    module_tree,
    topology,
)
from driftline.captures.recorder import Recorder, Refusal, Snapshot, TensorAddress
from driftline.captures.selection import Selection
from driftline.errors import BadInput
from driftline.numerics import kernel
from driftline.runs.records import usual_moment
from driftline.runs.sinks import Sink

Progress = Callable[[int, int], None]
# Beginnings of operator types that compute with integers.
_INTEGERS = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantizeM")


ROUNDED_WHILE_IT_RUNS = 0.01
"""Relative error of rounding to 255 steps between the smallest and the largest element: 0.004 of
uniform values, 0.007 to 0.012 of normal ones."""


class Budget(NamedTuple):
    """How much may be held at a time.

    Attributes:
        memory: Bytes of inner tensors.
        values: How many of them; 0 is no limit.
    """

    memory: int
    values: int = 0


class ModelCapture:
    """A model on its way into a run."""

    def __init__(self, file: Path, plan: SessionPlan, exported: FloatView, folder: Path) -> None:
        self._plan = plan
        self._name = file.name
        self._file = file
        optimised_model = sessions.optimise(file, plan, folder)
        self._path = optimised_model.path
        self._plain: Any = optimised_model.session
        self.wanted: list[Wanted] = wanted_by(optimised_model.session)
        self.outputs: list[str] = [output.name for output in optimised_model.session.get_outputs()]
        optimised = Graph(model_file.load_graph(optimised_model.path))
        self._integer_nodes = sum(node.op.startswith(_INTEGERS) for node in optimised.nodes)
        view = float_view(optimised, exported.names)
        blocked = blocked_values(exported.graph, view.graph)
        # The block size costs a session of its own, so it is asked only where blocks occur.
        self._block = block_size() if blocked else 0
        in_own_form = {
            # Later entries win: a value in blocks is described by its blocks alone.
            **flat_values(exported.graph, view.graph),
            **widened_values(exported.graph, view.graph),
            **integer_values(exported, view),
            **blocked,
        }
        # Values in a form of their own get the exported names, so that runs of any level can be
        # compared.
        own_names = {stored.name: value for value, stored in in_own_form.items()}
        view.graph.rename(own_names)
        view = view._replace(graph=without_reorders(view.graph, exported.graph))
        self._codes = {own_names.get(name, name): code for name, code in view.codes.items()}
        self._coded_weights = view.weights
        self._scaled_by = {
            name: coded.integers
            for coded in view.weights.values()
            for name in (coded.scale, coded.zero)
        }
        # A scale may have been multiplied with another one; the file still has it.
        left = {
            value: exported.holders[value]
            for value in exported.codes
            if value not in self._codes and exported.holders[value] in optimised.maker
        }
        self._codes |= {value: exported.codes[value] for value in left}
        holders = left | view.holders
        self._stored = {value: Stored(holder) for value, holder in holders.items()} | {
            value: stored._replace(name=view.holders.get(stored.name, stored.name))
            for value, stored in in_own_form.items()
        }
        self.traced = TracedGraph.of(
            exported.graph,
            view.graph,
            Names(exported.graph),
            lineage_of(exported.graph, view.graph),
        )
        self._tree = module_tree(self.traced)
        self._misread = exported.misread
        self._session: tuple[int, Any] | None = None
        self._weights: Weights | None = None
        self._no_tensors: set[str] = set()

    def plain_digests(self, feed: Feed) -> list[str]:
        """What the session without capture gives, as digests."""
        values = sessions.run(self._plain, self.outputs, _ort_feed(feed), self._name)
        return [_digest(value) for value in values]

    def integer_nodes(self) -> int:
        """How many nodes of the optimised graph were made of quantised ones."""
        return self._integer_nodes

    def unseen(self) -> list[str]:
        """What of a capture that is over is not in the run, one sentence each."""
        inner = Counter(node.op for node in self.traced.optimised.nodes if node.subgraphs)
        notes = [
            f"the inside of {_counted(count, op)} is not seen, only what goes in and comes out"
            for op, count in inner.items()
        ]
        if self._no_tensors:
            names = sorted(self._no_tensors)
            shown = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
            notes.append(
                f"{_counted(len(names), 'value')} not recorded, because only tensors of numbers "
                f"are: {shown}"
            )
        return notes

    def save_profile(self, path: Path) -> None:
        """Write down what ONNX Runtime measured of the session without capture.

        Raises:
            OSError: The file cannot be written.
        """
        written = Path(self._plain.end_profiling())
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(written, path)

    def free_plain_session(self) -> None:
        """The session without capture has done its part; its weights need not stay in memory."""
        self._plain = None

    def choose(self, selection: Selection, levels: Sequence[str]) -> list[Observation]:
        """What is recorded of every step.

        Raises:
            BadInput: Nothing is.
        """
        observations = [
            part for seen in observations_of(self.traced, levels) for part in self._parts_of(seen)
        ]
        selected = wanted(observations, selection, ids_of(self._tree))
        if not selected:
            raise _nothing(selection, observations)
        return selected

    def capture(
        self,
        recorder: Recorder,
        sink: Sink,
        selected: Sequence[Observation],
        feeds: Sequence[tuple[int, Feed]],
        expected: Sequence[Sequence[str]],
        budget: Budget,
        progress: Progress | None,
    ) -> tuple[int, bool]:
        """Record every step.

        Returns:
            How often each step was executed, and whether all gave what was expected.
        """
        integers = Integers(
            self._meanings(selected),
            self._rounded(),
            list(self._misread_nodes(selected)),
            self._rectified(selected),
        )
        sink.topology(topology(self.traced, self._tree, selected, integers))
        self._say_unseen(recorder)
        executions = 0
        faithful = True
        for number, (step, feed) in enumerate(feeds):
            sizes = sizes_of(
                self.traced.optimised, {name: tensor.shape for name, tensor in feed.items()}
            )
            parts = portions(selected, sizes, budget.memory, budget.values)
            executions = max(executions, len(parts))
            for index, part in enumerate(parts):
                values = self._values(part, index, len(parts), feed, sizes)
                # The first portion carries the model's outputs too; one comparison per step is
                # enough.
                if index == 0:
                    digests = [_digest(values[name]) for name in self.outputs]
                    faithful = (
                        self._faithful(recorder, digests, expected[number], step) and faithful
                    )
                counted = number * len(selected) + sum(map(len, parts[:index]))
                for observation in part:
                    self._record(recorder, observation, values, feed, step)
                    counted += 1
                    if progress is not None:
                        progress(counted, len(feeds) * len(selected))
                # Freed before the next execution, or two portions would be in memory.
                del values
            sink.step_done(step)
        return executions, faithful

    def _parts_of(self, seen: Observation) -> list[Observation]:
        """A tensor as it is stored: a weight of integers, in torchao's words, as its parts."""
        coded = self._coded_weights.get(seen.value) if seen.port == "param" else None
        if coded is None:
            return [seen]
        parts = {"qdata": coded.integers, "scale": coded.scale, "zero_point": coded.zero}
        return [
            seen._replace(slot=f"{seen.slot}.{part}", value=value)
            for part, value in parts.items()
            if value
        ]

    def _meanings(self, selected: Sequence[Observation]) -> Meanings:
        """What the integers among the recorded tensors mean."""
        return {
            (seen.site, seen.visit, seen.port, seen.slot): (code.scale, code.zero)
            for seen in selected
            # What a caller gives is recorded as it was given.
            if (code := self._codes.get(seen.value)) is not None and not _is_given(seen)
        }

    def _rectified(self, selected: Sequence[Observation]) -> list[Tensor]:
        """Outputs that are stored without what is below zero.

        A quantiser drops the rectifier behind a node whose integers have no sign; the rectifier may
        have stood in any of the modules that give the value.
        """
        clipped = self.traced.exported.clipped
        return [
            (seen.site, seen.visit, seen.port, seen.slot)
            for seen in selected
            if seen.value in clipped and seen.port == "output"
        ]

    def _misread_nodes(self, selected: Sequence[Observation]) -> Iterator[MisreadNode]:
        """Nodes that read integers for other numbers than they were made of, and at which modules
        what they make of them is first taken or given.
        """
        modules = {call.site for call in self.traced.modules} | {ROOT}
        borders: dict[str, dict[str, None]] = {}
        for seen in selected:
            if seen.site in modules and seen.port != "param":
                borders.setdefault(seen.value, {})[seen.site] = None
        graph = self.traced.exported
        for reader, sentence in self._misread.items():
            first: dict[str, None] = {}
            waiting, reached = [reader], {reader}
            while waiting:
                value = waiting.pop(0)
                first |= borders.get(value, {})
                for number in () if value in borders else graph.readers.get(value, ()):
                    made = [v for v in graph.nodes[number].outputs if v not in reached]
                    reached.update(made)
                    waiting += made
            module = self.traced.names.scope(reader).module
            yield MisreadNode(self.traced.site(reader), module, sentence, tuple(first))

    def _rounded(self) -> dict[str, float]:
        """What rounding of weights, and of what nodes are given, explains at every site."""
        errors: dict[str, float] = {}
        file = Weights(self._file) if any(n.integers for n in self.traced.exported.nodes) else None
        for node in self.traced.exported.nodes:
            own = [weight_rounding(file.read(name)) for name in node.integers] if file else []
            if node.rounds:
                own.append(ROUNDED_WHILE_IT_RUNS)
            error = math.hypot(*own)
            for value in node.outputs if error else ():
                site = self.traced.site(value)
                module = self.traced.names.scope(value).module
                for place in {site, module} - {""}:
                    errors[place] = math.hypot(errors.get(place, 0.0), error)
        return errors

    def _values(
        self,
        part: Sequence[Observation],
        index: int,
        portions: int,
        feed: Feed,
        sizes: Mapping[str, int],
    ) -> dict[str, Any]:
        """The values of one portion, by an execution of the graph with them as outputs."""
        # A value that is stored as a matrix needs the shape of another value to be restored.
        likes = [self._stored[s.value].like for s in part if s.value in self._stored]
        names = [
            value
            for value in dict.fromkeys((*self.outputs, *(s.value for s in part), *likes))
            if value in sizes or value in self.outputs or value in self._stored
        ]
        stored = [self._stored[name].name if name in self._stored else name for name in names]
        # With several portions each needs its own outputs, so sessions cannot be kept.
        if self._session is None or self._session[0] != index or portions > 1:
            self._session = None  # its memory first
            path = sessions.with_outputs(self._path, stored, index)
            self._session = (index, sessions.capturing(path, self._plan, self._name))
        values = sessions.run(self._session[1], stored, _ort_feed(feed), self._name)
        return dict(zip(names, values, strict=True))

    def _record(
        self,
        recorder: Recorder,
        observation: Observation,
        values: Mapping[str, Any],
        feed: Feed,
        step: int,
    ) -> None:
        tensor: Any = values.get(observation.value, feed.get(observation.value))
        if _is_given(observation):
            tensor = feed.get(observation.value)
        elif observation.port == "param":
            # Weights are read from the optimised file: an optimiser may have folded others into
            # them.
            self._weights = self._weights or Weights(self._path)
            tensor = self._weights.read(observation.value)
            whose = self._scaled_by.get(observation.value)
            if whose is not None and tensor is not None:
                tensor = _along_axis_of_codes(tensor, self._weights.read(whose))
        elif observation.value in self._stored and tensor is not None:
            stored = self._stored[observation.value]
            like = tuple(values[stored.like].shape()) if stored.like else ()
            tensor = usual(tensor, stored, self._block, like)
        if tensor is None:
            return
        # Asked before recording, so that the note at the end can name what was refused.
        if isinstance(look(tensor, values=False), Refusal):
            self._no_tensors.add(observation.value)
        address = TensorAddress(
            observation.site,
            observation.port,
            observation.slot,
            step,
            observation.visit,
            "forward",
            usual_moment(observation.port),
            observation.alias,
            observation.class_name,
        )
        recorder.guarded(observation.site, recorder.take, address, tensor)

    def _faithful(
        self, recorder: Recorder, digests: Sequence[str], expected: Sequence[str], step: int
    ) -> bool:
        changed = [
            name
            for name, digest, expected_digest in zip(self.outputs, digests, expected, strict=True)
            if digest != expected_digest
        ]
        if changed:
            recorder.event(
                "differs",
                f"step {step}: {', '.join(changed)} is not bit for bit what the session without "
                "capture gives; does the model draw random numbers, or add in no fixed order?",
                step=step,
            )
        return not changed

    def _say_unseen(self, recorder: Recorder) -> None:
        for node in self.traced.optimised.nodes:
            if node.subgraphs:
                made = next((value for value in node.outputs if value), "")
                recorder.event(
                    "inside",
                    f"what happens inside the {node.op} '{node.name or made}' is not seen, "
                    "only what goes in and comes out",
                    site=self.traced.site(made),
                )


def _is_given(observation: Observation) -> bool:
    return observation.site == ROOT and observation.port == "input"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _ort_feed(feed: Feed) -> dict[str, Any]:
    ort = model_file.engine()
    return {name: tensor.to_ort(ort) for name, tensor in feed.items()}


def _digest(value: Any) -> str:
    shot = look(value)
    if not isinstance(shot, Snapshot):
        return ""
    return f"{shot.dtype} {shot.shape} {kernel.digest_at(shot.address, shot.length)}"


def _nothing(selection: Selection, observations: Sequence[Observation]) -> BadInput:
    missed = selection.unmatched(
        (observation.site, observation.class_name, None) for observation in observations
    )
    if missed:
        kind, text, hint = missed[0]
        return BadInput(f"no {kind} of the model matches '{text}'", hint=hint)
    return BadInput("the selection takes no tensor of the model")


def _along_axis_of_codes(scales: HostTensor, codes: HostTensor | None) -> HostTensor:
    """Scales, or zero points, with the axes of the codes that they belong to.

    Of two axes that they fit it is the first: weights that kept their name have torch's order.
    """
    size = math.prod(scales.shape)
    sizes = codes.shape if codes is not None else ()
    axis = sizes.index(size) if size in sizes else None
    shape = tuple(size if place == axis else 1 for place in range(len(sizes)))
    return HostTensor(scales.data, scales.dtype, shape) if math.prod(shape) == size else scales
