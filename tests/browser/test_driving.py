"""The harness itself: it sees requests and complaints, or a silent page would prove nothing."""

from __future__ import annotations

from pathlib import Path

from driving import Browser, Tab


def test_a_request_and_an_error_on_the_console_are_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<img src='http://127.0.0.1:9/x.png'><button>press</button>"
        "<script>console.error('said so'); document.querySelector('button').onclick = "
        "() => { document.title = 'pressed'; null.x; }</script>"
    )
    tab = browser.tab()
    try:
        tab.go(page)
        tab.click("button")
        tab.wait("document.title === 'pressed'")
        assert page.as_uri() in tab.requests and "http://127.0.0.1:9/x.png" in tab.requests
        said = "\n".join(tab.complaints)
        assert "said so" in said and "TypeError" in said
    finally:
        tab.close()


def test_a_quiet_page_is_quiet(tab: Tab, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><link rel=icon href='data:,'><p>nothing</p>")
    tab.go(page)
    assert tab.requests == [page.as_uri()] and tab.complaints == []
    assert tab.text("p") == "nothing"
