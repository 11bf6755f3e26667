"""One capture under way: a model is optimised, executed as often as memory needs, and recorded."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.captures.onnxruntime import model_file, sessions
from driftline.captures.onnxruntime.graph import Graph, placed
from driftline.captures.onnxruntime.inputs import Feed, Wanted, wanted_by
from driftline.captures.onnxruntime.model_file import Weights
from driftline.captures.onnxruntime.recorder import Seen, Sight, portions, sights, sizes_of, wanted
from driftline.captures.onnxruntime.scopes import Names
from driftline.captures.onnxruntime.sessions import SessionPlan
from driftline.captures.onnxruntime.stored_forms import (
    block_size,
    blocked_values,
    flat_values,
    integer_values,
    usual,
    widened_values,
)
from driftline.captures.onnxruntime.tensors import look
from driftline.captures.onnxruntime.topology import ids_of, module_tree, topology
from driftline.captures.recorder import Intake, Refusal, Snapshot
from driftline.captures.selection import Selection
from driftline.errors import BadInput
from driftline.numerics import kernel
from driftline.runs.records import usual_moment
from driftline.runs.sinks import Sink

Progress = Callable[[int, int], None]
_INTEGERS = ("QLinear", "QGemm", "QAttention", "MatMulInteger", "ConvInteger", "DynamicQuantizeM")


class Budget(NamedTuple):
    """How much may be held at a time.

    Attributes:
        memory: Bytes of inner tensors.
        values: How many of them; 0 is no limit.
    """

    memory: int
    values: int = 0


class Work:
    """A model on its way into a run."""

    def __init__(self, file: Path, plan: SessionPlan, exported: Graph, folder: Path) -> None:
        self._plan = plan
        self._name = file.name
        made = sessions.optimise(file, plan, folder)
        self._path = made.path
        self._plain: Any = made.session
        self.wanted: list[Wanted] = wanted_by(made.session)
        self.outputs: list[str] = [one.name for one in made.session.get_outputs()]
        optimised = Graph(model_file.load_graph(made.path))
        blocked = blocked_values(exported, optimised)
        self._block = block_size() if blocked else 0
        self._stored = {
            **flat_values(exported, optimised),
            **widened_values(exported, optimised),
            **integer_values(exported, optimised),
            **blocked,
        }
        optimised.rename({one.name: value for value, one in self._stored.items()})
        self.seen = Seen.of(exported, optimised, Names(exported), placed(exported, optimised))
        self._tree = module_tree(self.seen)
        self._session: tuple[int, Any] | None = None
        self._weights: Weights | None = None
        self._no_tensors: set[str] = set()

    def plain_digests(self, feed: Feed) -> list[str]:
        """What the session without capture gives, as digests."""
        values = sessions.run(self._plain, self.outputs, _ort_feed(feed), self._name)
        return [_digest(value) for value in values]

    def integer_nodes(self) -> int:
        """How many nodes of the optimised graph were made of quantised ones."""
        return sum(node.op.startswith(_INTEGERS) for node in self.seen.optimised.nodes)

    def unseen(self) -> list[str]:
        """What of a capture that is over is not in the run, one sentence each."""
        inner = Counter(node.op for node in self.seen.optimised.nodes if node.subgraphs)
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

    def let_go(self) -> None:
        """The session without capture has done its part; its weights need not stay in memory."""
        self._plain = None

    def choose(self, selection: Selection, levels: Sequence[str]) -> list[Sight]:
        """What is recorded of every step.

        Raises:
            BadInput: Nothing is.
        """
        found = sights(self.seen, levels)
        taken = wanted(found, selection, ids_of(self._tree))
        if not taken:
            raise _nothing(selection, found)
        return taken

    def capture(
        self,
        intake: Intake,
        sink: Sink,
        taken: Sequence[Sight],
        feeds: Sequence[tuple[int, Feed]],
        expected: Sequence[Sequence[str]],
        budget: Budget,
        progress: Progress | None,
    ) -> tuple[int, bool]:
        """Record every step.

        Returns:
            How often each step was executed, and whether all gave what was expected.
        """
        sink.topology(topology(self.seen, self._tree, taken))
        self._say_unseen(intake)
        most = 0
        faithful = True
        for number, (step, feed) in enumerate(feeds):
            sizes = sizes_of(self.seen.optimised, {name: one.shape for name, one in feed.items()})
            parts = portions(taken, sizes, budget.memory, budget.values)
            most = max(most, len(parts))
            for at, part in enumerate(parts):
                values = self._values(part, at, len(parts), feed, sizes)
                if at == 0:
                    given = [_digest(values[name]) for name in self.outputs]
                    faithful = self._faithful(intake, given, expected[number], step) and faithful
                counted = number * len(taken) + sum(map(len, parts[:at]))
                for sight in part:
                    self._record(intake, sight, values, feed, step)
                    counted += 1
                    if progress is not None:
                        progress(counted, len(feeds) * len(taken))
                del values
            sink.step_done(step)
        return most, faithful

    def _values(
        self, part: Sequence[Sight], at: int, many: int, feed: Feed, sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        """The values of one portion, by an execution of the graph with them as outputs."""
        likes = [self._stored[s.value].like for s in part if s.value in self._stored]
        names = [
            value
            for value in dict.fromkeys((*self.outputs, *(s.value for s in part), *likes))
            if value in sizes or value in self.outputs
        ]
        stored = [self._stored[name].name if name in self._stored else name for name in names]
        if self._session is None or self._session[0] != at or many > 1:
            self._session = None  # its memory first
            path = sessions.with_outputs(self._path, stored, at)
            self._session = (at, sessions.capturing(path, self._plan, self._name))
        values = sessions.run(self._session[1], stored, _ort_feed(feed), self._name)
        return dict(zip(names, values, strict=True))

    def _record(
        self, intake: Intake, sight: Sight, values: Mapping[str, Any], feed: Feed, step: int
    ) -> None:
        tensor: Any = values.get(sight.value, feed.get(sight.value))
        if sight.port == "param":
            self._weights = self._weights or Weights(self._path)
            tensor = self._weights.read(sight.value)
        elif sight.value in self._stored and tensor is not None:
            stored = self._stored[sight.value]
            like = tuple(values[stored.like].shape()) if stored.like else ()
            tensor = usual(tensor, stored, self._block, like)
        if tensor is None:
            return
        if isinstance(look(tensor, values=False), Refusal):
            self._no_tensors.add(sight.value)
        intake.shielded(
            sight.site,
            intake.take,
            sight.site,
            sight.port,
            sight.slot,
            tensor,
            sight.alias,
            sight.class_name,
            sight.visit,
            "forward",
            usual_moment(sight.port),
            step,
        )

    def _faithful(
        self, intake: Intake, given: Sequence[str], expected: Sequence[str], step: int
    ) -> bool:
        other = [
            name for name, one, two in zip(self.outputs, given, expected, strict=True) if one != two
        ]
        if other:
            intake.event(
                "differs",
                f"step {step}: {', '.join(other)} is not bit for bit what the session without "
                "capture gives; does the model draw random numbers, or add in no fixed order?",
                step=step,
            )
        return not other

    def _say_unseen(self, intake: Intake) -> None:
        for node in self.seen.optimised.nodes:
            if node.subgraphs:
                made = next((value for value in node.outputs if value), "")
                intake.event(
                    "inside",
                    f"what happens inside the {node.op} '{node.name or made}' is not seen, "
                    "only what goes in and comes out",
                    site=self.seen.site(made),
                )


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


def _nothing(selection: Selection, found: Sequence[Sight]) -> BadInput:
    missed = selection.unmatched((sight.site, sight.class_name, None) for sight in found)
    if missed:
        kind, text, hint = missed[0]
        return BadInput(f"no {kind} of the model matches '{text}'", hint=hint)
    return BadInput("the selection takes no tensor of the model")
