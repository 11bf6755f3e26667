"""The example workflow is run as a runner would run it, but for what needs a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "ci" / "driftline.yml"
NEEDS_NETWORK = ("install",)


def steps_of(
    job: dict[str, object], folder: Path, python: str, **more: str
) -> dict[str, tuple[int, str]]:
    """Exit code and output of each step with commands; a failing one is followed by `always()`."""
    tools = folder / "tools"
    tools.mkdir()
    for name, words in (("driftline", "-m driftline"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{python}" {words} "$@"\n')
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        **{key: str(value) for key, value in dict(job["env"]).items()},  # type: ignore[call-overload]
        **more,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    found: dict[str, tuple[int, str]] = {}
    for step in job["steps"]:  # type: ignore[attr-defined]
        if "run" not in step or step["name"] in NEEDS_NETWORK:
            continue
        failed = any(code for code, _ in found.values())
        if failed and step.get("if") != "always()":
            continue
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        found[step["name"]] = done.returncode, done.stdout + done.stderr
    return found


@pytest.mark.parametrize(
    "fault", [pytest.param("", marks=pytest.mark.slow), "--fault gelu --fault-layer 2"]
)
def test_the_example_workflow_finds_a_fault_and_lets_a_clean_model_pass(
    fault: str, tmp_path: Path, warm_python: str
) -> None:
    (job,) = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"].values()
    shutil.copy(ROOT / "src" / "driftline" / "testing" / "demo" / "infer.py", tmp_path)
    # One token instead of three: half the time.
    reference, candidate = (f"{job['env'][side]} --tokens 1" for side in ("REFERENCE", "CANDIDATE"))
    programs = {"REFERENCE": reference, "CANDIDATE": f"{candidate} {fault}".strip()}
    found = steps_of(job, tmp_path, warm_python, **programs)
    assert list(found) == ["run both programs", "compare every layer", "keep the results"]
    codes = [code for code, _ in found.values()]
    assert codes == [0, 1 if fault else 0, 0], found
    said = found["compare every layer"][1].splitlines()
    errors = [line for line in said if line.startswith("::error ")]
    assert len(errors) == (1 if fault else 0)
    assert all("layers.2.mlp.act_fn" in line for line in errors)
    assert sum(line.startswith("::notice ") for line in said) == 1
    assert ("FAIL" if fault else "PASS") in (tmp_path / "summary.md").read_text("utf-8")
    suite = ElementTree.parse(tmp_path / "driftline.xml").getroot()[0]
    assert (suite.get("failures") != "0") == bool(fault)
    uploaded = job["steps"][-1]["with"]["path"].split()
    assert all((tmp_path / name).exists() for name in uploaded)
