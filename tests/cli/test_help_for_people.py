"""Help, completion and the tour: what somebody meets who has just installed Driftline."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftline.cli.app import COMMANDS, option_names
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

Say = Callable[..., Any]
EVERYDAY = ["diff", "dump", "compare", "diagnose", "report", "view"]


def titles(page: str) -> list[str]:
    return re.findall(r"╭─ (.*?) ─", page)


def test_the_overview_begins_with_six_everyday_commands(driftline: Say) -> None:
    page = driftline("--help").out
    everyday, _, more = page.partition("╭─ More")
    assert [name for name in COMMANDS if re.search(rf"^│ {name}\b", everyday, re.M)] == EVERYDAY
    assert all(re.search(rf"^│ {name}\b", more, re.M) for name in COMMANDS if name not in EVERYDAY)
    assert titles(page)[0] == "Everyday"
    assert all(title.startswith("More: ") for title in titles(page)[1:])


def processor_time_of_children() -> float:
    """Seconds; unlike the clock's they do not grow while the machine does other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_overview_is_quick() -> None:
    command = [sys.executable, "-m", "driftline", "--help"]
    best = float("inf")
    for _ in range(3):
        begun = processor_time_of_children()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60)
        best = min(best, processor_time_of_children() - begun)
    # 0.15 s on an idle machine.
    assert best < 1


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if c.everyday])
def test_everyday_options_stand_first_and_other_tools_spellings_last(
    driftline: Say, name: str
) -> None:
    page = driftline(name, "--help").out
    names = [title for title in titles(page) if title != "Arguments"]
    assert names[0] == "Everyday options"
    first = page.split("╭─ Everyday options")[1].split("╰")[0]
    order = [first.index(f"│ {option} ") for option in COMMANDS[name].everyday]
    assert order == sorted(order)
    foreign = {n for n in option_names(name) if "_" in n or re.fullmatch(r"-[a-z]{2,}", n)}
    if foreign:
        assert names[-1] == "Spellings of other tools"
        before, _, last = page.partition("╭─ Spellings of other tools")
        for name in foreign:
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", last), name
            assert not re.search(rf"^│ (\S+ )?{re.escape(name)} ", before, re.M), name


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_pages_fit_any_width(driftline: Say, monkeypatch: Any, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["--help"], ["dump", "--help"], ["compare", "--help"]):
        lines = driftline(*words).out.splitlines()
        assert max(map(len, lines)) <= min(columns, 100)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    for name, factor in (("ref", 1.0), ("cand", 1.5)):
        writer = RunWriter(folder / name)
        for step in range(3):
            for port in ("input", "output"):
                for layer in range(2):
                    key = TensorKey.of(f"layers.{layer}", port, step=step)
                    scale = factor if (layer, port) == (1, "output") else 1.0
                    values = np.full((2, 3), step + 1, np.float32) * scale
                    record_into(writer, key, values, class_name="Linear")
        writer.close()
    return folder


def test_colours_go_where_the_user_wants_them(
    driftline: Say, two_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", str(two_runs / "ref"), str(two_runs / "cand"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b[" not in driftline(*words).out  # a pipe
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31mFAIL" in driftline(*words).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in driftline(*words).out


def test_show_takes_sites_ports_and_steps_of_a_run(driftline: Say, two_runs: Path) -> None:
    run = str(two_runs / "ref")
    words = ("show", run, "--site", "layers.1", "--port", "output", "--step", "1-2")
    said = driftline(*words, "--format", "csv")
    lines = [line.split(",") for line in said.out.splitlines()[1:]]
    assert [(line[2], line[3], line[5]) for line in lines] == [
        ("1", "layers.1", "output"),
        ("2", "layers.1", "output"),
    ]
    assert driftline("show", run, "--port", "output").out.count("layers.") == 6
    wrong = driftline("show", run, "--port", "outputs")
    assert wrong.code == 2 and "has no port 'outputs'" in wrong.err and "input, output" in wrong.err
    assert "it has steps 0, 1, 2" in driftline("show", run, "--step", "7").err


def test_show_takes_sites_ports_and_steps_of_a_comparison(
    driftline: Say, two_runs: Path, tmp_path: Path
) -> None:
    runs = (str(two_runs / "ref"), str(two_runs / "cand"))
    table = str(tmp_path / "table")
    assert driftline("compare", *runs, "-o", table).code == 1
    said = driftline("show", table, "--site", "layers.1", "--step", "2")
    assert said.out.startswith("FAIL: ")
    assert said.out.count("layers.1 ") == 2 and "layers.0 " not in said.out
    rows = driftline("show", table, "--port", "output", "--format", "csv").out.splitlines()
    assert len(rows) == 1 + 6
    wrong = driftline("show", table, "--site", "layer.1")
    assert wrong.code == 2 and "did you mean 'layers.1'" in wrong.err


REFUSALS = {"BadInput", "BadRun", "BadFile", "AlreadyThere", "NotInstalled", "DriftlineError"}


def test_every_refusal_of_the_command_line_says_what_to_do() -> None:
    cli = Path(__file__).parents[2] / "src" / "driftline" / "cli"
    without = [
        f"{path.name}:{node.lineno}"
        for path in cli.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") in REFUSALS
        and not any(word.arg == "hint" for word in node.exc.keywords)
    ]
    assert without == []


def test_hints_name_our_own_options_before_those_of_other_tools(driftline: Say) -> None:
    said = driftline("dump", "-er", "0,1", "--step", "1", "--", "true")
    assert "the steps are given twice, by --step and by -er" in said.err


BASH_QUESTION = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$(({count} - 1))
_driftline
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def bash_completes(script: Path, *words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    question = BASH_QUESTION.format(script=script, words=quoted, count=len(words))
    done = subprocess.run(
        ["bash", "-c", question], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(driftline: Say, tmp_path: Path) -> None:
    script = tmp_path / "driftline.bash"
    script.write_text(driftline("completion", "bash").out)
    assert bash_completes(script, "driftline", "dia") == ["diagnose"]
    assert bash_completes(script, "driftline", "compare", "--form") == ["--format"]
    assert bash_completes(script, "driftline", "dump", "-e") == ["-er"]
    choices = bash_completes(script, "driftline", "compare", "--format", "")
    assert {"table", "json", "github", "junit"} <= set(choices)
    assert bash_completes(script, "driftline", "completion", "f") == ["fish"]
    every = bash_completes(script, "driftline", "dump", "-")
    assert set(every) == {*option_names("dump"), "--help", "--python"}
    # Files, where a path is wanted; and the words of another program are not ours.
    (tmp_path / "reference").mkdir()
    here = f"{tmp_path}/ref"
    assert bash_completes(script, "driftline", "compare", here) == [f"{tmp_path}/reference"]
    assert bash_completes(script, "driftline", "dump", "--", "python", "--form") == []
    # A folder may be called like a command.
    assert bash_completes(script, "driftline", "compare", "ref", "dump", "--form") == ["--format"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_can_be_read_by_them(
    driftline: Say, shell: str, tmp_path: Path
) -> None:
    import shutil

    said = driftline("completion", shell)
    assert said.code == 0
    for name in COMMANDS:
        assert name in said.out
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(said.out)
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)
    if shell == "fish":
        question = f"source {script}; complete -C 'driftline compare --form'"
        done = subprocess.run(
            ["fish", "-c", question], capture_output=True, text=True, timeout=60, check=True
        )
        assert "--format" in done.stdout
        question = f"source {script}; complete -C 'driftline dump -e'"
        done = subprocess.run(
            ["fish", "-c", question], capture_output=True, text=True, timeout=60, check=True
        )
        assert "-er" in done.stdout  # a spelling of another tool: one dash, several letters


def test_the_tour_works_without_torch(
    driftline: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    said = driftline("demo")
    assert said.code == 0, said.err
    assert "The planted fault was named: 05_activation" in said.out
    assert (tmp_path / "driftline-demo" / "report.html").is_file()
    again = driftline("demo")
    assert again.code == 2 and "driftline-demo is not empty" in again.err
    # What is not a tour is never deleted.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert driftline("demo", "-o", "mine", "--force").code == 2
    assert (tmp_path / "mine" / "thesis.txt").exists()
