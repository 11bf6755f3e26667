"""Facts about the models of a process: `model.jsonl` and `weights.jsonl` next to the index.

`model.jsonl` describes modules, their attributes, code, state and training; `weights.jsonl` holds
summaries, digests and samples of the values of parameters and buffers. docs/run-format.md describes
both. This file writes and reads the lines. It does not know how a framework's model is inspected,
or how two models are compared.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.numerics.fields import Summary
from driftline.runs.index_lines import decode_summary
from driftline.runs.layout import MODEL as MODEL
from driftline.runs.layout import WEIGHTS as WEIGHTS

if TYPE_CHECKING:
    from driftline.runs.run import Run

SCHEMA = 1
MOST_SAMPLES = 4096
"""Number of elements of a tensor whose values are kept: an even grid over all of its axes."""
_LONGEST_LINE = 8 << 20
_MOST_LINES = 4_000_000
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

Value = Any
"""A scalar fact: number, text, truth value, None, or a list of these.

Non-finite numbers and values of a framework's own types (`torch.bfloat16`) are text.
"""
F64 = npt.NDArray[np.float64]


def line_of(kind: str, **fields: Any) -> str:
    """One line of a sidecar; fields that are None, empty or false are omitted."""
    kept = {name: value for name, value in fields.items() if not _is_usual(value)}
    return _encode({"kind": kind, **kept}) + "\n"


def _is_usual(value: Any) -> bool:
    # 0 is a fact (a step, a number); only empty containers, None and False carry no information.
    return value is None or value is False or (value in ("", [], {}, ()) and value != 0)


# Samples: which elements of a tensor are kept.


def grid_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of sampled indices for each axis of a tensor, 4096 elements at most.

    All axes have the same limit, so a transposed tensor has the transposed grid.

    >>> grid_of((768,)), grid_of((4096, 4096)), grid_of((8, 100_000))
    ((768,), (64, 64), (8, 512))
    """
    if math.prod(shape) <= MOST_SAMPLES:
        return shape
    low, high = 1, MOST_SAMPLES
    while low < high:
        middle = (low + high + 1) // 2
        if math.prod(min(size, middle) for size in shape) <= MOST_SAMPLES:
            low = middle
        else:
            high = middle - 1
    return tuple(min(size, low) for size in shape)


def grid_indices(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], ...]:
    """The sampled indices of each axis, evenly spaced, beginning with the first."""
    return tuple(
        np.arange(count, dtype=np.int64) * size // max(count, 1)
        for size, count in zip(shape, grid_of(shape), strict=True)
    )


# Reading.


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """The code of one function.

    Attributes:
        digest: Digest of its instructions, names and constants; the prefix names the Python
            version.
        file: Source file; the home folder is written as `~`.
        line: First line of the function in that file.
        lines: Line number → digest of the instructions of that line.
    """

    digest: str = ""
    file: str = ""
    line: int = 0
    lines: Mapping[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """A class of modules.

    Attributes:
        name: Class name with its module path: `torch.nn.modules.linear.Linear`.
        code: Functions by name: `forward`, other methods, and functions that they call.
        constants: Scalar attributes of the class itself.
    """

    name: str
    code: Mapping[str, CodeFacts] = field(default_factory=dict[str, CodeFacts])
    constants: Mapping[str, Value] = field(default_factory=dict[str, Value])


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One module.

    Attributes:
        site: Site in the keys of its tensors.
        class_name: Class name with its module path.
        attributes: Scalar attributes by name; short tables have dotted names (`scaling.default`).
        functions: Functions and classes held as attributes, by qualified name.
        training: Whether it is in training mode; None if the framework has no such mode.
        hooks: Kind of hook → qualified names of the functions.
        forward: Qualified name of the function that replaces the class's `forward`.
    """

    site: str
    class_name: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict[str, Value])
    functions: Mapping[str, str] = field(default_factory=dict[str, str])
    training: bool | None = None
    hooks: Mapping[str, list[str]] = field(default_factory=dict[str, "list[str]"])
    forward: str = ""

    @property
    def short_class(self) -> str:
        return self.class_name.rpartition(".")[2]


class TensorFacts(NamedTuple):
    """A parameter or buffer.

    Attributes:
        site: The module that holds it.
        name: Its name in that module.
        is_buffer: Whether it is a buffer rather than a parameter.
        tied: `site.name` of the first name of the same tensor; empty if this is the first name.
        placement: For a shard: how the whole tensor is distributed over its ranks.
        unreadable: Why it has no values: meta device, lazy, packed.
    """

    site: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_buffer: bool = False
    device: str = ""
    requires_grad: bool = False
    tied: str = ""
    placement: str = ""
    unreadable: str = ""

    @property
    def path(self) -> str:
        return tensor_path(self.site, self.name)


class WeightValues(NamedTuple):
    """The stored facts about the values of a parameter or buffer.

    Attributes:
        basis: `all`, or `sample` if only the samples were read.
        digest: Digest of its bytes in C order, as in the index.
        rounded: Number format → digest of its values rounded to that format.
        unordered: Number format → digest that does not depend on the order of elements; `own`
            stands for its own format.
        described: The summary of all elements, or of the samples, as it is in the file.
        encoded: The samples: base64 of their bytes.
        unreadable: Why there are no values.
    """

    site: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    basis: str = "all"
    digest: str = ""
    rounded: Mapping[str, str] = {}
    unordered: Mapping[str, str] = {}
    described: Mapping[str, Any] | None = None
    encoded: str = ""
    unreadable: str = ""

    @property
    def summary(self) -> Summary | None:
        """The summary; None if damaged or absent. Decoded on demand, because few are needed."""
        if self.described is None:
            return None
        try:
            return decode_summary(self.described)
        except (ValueError, TypeError):
            return None

    def samples(self) -> F64 | None:
        """The sampled elements in float64, in the shape of `grid_of`; None if damaged or absent.

        The samples of a tensor with at most 4096 elements are all its elements.
        """
        dtype, grid = DTYPES.get(self.dtype), grid_of(self.shape)
        if dtype is None or not self.encoded:
            return None
        try:
            content = binascii.a2b_base64(self.encoded, strict_mode=True)
            raw = np.frombuffer(content, np.dtype(dtype.storage))
            values = to_float64(raw, dtype, math.prod(grid))
        except ValueError:
            return None
        if values.size != math.prod(grid) or values.dtype.kind == "c":
            return None
        return cast("F64", values.astype(np.float64).reshape(grid))

    def whole(self) -> F64 | None:
        """All values, if the samples contain all of them; otherwise None."""
        return self.samples() if grid_of(self.shape) == self.shape else None


class LaterLook(NamedTuple):
    """A later inspection of a model, before a call or at the end of the program.

    Attributes:
        model: Number of the model in the process.
        step: Step that was about to begin.
        at_end: Whether the program had ended.
    """

    model: int
    step: int
    at_end: bool


@dataclass(slots=True)
class ModelFacts:
    """All facts about the models of one process.

    Attributes:
        framework: torch, paddle, onnxruntime; empty if nothing was captured.
        modules: Site → module, as it was first seen.
        tensors: `site.name` → parameter or buffer.
        weights: `site.name` → stored facts about its values.
        classes: Class name → class.
        config: Dotted name → value, of the configurations of the models.
        process: Name → value: number formats, switches, seeds.
        training: Records of optimizers, schedulers, scalers, clipping, losses and the order of
            calls, in the order of the file: dictionaries with `kind` and `step`.
        changes: Records of modules and modes that changed later, with the step.
        looks: Later look at a model → number of changes that had been written by then.
        notes: Sentences about what could not be inspected.
    """

    framework: str = ""
    modules: dict[str, ModuleFacts] = field(default_factory=dict[str, ModuleFacts])
    tensors: dict[str, TensorFacts] = field(default_factory=dict[str, TensorFacts])
    weights: dict[str, WeightValues] = field(default_factory=dict[str, WeightValues])
    classes: dict[str, ClassFacts] = field(default_factory=dict[str, ClassFacts])
    config: dict[str, Value] = field(default_factory=dict[str, Value])
    process: dict[str, Value] = field(default_factory=dict[str, Value])
    training: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    changes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    looks: dict[LaterLook, int] = field(default_factory=dict[LaterLook, int])
    notes: list[str] = field(default_factory=list[str])

    def __bool__(self) -> bool:
        return bool(self.modules or self.tensors)

    def at(self, look: LaterLook) -> ModelFacts:
        """Modules, parameters and buffers as a later look saw them, without values."""
        later = ModelFacts(
            self.framework, dict(self.modules), dict(self.tensors), training=self.training
        )
        for fields in self.changes[: self.looks[look]]:
            kind, site = fields.get("kind"), _text(fields.get("site"))
            if fields.get("model", 0) != look.model:
                continue
            if kind == "module":
                later.modules[site] = _module(site, fields)
            elif kind == "tensor":
                tensor = _tensor(site, fields)
                later.tensors[tensor.path] = tensor
            elif kind == "gone" and "name" in fields:
                later.tensors.pop(tensor_path(site, _text(fields["name"])), None)
            elif kind == "gone":
                later.modules.pop(site, None)
        return later

    def attributes(self, site: str) -> Mapping[str, Value]:
        """Scalar attributes of the module at a site; empty if it is unknown."""
        module = self.modules.get(site)
        return {} if module is None else module.attributes


def tensor_path(site: str, name: str) -> str:
    """`site.name`; for tensors of the root only the name.

    >>> tensor_path("layers.0", "weight"), tensor_path("(root)", "scale")
    ('layers.0.weight', 'scale')
    """
    return name if site == "(root)" else f"{site}.{name}"


def read_model_facts(
    run: Run, rank: int = 0, process: int = 0, *, weights: bool = True
) -> ModelFacts:
    """The facts of a process; empty for a run without them.

    Args:
        run: Any run.
        rank: Rank of the process.
        process: Number of the process of that rank.
        weights: Whether to read the facts about values, too.
    """
    facts = ModelFacts()
    for fields in sheet_lines(run.sheet(MODEL, rank, process)):
        _add(facts, fields)
    if weights and facts:
        for fields in sheet_lines(run.sheet(WEIGHTS, rank, process)):
            if fields.get("kind") == "weight":
                values = _weight(fields)
                # The first line counts, as for modules.
                facts.weights.setdefault(tensor_path(values.site, values.name), values)
            else:
                _add(facts, fields)
    return facts


def attributes_of(run: Run, site: str, rank: int = 0, process: int = 0) -> Mapping[str, Value]:
    """Scalar attributes of the module at a site (`eps`, `stride`, `groups`, ...); empty if unknown.

    This reads the file each time; for many sites, call `read_model_facts` once.
    """
    return read_model_facts(run, rank, process, weights=False).attributes(site)


def sheet_lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines; damaged or overlong lines are skipped."""
    for number, line in enumerate(text.split("\n")):
        if number >= _MOST_LINES:
            return
        if line and len(line) <= _LONGEST_LINE:
            try:
                fields = json.loads(line)
            # The file may come from somebody else, or be cut in the middle of a line.
            except (ValueError, RecursionError):
                continue
            if isinstance(fields, dict):
                yield cast("dict[str, Any]", fields)


_TRAINING = frozenset({"optimizer", "scheduler", "scaler", "clipping", "loss", "order", "average"})


def _add(facts: ModelFacts, fields: dict[str, Any]) -> None:
    """Add one line; fields of unexpected types are ignored."""
    kind, site = fields.get("kind"), _text(fields.get("site"))
    # Later revisions are changes, because the first step was computed with the first state.
    later = type(fields.get("revision")) is int and fields["revision"] > 0
    if kind == "model":
        facts.framework = facts.framework or _text(fields.get("framework"))
    elif kind == "class":
        name = _text(fields.get("class"))
        facts.classes.setdefault(name, _class(name, fields))
    elif kind in ("module", "tensor", "gone") and later:
        facts.changes.append(fields)
    elif kind == "module":
        facts.modules.setdefault(site, _module(site, fields))
    elif kind == "tensor":
        tensor = _tensor(site, fields)
        facts.tensors.setdefault(tensor.path, tensor)
    elif kind == "config":
        facts.config.update(_table(fields.get("values")))
    elif kind == "process":
        # The first value of each name counts; all later lines are changes.
        if facts.process:
            facts.changes.append(fields)
        for name, value in _table(fields.get("values")).items():
            facts.process.setdefault(name, value)
    elif kind == "looked":
        model, step = fields.get("model", 0), fields.get("step", 0)
        if type(model) is int and type(step) is int:
            look = LaterLook(model, step, fields.get("at_end") is True)
            facts.looks[look] = len(facts.changes)
    elif kind in _TRAINING:
        facts.training.append(fields)
    elif kind == "note":
        facts.notes.append(_text(fields.get("text")))


def _module(site: str, fields: Mapping[str, Any]) -> ModuleFacts:
    hooks = {
        kind: [str(name) for name in cast("list[Any]", names)]
        for kind, names in _table(fields.get("hooks")).items()
        if isinstance(names, list)
    }
    return ModuleFacts(
        site,
        _text(fields.get("class")),
        _table(fields.get("attributes")),
        {name: str(value) for name, value in _table(fields.get("functions")).items()},
        # `false` is not written, so an existing mode is written as a word.
        {"train": True, "eval": False}.get(_text(fields.get("mode"))),
        hooks,
        _text(fields.get("forward")),
    )


def _tensor(site: str, fields: Mapping[str, Any]) -> TensorFacts:
    return TensorFacts(
        site,
        _text(fields.get("name")),
        _text(fields.get("dtype")),
        _shape(fields.get("shape")),
        fields.get("buffer") is True,
        _text(fields.get("device")),
        fields.get("requires_grad") is True,
        _text(fields.get("tied")),
        _text(fields.get("placement")),
        _text(fields.get("unreadable")),
    )


def _class(name: str, fields: Mapping[str, Any]) -> ClassFacts:
    code: dict[str, CodeFacts] = {}
    for function, value in _table(fields.get("code")).items():
        about = _table(value)
        first = about.get("line")
        first = first if type(first) is int else 0
        digests = {
            first + int(offset): _text(digest)
            for offset, digest in _table(about.get("lines")).items()
            if offset.isdigit() and len(offset) < 9
        }
        code[function] = CodeFacts(
            _text(about.get("digest")), _text(about.get("file")), first, digests
        )
    return ClassFacts(name, code, _table(fields.get("constants")))


def _weight(fields: Mapping[str, Any]) -> WeightValues:
    return WeightValues(
        _text(fields.get("site")),
        _text(fields.get("name")),
        _text(fields.get("dtype")),
        _shape(fields.get("shape")),
        _text(fields.get("basis")) or "all",
        _text(fields.get("digest")),
        {name: str(value) for name, value in _table(fields.get("rounded")).items()},
        {name: str(value) for name, value in _table(fields.get("unordered")).items()},
        _table(fields.get("summary")) or None,
        _text(fields.get("samples")),
        _text(fields.get("unreadable")),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _shape(value: Any) -> tuple[int, ...]:
    sizes = cast("list[Any]", value) if isinstance(value, list) else []
    if len(sizes) > 64 or any(type(size) is not int or not 0 <= size < 1 << 48 for size in sizes):
        return ()
    return tuple(sizes)
