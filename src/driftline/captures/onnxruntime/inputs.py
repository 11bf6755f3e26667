"""Inputs of an ONNX model: arrays by name, `.npz` files, or the inputs that another run captured.

Each set of inputs is a step. Names, types and shapes are checked against the model before it is
run. Error messages list the inputs of the model.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.captures.onnxruntime.graph import Graph, sizes_in
from driftline.captures.onnxruntime.model_file import load_graph
from driftline.captures.onnxruntime.tensors import TYPES, AnyArray, HostTensor, TextTensor, dtype_in
from driftline.errors import BadFile, BadInput, did_you_mean
from driftline.numerics.dtypes import DTYPES
from driftline.runs.reader import open_run
from driftline.runs.records import Record
from driftline.runs.run import Run

# Sites of the whole model.
ROOTS = ("(root)", "")
_TEXTS = "tensor(string)"
NOTHING_TAKEN = "the model takes no inputs"
Source = Mapping[str, Any] | str | os.PathLike[str] | Run


class Wanted(NamedTuple):
    """One input of a model.

    Attributes:
        name: Its name.
        dtype: Our name of its element type; empty if it is not a tensor of numbers.
        shape: Its sizes; a text or None for a size that may vary.
        kind: The session's name of its type.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    kind: str

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.name}: {self.dtype or self.kind} [{sizes}]"


Feed = dict[str, HostTensor | TextTensor]


def wanted_by(session: Any) -> list[Wanted]:
    """The inputs of a session, in order."""
    return [
        Wanted(info.name, dtype_in(info.type), tuple(info.shape), info.type)
        for info in session.get_inputs()
    ]


def declared(model: Any) -> str:
    """The inputs that a model's file declares, as text."""
    weights = {tensor.name for tensor in model.graph.initializer}
    declared_inputs: list[Wanted] = []
    for info in model.graph.input:
        if info.name not in weights:
            tensor_type = info.type.tensor_type
            shape = tuple(sizes_in(tensor_type.shape))
            kind = (info.type.WhichOneof("value") or "value").removesuffix("_type")
            kind = "texts" if kind == "tensor" else kind
            declared_inputs.append(
                Wanted(info.name, TYPES.get(tensor_type.elem_type, ""), shape, kind)
            )
    return _takes(declared_inputs)


def feeds_of(
    sources: Source | Iterable[Source], wanted: Sequence[Wanted]
) -> list[tuple[int, Feed]]:
    """Read and check sets of inputs; return each with the number of its step.

    Raises:
        DriftlineError: A set cannot be read, or does not fit the model.
    """
    source_list = (
        [sources] if isinstance(sources, (str, os.PathLike, Mapping, Run)) else list(sources)
    )
    if not source_list and not wanted:
        return [(0, {})]
    if not source_list:
        raise BadInput("no inputs were given", hint=_takes(wanted))
    feeds: list[tuple[int, Feed]] = []
    for source in source_list:
        for step, arrays, where in _sets(cast(Source, source), wanted):
            # Steps of a single run keep their numbers; sets from several sources are numbered.
            number = step if len(source_list) == 1 else len(feeds)
            feeds.append((number, checked(arrays, wanted, where)))
    return feeds


def _sets(source: Source, wanted: Sequence[Wanted]) -> list[tuple[int, Mapping[str, Any], str]]:
    if isinstance(source, Mapping):
        return [(0, source, "the inputs")]
    if isinstance(source, Run):
        return _from_run(source, wanted)
    path = Path(source)
    if path.is_dir():
        return _from_run(open_run(path), wanted)
    return [(0, _from_file(path, wanted), f"'{path}'")]


def _from_file(path: Path, wanted: Sequence[Wanted]) -> Mapping[str, Any]:
    """The arrays of an `.npz` file, or of an `.npy` file if the model has a single input."""
    try:
        # An array needs no name if the model has only one input.
        if path.suffix == ".npy" and len(wanted) == 1:
            return {wanted[0].name: np.load(path, allow_pickle=False)}
        if not zipfile.is_zipfile(path):
            if not path.exists():
                raise BadFile(
                    f"there is no file of inputs '{path}'", hint="give an .npz file or a run"
                )
            raise BadFile(
                f"'{path}' is no file of named arrays",
                hint=f"write one with numpy.savez; {_takes(wanted)}",
            )
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadFile(
            f"cannot read the inputs in '{path}': {error}",
            hint=f"write plain arrays with numpy.savez; {_takes(wanted)}",
        ) from None


def _from_run(run: Run, wanted: Sequence[Wanted]) -> list[tuple[int, Mapping[str, Any], str]]:
    """The inputs of another run's model, for each step."""
    by_step: dict[int, list[Record]] = {}
    for record in run.records:
        key = record.key
        # Only the model's inputs in rank 0 and in the first call of each step are used.
        if key.port == "input" and key.site in ROOTS and (key.rank, key.visit) == (0, 0):
            by_step.setdefault(key.step, []).append(record)
    if not by_step:
        raise BadInput(
            f"run '{run.name}' has no inputs of the whole model",
            hint="dump it again without --site, --class and --port, or give an .npz file",
        )
    where = f"run '{run.name}'"
    # A run may keep only summaries of later steps, which cannot be inputs, so these steps are left
    # out. If there is no other step, the run is refused below.
    valued = {
        step: records
        for step, records in by_step.items()
        if all(record.kept == "full" for record in records)
    }
    return [
        (step, _named(records, run, wanted, where), f"{where}, step {step}")
        for step, records in sorted((valued or by_step).items())
    ]


def _named(
    records: Sequence[Record], run: Run, wanted: Sequence[Wanted], where: str
) -> dict[str, HostTensor]:
    """A model's captured inputs, by their names in the ONNX file.

    They are matched by name, then by position if type and shape fit, then by type and shape if
    there is only one candidate.

    Raises:
        BadInput: An input has no match.
    """
    by_name = {record.key.slot: record for record in records}
    chosen = {need.name: by_name[need.name] for need in wanted if need.name in by_name}
    left = [record for record in records if record not in chosen.values()]
    _choose_by_position(wanted, left, chosen)
    _choose_the_only_ones(wanted, left, chosen)
    missing = [need for need in wanted if need.name not in chosen]
    if missing:
        slots = ", ".join(sorted(by_name)) or "none"
        raise BadInput(
            f"{where} has no input for {_list(need.name for need in missing)}",
            hint=f"it has {slots}; {_takes(wanted)}",
        )
    return {name: _host(run, record, where) for name, record in chosen.items()}


def _choose_by_position(
    wanted: Sequence[Wanted], left: list[Record], chosen: dict[str, Record]
) -> None:
    for place, need in enumerate(wanted):
        if need.name not in chosen:
            at_place = [r for r in left if (r.alias or r.key.slot) == str(place)]
            fitting = next((record for record in at_place if _fits(record, need)), None)
            if fitting is not None:
                chosen[need.name] = fitting
                left.remove(fitting)


def _choose_the_only_ones(
    wanted: Sequence[Wanted], left: list[Record], chosen: dict[str, Record]
) -> None:
    """Match pairs of equal type and shape in which neither side has another candidate."""
    open_needs = [need for need in wanted if need.name not in chosen]
    for need in list(open_needs):
        candidates = [record for record in left if _fits(record, need)]
        rivals = [other for other in open_needs if candidates and _fits(candidates[0], other)]
        if len(candidates) == 1 and len(rivals) == 1:
            chosen[need.name] = candidates[0]
            left.remove(candidates[0])
            open_needs.remove(need)


def _fits(record: Record, need: Wanted) -> bool:
    return record.dtype == need.dtype and _shape_fits(record.shape, need)


def _shape_fits(shape: tuple[int, ...], need: Wanted) -> bool:
    return len(shape) == len(need.shape) and all(
        not isinstance(size, int) or size == actual
        for size, actual in zip(need.shape, shape, strict=True)
    )


def _host(run: Run, record: Record, where: str) -> HostTensor:
    # A reduced tensor cannot be an input of a model.
    if record.kept != "full":
        raise BadInput(
            f"{where} keeps only a {record.kept} of {record.key}",
            hint="dump it again with whole tensors",
        )
    return HostTensor(np.array(run.raw(record)), record.dtype, record.shape)


def checked(arrays: Mapping[str, Any], wanted: Sequence[Wanted], where: str) -> Feed:
    """Check a set of inputs and convert it for the model.

    Raises:
        BadInput: A name is missing or unknown, or a type or shape does not fit.
    """
    by_name = {need.name: need for need in wanted}
    for name in arrays:
        if name not in by_name:
            raise BadInput(
                f"the model has no input '{name}', which is in {where}",
                hint=f"{_near(name, by_name)}{_takes(wanted)}",
            )
    missing = [need for need in wanted if need.name not in arrays]
    if missing:
        raise BadInput(
            f"{_list(need.name for need in missing)} is not in {where}", hint=_takes(wanted)
        )
    return {need.name: _one(arrays[need.name], need, where) for need in wanted}


def _one(value: Any, need: Wanted, where: str) -> HostTensor | TextTensor:
    if need.kind == _TEXTS and not isinstance(value, HostTensor):
        return _texts(value, need, where)
    tensor = value if isinstance(value, HostTensor) else _array(value, need, where)
    # From Python, ONNX Runtime cannot make tensors with less than a byte per element.
    if not need.dtype or DTYPES[need.dtype].bits < 8:
        raise BadInput(
            f"the input '{need.name}' is a {need.kind}, which cannot be given from here",
            hint="tensors of numbers and of texts can",
        )
    if tensor.dtype != need.dtype:
        raise BadInput(
            f"input '{need.name}' is {tensor.dtype} in {where}, the model takes {need.dtype}",
            hint=f"convert it, such as with .astype('{need.dtype}')",
        )
    if not _shape_fits(tensor.shape, need):
        raise BadInput(
            f"input '{need.name}' has the shape {list(tensor.shape)} in {where}, "
            f"the model takes {str(need).rpartition(' [')[2].join(('[', ''))}",
            hint=_takes([need]),
        )
    return tensor


def _texts(value: Any, need: Wanted, where: str) -> TextTensor:
    array: AnyArray = np.asarray(value)
    # numpy stores texts as U, S or object; an object array may contain other things, too.
    if array.dtype.kind not in "US" and not all(isinstance(text, str) for text in array.flat):
        raise BadInput(
            f"input '{need.name}' of {where} is {array.dtype.name}, the model takes texts",
            hint="such as numpy.array(['one', 'two'])",
        )
    if not _shape_fits(array.shape, need):
        raise BadInput(
            f"input '{need.name}' has the shape {list(array.shape)} in {where}", hint=_takes([need])
        )
    return TextTensor(array.astype(str))


def _array(value: Any, need: Wanted, where: str) -> HostTensor:
    # numpy accepts a torch tensor on the host, but not one on a device or of bfloat16.
    try:
        array: AnyArray = np.asarray(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"input '{need.name}' of {where} is no array: {error}", hint="give an array of numbers"
        ) from None
    dtype = array.dtype.name
    if dtype not in DTYPES:
        raise BadInput(
            f"input '{need.name}' of {where} is of type {dtype}, which has no numbers",
            hint="give an array of floats, integers or booleans",
        )
    return HostTensor(array, dtype, array.shape)


def _takes(wanted: Sequence[Wanted]) -> str:
    # Only some inputs are listed, to keep the hint short.
    shown = "; ".join(map(str, wanted[:6])) + (" and more" if len(wanted) > 6 else "")
    return f"the model takes {shown}" if wanted else NOTHING_TAKEN


def _near(name: str, by_name: Mapping[str, Wanted]) -> str:
    hint = did_you_mean(name, by_name)
    return f"{hint} " if hint.startswith("did") else ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


# Random inputs, for a comparison of two files if the user has no inputs.

BATCH, LENGTH = 2, 8
"""Sizes used if files leave them open: of the first axis, and of any other axis."""


def random_inputs(
    model: str | os.PathLike[str], seed: int = 0, companion: str | os.PathLike[str] | None = None
) -> dict[str, AnyArray]:
    """Random arrays for all declared inputs of a model.

    Floating point numbers are normally distributed. Integers that index a table are valid row
    numbers of it; other integers (masks, flags) are ones. Axes with the same name have the same
    size. A size that the file leaves open is that of the other file, if that declares it.

    Args:
        model: The model file.
        seed: Seed of the random numbers.
        companion: Another model file that will get the same inputs.

    Raises:
        BadFile: A file is no ONNX model.
        BadInput: The model has an input that is not a tensor of numbers.
    """
    graph = Graph(load_graph(Path(model)))
    rng = np.random.default_rng(seed)
    others = Graph(load_graph(Path(companion))).shapes if companion is not None else {}
    sizes: dict[str, int] = {}
    arrays: dict[str, AnyArray] = {}
    for name in graph.inputs:
        dtype = TYPES.get(graph.types.get(name, 0), "")
        if dtype not in DTYPES:
            raise BadInput(f"input '{name}' is no tensor of numbers", hint="give --inputs x.npz")
        shape: list[int] = []
        for axis, size in enumerate(graph.shapes.get(name, ())):
            usual = next(
                (n for n in others.get(name, ())[axis : axis + 1] if isinstance(n, int)), 0
            )
            usual = usual or (LENGTH if axis else BATCH)
            if isinstance(size, str):
                size = sizes.setdefault(size, usual)
            shape.append(size or usual)
        arrays[name] = _drawn(dtype, tuple(shape), _rows_of(name, graph), rng)
    return arrays


def _drawn(dtype: str, shape: tuple[int, ...], rows: int, rng: np.random.Generator) -> AnyArray:
    kind = DTYPES[dtype]
    if kind.is_floating:
        numpy_name = dtype if dtype in ("float64", "float16") else "float32"
        return rng.standard_normal(shape).astype(numpy_name)
    if dtype == "bool" or not rows:
        return np.ones(shape, dtype)
    return rng.integers(0, rows, shape).astype(dtype)


def _rows_of(name: str, graph: Graph) -> int:
    """Number of rows of the smallest table that an input indexes; 0 if it indexes none."""
    rows: list[int] = []
    for number in graph.readers.get(name, ()):
        node = graph.nodes[number]
        table = graph.shapes.get(node.inputs[0], ()) if node.inputs else ()
        if node.op == "Gather" and node.inputs[1:2] == (name,) and table:
            rows += [size for size in table[:1] if isinstance(size, int)]
    return min(rows, default=0)
