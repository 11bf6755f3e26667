"""No block of a page is only to be looked at: it is run, or read by a test, or says why not.

Commands are run by `test_docs_commands.py`, page by page. Here are the others: Python, files that a
program reads, and the question whether anything is left.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import kitchens
import numpy as np
import pytest
import yaml
from documents import HELD, PAGES, PYTHON_IN_PLACE, ROOT, Fence, fences_of, name_of, unchecked

from driftline.alignment.plan_file import read_plan
from driftline.cli import app
from driftline.comparison.tolerance.thresholds import load_thresholds
from driftline.decoding.known_limits import read_table
from driftline.runs.reader import open_run
from driftline.runs.records import TensorKey
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

MODEL = """
import driftline, numpy, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
inputs = torch.ones(1, 8)
"""
PRELUDES = {
    "README.md": MODEL + "with driftline.capture(model, 'cand'): model(inputs)\n",
    "docs/command-line.md": "import numpy\nreference = candidate = numpy.ones(4)\n",
    "docs/decoders.md": MODEL,
    "docs/engines.md": MODEL + "from driftline.dialects.ait.torchair import get_fx_dump_config\n",
    "docs/museum.md": "from benchmarks.museum.networks import Variant, case\n",
    "docs/operators.md": MODEL + "x = numpy.ones((2, 3), numpy.float32)\n",
    "docs/served-models.md": MODEL + "ids = inputs\n",
}
"""What the Python of a page takes for granted: a model, something to give it."""
ELSEWHERE = (
    "from pathlib import Path\n\nimport numpy",
    "import my_format",
    "import json\nimport math",
)
"""How blocks begin that the tests named in `HELD` run."""


def python_of(page: Path) -> list[str]:
    blocks = ["\n".join(f.lines) for f in fences_of(page) if f.language == "python"]
    return [code for code in blocks if not code.startswith(ELSEWHERE)]


WITH_PYTHON = [p for p in PAGES if name_of(p) not in PYTHON_IN_PLACE and python_of(p)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_only_to_be_looked_at(page: Path) -> None:
    lonely = [f"{name_of(page)}:{block.line} [{block.language}]" for block in unchecked(page)]
    assert lonely == []


def test_a_block_that_nobody_checks_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    page = tmp_path / "page.md"

    def lonely(text: str) -> list[str]:
        page.write_text(text, "utf-8")
        return [block.language for block in unchecked(page)]

    assert lonely("```sh\ndriftline doctor\n```\n\n```text\nkernel\n```\n") == []
    assert lonely("```text\nPASS\n```\n") == ["text"]
    assert lonely("```sh\ndriftline doctor\nrm -r x\n```\n") == ["sh"]
    assert lonely("```json\n{}\n```\n") == ["json"]
    assert lonely("Said so:\n\n    FAIL: something\n") == ["indented"]
    assert lonely("```\na --> b\n```\n") == [""]
    assert lonely("<!-- not run here: a picture -->\n```\na --> b\n```\n") == []
    assert lonely("<!-- not run here: no time -->\n```\na --> b\n```\n") == [""]


@pytest.mark.parametrize("page", HELD)
def test_blocks_that_are_held_elsewhere_are_there_and_so_is_their_test(page: str) -> None:
    languages = {block.language for block in fences_of(ROOT / page)}
    for language, test in HELD[page].items():
        assert language in languages, f"{page} has no block of {language}"
        text = (ROOT / "tests" / test).read_text("utf-8")
        assert test.startswith("docs/") or Path(page).stem.replace("-", "_") in text.replace(
            "-", "_"
        ), f"{test} does not speak of {page}"


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_the_page_runs(page: Path, tmp_path: Path, warm_python: str) -> None:
    kitchens.files(tmp_path)
    shutil.copytree(kitchens.DATA / "ascend" / "mini_atb", tmp_path / "msit_dump_20240701_120000")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for number, code in enumerate(python_of(page)):
        file = tmp_path / f"test_block_{number}.py"
        file.write_text(f"{PRELUDES.get(name_of(page), '')}\n{code}\n", "utf-8")
        tests = ["-m", "pytest", "-q", "--driftline-update=new"] if "def test_" in code else []
        done = subprocess.run(
            [sys.executable if tests else warm_python, *tests, file.name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, f"{name_of(page)}\n{code}\n{done.stdout}{done.stderr}"


def block(page: str, language: str, number: int = 0) -> str:
    blocks: list[Fence] = [f for f in fences_of(ROOT / page) if f.language == language]
    return "\n".join(blocks[number].lines)


def test_the_plan_on_the_page_can_be_given_to_compare(tmp_path: Path) -> None:
    text = block("docs/alignment.md", "toml")
    (tmp_path / "plan.toml").write_text(text, "utf-8")

    def run(name: str, shape: tuple[int, ...]) -> Run:
        sites = re.findall(rf'^{name} = "rank0/step0/(.*)/output/(.)"', text, re.MULTILINE)
        writer = RunWriter(tmp_path / name)
        for site, slot in sites:
            values = np.zeros(shape, np.float32)
            record_into(writer, TensorKey.of(site, "output", slot), values, class_name="Linear")
        writer.close()
        return open_run(tmp_path / name)

    plan = read_plan(
        tmp_path / "plan.toml", run("reference", (1, 8, 96)), run("candidate", (1, 8, 32))
    )
    (pair,) = plan.pairs
    assert pair.confidence == 0.7 and str(pair.reference_recipe) != ""


def test_the_thresholds_on_the_page_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text(block("docs/decoders.md", "json"), "utf-8")
    thresholds = load_thresholds(tmp_path / "limits.json")
    assert thresholds.model_id == "acme--tiny"
    assert {entry.metric for entry in thresholds.entries} >= {"ce"}
    (tmp_path / "table.json").write_text(block("docs/decoders.md", "json", 1), "utf-8")
    (entry,) = read_table(tmp_path / "table.json")
    assert entry.model_id == "ibm-granite/granite-3.2-8b-instruct"


def test_the_step_of_a_workflow_on_the_page_is_a_command_that_exists() -> None:
    ((step),) = yaml.safe_load(block("docs/verdicts.md", "yaml"))
    words = shlex.split(step["run"])
    app.read(words[1], app.load(words[1]), words[2:])
