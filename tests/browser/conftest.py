"""One Chromium for all tests of pages; without one they are skipped, and the run's end says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import Browser, PageTrouble, Tab, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real Chromium."""
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: the page was not opened")
    try:
        running = Browser(program)
    except (PageTrouble, OSError) as trouble:
        pytest.skip(f"no Chromium here: {program} does not start ({trouble})")
    yield running
    running.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A tab with an empty profile. Its console must stay silent."""
    opened = browser.tab()
    yield opened
    said = opened.complaints
    opened.close()
    assert not said, f"the page complained: {said}"


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of pages go: $DRIFTLINE_SCREENSHOTS, to look at them, or nowhere for long."""
    wanted = os.environ.get("DRIFTLINE_SCREENSHOTS")
    return Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")
