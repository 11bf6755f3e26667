"""`driftline view` in a real browser: a site is chosen, a map is zoomed, values are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from driftline.reporting.viewer.api import Viewer, serve
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into
from support.chromium import Traffic, drag, point, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip(
    "playwright.sync_api", reason="no Chromium here: playwright is not installed"
).expect
RANDOM = np.random.default_rng(5)
OURS = RANDOM.normal(size=(2, 24, 96)).astype(np.float32)
THEIRS = OURS.copy()
THEIRS[1, 7, 32:48] += 0.75
CONTRAST, NAMELESS = (
    (Path(__file__).parent / f"{name}.js").read_text(encoding="utf-8")
    for name in ("contrast", "nameless")
)
HOSTILE = "</script><img src=x onerror=alert(1)>"


def write(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> RunWriter:
    writer = RunWriter(folder)
    for name, values in tensors.items():
        record_into(writer, TensorKey.of(name, "output"), values)
    writer.flush()
    return writer


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    place = tmp_path_factory.mktemp("runs")
    names = ("embed", "layers.0.mlp", "layers.1.mlp", HOSTILE)
    write(place / "ref", dict.fromkeys(names, OURS)).close()
    write(
        place / "cand",
        {"embed": OURS, "layers.0.mlp": OURS, "layers.1.mlp": THEIRS, HOSTILE: THEIRS},
    ).close()
    with serve(place / "ref", place / "cand") as running:
        yield running


def opened(page: Page, viewer: Viewer) -> None:
    page.goto(viewer.url)
    expect(page.locator("html")).to_have_attribute("data-ready", "yes")
    expect(page.locator("#tensor .tensor-map canvas").first).to_be_attached()
    expect(page.locator(".values td").first).to_be_attached()


def test_a_site_is_chosen_a_map_zoomed_and_values_are_shown(
    page: Page, traffic: Traffic, viewer: Viewer, screenshots: Path
) -> None:
    page.emulate_media(color_scheme="light")
    opened(page, viewer)
    assert "layers.1.mlp" in page.inner_text("h1")
    assert "layers.1.mlp" in page.inner_text("#tensor-title")
    # The values that are shown first are those where the error is largest.
    assert "batch 1, token 7" in page.inner_text(".values")
    expect(page.locator(".tensor-figures h3")).to_contain_text("whole tensor")
    assert "4,608 elements" in page.inner_text(".tensor-figures h3")
    page.screenshot(path=screenshots / "view-light.png", full_page=True)

    page.mouse.click(*point(page, ".tensor-map canvas", across=0.45, down=0.66))
    expect(page.locator(".values td.chosen").first).to_be_attached()
    page.mouse.wheel(0, -480)
    expect(page.locator(".tensor-figures h3")).to_contain_text("What is visible")
    few = int(page.inner_text(".tensor-figures h3").split(", ")[-1].split()[0].replace(",", ""))
    assert 0 < few < 4608
    corners = (point(page, ".tensor-map canvas", part, part) for part in (0.3, 0.6))
    page.keyboard.down("Shift")
    drag(page, *corners)
    page.keyboard.up("Shift")
    expect(page.locator(".tensor-figures h3")).to_contain_text("The selection")
    page.screenshot(path=screenshots / "view-selection.png", full_page=True)
    page.click("#tensor [aria-label='Zoom'] button:last-child")
    page.click(".tensor-figures button.small")
    expect(page.locator(".tensor-figures h3")).to_contain_text("whole tensor")

    page.goto(viewer.url + "#site=layers.0.mlp")
    expect(page.locator("#tensor-title")).to_contain_text("layers.0.mlp")
    expect(page.locator(".tensor-figures")).to_contain_text("0 (0 %)")
    assert {url.split("/")[2] for url in traffic.requests} == {viewer.url.split("/")[2]}


def test_a_slice_is_typed_and_the_keyboard_moves_the_map(page: Page, viewer: Viewer) -> None:
    opened(page, viewer)
    page.click("#tensor input[type=number]")
    page.keyboard.insert_text("1")
    page.keyboard.press("Enter")
    shown = expect(page.locator(".tensor-figures h3"))
    shown.to_contain_text("rows 24–47, columns 0–95")
    page.evaluate("document.querySelector('.tensor-map canvas').focus()")
    page.keyboard.press("+")
    shown.to_contain_text("rows 30–41, columns 24–71")
    page.keyboard.press("ArrowRight")
    shown.to_contain_text("columns 36–83")
    page.keyboard.press("0")
    shown.to_contain_text("whole tensor")


def test_names_of_strangers_stay_text_and_themes_hold(
    page: Page, viewer: Viewer, screenshots: Path
) -> None:
    page.emulate_media(color_scheme="dark")
    opened(page, viewer)
    page.evaluate(f"location.hash = 'site=' + encodeURIComponent({HOSTILE!r})")
    expect(page.locator("#tensor-title")).to_contain_text("onerror")
    assert page.locator("img").count() == 0
    page.click("#tensor button[data-name=reference]")
    expect(page.locator("#tensor .tensor-figures h3").first).to_be_attached()
    assert page.evaluate(CONTRAST) == [] and page.evaluate(NAMELESS) == []
    page.screenshot(path=screenshots / "view-dark.png", full_page=True)
    page.set_viewport_size({"width": 375, "height": 720})
    page.emulate_media(color_scheme="light")
    until(page, "document.documentElement.scrollWidth <= innerWidth")
    until(page, "document.querySelector('.values')?.rows[0].cells.length < 6")
    assert page.evaluate(CONTRAST) == [] and page.evaluate(NAMELESS) == []
    page.screenshot(path=screenshots / "view-375.png")


def test_what_is_new_in_a_run_appears_on_reload(page: Page, tmp_path: Path) -> None:
    write(tmp_path / "ref", {"first": OURS, "second": OURS}).close()
    writer = write(tmp_path / "cand", {"first": OURS})
    with serve(tmp_path / "ref", tmp_path / "cand") as running:
        opened(page, running)
        assert "1 of 2 tensors" in page.inner_text(".headline")
        page.goto(running.url + "#site=second")
        expect(page.locator("#tensor")).to_contain_text(
            "not yet in the candidate, which is still being written"
        )
        record_into(writer, "second", THEIRS)
        writer.flush()
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-ready", "yes")
        assert "2 of 2 tensors" in page.inner_text(".headline") and "second" in page.inner_text(
            "h1"
        )
        writer.close()
        page.goto("about:blank")  # it may still ask for the map, and its server ends now
