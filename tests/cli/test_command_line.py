"""The console script: words in, sentences and exit codes out, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from cyclopts import Parameter

from driftline import __version__
from driftline.cli import app
from driftline.cli.app import COMMANDS, LOOK, Command
from driftline.cli.options import place

Say = Callable[..., Any]


def seed_like(
    *program: Annotated[str, place("PROGRAM")],
    ids: Annotated[str, Parameter(name=("--save-operation-ids", "-ids"))] = "",
    execute_range: Annotated[str, Parameter(name=("--execute-range", "-er"))] = "0",
    child: Annotated[
        Literal["true", "false"], Parameter(name=("--save-operation-child", "-child"))
    ] = "true",
    time: Annotated[int, Parameter(name=("--save-time", "-time"))] = 3,
    opname: Annotated[str, Parameter(name=("--operation-name", "-opname"))] = "",
    only_desc: Annotated[bool, Parameter(name=("--only-save-desc", "-sd"))] = False,
    output: Annotated[str, Parameter(name=("--output", "-o"))] = "",
) -> int:
    """Spelt like the seeds' commands."""
    print(program, ids, execute_range, child, time, opname, only_desc, output)
    return 0


@pytest.fixture
def seed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command("nowhere:nothing", LOOK, "for tests", takes_program=True)
    monkeypatch.setitem(COMMANDS, "seed", command)
    real = app.load
    monkeypatch.setattr(app, "load", lambda n: seed_like if n == "seed" else real(n))


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("-er 3,5,7,7 -- x", "('x',) '' '3,5,7,7'"),
        ("-er -1,3 -- x", "('x',) '' '-1,3'"),
        ("-er=3,5 -ids=2,3_1 -- x", "('x',) '2,3_1' '3,5'"),
        (
            "-child false -time 2 -opname self,mlp -sd -o out -- x",
            "'false' 2 'self,mlp' True 'out'",
        ),
        ("-sd -- python x.py -sd --help -o 3", "('python', 'x.py', '-sd', '--help', '-o', '3')"),
        ("--execute-range 1,2 --save-time 0 -- x", "'1,2' 'true' 0"),
    ],
)
def test_single_dash_long_options_of_the_seeds_are_options(
    driftline: Say, seed_command: None, words: str, printed: str
) -> None:
    said = driftline("seed", *words.split())
    assert said.code == 0, said.err
    plain = said.out.replace("'", "")
    assert printed.replace("'", "") in plain


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-opnam mlp -- x", "has no option -opnam"),
        ("-opnam mlp -- x", "did you mean -opname?"),
        ("-time2 -- x", "did you mean -time?"),
        ("-oout -- x", "has no option -oout"),
        ("-sdo out -- x", "has no option -sdo"),
        ("python x.py", "the program comes after two dashes"),
        ("-sd python x.py", "the program comes after two dashes"),
        ("-er", "-er needs a value"),
        ("-time two -- x", "-time takes a whole number, not 'two'"),
        ("-child maybe -- x", "-child takes true or false, not 'maybe'"),
        ("-sd -sd -er 1 -er 2 -- x", "more than once"),
    ],
)
def test_a_misspelt_option_is_refused_and_never_becomes_something_else(
    driftline: Say, seed_command: None, words: str, says: str
) -> None:
    said = driftline("seed", *words.split())
    assert said.code == 2
    assert said.out == ""
    assert says in said.err


def test_the_overview_names_every_command_and_the_exit_codes(driftline: Say) -> None:
    said = driftline("--help")
    assert said.code == 0
    words = " ".join(said.out.replace("│", " ").split())
    for name, command in COMMANDS.items():
        assert f" {name} {command.summary} " in words
    for group in {command.group.name for command in COMMANDS.values()}:
        assert said.out.count(f"─ {group} ─") == 1
    assert "exit codes: 0 fine" in said.out
    assert driftline("-h").out == driftline("help").out == said.out
    assert driftline().code == 2


def test_help_of_a_command_can_be_asked_for_in_three_ways(driftline: Say) -> None:
    page = driftline("compare", "--help").out
    assert page.startswith("Usage: driftline compare [OPTIONS] REF CAND\n")
    assert driftline("help", "compare").out == page
    assert driftline("compare", "-h", "whatever").out == page


def test_the_version_is_said(driftline: Say) -> None:
    assert driftline("--version").out == f"driftline {__version__}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("comprae", "a", "b"), "there is no command 'comprae'"),
        (("comprae", "a", "b"), "did you mean 'compare'"),
        (("help", "comprae"), "did you mean 'compare'"),
        (("compare", "a", "b", "--formt", "json"), "did you mean --format"),
        (("compare", "a", "b", "--format", "jsn"), "did you mean 'json'?"),
        (("compare", "a", "b", "c"), "does not know what to do with 'c'"),
        (("compare", "a"), "`driftline compare` needs CAND"),
        (("compare",), "`driftline compare` needs REF"),
        (("compare", "a", "b", "-o"), "-o needs a value"),
        (("show",), "`driftline show` needs PATH"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_with_a_way_out(
    driftline: Say, words: tuple[str, ...], says: str
) -> None:
    said = driftline(*words)
    assert said.code == 2
    assert said.out == ""
    assert says in said.err
    lines = said.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("driftline: ") and lines[1].startswith("  hint: ")


def plant(monkeypatch: pytest.MonkeyPatch, trouble: BaseException) -> None:
    def bad(*words: object) -> int:
        raise trouble

    monkeypatch.setattr(app, "run", bad)


def test_a_bug_of_ours_says_so_and_keeps_the_traceback(
    driftline: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plant(monkeypatch, ZeroDivisionError("planted\nsecond line"))
    said = driftline("doctor")
    assert said.code == 2
    assert "a bug in driftline" in said.err and "ZeroDivisionError: planted" in said.err
    assert "Traceback" not in said.err and len(said.err.splitlines()) == 2
    (report,) = tmp_path.glob("driftline-bug-*.txt")
    assert str(report) in said.err
    assert "Traceback" in report.read_text()


def test_the_debug_variable_shows_the_traceback_at_once(
    driftline: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIFTLINE_DEBUG", "1")
    plant(monkeypatch, ZeroDivisionError("planted"))
    assert "Traceback" in driftline("doctor").err


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        (PermissionError(13, "Permission denied", "a.npy"), "driftline: a.npy: Permission denied"),
        (OSError(28, "No space left on device"), "driftline: No space left on device"),
        (MemoryError(), "driftline: there is not enough memory"),
    ],
)
def test_what_the_system_refuses_is_a_sentence_and_not_our_bug(
    driftline: Say, monkeypatch: pytest.MonkeyPatch, trouble: BaseException, says: str
) -> None:
    plant(monkeypatch, trouble)
    said = driftline("doctor")
    assert said.code == 2
    assert said.err.startswith(says)
    assert "bug" not in said.err


def test_an_interrupt_is_130_and_no_traceback(
    driftline: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, KeyboardInterrupt())
    said = driftline("doctor")
    assert (said.code, said.err) == (130, "driftline: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error(reference: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "driftline", "show", str(reference), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait() == 128 + signal.SIGPIPE
    program.stderr.close()


def test_the_examples_of_a_help_page_keep_their_lines(driftline: Say) -> None:
    page = driftline("metrics", "--help").out
    assert "\n$ driftline metrics --model_path=M " in page
    assert "\n    --batch_size=1 --min_pad_length=64" in page


def test_a_help_page_has_colours_on_a_terminal_only(driftline: Say) -> None:
    assert "\x1b[" not in driftline("compare", "--help").out


@pytest.mark.parametrize("module", ["driftline", "driftline.cli.main"])
def test_python_dash_m_is_the_same_program(tmp_path: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "show", str(tmp_path / "no")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("driftline: there is no")


def test_doctor_names_versions_kernel_and_devices(driftline: Say) -> None:
    said = driftline("doctor")
    assert said.code == 0
    for word in ("driftline", "python", "numpy", "kernel", "torch", "paddle", "devices"):
        assert word in said.out
    assert textwrap.dedent(driftline("doctor", "--format", "json").out).startswith("{")


def test_a_closed_stdout_is_no_bug_of_ours() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m driftline --help >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
