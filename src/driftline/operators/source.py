"""Sources of operators to be checked: an ATB dump, or a run captured at operator level.

A source yields one `Checked` per operator call that the user's filters leave. The two sources are
`operators/atb/source.py` and `operators/aten/source.py`; the command knows only this protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from driftline.operators.result import Metric, OperatorCall, OutputRow

AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class CheckOptions(NamedTuple):
    """Which operators are checked, and how.

    Attributes:
        ids: Operation ids; one matches itself and everything inside it. Empty: all.
        names: Parts of operator types, in any case. Empty: all. Both filters must match.
        metrics: Further figures.
        rerun: Execute the operator again, and check the new outputs.
        device: Device for `rerun`: "cpu", "cuda:0", or a number.
        csv: Operation csv with the operators to check; None: all operators in the dump.
        imports: Modules that define custom torch operators.
    """

    ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    rerun: bool = False
    device: str = ""
    csv: Path | None = None
    imports: tuple[str, ...] = ()

    def wants(self, op_type: str, ids: str) -> bool:
        """Whether an operator is to be checked."""
        kind = op_type.lower()
        by_name = not self.names or any(name.lower() in kind for name in self.names)
        # An id matches itself and everything below it: `24` matches `24_1` but not `240`.
        by_id = not self.ids or any(
            ids == wanted or ids.startswith(f"{wanted}_") for wanted in self.ids
        )
        return by_name and by_id


class Reproduction(NamedTuple):
    """The contents of a stand-alone script that shows a failure.

    Attributes:
        call: The operator.
        inputs: Input arrays as stored (bfloat16 as uint16), by name.
        outputs: Output arrays as stored, by name.
        dtypes: The element type of each of them.
        script: Text of the script; it reads `tensors.npz` next to it.
    """

    call: OperatorCall
    inputs: Mapping[str, AnyArray]
    outputs: Mapping[str, AnyArray]
    dtypes: Mapping[str, str]
    script: str


class Checked(NamedTuple):
    """One checked operator call.

    Attributes:
        call: The operator.
        rows: One per output; one without a slot if the call as a whole could not be checked.
    """

    call: OperatorCall
    rows: tuple[OutputRow, ...]


class Source(Protocol):
    """Operators to be checked.

    Attributes:
        kind: `ATB dump` or `aten calls`; printed.
        filtered: Operator calls that the filters left out.
        remarks: Sentences to print with the result.
    """

    kind: str
    filtered: int
    remarks: Sequence[str]

    def __len__(self) -> int:
        """The number of calls to check."""
        ...

    def __iter__(self) -> Iterator[Checked]: ...

    def call(self, number: int) -> OperatorCall:
        """The call at an index."""
        ...

    def at(self, number: int) -> Checked:
        """The result of the call at an index."""
        ...

    def reproduction(self, checked: Checked) -> Reproduction | None:
        """A script that shows a failing call without Driftline; None if there can be none."""
        ...


def open_source(path: Path, options: CheckOptions) -> Source:
    """Open the source behind a path.

    Raises:
        DriftlineError: There is nothing that can be checked.
    """
    # Imported here, because opening one kind of source should not load the other.
    from driftline.errors import BadInput
    from driftline.formats.ascend.atb.folders import locate

    # An ATB dump is recognised by its folders, before a general reader tries the path.
    if path.is_dir() and locate(path) is not None:
        from driftline.operators.atb.source import AtbSource

        return AtbSource(path, options)
    if options.csv is not None and not options.csv.is_file():
        raise BadInput(
            f"there is no operation csv {options.csv}",
            hint="leave -c out to check every operator of the folder",
        )
    from driftline.formats.registry import open_run

    run = open_run(path)
    from driftline.operators.aten.source import AtenSource

    return AtenSource(run, options)
