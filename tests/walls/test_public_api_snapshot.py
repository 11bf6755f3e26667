"""The names and signatures that are a promise. `pytest --snapshot-update` after a wanted change."""

from __future__ import annotations

import inspect
from typing import Any

import driftline
from driftline.comparison.table.table import Row, Table
from driftline.runs.run import Run, TensorHandle


def described(owner: object, name: str) -> str:
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        return f"{name}  (property)"
    if inspect.isdatadescriptor(found):
        return f"{name}  (field)"  # in a slot or in a tuple, that is the class's own business
    found = getattr(owner, name)
    if inspect.isclass(found) or callable(found):
        return f"{name}{inspect.signature(found)}"
    return f"{name}  ({type(found).__name__})"


PROMISED: dict[type, str] = {
    Run: "records tensors get sites manifest losses events topology raw",
    TensorHandle: "key record dtype shape summary lost numpy raw float64",
    Table: "rows columns verdict coverage finding first first_site failing worst as_json write",
    Row: "key site port slot step rank visit status reason metrics as_json",
}
"""What users may rely on; other names of these classes are for the package itself."""


def test_the_doors_of_the_package(snapshot: Any) -> None:
    for name in driftline.__all__:
        getattr(driftline, name)  # opened, so that the static look finds them
    assert [described(driftline, name) for name in sorted(driftline.__all__)] == snapshot


def test_what_a_run_a_tensor_and_a_table_offer(snapshot: Any) -> None:
    lines = [
        f"{owner.__name__}.{described(owner, name)}"
        for owner, names in PROMISED.items()
        for name in names.split()
    ]
    assert lines == snapshot
