"""What commands do not load: most of a small comparison is the start of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Without `site`, which loads whatever else is installed here.
PLAIN_PYTHON = (sys.executable, "-S", "-c")
PROGRAM = f"""
import sys; sys.path[:] = {sys.path!r}
from driftline.cli.main import main
code = main(sys.argv[1:])
slow = {{"pyarrow", "torch", "transformers", "rich.progress", "rich.markdown"}}
slow.add("driftline.captures")
print(sorted(slow & set(sys.modules)), code)
"""


@pytest.mark.parametrize(
    ("command", "code"), [("compare {ref} {cand}", 0), ("show {ref}", 0), ("--help", 0)]
)
def test_small_commands_load_neither_torch_nor_pyarrow_nor_what_captures(
    command: str, code: int, reference: Path, clean: Path
) -> None:
    words = command.format(ref=reference, cand=clean).split()
    done = subprocess.run(
        [*PLAIN_PYTHON, PROGRAM, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == f"[] {code}"
