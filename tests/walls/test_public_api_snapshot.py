"""The names and signatures that are a promise. `pytest --snapshot-update` after a wanted change."""

from __future__ import annotations

import inspect
from typing import Any

import driftline
from driftline.comparison.table import Row, Table
from driftline.runs.run import Run, TensorHandle


def described(owner: object, name: str) -> str:
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        return f"{name}  (property)"
    found = getattr(owner, name)
    if inspect.isclass(found) or callable(found):
        return f"{name}{inspect.signature(found)}"
    return f"{name}  ({type(found).__name__})"


def members(owner: type) -> list[str]:
    names = [name for name in dir(owner) if not name.startswith("_")]
    return [f"{owner.__name__}.{described(owner, name)}" for name in names]


def test_the_doors_of_the_package(snapshot: Any) -> None:
    for name in driftline.__all__:
        getattr(driftline, name)  # opened, so that the static look finds them
    assert [described(driftline, name) for name in sorted(driftline.__all__)] == snapshot


def test_what_a_run_a_tensor_and_a_table_offer(snapshot: Any) -> None:
    assert [
        line for owner in (Run, TensorHandle, Table, Row) for line in members(owner)
    ] == snapshot
