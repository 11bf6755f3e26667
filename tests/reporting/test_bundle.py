"""The front end that is checked in is the one its sources build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"
BUNDLE = Path(__file__).parents[2] / "src" / "driftline" / "reporting" / "html" / "bundle"
LOUD = "NO NODE: the front end that is checked in was not built again and compared"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with what they are built with: as it lies here, or fetched into another place."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip(f"{LOUD}: there is no node and npm here")
    if (WEB / "node_modules" / "esbuild").is_dir() and (WEB / "node_modules" / "uplot").is_dir():
        return WEB
    place = tmp_path_factory.mktemp("web") / "web"
    shutil.copytree(WEB, place, ignore=shutil.ignore_patterns("node_modules"))
    words = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        fetched = subprocess.run(words, cwd=place, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{LOUD}: npm did not answer")
    if fetched.returncode:
        pytest.skip(f"{LOUD}: npm ci could not fetch what it is built with")
    return place


def test_the_bundle_is_what_its_sources_build(web: Path, tmp_path: Path) -> None:
    words = ["node", "build.mjs", str(tmp_path)]
    built = subprocess.run(words, cwd=web, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    names = sorted(path.name for path in BUNDLE.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (BUNDLE / name).read_bytes(), (
            f"{name} is not what web/ builds: cd web && npm ci && npm run build"
        )


@pytest.mark.slow
def test_the_sources_have_no_type_errors(web: Path) -> None:
    words = ["node", "node_modules/typescript/bin/tsc", "--noEmit"]
    checked = subprocess.run(words, cwd=web, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
