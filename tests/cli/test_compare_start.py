"""What `driftline compare` does not load: torch and pyarrow take longer than a small comparison."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter

# Without `site`, which loads whatever else is installed here.
PLAIN_PYTHON = (sys.executable, "-S", "-c")
PATHS = f"import sys; sys.path[:] = {sys.path!r}"

PROGRAM = f"""
{PATHS}
from driftline.cli.main import main
code = main(sys.argv[1:])
slow = {{"msgspec", "pyarrow", "torch"}}
print(sorted(slow & set(sys.modules)), code)
"""


def test_two_runs_are_compared_without_loading_torch_or_pyarrow(tmp_path: Path) -> None:
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
