"""The fixtures see requests and complaints: without that a silent page would prove nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.chromium import Traffic


def test_a_request_and_an_error_on_the_console_are_seen(
    any_page: Any, traffic: Traffic, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        "<img src='http://127.0.0.1:9/x.png'><button>press</button>"
        "<script>console.error('said so'); document.querySelector('button').onclick = "
        "() => { document.title = 'pressed'; null.x; }</script>"
    )
    any_page.goto(path.as_uri())
    any_page.click("button")
    assert any_page.title() == "pressed"
    assert {path.as_uri(), "http://127.0.0.1:9/x.png"} <= set(traffic.requests)
    complaints = "\n".join(traffic.complaints)
    assert "said so" in complaints and "TypeError" in complaints


def test_what_a_policy_blocks_is_a_complaint(
    any_page: Any, traffic: Traffic, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        '<!doctype html><meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
        "<style>p { color: red; }</style>"
    )
    any_page.goto(path.as_uri())
    assert any("style-src" in text for text in traffic.complaints), traffic.complaints


def test_a_quiet_page_is_quiet(page: Any, traffic: Traffic, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!doctype html><link rel=icon href='data:,'><p>nothing</p>")
    page.goto(path.as_uri())
    assert traffic.requests == [path.as_uri()] and traffic.complaints == []
    assert page.inner_text("p") == "nothing"
