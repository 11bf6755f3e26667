"""The system's Chromium, driven by playwright, for the tests of pages and their benchmark."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


class NoChromium(Exception):
    """playwright or Chromium is missing, or Chromium does not start."""


@contextmanager
def launched() -> Iterator[Any]:
    """Launch the system's Chromium with playwright, whose own downloads are not used.

    Raises:
        NoChromium: No browser can be started.
    """
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, filter(None, names))), None)
    if program is None:
        raise NoChromium("no Chromium here: the page was not opened")
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as missing:
        raise NoChromium(f"no Chromium here: nothing drives it ({missing})") from missing
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        except Error as trouble:
            reason = trouble.message.splitlines()[0]
            problem = f"no Chromium here: {program} does not start ({reason})"
            raise NoChromium(problem) from trouble
        try:
            yield browser
        finally:
            browser.close()


class Traffic:
    """Records the network requests of a page and the complaints on its console.

    Attributes:
        requests: All requested addresses, except those of content in the page itself.
        complaints: Errors and warnings of the console, uncaught exceptions, blocked resources.
    """

    def __init__(self, page: Any) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self._requested(request.url))
        page.on("websocket", lambda socket: self._requested(socket.url))
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(f"{error.name}: {error}"))

    def _requested(self, url: str) -> None:
        if not url.startswith(("data:", "blob:", "about:")):
            self.requests.append(url)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")


def until(page: Any, expression: str, seconds: float = 30.0) -> Any:
    """Wait until a JavaScript expression is true; returns its value.

    `page.wait_for_function` needs `unsafe-eval`, which the policy of driftline's pages forbids.
    """
    end = time.monotonic() + seconds
    while not (value := page.evaluate(expression)):
        assert time.monotonic() < end, f"waited for {expression}"
        page.wait_for_timeout(20)
    return value


def point(page: Any, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
    """Scroll an element into view; returns a point in it, given by fractions, for `page.mouse`."""
    element = page.locator(selector).first
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None, f"{selector} is not visible"
    return box["x"] + box["width"] * across, box["y"] + box["height"] * down


def drag(page: Any, start: tuple[float, float], stop: tuple[float, float]) -> None:
    """Press the mouse at one point and release it at another; see `point`."""
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*stop, steps=3)
    page.mouse.up()
