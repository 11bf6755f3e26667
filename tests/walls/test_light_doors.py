"""What is light stays light: the package, its help and its doors load nothing that is not used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import driftline
from driftline.cli.commands import COMMANDS

HEAVY = ("torch", "pyarrow", "rich", "numpy", "transformers", "msgspec", "ml_dtypes")


def modules_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded by running the code."""
    before = "import sys; before = set(sys.modules)"
    report = "print(); print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_importing_driftline_loads_nothing_heavy() -> None:
    assert not modules_after("import driftline") & {*HEAVY, "typing"}


def test_the_pytest_plugin_loads_nothing_but_itself() -> None:
    """Every pytest run on a machine that has Driftline installed imports it."""
    loaded = modules_after(
        "import pytest; before |= set(sys.modules)\n"
        "import driftline.testing.expectations.pytest_plugin"
    )
    assert loaded == {"driftline"}


def test_the_overview_loads_nothing_heavy() -> None:
    loaded = modules_after("from driftline.cli.main import main; main(['--help'])")
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_loads_neither_torch_nor_pyarrow_nor_rich(command: str) -> None:
    loaded = modules_after(f"from driftline.cli.main import main; main(['{command}', '--help'])")
    assert not loaded & {"torch", "pyarrow", "rich", "transformers"}


def test_every_door_opens() -> None:
    for name in driftline.__all__:
        assert getattr(driftline, name) is not None
    assert set(driftline.__all__) <= set(dir(driftline))


def test_a_door_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'comprae'"):
        _ = driftline.comprae  # pyright: ignore


def test_every_command_is_where_the_table_says() -> None:
    for name, command in COMMANDS.items():
        module, _, function = command.address.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), name
