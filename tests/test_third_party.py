"""Programs on other people's packages: there are enough, and a fault is found through commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.third_party.catalogue import FORMATS, PACKAGES, load

ROOT = Path(__file__).resolve().parents[1]


def test_there_are_thirty_programs_of_twenty_packages() -> None:
    programs = load().values()
    assert len(programs) >= 30
    assert len({program.package for program in programs}) >= 20
    assert {program.format for program in programs} == set(FORMATS)
    assert all(program.sites for program in programs)


@pytest.mark.slow
def test_a_fault_in_somebody_else_s_model_is_found_and_its_clean_twin_passes(
    tmp_path: Path,
) -> None:
    if not PACKAGES.is_ready:
        pytest.skip("the packages are not installed: make bench-third-party")
    table = tmp_path / "said.jsonl"
    command = [sys.executable, "-m", "benchmarks.third_party", "--only", "vit_pytorch_cct"]
    done = subprocess.run(
        [*command, "--json", str(table)], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(table.read_text())
    for way in ("two runs", "replay"):
        assert said["clean"][way]["code"] == 0
        assert said["faulty"][way]["exact"]
