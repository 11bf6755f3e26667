"""Our own modules are found sooner, and are what Python would have found."""

from __future__ import annotations

import compileall
import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.cli.own_modules import _Finder

PROGRAM = """
import sys
sys.argv = ["driftline", "compare", "--help"]
if {quickly}:
    from driftline.cli.own_modules import find_quickly
    find_quickly()
from driftline.cli.main import main
import driftline.numerics.kernel
main(sys.argv[1:])
for name, module in sorted(sys.modules.items()):
    if name.startswith("driftline."):
        spec = module.__spec__
        print("@", name, module.__file__, module.__cached__, module.__package__, spec.origin,
              spec.submodule_search_locations, spec.has_location, module.__loader__.path,
              module.__loader__.is_package(name))
print("loaders", sorted({{type(m.__loader__).__name__ for n, m in sys.modules.items()
                         if n.startswith("driftline.")}}))
"""


def loaded(home: Path, *, quickly: bool) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(quickly=quickly)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("@")], lines[-1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, compiled beside its sources as an installation leaves it."""
    import shutil

    import driftline

    home = tmp_path_factory.mktemp("home")
    here = Path(driftline.__file__).parent
    for room in ("", "cli", "numerics", "comparison", "runs", "tolerance"):
        (home / "driftline" / room).mkdir(exist_ok=True)
        for source in (here / room).iterdir():
            if source.suffix in (".py", ".so"):
                shutil.copy(source, home / "driftline" / room)
    compileall.compile_dir(home, quiet=2)
    return home


def test_modules_are_those_that_python_would_have_loaded(home: Path) -> None:
    usual, by = loaded(home, quickly=False)
    assert by == "loaders ['SourceFileLoader']"
    quick, by = loaded(home, quickly=True)
    assert by == "loaders ['SourceFileLoader', '_Loader']"  # the finder itself was found as ever
    ours = [line for line in quick if " driftline.cli.own_modules " not in line]
    assert ours == [line for line in usual if " driftline.cli.own_modules " not in line]
    assert len(ours) > 10


def place(home: Path, text: str) -> Path:
    source = home / "driftline" / "one.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(text)
    return source


@pytest.mark.parametrize("harm", ["edited", "uncompiled", "cut", "of another Python", "by hash"])
def test_compiled_code_that_is_not_that_of_its_source_is_left_to_python(
    tmp_path: Path, harm: str
) -> None:
    source = place(tmp_path, "value = 1\n")
    py_compile.compile(str(source))
    compiled = Path(importlib.util.cache_from_source(str(source)))
    finder = _Finder(str(tmp_path))
    found = finder.find_spec("driftline.one")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert (module.value, module.__file__, module.__cached__) == (1, str(source), str(compiled))
    if harm == "edited":
        source.write_text("value = 22\n")
    elif harm == "uncompiled":
        compiled.unlink()
    elif harm == "cut":
        compiled.write_bytes(compiled.read_bytes()[:-9])
    elif harm == "of another Python":
        compiled.write_bytes(b"\x00\x01\r\n" + compiled.read_bytes()[4:])
    else:
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        py_compile.compile(str(source), invalidation_mode=mode)
    assert finder.find_spec("driftline.one") is None


def test_compiled_code_is_also_found_where_it_was_told_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = place(tmp_path / "home", "value = 1\n")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere"))
    compiled = py_compile.compile(str(source))
    found = _Finder(str(tmp_path / "home"), sys.pycache_prefix).find_spec("driftline.one")
    assert found is not None
    assert found.cached == compiled == importlib.util.cache_from_source(str(source))
    assert compiled.startswith(str(tmp_path / "elsewhere"))


def test_other_names_are_left_to_python(tmp_path: Path) -> None:
    finder = _Finder(str(tmp_path))
    assert finder.find_spec("json") is None
    assert finder.find_spec("driftline") is None
    assert finder.find_spec("driftline.nowhere") is None
