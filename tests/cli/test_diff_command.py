"""`driftline diff` as somebody uses it who has two commands and a question."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from driftline.diagnosis.experiments import two_programs
from driftline.errors import BadInput
from driftline.reporting.html.report import page_of

PROGRAM = """
import os, sys
import torch
from torch import nn

with open("runs.txt", "a") as file:
    file.write("run\\n")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()
inputs = torch.randn(4, 16)
dtype = getattr(torch, os.environ.get("DTYPE", "float32"))
model, inputs = model.to(dtype), inputs.to(dtype)
if "--fault" in sys.argv:
    model[2].weight.data *= 1.5
if "--crash" in sys.argv:
    sys.exit(3)
with torch.no_grad():
    model(inputs)
"""


def diff(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "driftline", "diff", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def command(*words: str) -> str:
    return shlex.join([sys.executable, "infer.py", *words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "infer.py").write_text(PROGRAM)
    return tmp_path


def test_a_fault_is_named_and_a_second_call_runs_nothing_again(folder: Path) -> None:
    done = diff(folder, command(), command("--fault"))
    assert done.returncode == 1, done.stderr
    assert "FAIL" in done.stdout
    assert "the drift starts at '2' (Linear)" in done.stdout
    assert "the trusted module's own arithmetic" in done.stdout  # the replay was made
    page = folder / "driftline-diff" / "report.html"
    assert "the report is in driftline-diff/report.html" in done.stderr
    assert "<html" in page.read_text()[:400]
    # The reference twice (dump and replay), the candidate once.
    assert (folder / "runs.txt").read_text().count("run") == 3

    again = diff(folder, command(), command("--fault"))
    assert again.returncode == 1
    assert "the reference was dumped before" in again.stderr
    assert (folder / "runs.txt").read_text().count("run") == 3
    assert again.stdout == done.stdout

    other = diff(folder, command("--fault"), command())
    assert other.returncode == 2
    assert "holds another diff" in other.stderr


def test_a_repaired_program_is_run_again(folder: Path) -> None:
    """Somebody mends the model, in a file that the command does not even name, and asks again."""
    (folder / "infer.py").write_text(
        PROGRAM.replace(
            "from torch import nn", "from torch import nn\nfrom model import Scaled"
        ).replace("nn.GELU()", "Scaled(2.0 if '--port' in sys.argv else 1.0)")
    )
    model = (
        "from torch import nn\n\nclass Scaled(nn.Module):\n    def __init__(self, by):\n"
        "        super().__init__()\n        self.by = by\n    def forward(self, x):\n"
        "        return x * self.by\n"
    )
    (folder / "model.py").write_text(model)
    words = (command(), command("--port"), "--no-replay")
    assert "the drift starts at '1'" in diff(folder, *words).stdout
    (folder / "model.py").write_text(model.replace("x * self.by", "x * 1.0"))
    again = diff(folder, *words)
    assert "model.py has changed since the candidate was dumped" in again.stderr
    assert again.returncode == 0, again.stdout
    assert (folder / "runs.txt").read_text().count("run") == 4
    assert "the reference was dumped before" in diff(folder, *words).stderr


def test_the_table_that_is_kept_says_what_the_report_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay came after the first comparison; whoever opens the table later has it, too."""
    monkeypatch.chdir(folder)
    difference = two_programs.diff_programs(
        two_programs.Program((sys.executable, "infer.py")),
        two_programs.Program((sys.executable, "infer.py", "--fault")),
        folder / "kept",
    )
    kept = page_of(folder / "kept" / "table").document["diagnosis"]
    assert difference.diagnosis.confidence > 0.9
    assert kept["confidence"] == difference.diagnosis.confidence
    assert kept["finding"] == list(difference.diagnosis.sentences)
    alone = page_of(folder / "kept" / "ref", folder / "kept" / "cand").document["diagnosis"]
    assert alone["confidence"] < difference.diagnosis.confidence


def test_a_program_without_a_model_is_not_said_to_have_failed(folder: Path) -> None:
    (folder / "greeting.py").write_text("print('hello')")
    done = diff(folder, shlex.join([sys.executable, "greeting.py"]), command())
    assert done.returncode == 2
    assert "nothing was captured" in done.stderr
    assert "the reference left nothing to compare" in done.stderr
    assert "ended with status" not in done.stderr


def test_one_command_under_two_sets_of_variables(folder: Path) -> None:
    words = ("--env", "DTYPE=float32", "--env", "DTYPE=bfloat16", "-o", "formats")
    done = diff(folder, command(), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    question = json.loads((folder / "formats" / "diff.json").read_text())
    assert question["candidate"]["variables"] == {"DTYPE": "bfloat16"}
    # Nothing failed, so nothing is replayed.
    assert (folder / "runs.txt").read_text().count("run") == 2


def test_two_revisions_of_one_repository(folder: Path) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    git("add", "infer.py")
    git("commit", "-qm", "right")
    (folder / "infer.py").write_text(PROGRAM.replace("nn.GELU()", "nn.ReLU()"))
    git("commit", "-qam", "wrong")
    done = diff(folder, command(), "--rev", "HEAD~1..HEAD", "--no-replay")
    assert done.returncode == 1, done.stderr
    assert "'1' (GELU)" in done.stdout
    (folder / "infer.py").write_text(PROGRAM)
    git("commit", "-qam", "right again")
    again = diff(folder, command(), "--rev", "HEAD~2..HEAD", "--no-replay", "-o", "other")
    assert again.returncode == 0, again.stderr
    moved = diff(folder, command(), "--rev", "HEAD~1..HEAD", "--no-replay")
    assert "HEAD~1 has changed since the reference was dumped" in moved.stderr
    trees = subprocess.run(["git", "worktree", "list"], cwd=folder, capture_output=True, text=True)
    assert len(trees.stdout.splitlines()) == 1


def test_a_program_that_fails_ends_the_diff_with_a_sentence(folder: Path) -> None:
    done = diff(folder, command("--crash"), command())
    assert done.returncode == 2
    assert "the reference ended with status 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((command(),), "one command and nothing that differs"),
        ((command(), "--rev", "main"), "--rev takes A..B, not 'main'"),
        ((command(), "--env", "DTYPE"), "--env takes NAME=VALUE, not 'DTYPE'"),
        ((command(), "--env", "A=1", "--env", "A=2", "--env", "A=3"), "--env was given 3 times"),
        ((command(), "nothing-of-this-name x"), "command not found: nothing-of-this-name"),
        ((command(), command(), "-o", "."), "holds other files"),
    ],
)
def test_questions_that_mean_nothing_are_refused(
    folder: Path, words: tuple[str, ...], sentence: str
) -> None:
    done = diff(folder, *words)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_two_revisions_without_git_say_what_to_do_instead(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="--rev needs git") as refused:
        two_programs._git("rev-parse", "HEAD")
    assert refused.value.hint == "give two commands instead"
