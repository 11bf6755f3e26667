"""C sources under AddressSanitizer and UndefinedBehaviorSanitizer: those that touch files.

The kernel's own driver is in tests/numerics.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import driftline

SOURCE = Path(driftline.__file__).parent
FLAGS = ["-O1", "-g", "-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS += ["-Wall", "-Wextra", "-Werror"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler with sanitizers")
def test_the_sanitizers_find_nothing_in_what_reads_files(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("sanitized_files.c")
    program, folder = tmp_path / "program", tmp_path / "files"
    folder.mkdir()
    places = ["-I", str(SOURCE / "formats"), "-I", str(SOURCE / "runs" / "files")]
    subprocess.run(
        ["gcc", *FLAGS, *places, driver, "-o", program, "-lpthread"], check=True, timeout=110
    )
    # A SIGBUS that is handled on purpose is not the sanitizer's business.
    environment = {**os.environ, "ASAN_OPTIONS": "handle_sigbus=0"}
    done = subprocess.run(
        [program, folder], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-4000:]
