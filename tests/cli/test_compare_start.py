"""What `driftline compare` does not load: most of a small comparison is the start of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from driftline.numerics import kernel
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.writer import RunWriter

# Without `site`, which loads whatever else is installed here.
PLAIN_PYTHON = (sys.executable, "-S", "-c")
PATHS = f"import sys; sys.path[:] = {sys.path!r}"

PROGRAM = f"""
{PATHS}
from driftline.cli.main import main
code = main(sys.argv[1:])
slow = {{"inspect", "msgspec", "numpy", "pyarrow", "shutil", "torch"}}
print(sorted(slow & set(sys.modules)), code)
"""


@pytest.mark.skipif(not kernel.takes_addresses(), reason="the C kernel was not built here")
def test_two_runs_are_compared_without_loading_numpy(tmp_path: Path) -> None:
    for name, shift in (("ref", 0.0), ("cand", 1e-6)):
        writer = RunWriter(tmp_path / name)
        ids = np.arange(16, dtype=np.int64).view(np.uint8)
        writer.put(Record(TensorKey.of("(root)", "input", "input_ids"), 0, "int64", (1, 16)), ids)
        values = (np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(1 + shift)).view(np.uint8)
        writer.put(Record(TensorKey.of("a", "output"), 1, "float32", (8, 8)), values)
        writer.close()
    words = ["compare", str(tmp_path / "ref"), str(tmp_path / "cand")]
    done = subprocess.run(
        [*PLAIN_PYTHON, PROGRAM, *words, "--csv", str(tmp_path / "rows.csv")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[-2] == "[] 0"
    assert (tmp_path / "rows.csv").read_text().count("\n") == 3


BEGINNING = f"""
{PATHS}
from driftline.comparison import foreseen
begun = []
foreseen.begin = lambda *of: begun.append({{"pathlib", "re", "typing"}} & set(sys.modules))
from driftline.cli.main import main
main(["compare", "a", "b"], alone=True)
print(begun)
"""


def test_measuring_begins_before_pathlib_and_typing_are_loaded() -> None:
    done = subprocess.run([*PLAIN_PYTHON, BEGINNING], capture_output=True, text=True, check=True)
    assert done.stdout == "[set()]\n", done.stderr
