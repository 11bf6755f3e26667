"""The command line as users see it. `pytest --snapshot-update` after a wanted change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from driftline.cli.app import COMMANDS, option_names
from driftline.cli.main import main

DOCS = Path(__file__).parents[2] / "docs" / "command-line.md"


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_the_overview(capsys: pytest.CaptureFixture[str], snapshot: Any) -> None:
    main(["--help"])
    assert capsys.readouterr().out == snapshot


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of(command: str, capsys: pytest.CaptureFixture[str], snapshot: Any) -> None:
    main([command, "--help"])
    assert capsys.readouterr().out == snapshot


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_the_width(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (70, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        main([command, "--help"])
        for line in capsys.readouterr().out.splitlines():
            assert len(line) <= columns, line


def section(command: str) -> str:
    text = DOCS.read_text("utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(f"`driftline {command}`"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: str) -> None:
    documented = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", section(command)))
    missing = set(option_names(command)) - documented
    assert not missing, f"docs/command-line.md does not mention {sorted(missing)}"


@pytest.mark.parametrize("command", COMMANDS)
def test_no_documented_option_is_made_up(command: str) -> None:
    rows = [line for line in section(command).splitlines() if line.startswith("| `")]
    named = {
        word for row in rows for word in re.findall(r"`(--?[a-zA-Z][\w-]*)", row.split("|")[1])
    }
    # `completion` has no option at all.
    assert named or not option_names(command), "the section has a table of options"
    assert named <= set(option_names(command))
