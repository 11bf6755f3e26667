"""What a model is fed: arrays by name, `.npz` files, or the inputs that another run captured.

Each set of inputs is a step. Names, types and shapes are held against the model before anything is
run, and every refusal says what the model takes.
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

from driftline.captures.onnxruntime.graph import sizes_in
from driftline.captures.onnxruntime.tensors import TYPES, AnyArray, HostTensor, TextTensor, dtype_in
from driftline.errors import BadFile, BadInput, did_you_mean
from driftline.numerics.dtypes import DTYPES
from driftline.runs.reader import open_run
from driftline.runs.records import Record
from driftline.runs.run import Run

ROOTS = ("(root)", "")
_TEXTS = "tensor(string)"
NOTHING_TAKEN = "the model takes no inputs"
Source = Mapping[str, Any] | str | os.PathLike[str] | Run


class Wanted(NamedTuple):
    """One input that a model takes.

    Attributes:
        name: Its name.
        dtype: Our name of its type; empty for what is no tensor of numbers.
        shape: Sizes; a text or None where any size will do.
        kind: How the session calls its type.
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
        Wanted(one.name, dtype_in(one.type), tuple(one.shape), one.type)
        for one in session.get_inputs()
    ]


def declared(model: Any) -> str:
    """What a model takes, as its file says it."""
    weights = {tensor.name for tensor in model.graph.initializer}
    found: list[Wanted] = []
    for one in model.graph.input:
        if one.name not in weights:
            told = one.type.tensor_type
            shape = tuple(sizes_in(told.shape))
            kind = (one.type.WhichOneof("value") or "value").removesuffix("_type")
            kind = "texts" if kind == "tensor" else kind
            found.append(Wanted(one.name, TYPES.get(told.elem_type, ""), shape, kind))
    return _takes(found)


def feeds_of(
    sources: Source | Iterable[Source], wanted: Sequence[Wanted]
) -> list[tuple[int, Feed]]:
    """Sets of inputs, each with the number of its step.

    Raises:
        DriftlineError: One cannot be read, or is not what the model takes.
    """
    many = [sources] if isinstance(sources, (str, os.PathLike, Mapping, Run)) else list(sources)
    if not many and not wanted:
        return [(0, {})]
    if not many:
        raise BadInput("no inputs were given", hint=_takes(wanted))
    found: list[tuple[int, Feed]] = []
    for source in many:
        for step, arrays, where in _sets(cast(Source, source), wanted):
            number = step if len(many) == 1 else len(found)
            found.append((number, checked(arrays, wanted, where)))
    return found


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
    """Arrays of an `.npz`; a single `.npy` is the only input there is."""
    try:
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
    """What the model of another run was given, step by step."""
    given: dict[int, list[Record]] = {}
    for record in run.records:
        key = record.key
        if key.port == "input" and key.site in ROOTS and (key.rank, key.visit) == (0, 0):
            given.setdefault(key.step, []).append(record)
    if not given:
        raise BadInput(
            f"run '{run.name}' has no inputs of the whole model",
            hint="dump it again without --site, --class and --port, or give an .npz file",
        )
    where = f"run '{run.name}'"
    return [
        (step, _named(records, run, wanted, where), f"{where}, step {step}")
        for step, records in sorted(given.items())
    ]


def _named(
    records: Sequence[Record], run: Run, wanted: Sequence[Wanted], where: str
) -> dict[str, HostTensor]:
    """A model's captured inputs under the names that the ONNX file has for them.

    By name; then by position, where type and shape fit; then what is the only one of its look.
    """
    by_name = {record.key.slot: record for record in records}
    chosen: dict[str, Record] = {}
    for one in wanted:
        if one.name in by_name:
            chosen[one.name] = by_name[one.name]
    left = [record for record in records if record not in chosen.values()]
    open_ = [one for one in wanted if one.name not in chosen]
    for place, one in enumerate(wanted):
        if one.name not in chosen:
            at = [r for r in left if (r.alias or r.key.slot) == str(place) and _fits(r, one)]
            if at:
                chosen[one.name] = at[0]
                left.remove(at[0])
                open_.remove(one)
    for one in list(open_):
        alike = [record for record in left if _fits(record, one)]
        rivals = [other for other in open_ if alike and _fits(alike[0], other)]
        if len(alike) == 1 and len(rivals) == 1:
            chosen[one.name] = alike[0]
            left.remove(alike[0])
            open_.remove(one)
    if open_:
        slots = ", ".join(sorted(by_name)) or "none"
        raise BadInput(
            f"{where} has no input for {_list(one.name for one in open_)}",
            hint=f"it has {slots}; {_takes(wanted)}",
        )
    return {name: _host(run, record, where) for name, record in chosen.items()}


def _fits(record: Record, one: Wanted) -> bool:
    return record.dtype == one.dtype and _shape_fits(record.shape, one)


def _shape_fits(shape: tuple[int, ...], one: Wanted) -> bool:
    return len(shape) == len(one.shape) and all(
        not isinstance(size, int) or size == given
        for size, given in zip(one.shape, shape, strict=True)
    )


def _host(run: Run, record: Record, where: str) -> HostTensor:
    if record.kept != "full":
        raise BadInput(
            f"{where} keeps only a {record.kept} of {record.key}",
            hint="dump it again with whole tensors",
        )
    return HostTensor(np.array(run.raw(record)), record.dtype, record.shape)


def checked(arrays: Mapping[str, Any], wanted: Sequence[Wanted], where: str) -> Feed:
    """A set of inputs that a model will take.

    Raises:
        BadInput: A name is missing or unknown, a type or a shape is another one.
    """
    known = {one.name: one for one in wanted}
    for name in arrays:
        if name not in known:
            raise BadInput(
                f"the model has no input '{name}', which is in {where}",
                hint=f"{_near(name, known)}{_takes(wanted)}",
            )
    missing = [one for one in wanted if one.name not in arrays]
    if missing:
        raise BadInput(
            f"{_list(one.name for one in missing)} is not in {where}", hint=_takes(wanted)
        )
    return {one.name: _one(arrays[one.name], one, where) for one in wanted}


def _one(given: Any, one: Wanted, where: str) -> HostTensor | TextTensor:
    if one.kind == _TEXTS and not isinstance(given, HostTensor):
        return _texts(given, one, where)
    tensor = given if isinstance(given, HostTensor) else _array(given, one, where)
    if not one.dtype or DTYPES[one.dtype].bits < 8:
        raise BadInput(
            f"the input '{one.name}' is a {one.kind}, which cannot be given from here",
            hint="tensors of numbers and of texts can",
        )
    if tensor.dtype != one.dtype:
        raise BadInput(
            f"input '{one.name}' is {tensor.dtype} in {where}, the model takes {one.dtype}",
            hint=f"convert it, such as with .astype('{one.dtype}')",
        )
    if not _shape_fits(tensor.shape, one):
        raise BadInput(
            f"input '{one.name}' has the shape {list(tensor.shape)} in {where}, "
            f"the model takes {str(one).rpartition(' [')[2].join(('[', ''))}",
            hint=_takes([one]),
        )
    return tensor


def _texts(given: Any, one: Wanted, where: str) -> TextTensor:
    array: AnyArray = np.asarray(given)
    if array.dtype.kind not in "US" and not all(isinstance(text, str) for text in array.flat):
        raise BadInput(
            f"input '{one.name}' of {where} is {array.dtype.name}, the model takes texts",
            hint="such as numpy.array(['one', 'two'])",
        )
    if not _shape_fits(array.shape, one):
        raise BadInput(
            f"input '{one.name}' has the shape {list(array.shape)} in {where}", hint=_takes([one])
        )
    return TextTensor(array.astype(str))


def _array(given: Any, one: Wanted, where: str) -> HostTensor:
    # A torch tensor of the host is an array to numpy; one of a device, or bfloat16, is not.
    try:
        array: AnyArray = np.asarray(given.detach() if hasattr(given, "detach") else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"input '{one.name}' of {where} is no array: {error}") from None
    dtype = array.dtype.name
    if dtype not in DTYPES:
        raise BadInput(f"input '{one.name}' of {where} is of type {dtype}, which has no numbers")
    return HostTensor(array, dtype, array.shape)


def _takes(wanted: Sequence[Wanted]) -> str:
    shown = "; ".join(map(str, wanted[:6])) + (" and more" if len(wanted) > 6 else "")
    return f"the model takes {shown}" if wanted else NOTHING_TAKEN


def _near(name: str, known: Mapping[str, Wanted]) -> str:
    hint = did_you_mean(name, known)
    return f"{hint} " if hint.startswith("did") else ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
