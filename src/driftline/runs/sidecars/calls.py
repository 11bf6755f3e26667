"""One line of `calls.jsonl`: an operator or module call with its inputs and outputs.

Lines hold descriptions only: types, shapes, parameters, and the origin of each tensor. Values are
in the index: the key of a tensor consists of the call's site, step, visit and phase and the
tensor's port and slot. This file knows the JSON, but no files and no framework.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as json_string
from typing import Any, NamedTuple, cast

from driftline.runs.layout import CALLS as CALLS
from driftline.runs.layout import GRAPHS as GRAPHS

# Half a gigabyte holds some million calls; a larger file is not read.
LARGEST_CALLS = 1 << 29
_LONGEST_LINE = 1 << 20
_LARGEST_NUMBER = 1 << 62
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

Source = tuple[int, str] | str | None
"""Call and slot that made a tensor, the name of a parameter, or `(outside).n`; None if unknown."""


class CallTensor(NamedTuple):
    """An input or output tensor of a call.

    Attributes:
        slot: Slot in the tensor's key.
        alias: Position of an argument whose slot is its name.
        dtype: A name of `numerics.dtypes.DTYPES`.
        shape: Sizes of its axes.
        source: Origin of an input.
        order: Its axes in memory order, slowest first; empty for the usual order. A tensor under
            port `param` is stored in this order.
    """

    slot: str
    dtype: str
    shape: tuple[int, ...]
    alias: str = ""
    source: Source = None
    order: tuple[int, ...] = ()

    def to_json(self) -> str:
        text = (
            f'{{"slot":{json_string(self.slot)},"dtype":{json_string(self.dtype)},'
            f'"shape":[{",".join(map(str, self.shape))}]'
        )
        if self.alias:
            text += f',"alias":{json_string(self.alias)}'
        source = self.source
        if isinstance(source, str):
            text += f',"from":{json_string(source)}'
        elif source is not None:
            text += f',"from":[{source[0]},{json_string(source[1])}]'
        if self.order:
            text += f',"order":[{",".join(map(str, self.order))}]'
        return text + "}"


class Call(NamedTuple):
    """An operator or module that ran.

    Attributes:
        number: Number of the call in the process, in the order in which calls began.
        kind: operator, or module.
        site: Site in the keys of its tensors.
        class_name: Operator with its overload, or class of the module.
        ids: Its place: child indices of the module tree, joined by `_`. For an operator, the ids of
            its module, followed by a number greater than those of the module's children.
        step: Step in the keys.
        visit: Visit in the keys.
        phase: Phase in the keys.
        inside: Number of the module call that contains it; None if there is none.
        inputs: Input tensors.
        outputs: Output tensors.
        param: Arguments of an operator that are not tensors.
    """

    number: int
    kind: str
    site: str
    class_name: str
    ids: str = ""
    step: int = 0
    visit: int = 0
    phase: str = "forward"
    inside: int | None = None
    inputs: tuple[CallTensor, ...] = ()
    outputs: tuple[CallTensor, ...] = ()
    param: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        """`aten.addmm.default_0_1_4`: unique in its step, as in a line of an operation csv."""
        return f"{self.class_name}_{self.ids}" if self.ids else self.class_name

    def to_line(self) -> str:
        """The JSON and a line end; formatted by hand, because the program waits for it."""
        inside = "null" if self.inside is None else self.inside
        text = (
            f'{{"call":{self.number},"kind":{json_string(self.kind)},'
            f'"site":{json_string(self.site)},"class":{json_string(self.class_name)},'
            f'"ids":{json_string(self.ids)},"step":{self.step},"visit":{self.visit},'
            f'"phase":{json_string(self.phase)},"in":{inside},'
            f'"inputs":[{",".join([tensor.to_json() for tensor in self.inputs])}],'
            f'"outputs":[{",".join([tensor.to_json() for tensor in self.outputs])}]'
        )
        return f'{text},"param":{_encode(self.param)}}}\n' if self.param else text + "}\n"


def read_calls(text: str) -> Iterator[Call]:
    """The calls in a file's text; invalid lines are skipped."""
    for line in text.split("\n"):
        if line and len(line) <= _LONGEST_LINE:
            try:
                call = _call(json.loads(line))
            # The file may come from somebody else, or be cut in the middle of a line.
            except (ValueError, RecursionError, TypeError, KeyError, OverflowError):
                continue
            if call is not None:
                yield call


def _call(data: Any) -> Call | None:
    if not isinstance(data, dict):
        return None
    fields = cast("Mapping[str, Any]", data)
    inside, param = fields.get("in"), fields.get("param")
    return Call(
        _number(fields["call"]),
        "module" if fields.get("kind") == "module" else "operator",
        str(fields["site"]),
        str(fields["class"]),
        str(fields.get("ids") or ""),
        _number(fields.get("step", 0)),
        _number(fields.get("visit", 0)),
        str(fields.get("phase", "forward")),
        None if inside is None else _number(inside),
        _tensors(fields.get("inputs")),
        _tensors(fields.get("outputs")),
        cast("Mapping[str, Any]", param) if isinstance(param, dict) else {},
    )


def _tensors(value: Any) -> tuple[CallTensor, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(
        CallTensor(
            str(fields["slot"]),
            str(fields["dtype"]),
            tuple(_number(size) for size in cast("Sequence[Any]", fields["shape"])),
            str(fields.get("alias", "")),
            _source(fields.get("from")),
            tuple(_number(axis) for axis in cast("Sequence[Any]", fields.get("order") or ())),
        )
        for fields in cast("list[Mapping[str, Any]]", value)
    )


def _source(value: Any) -> Source:
    if isinstance(value, str) or value is None:
        return value
    call, slot = value
    return _number(call), str(slot)


def _number(value: Any) -> int:
    number = int(value)
    if not 0 <= number < _LARGEST_NUMBER:
        raise ValueError("no number of a call")
    return number
