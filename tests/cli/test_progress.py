"""The line that says how far a long comparison is."""

from __future__ import annotations

import pytest

from driftline.cli.progress import Progress, on_terminal


def test_nothing_is_said_to_a_file_or_a_pipe() -> None:
    assert on_terminal("pairs") is None


def test_a_short_job_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("pairs")
    progress(1, 10)
    progress.close()
    assert capsys.readouterr().err == ""


def test_a_long_job_says_rate_and_what_is_left_and_clears_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress("pairs")
    progress.started -= 10  # ten seconds ago
    progress(50, 100)
    progress(51, 100)  # too soon after the last word
    said = capsys.readouterr().err
    assert "50 of 100 pairs, 5/s, 10 s left" in said
    assert "51" not in said
    progress.close()
    assert capsys.readouterr().err == "\r\x1b[K"
