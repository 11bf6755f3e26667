"""One Chromium for each file of tests; without one they are skipped, and the run's end says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.chromium import NoChromium, Traffic, launched


# Not for the session: playwright keeps a running event loop in this thread as long as it is open,
# and a test of another file that calls `asyncio.run` would fail.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium."""
    try:
        with launched() as running:
            yield running
    except NoChromium as problem:
        pytest.skip(str(problem))


@pytest.fixture
def any_page(browser: Any) -> Iterator[Any]:
    """A page with an empty profile, which may complain."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, color_scheme="light", reduced_motion="reduce"
    )
    yield context.new_page()
    context.close()


@pytest.fixture
def traffic(any_page: Any) -> Traffic:
    """What the page of this test asks for and says."""
    return Traffic(any_page)


@pytest.fixture
def page(any_page: Any, traffic: Traffic) -> Iterator[Any]:
    """A page with an empty profile. Its console must stay silent."""
    yield any_page
    any_page.title()  # what the page said before it answers this has arrived
    assert not traffic.complaints, f"the page complained: {traffic.complaints}"
