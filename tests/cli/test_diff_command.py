"""`driftline diff` as somebody uses it who has two commands and a question."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from driftline.diagnosis.experiments import two_programs
from driftline.errors import BadInput
from driftline.reporting.html.report import page_of
from support.commands import Said, caller

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


def command(*words: str) -> str:
    return shlex.join(["python", "infer.py", *words])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "infer.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture(autouse=True)
def _python(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> None:
    """What `python` is here: how the programs start is not the point, and they are many."""
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{Path(warm_python).parent}{os.pathsep}{before}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def diff(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """The command, in this process and in the folder; its programs are processes."""
    monkeypatch.chdir(folder)
    run = caller(capfd, monkeypatch)
    return lambda *words: run("diff", *words)


def test_a_fault_is_named_and_a_second_call_runs_nothing_again(
    folder: Path, diff: Callable[..., Said]
) -> None:
    done = diff(command(), command("--fault"))
    assert done.code == 1, done.err
    assert "FAIL" in done.out
    assert "the drift starts at '2' (Linear)" in done.out
    assert "the trusted module's own arithmetic" in done.out  # the replay was made
    page = folder / "driftline-diff" / "report.html"
    assert "the report is in driftline-diff/report.html" in done.err
    assert "<html" in page.read_text()[:400]
    # The reference twice (dump and replay), the candidate once.
    assert (folder / "runs.txt").read_text().count("run") == 3

    again = diff(command(), command("--fault"))
    assert again.code == 1
    assert "the reference was dumped before" in again.err
    assert (folder / "runs.txt").read_text().count("run") == 3
    assert again.out == done.out

    other = diff(command("--fault"), command())
    assert other.code == 2
    assert "holds another diff" in other.err


def test_no_secret_of_the_programs_is_printed_or_kept(
    folder: Path, diff: Callable[..., Said]
) -> None:
    """Folders of a diff are sent to others; what was asked is told from them all the same."""
    words = ("--hf-token", "Zq7-first", "-p", "Zq7-second", "https://me:Zq7-third@host/x")
    asked = (command(*words), command("--fault"), "--env", "API_KEY=Zq7-fourth")
    done = diff(*asked)
    assert done.code == 1, done.err
    assert "--hf-token '***' -p '***'" in done.err
    assert (folder / "driftline-diff" / "replay" / "replay.json").is_file()
    kept = [file for file in (folder / "driftline-diff").rglob("*") if file.is_file()]
    assert [file.name for file in kept if b"Zq7" in file.read_bytes()] == []
    assert "Zq7" not in done.out + done.err

    assert "the reference was dumped before" in diff(*asked).err
    other = diff(command(*words), command("--fault"), "--env", "API_KEY=Zq7-fifth")
    assert other.code == 2 and "holds another diff" in other.err
    assert "Zq7" not in other.err


def test_a_repaired_program_is_run_again(folder: Path, diff: Callable[..., Said]) -> None:
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
    assert "the drift starts at '1'" in diff(*words).out
    (folder / "model.py").write_text(model.replace("x * self.by", "x * 1.0"))
    again = diff(*words)
    assert "model.py has changed since the candidate was dumped" in again.err
    assert again.code == 0, again.out
    assert (folder / "runs.txt").read_text().count("run") == 4
    assert "the reference was dumped before" in diff(*words).err


def test_the_table_that_is_kept_says_what_the_report_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay came after the first comparison; whoever opens the table later has it, too."""
    monkeypatch.chdir(folder)
    difference = two_programs.diff_programs(
        two_programs.Program(("python", "infer.py")),
        two_programs.Program(("python", "infer.py", "--fault")),
        folder / "kept",
    )
    kept = page_of(folder / "kept" / "table").document["diagnosis"]
    assert difference.diagnosis.confidence > 0.9
    assert kept["confidence"] == difference.diagnosis.confidence
    assert kept["finding"] == list(difference.diagnosis.sentences)
    alone = page_of(folder / "kept" / "ref", folder / "kept" / "cand").document["diagnosis"]
    assert alone["confidence"] < difference.diagnosis.confidence


def test_a_program_without_a_model_is_not_said_to_have_failed(
    folder: Path, diff: Callable[..., Said]
) -> None:
    (folder / "greeting.py").write_text("print('hello')")
    done = diff(shlex.join(["python", "greeting.py"]), command())
    assert done.code == 2
    assert "nothing was captured" in done.err
    assert "the reference left nothing to compare" in done.err
    assert "ended with status" not in done.err


def test_one_command_under_two_sets_of_variables(folder: Path, diff: Callable[..., Said]) -> None:
    words = ("--env", "DTYPE=float32", "--env", "DTYPE=bfloat16", "-o", "formats")
    done = diff(command(), *words)
    assert done.code == 0, done.out + done.err
    assert "PASS" in done.out
    question = json.loads((folder / "formats" / "diff.json").read_text())
    assert question["candidate"]["variables"] == {"DTYPE": "bfloat16"}
    # Nothing failed, so nothing is replayed.
    assert (folder / "runs.txt").read_text().count("run") == 2


def test_two_revisions_of_one_repository(folder: Path, diff: Callable[..., Said]) -> None:
    def git(*words: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True)

    git("init", "-q")
    git("add", "infer.py")
    git("commit", "-qm", "right")
    (folder / "infer.py").write_text(PROGRAM.replace("nn.GELU()", "nn.ReLU()"))
    git("commit", "-qam", "wrong")
    done = diff(command(), "--rev", "HEAD~1..HEAD", "--no-replay")
    assert done.code == 1, done.err
    assert "'1' (GELU)" in done.out
    (folder / "infer.py").write_text(PROGRAM)
    git("commit", "-qam", "right again")
    again = diff(command(), "--rev", "HEAD~2..HEAD", "--no-replay", "-o", "other")
    assert again.code == 0, again.err
    moved = diff(command(), "--rev", "HEAD~1..HEAD", "--no-replay")
    assert "HEAD~1 has changed since the reference was dumped" in moved.err
    trees = subprocess.run(["git", "worktree", "list"], cwd=folder, capture_output=True, text=True)
    assert len(trees.stdout.splitlines()) == 1


def test_a_program_that_fails_ends_the_diff_with_a_sentence(
    folder: Path, diff: Callable[..., Said]
) -> None:
    done = diff(command("--crash"), command())
    assert done.code == 2
    assert "the reference ended with status 3" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((command(), "--env", "API_KEY:Zq7"), "--env takes NAME=VALUE, not 'API_KEY:***'"),
        ((command(), "HF_TOKEN=Zq7 x"), "command not found: HF_TOKEN=***"),
        ((command(),), "there is only one command, and no option"),
        ((command(), "--rev", "main"), "--rev takes A..B, not 'main'"),
        ((command(), "--env", "DTYPE"), "--env takes NAME=VALUE, not 'DTYPE'"),
        ((command(), "--env", "A=1", "--env", "A=2", "--env", "A=3"), "--env was given 3 times"),
        ((command(), "nothing-of-this-name x"), "command not found: nothing-of-this-name"),
        ((command(), command(), "-o", "."), "holds other files"),
    ],
)
def test_questions_that_mean_nothing_are_refused(
    folder: Path, words: tuple[str, ...], sentence: str, diff: Callable[..., Said]
) -> None:
    done = diff(*words)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_two_revisions_without_git_say_what_to_do_instead(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="--rev needs git") as refused:
        two_programs._git("rev-parse", "HEAD")
    assert refused.value.hint == "give two commands instead"
