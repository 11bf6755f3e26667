"""`driftline view` in a real browser: a site is chosen, a map is zoomed, values are shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driving import Tab

from driftline.runs.key import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into
from driftline.viewer.door import Viewer, serve

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


def opened(tab: Tab, viewer: Viewer) -> None:
    tab.go(viewer.url)
    tab.wait("document.documentElement.dataset.ready === 'yes'")
    tab.there("#tensor .tensor-map canvas")
    tab.wait("document.querySelectorAll('.values td').length > 0")


def test_a_site_is_chosen_a_map_zoomed_and_values_are_shown(
    tab: Tab, viewer: Viewer, screenshots: Path
) -> None:
    tab.theme("light")
    opened(tab, viewer)
    assert "layers.1.mlp" in tab.text("h1")
    assert "layers.1.mlp" in tab.text("#tensor-title")
    # The values that are shown first are those where the error is largest.
    assert "batch 1, token 7" in tab.text(".values")
    tab.wait("document.querySelector('.tensor-figures h3')?.innerText.includes('whole tensor')")
    assert "4,608 elements" in tab.text(".tensor-figures h3")
    tab.picture(screenshots / "view-light.png", whole=True)

    tab.click(".tensor-map canvas", across=0.45, down=0.66)
    tab.wait("!!document.querySelector('.values td.chosen')")
    tab.wheel(".tensor-map canvas", -480, across=0.45, down=0.66)
    tab.wait("document.querySelector('.tensor-figures h3')?.innerText.includes('What is visible')")
    few = int(tab.text(".tensor-figures h3").split(", ")[-1].split()[0].replace(",", ""))
    assert 0 < few < 4608
    tab.drag(".tensor-map canvas", (0.3, 0.3), (0.6, 0.6), modifiers=8)  # with Shift
    tab.wait("document.querySelector('.tensor-figures h3')?.innerText.includes('The selection')")
    tab.picture(screenshots / "view-selection.png", whole=True)
    tab.click("#tensor [aria-label='Zoom'] button:last-child")
    tab.click(".tensor-figures button.small")
    tab.wait("document.querySelector('.tensor-figures h3')?.innerText.includes('whole tensor')")

    tab.go(viewer.url + "#site=layers.0.mlp")
    tab.wait("document.querySelector('#tensor-title').innerText.includes('layers.0.mlp')")
    tab.wait("document.querySelector('.tensor-figures')?.innerText.includes('0 (0 %)')")
    assert {url.split("/")[2] for url in tab.requests} == {viewer.url.split("/")[2]}


def test_a_slice_is_typed_and_the_keyboard_moves_the_map(tab: Tab, viewer: Viewer) -> None:
    opened(tab, viewer)
    tab.click("#tensor input[type=number]")
    tab.write("1")
    tab.press("Enter")
    shown = "document.querySelector('.tensor-figures h3')?.innerText"
    tab.wait(f"{shown}.includes('rows 24–47, columns 0–95')")
    tab.eval("document.querySelector('.tensor-map canvas').focus()")
    tab.press("+")
    tab.wait(f"{shown}.includes('rows 30–41, columns 24–71')")
    tab.press("ArrowRight")
    tab.wait(f"{shown}.includes('columns 36–83')")
    tab.press("0")
    tab.wait(f"{shown}.includes('whole tensor')")


def test_names_of_strangers_stay_text_and_themes_hold(
    tab: Tab, viewer: Viewer, screenshots: Path
) -> None:
    tab.theme("dark")
    opened(tab, viewer)
    tab.eval(f"location.hash = 'site=' + encodeURIComponent({HOSTILE!r})")
    tab.wait("document.querySelector('#tensor-title').innerText.includes('onerror')")
    assert tab.eval("document.querySelectorAll('img').length") == 0
    tab.click("#tensor button[data-name=reference]")
    tab.there("#tensor .tensor-figures h3")
    assert tab.eval(CONTRAST) == [] and tab.eval(NAMELESS) == []
    tab.picture(screenshots / "view-dark.png", whole=True)
    tab.size(375, 720)
    tab.theme("light")
    tab.wait("document.documentElement.scrollWidth <= innerWidth")
    tab.wait("document.querySelector('.values')?.rows[0].cells.length < 6")
    assert tab.eval(CONTRAST) == [] and tab.eval(NAMELESS) == []
    tab.picture(screenshots / "view-375.png")


def test_what_is_new_in_a_run_appears_on_reload(tab: Tab, tmp_path: Path) -> None:
    write(tmp_path / "ref", {"first": OURS, "second": OURS}).close()
    writer = write(tmp_path / "cand", {"first": OURS})
    with serve(tmp_path / "ref", tmp_path / "cand") as running:
        opened(tab, running)
        assert "1 of 2 tensors" in tab.text(".headline")
        tab.go(running.url + "#site=second")
        tab.wait("document.querySelector('#tensor')?.innerText.includes('only in the reference')")
        record_into(writer, "second", THEIRS)
        writer.flush()
        tab.reload()
        tab.wait("document.documentElement.dataset.ready === 'yes'")
        assert "2 of 2 tensors" in tab.text(".headline") and "second" in tab.text("h1")
        writer.close()
