"""The bar that says how far a long comparison is."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from driftline.cli.progress import QUIET_SECONDS, Bar, progress_bar


class Terminal(io.StringIO):
    """A stderr that somebody looks at."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Puts a terminal in the place of stderr; in the test, as pytest itself replaces it before."""

    def put() -> Terminal:
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        return stream

    return put


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that bars see."""
    now = [100.0]
    monkeypatch.setattr("driftline.cli.progress.time.monotonic", lambda: now[0])
    return now


def test_nothing_is_shown_in_a_file_or_a_pipe_or_where_quiet_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar("pairs") as bar:
        assert bar is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("pairs", quiet=True) as bar:
        assert bar is None


def test_a_short_job_shows_nothing(look: Callable[[], Terminal], clock: list[float]) -> None:
    terminal = look()
    with progress_bar("pairs") as bar:
        assert isinstance(bar, Bar)
        bar(1, 10)
        clock[0] += QUIET_SECONDS / 2
        bar(10, 10)
    assert terminal.getvalue() == ""


def test_a_long_job_shows_how_much_is_done_and_takes_its_bar_away(
    look: Callable[[], Terminal], clock: list[float]
) -> None:
    terminal = look()
    with progress_bar("pairs") as bar:
        assert isinstance(bar, Bar)
        bar(1, 100)
        clock[0] += 10
        bar(50, 100)
    shown = terminal.getvalue()
    assert "50/100" in shown and "pairs" in shown
    assert shown.endswith("\x1b[2K") or shown.rstrip().endswith("\x1b[2K")


def test_results_go_to_stdout_while_a_bar_is_shown(
    look: Callable[[], Terminal], clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = look()
    with progress_bar("pairs") as bar:
        assert isinstance(bar, Bar)
        bar(1, 100)
        clock[0] += 10
        bar(50, 100)
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.getvalue()


def test_a_count_that_begins_again_waits_again(
    look: Callable[[], Terminal], clock: list[float]
) -> None:
    terminal = look()
    with progress_bar("tokens") as bar:
        assert isinstance(bar, Bar)
        bar(1, 4)
        clock[0] += 10
        bar(3, 4)  # the text ended early
        shown = len(terminal.getvalue())
        assert shown
        bar(1, 8)
        after_close = len(terminal.getvalue())
        bar(2, 8)
        assert len(terminal.getvalue()) == after_close
        clock[0] += 10
        bar(3, 8)
    assert "3/8" in terminal.getvalue()
