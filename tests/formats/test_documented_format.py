"""The format that docs/formats.md writes passes the suite that docs/formats.md runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_documented_format_passes_the_documented_suite(tmp_path: Path) -> None:
    _, own = DOCS.read_text("utf-8").split("## A format of your own")
    code, suite = re.findall(r"```python\n(.*?)```", own, re.DOTALL)
    (tmp_path / "my_format.py").write_text(code)
    (tmp_path / "test_my_format.py").write_text(suite)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_the_documented_ways_into_an_atb_dump_work(tmp_path: Path) -> None:
    dump = DOCS.parents[1] / "tests" / "data" / "ascend" / "mini_atb" / "msit_dump_20240701_120000"
    (tmp_path / dump.name).symlink_to(dump)
    _, own = DOCS.read_text("utf-8").split("## ATB dumps")
    code = re.findall(r"```python\n(.*?)```", own, re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
