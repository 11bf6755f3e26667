"""The wheel of `make dist`, in empty environments: every Python there is, with and without torch.

Minutes long, and packages are fetched: part of the long set. `DRIFTLINE_WHEEL` names the wheel;
without it the one in `dist/` is taken, and built if there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: a name on the path may be a shim that leads nowhere."""
    folders = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
    for path in (*map(str, folders), None):
        found = shutil.which(f"python{version}", path=path)
        if found and not subprocess.run([found, "-V"], capture_output=True, timeout=60).returncode:
            return found
    return None


@pytest.fixture(scope="module")
def wheel() -> Path:
    named = os.environ.get("DRIFTLINE_WHEEL")
    if named:
        return Path(named)
    if not list((ROOT / "dist").glob("*.whl")):
        done = subprocess.run(
            ["make", "dist", f"PYTHON={sys.executable}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (ROOT / "dist").glob("*.whl")
    return built


def test_the_wheel_fits_any_linux_and_holds_what_it_needs(wheel: Path) -> None:
    assert "-py3-none-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "driftline/numerics/_kernel.so",
        "driftline/testing/demo/infer.py",
        "driftline/reporting/html/bundle/page.js",
        "driftline-launch.pth",
    ):
        assert part in names
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist")]
    assert not [line for line in needed if "pyarrow" in line and "extra ==" not in line]


@pytest.mark.parametrize("version", PYTHONS)
def test_the_tour_in_an_empty_environment(wheel: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    script = ROOT / "tools" / "first_hour.py"
    done = subprocess.run(
        [sys.executable, str(script), str(wheel), "--without-torch", "--python", python],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The planted fault was named: 05_activation" in done.stdout
    # The compiled kernel is used, though no compiler was there.
    assert "kernel        numpy" not in done.stdout


@pytest.mark.parametrize("version", PYTHONS)
def test_the_first_hour_with_torch(wheel: Path, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    page = tmp_path / "first-hour.md"
    script = ROOT / "tools" / "first_hour.py"
    done = subprocess.run(
        [sys.executable, str(script), str(wheel), "-o", str(page), "--python", python],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text("utf-8")
    assert "The planted fault was named: layers.5.mlp.act_fn" in text
    assert "the drift starts at '1' (SiLU" in text  # pytest names the layer
    kept = (ROOT / "docs" / "first-hour.md").read_text("utf-8")
    commands = [line for line in text.splitlines() if line.startswith("$ ")]
    assert [line for line in kept.splitlines() if line.startswith("$ ")][1:] == commands[1:]
