"""What was left out of a run is said at its end, where somebody reads it."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests of pages need a browser; a run without one must not look complete."""
    left_out = [
        report
        for report in terminalreporter.getreports("skipped")
        if "no Chromium here" in str(report.longrepr)
    ]
    if left_out:
        terminalreporter.write_sep(
            "!", "NO CHROMIUM: the pages were not opened", red=True, bold=True
        )
        terminalreporter.write_line(
            f"{len(left_out)} tests of the report and the viewer were skipped. Install Chromium "
            "(Debian: apt-get install chromium), or name one with CHROMIUM=/path/to/it.",
            red=True,
        )
    unbuilt = [
        report
        for report in terminalreporter.getreports("skipped")
        if "NO NODE" in str(report.longrepr)
    ]
    if unbuilt:
        said = str(unbuilt[0].longrepr).partition("NO NODE")[2].rstrip("')")
        terminalreporter.write_sep("!", f"NO NODE{said}", red=True, bold=True)
