"""Every command of the corpus still prints, returns and writes what its record says.

The commands are in `commands/`, their records in `records/`, one file each of the same name. After
a change that is meant to be seen:

    pytest tests/corpus --record-commands

and read the difference before it is committed; the commit says why it is there. A new command line
is added to a file of `commands/` and recorded the same way.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from pathlib import Path

import pytest
from command_records import FOLDER, commands, names, record

RECORDS = FOLDER / "records"


@pytest.mark.parametrize("name", names())
def test_commands_do_what_their_record_says(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue("warm_python") if name == "programs" else sys.executable
    # Not in pytest's own folder: its path grows with the number of sessions, and tables are laid
    # out by the width of what is in them.
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        text, whole = record(name, Path(folder) / "place", python)
    (tmp_path / "whole.txt").write_text(whole, "utf-8")
    path = RECORDS / f"{name}.txt"
    if request.config.getoption("--record-commands"):
        path.write_text(text, "utf-8")
    kept = path.read_text("utf-8")
    assert [line[2:] for line in kept.splitlines() if line.startswith("$ ")] == commands(name)
    difference = list(
        difflib.unified_diff(kept.splitlines(), text.splitlines(), "recorded", "now", lineterm="")
    )
    message = f"all of it is in {tmp_path / 'whole.txt'}"
    assert not difference, "\n".join([*difference, message])


def test_every_record_has_its_commands() -> None:
    assert sorted(path.stem for path in RECORDS.glob("*.txt")) == names()
    assert sum(len(commands(name)) for name in names()) >= 120
