"""What the README and the examples promise is run here, word for word."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "src" / "driftline" / "testing" / "demo"


def shell_blocks(page: Path) -> list[str]:
    """The commands of a page, also of blocks that stand in a list."""
    return re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run_words(words: list[str], folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    assert words[0] == "driftline"
    return subprocess.run(
        [python, "-m", "driftline", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_commands_of_the_readme_work_on_a_script_that_knows_nothing(
    tmp_path: Path, warm_python: str
) -> None:
    shutil.copy(DEMO / "infer.py", tmp_path)
    one, three, *_ = shell_blocks(ROOT / "README.md")
    commands = [*three.strip().splitlines(), one.strip()]
    assert len(commands) == 4
    # "python" must be the interpreter of this environment, as it is in an activated one.
    outcomes = [
        run_words(
            [word.replace("python ", f"{warm_python} ") for word in shlex.split(command)],
            tmp_path,
            warm_python,
        )
        for command in commands
    ]
    assert [one.returncode for one in outcomes] == [0, 0, 0, 0], [one.stderr for one in outcomes]
    assert "PASS" in outcomes[2].stdout and "PASS" in outcomes[3].stdout


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        ("gelu", "layers.2.mlp.act_fn"),
        pytest.param("channels", "layers.2.mlp.down_proj", marks=pytest.mark.slow),
        pytest.param("scale", "layers.2.self_attn", marks=pytest.mark.slow),
    ],
)
def test_each_fault_the_demo_can_plant_is_named_at_its_module(
    tmp_path: Path, fault: str, culprit: str, warm_python: str
) -> None:
    script = f"{warm_python} {DEMO / 'infer.py'} --tokens 1"
    reference = run_words(
        ["driftline", "dump", "-o", "ref", "--exec", script], tmp_path, warm_python
    )
    assert reference.returncode == 0, reference.stderr
    broken = f"{script} --dtype bfloat16 --fault {fault} --fault-layer 2"
    candidate = run_words(
        ["driftline", "dump", "-o", "cand", "--exec", broken], tmp_path, warm_python
    )
    assert candidate.returncode == 0, candidate.stderr
    compared = run_words(["driftline", "compare", "ref", "cand"], tmp_path, warm_python)
    assert compared.returncode == 1
    assert (
        f"starts at '{culprit}'" in compared.stdout
        or f"starts inside '{culprit}'" in compared.stdout
    )


def test_the_tour_names_the_planted_fault(
    tmp_path: Path,
    warm_python: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python)  # what the tour starts
    code = main(["demo"])
    said = capfd.readouterr()
    assert code == 0, said.out + said.err
    assert "The planted fault was named: layers.5.mlp.act_fn" in said.out
    assert "<html" in (tmp_path / "driftline-demo/driftline-diff/report.html").read_text()[:400]
    # What was said once is not said twice, and nothing inside the tour suggests another command.
    assert said.out.count("What differs") == 1
    assert "next: " not in said.err


def test_every_page_the_readme_links_to_exists() -> None:
    pages = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert pages
    assert [page for page in pages if not (ROOT / page).exists()] == []


def test_the_python_example_tells_the_ported_model_from_the_broken_one(warm_python: str) -> None:
    script = ROOT / "examples" / "python" / "two_models.py"
    done = subprocess.run([warm_python, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ported: pass")
    assert lines[1].startswith("broken: fail, the drift starts at '2' (LayerNorm)")
    assert any("rank0/step0/3/output/0 float32 (4, 8)" in line for line in lines)


def test_the_commands_of_the_examples_page_find_the_fault(tmp_path: Path, warm_python: str) -> None:
    commands = shell_blocks(ROOT / "examples" / "README.md")[0].strip().splitlines()
    codes = [
        run_words(
            [word.replace("python ", f"{warm_python} ") for word in shlex.split(command)],
            tmp_path,
            warm_python,
        ).returncode
        for command in commands
    ]
    assert codes == [0, 0, 0, 1]
