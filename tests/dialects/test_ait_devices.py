"""Dumps of several devices and of other batches: all is compared, or INCOMPLETE says what is not.

As `driftline compare` and as `ait llm compare`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

BIN = Path(sys.executable).parent
PROMPT = np.array([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("devices")
    model = toy_decoder(layers=2)
    for name, error in (("clean", None), ("faulty", Error(1))):
        atb_twin(base / name, model, PROMPT, device=0, pid=1)
        atb_twin(base / name, model, PROMPT, device=1, pid=2, error=error)
    atb_twin(base / "single", model, PROMPT, device=0, pid=1)
    torch_twin(base / "torch", model, PROMPT)
    torch_twin(base / "torch of two", model, PROMPT)
    processes = base / "torch of two" / "ait_dump" / "torch_tensors"
    (first,) = processes.iterdir()
    shutil.copytree(first, processes / "npu1_2")
    first.rename(processes / "npu0_1")
    other = np.array([[2, 7, 1, 8, 2]])
    atb_twin(base / "batch", model, np.concatenate((PROMPT, other)))
    return base


EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCOMPLETE": 2}


def _compared(python: str, dumps: Path, folder: Path, golden: str, mine: str, spelling: str) -> str:
    words = [str(BIN / "driftline"), "compare"]
    if spelling == "theirs":
        words = [str(BIN / "ait"), "llm", "compare"]
    words += ["-gp", str(dumps / golden), "-mp", str(dumps / mine), "-o", str(folder)]
    done = subprocess.run([python, *words], capture_output=True, text=True, timeout=110)
    assert "Traceback" not in done.stderr
    # A script that only asks for the code must not take INCOMPLETE for a PASS.
    assert done.returncode == EXIT_CODES[done.stdout.split(":")[0]], done.stdout
    return " ".join(done.stdout.split())


@pytest.fixture
def compared(warm_python: str) -> Callable[..., str]:
    """What either command says of two dumps."""
    return partial(_compared, warm_python)


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_every_device_folder_is_compared(
    compared: Callable[..., str], dumps: Path, tmp_path: Path, spelling: str
) -> None:
    assert compared(dumps, tmp_path, "clean", "clean", spelling).startswith("PASS")
    assert compared(dumps, tmp_path, "torch of two", "clean", spelling).startswith("PASS")
    for golden in ("clean", "torch of two"):
        text = compared(dumps, tmp_path, golden, "faulty", spelling)
        assert text.startswith("FAIL") and "on rank 1" in text


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("golden", "mine", "words"),
    [
        ("clean", "single", "nothing of rank1 of the reference was compared"),
        ("single", "faulty", "nothing of rank1 of the candidate was compared"),
        ("torch", "faulty", "nothing of rank1 of the candidate was compared"),
        ("torch of two", "single", "nothing of rank1 of the reference was compared"),
        ("torch", "batch", "not compared: row 1 of 2 of the candidate"),
        ("single", "batch", "not compared: row 1 of 2 of the candidate"),
        ("batch", "single", "not compared: row 1 of 2 of the reference"),
    ],
)
def test_what_is_not_compared_makes_it_incomplete(
    compared: Callable[..., str],
    dumps: Path,
    tmp_path: Path,
    golden: str,
    mine: str,
    words: str,
    spelling: str,
) -> None:
    text = compared(dumps, tmp_path, golden, mine, spelling)
    assert text.startswith("INCOMPLETE") and words in text


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_one_torch_process_is_compared_with_each_device_by_its_folder(
    compared: Callable[..., str], dumps: Path, tmp_path: Path, spelling: str
) -> None:
    """What INCOMPLETE leaves to do, as docs/seed-differences.md says."""
    for device, words in (("0_1", "PASS"), ("1_2", "FAIL")):
        (folder,) = (dumps / "faulty").glob(f"*/tensors/{device}")
        mine = str(folder.relative_to(dumps))
        assert compared(dumps, tmp_path, "torch", mine, spelling).startswith(words)
