"""Facts that change from step to step: `steps.jsonl` next to the index.

It holds weights before and after an update, and gradients as the optimizer sees them, each as
digest, figures, sketch and a few samples; and digests of the model's inputs and outputs in steps
that are not captured otherwise. docs/run-format.md describes the lines. This file writes and reads
them. It does not know which steps are inspected, or how two runs differ.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.runs.json_values import list_of, object_of
from driftline.runs.layout import STEPS as STEPS
from driftline.runs.sidecars.model_facts import line_of, sheet_lines

if TYPE_CHECKING:
    from driftline.runs.run import Run

SAMPLES = 64
"""Number of elements of a tensor whose values are kept, evenly spaced."""
SKETCH = 64
"""Number of values of a sketch, as in a summary."""
TENSORS_PER_LINE = 1000
_FIGURES = 6
_MOST_PARAMETERS = 1 << 20

What: TypeAlias = Literal["weights", "gradients"]
When: TypeAlias = Literal["before", "after"]
F64: TypeAlias = npt.NDArray[np.float64]


class TensorState(NamedTuple):
    """One weight or gradient at one moment.

    Attributes:
        digest: Digest of its bytes; empty if only samples were fetched from a device.
        figures: L2 norm, mean, standard deviation, least and largest value, and number of
            non-finite elements.
        sketch: Random projections of all elements. They are linear, so the sketch of a sum is the
            sum of the sketches. Empty if only samples were fetched.
        samples: Evenly spaced elements.
    """

    digest: str
    figures: tuple[float, ...]
    sketch: F64
    samples: F64

    @property
    def norm(self) -> float:
        return self.figures[0]


class Parameter(NamedTuple):
    """A tensor that an optimizer updates, or that a model holds.

    Attributes:
        path: `site.name`.
        dtype: Name of its element type.
        shape: Sizes of its axes.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]


class StateKey(NamedTuple):
    """When weights or gradients were read, and whose they are.

    Attributes:
        step: The step.
        what: Weights or gradients.
        when: Before or after the update; gradients are those that the update uses.
        owner: `optimizer 0`, or the site of a model's root.
        call: Before which further call of the model in this step: weights that have changed between
            two calls. 0 for any other moment.
    """

    step: int
    what: What
    when: When
    owner: str
    call: int = 0


@dataclass(slots=True)
class State:
    """All weights, or all gradients, of one model or optimizer at one moment of a step.

    Attributes:
        key: When, and whose.
        tensors: By path. A parameter without a gradient is not there.
    """

    key: StateKey
    tensors: dict[str, TensorState] = field(default_factory=dict[str, TensorState])


@dataclass(slots=True)
class StepFacts:
    """The facts that one process has written about its steps.

    Attributes:
        parameters: Path → parameter.
        states: States, in the order in which they were taken.
        norms: Step → norms that clipping computed, one for each call.
        calls: (Site of the root, step) → `input slot`, `output slot` → digest.
        thinned: Sentences about steps that were left out to stay within limits.
    """

    parameters: dict[str, Parameter] = field(default_factory=dict[str, Parameter])
    states: list[State] = field(default_factory=list[State])
    norms: dict[int, list[float]] = field(default_factory=dict[int, "list[float]"])
    calls: dict[tuple[str, int], dict[str, str]] = field(
        default_factory=dict[tuple[str, int], "dict[str, str]"]
    )
    thinned: list[str] = field(default_factory=list[str])

    def __bool__(self) -> bool:
        return bool(self.states or self.calls)

    def shape_of(self, path: str) -> tuple[int, ...] | None:
        """Sizes of a parameter; None if this process does not have it."""
        parameter = self.parameters.get(path)
        return None if parameter is None else parameter.shape


# Writing.


def parameters_line(owner: str, first: int, parameters: Sequence[Parameter]) -> str:
    """Names of tensors, which states need not repeat."""
    return line_of(
        "parameters",
        owner=owner,
        first=first,
        paths=[parameter.path for parameter in parameters],
        dtypes=[parameter.dtype for parameter in parameters],
        shapes=[list(parameter.shape) for parameter in parameters],
    )


def state_line(key: StateKey, first: int, tensors: Sequence[Any]) -> str:
    """One line of a state.

    Args:
        key: When, and whose.
        first: Number of the first tensor among the owner's parameters.
        tensors: A `TensorState` for each parameter, or None.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    return line_of(
        "state",
        step=key.step,
        what=key.what,
        when=key.when,
        owner=key.owner,
        **({"call": key.call} if key.call else {}),
        first=first,
        digests=[None if tensor is None else tensor.digest for tensor in tensors],
        figures=_packed([tensor.figures for tensor in present], "<f8"),
        sketched=[len(tensor.sketch) for tensor in present],
        sketches=_packed([tensor.sketch for tensor in present], "<f8"),
        counts=[len(tensor.samples) for tensor in present],
        samples=_packed([tensor.samples for tensor in present], "<f4"),
    )


def _packed(rows: Sequence[Any], dtype: str) -> str:
    if not rows:
        return ""
    joined = np.concatenate([np.asarray(row, dtype) for row in rows])
    return base64.b64encode(joined.tobytes()).decode("ascii")


# Reading.


def read_step_facts(run: Run, rank: int = 0, process: int = 0) -> StepFacts:
    """The facts of a process; empty for a run without them."""
    facts = StepFacts()
    owners: dict[str, dict[int, Parameter]] = {}
    states: dict[StateKey, State] = {}
    for fields in sheet_lines(run.sheet(STEPS, rank, process)):
        kind, step = fields.get("kind"), fields.get("step")
        if kind == "parameters":
            _add_parameters(facts, owners, fields)
        elif type(step) is not int or step < 0:
            continue
        elif kind == "state":
            _add_state(facts, owners, states, fields, step)
        elif kind == "clipped":
            facts.norms.setdefault(step, []).append(_number(fields.get("norm")))
        elif kind == "call":
            digests = {str(k): str(v) for k, v in object_of(fields.get("digests")).items()}
            facts.calls.setdefault((str(fields.get("site", "")), step), digests)
        elif kind == "thinned":
            facts.thinned.append(str(fields.get("text", ""))[:300])
    return facts


def _add_parameters(
    facts: StepFacts, owners: dict[str, dict[int, Parameter]], fields: Mapping[str, Any]
) -> None:
    first = fields.get("first", 0)
    if type(first) is not int:
        return
    named = owners.setdefault(str(fields.get("owner", "")), {})
    listed = zip(
        list_of(fields.get("paths")),
        list_of(fields.get("dtypes")),
        list_of(fields.get("shapes")),
        strict=False,
    )
    for number, (path, dtype, shape) in enumerate(listed, first):
        if len(named) >= _MOST_PARAMETERS:
            return
        sizes = tuple(size for size in list_of(shape) if type(size) is int)
        parameter = Parameter(str(path), str(dtype), sizes)
        named[number] = parameter
        facts.parameters.setdefault(parameter.path, parameter)


def _add_state(
    facts: StepFacts,
    owners: Mapping[str, Mapping[int, Parameter]],
    states: dict[StateKey, State],
    fields: Mapping[str, Any],
    step: int,
) -> None:
    what, when, owner = (str(fields.get(name, "")) for name in ("what", "when", "owner"))
    if what not in ("weights", "gradients") or when not in ("before", "after"):
        return
    call = fields.get("call", 0)
    key = StateKey(step, what, when, owner, call if type(call) is int else 0)
    state = states.get(key)
    if state is None:
        state = states[key] = State(key)
        facts.states.append(state)
    named = owners.get(owner, {})
    first = fields.get("first", 0)
    for number, tensor in _tensors(fields, first if type(first) is int else 0):
        parameter = named.get(number)
        if parameter is not None:
            state.tensors[parameter.path] = tensor


def _tensors(fields: Mapping[str, Any], first: int) -> Iterator[tuple[int, TensorState]]:
    """Number and state of each tensor of a line; of a damaged line, as many as are valid."""
    digests = list_of(fields.get("digests"))
    figures = _unpacked(fields.get("figures"), "<f8")
    sketches = _unpacked(fields.get("sketches"), "<f8")
    samples = _unpacked(fields.get("samples"), "<f4")
    sizes = [list_of(fields.get(name)) for name in ("sketched", "counts")]
    sketched = sampled = present = 0
    for number, digest in enumerate(digests, first):
        if digest is None:
            continue
        if present >= len(sizes[0]) or present >= len(sizes[1]):
            return
        width, count = sizes[0][present], sizes[1][present]
        row = figures[present * _FIGURES : (present + 1) * _FIGURES]
        proper = type(width) is int and type(count) is int and width >= 0 and count >= 0
        if not proper or len(row) != _FIGURES:
            return
        yield (
            number,
            TensorState(
                str(digest),
                tuple(map(float, row)),
                sketches[sketched : sketched + width],
                samples[sampled : sampled + count],
            ),
        )
        sketched, sampled, present = sketched + width, sampled + count, present + 1


def _unpacked(text: Any, dtype: str) -> F64:
    try:
        content = binascii.a2b_base64(text if isinstance(text, str) else "", strict_mode=True)
        return np.frombuffer(content, dtype).astype(np.float64)
    except ValueError:
        return np.empty(0)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
