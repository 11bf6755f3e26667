"""Examples in docstrings are promises too."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import driftline

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(driftline.__path__, "driftline.")
    # The first is run by being imported; the others are C libraries, not Python modules.
    if module.name
    not in (
        "driftline.__main__",
        "driftline.numerics._kernel",
        "driftline.formats._read_ahead",
        "driftline.numerics.gpu._launch",
        "driftline.runs.files._mapped_file",
    )
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_its_docstrings_are_true(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples_at_all() -> None:
    finder = doctest.DocTestFinder()
    found = sum(
        1
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    )
    assert found > 10
