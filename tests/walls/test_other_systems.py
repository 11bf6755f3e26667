"""What only Linux has is asked for first: nobody has tried macOS, and this much cannot stop it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LINUX_ONLY = (
    *("sched_getaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "copy_file_range"),
    *("eventfd", "pidfd_open", "preadv", "sendfile", "splice", "O_TMPFILE", "O_DIRECT", "O_PATH"),
)
PROGRAM = """
import mmap, os, sys
for name in {names}:
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in vars(mmap) if name.startswith("MADV_") or name == "MAP_POPULATE"]:
    delattr(mmap, name)
import numpy as np
from driftline.cli.main import main
np.save("a.npy", np.ones((300, 300))), np.save("b.npy", np.full((300, 300), 2.0))
codes = [main(["doctor"]), main(["compare", "a.npy", "b.npy", "-o", "table"])]
codes += [main(["report", "table", "-o", "report.html"]), main(["show", "table"])]
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.token_scores import score_rows
rows, kind = np.ones((4, 64), np.float32), DTYPES["float32"]
score_rows(rows, kind, rows, kind, np.zeros(4, np.int64), k=2)
print(codes)
"""


def test_what_macos_lacks_is_not_needed(tmp_path: Path) -> None:
    program = PROGRAM.format(names=LINUX_ONLY)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 1, 0, 0]"
