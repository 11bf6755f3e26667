"""The documents' step 4: expectations of a model, captured and checked by the commands they print.

pytest is started as a reader would start it, and finds the plugin by its entry point. Only the
model is replaced, and the file that lists it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
AGAIN = "please re-run the tests without --capture_expectation"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_llama: str) -> Path:
    """An empty folder, and two models outside of it."""
    announced = {entry.name for entry in entry_points(group="pytest11")}
    assert "driftline" in announced, "this driftline is not installed: make install"
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "300")
    quick = tmp_path / "bin" / "pytest"  # the command itself, where torch is imported already
    quick.parent.mkdir()
    quick.write_text(f'#!/bin/sh\nexec "{warm_llama}" "{BIN}/pytest" "$@"\n')
    quick.chmod(0o755)
    monkeypatch.setenv("PATH", f"{quick.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    for variable in ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(variable, raising=False)
    path = os.environ.get("PYTHONPATH")
    if path:  # relative to where the tests were started
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(absolute, path.split(os.pathsep))))
    for name in ("tiny-llama", "tiny-roberta-qa"):
        shutil.copytree(FIXTURES / name, tmp_path / "models" / "acme" / name)
    return here


def absolute(path: str) -> str:
    return str(Path(__file__).parents[2] / path)


def shell(line: str, *, code: int = 0) -> str:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_documented_commands_capture_and_then_pass(desk: Path) -> None:
    model = desk.parent / "models" / "acme" / "tiny-llama"
    tests = desk / "tests" / "models"
    tests.mkdir(parents=True)
    (tests / "test_model_expectations.py").write_text(
        "from driftline.suites.test_model_expectations import *\n\n"
        f"decoder_models = ['{model}']\n"
        "tuple_output_models = []\n"
    )
    command = "pytest tests/models/test_model_expectations.py::TestAIUDecoderModels"
    said = shell(f"{command} --capture_expectation", code=1)
    test = "FAILED tests/models/test_model_expectations.py::TestAIUDecoderModels::test_model"
    for kind, what in (("output", "Signature"), ("weight_keys", "Weights Key")):
        assert f"{test}_{kind}[{model}-True] - Failed: {what} file has been saved, {AGAIN}" in said
    said = shell(f"{command} -vv -rs")
    test = "tests/models/test_model_expectations.py::TestAIUDecoderModels::test_model"
    assert f"{test}_output[{model}-False] <- " in said
    assert f"{test}_unfused[{model}] <- " in said
    # pytest breaks or cuts a test's own line where the terminal ends, after paths of any length;
    # what -rs adds at the end is whole.
    assert "AllAIUmodelsarealreadyunfused" in "".join(said.split())
    assert "2 passed, 1 skipped" in said
    kept = sorted(p.name for p in (desk / "tests" / "resources" / "expectations").iterdir())
    stem = "models.test_model_expectations.TestAIUDecoderModels.acme--tiny-llama.test_model"
    assert kept == [
        f"{stem}_output",
        f"{stem}_output.json",
        f"{stem}_weight_keys",
        f"{stem}_weight_keys.json",
    ]


@pytest.mark.slow
def test_the_installed_suite_runs_from_an_empty_folder(desk: Path) -> None:
    model = desk.parent / "models" / "acme" / "tiny-roberta-qa"
    command = (
        "pytest --pyargs driftline.suites.test_model_expectations::TestAIUModelsTupleOutput "
        f"--driftline-tuple-output-models={model}"
    )
    assert f"this makes it: {command} --capture_expectation" in shell(command, code=1)
    assert not list(desk.iterdir())
    assert AGAIN in shell(f"{command} --capture_expectation", code=1)
    assert "2 passed, 1 skipped" in shell(command)
