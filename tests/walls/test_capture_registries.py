"""Registries of capture: every framework and every kind of event is in its one table."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

import driftline
from driftline.captures.events import EVENTS, is_sent, is_shown
from driftline.captures.framework import FRAMEWORKS
from driftline.captures.launch import bootstrap, jobs

SOURCE = Path(driftline.__file__).parent
_WRITERS = {"event", "event_once", "_say"}


def kinds_in(source: str) -> set[str]:
    """Kinds of the events that a file writes: the first of two or more arguments, as a text."""
    kinds: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        first = node.args[0]
        if called in _WRITERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
            kinds.add(first.value)
    return kinds


def test_every_kind_of_event_that_is_written_is_in_the_table() -> None:
    written: set[str] = set()
    for folder in ("captures", "runs"):
        for path in (SOURCE / folder).rglob("*.py"):
            written |= kinds_in(path.read_text(encoding="utf-8"))
    assert len(written) > 30
    assert written <= EVENTS.keys()


def test_a_kind_that_nobody_has_listed_is_shown_and_sent() -> None:
    assert is_shown("of a plug-in")
    assert is_sent("of a plug-in")
    assert not is_shown("step")
    assert not is_sent("tiling")


def test_the_bootstrap_waits_for_the_frameworks_of_the_table() -> None:
    assert tuple(FRAMEWORKS) == bootstrap.FRAMEWORKS == jobs.FRAMEWORKS


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_part_of_a_framework_is_where_the_table_says(name: str) -> None:
    framework = FRAMEWORKS[name]
    for address in framework:
        assert importlib.util.find_spec(address.partition(":")[0]) is not None
    pytest.importorskip(name)
    module, _, session = framework.session.partition(":")
    assert hasattr(importlib.import_module(module), session)
    for part in ("is_model", "session_for", "check_levels", "facts", "Engine"):
        assert hasattr(importlib.import_module(framework.adapter), part)
    assert hasattr(importlib.import_module(framework.module_calls), "active")
    assert hasattr(importlib.import_module(framework.provenance), "facts")
