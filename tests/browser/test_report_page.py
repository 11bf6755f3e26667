"""`driftline report` in a real browser: the demo's report as a stranger uses it, and odd ones.

One Chromium for all of them. Every test demands a silent console (the fixture does), and those that
open a report demand that nothing but the file itself was asked for.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from driftline.reporting.html.report import report
from driftline.runs.memory import MemorySink
from driftline.runs.records import TensorKey
from driftline.testing.runs import run_of
from support.chromium import Traffic, drag, point, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip(
    "playwright.sync_api", reason="no Chromium here: playwright is not installed"
).expect
DEMO = Path(__file__).parents[2] / "src" / "driftline" / "testing" / "demo" / "infer.py"
CULPRIT = "layers.5.mlp.act_fn"
HOSTILE = "</script><img src=x onerror=alert(1)>"

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
NAMELESS = (Path(__file__).parent / "nameless.js").read_text(encoding="utf-8")
MOVED = (Path(__file__).parent / "moved.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the demo: its model with and without the fault, captured in this process."""
    torch = pytest.importorskip("torch")
    import driftline

    spec = importlib.util.spec_from_file_location("demo_infer", DEMO)
    assert spec is not None and spec.loader is not None
    infer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(infer)
    tokens = torch.randint(0, 512, (1, 48), generator=torch.Generator().manual_seed(1))
    runs: list[Any] = []
    for name, dtype, fault in (("ref", torch.float32, "none"), ("cand", torch.bfloat16, "gelu")):
        model = infer.build()
        infer.plant(model, fault, 5)
        model.to(dtype)
        sink = MemorySink(name=name)
        with torch.no_grad(), driftline.capture(model, sink):
            model(tokens)
        runs.append(sink.run())
    place = tmp_path_factory.mktemp("report") / "demo report.html"
    report(*runs, place, pictures=4)
    return place


def opened(page: Page, report: Path, fragment: str = "") -> None:
    page.goto(report.resolve().as_uri() + fragment)
    expect(page.locator("html")).to_have_attribute("data-ready", "yes")


def only_itself(traffic: Traffic, report: Path) -> bool:
    return {url.partition("#")[0] for url in traffic.requests} == {report.resolve().as_uri()}


def chosen(page: Page) -> str:
    return page.inner_text("#site h3").replace("#", "").strip()


def comes_up(page: Page, site: str) -> None:
    """A link is followed after the click that asked for it."""
    expect(page.locator("#site h3")).to_have_text(re.compile(rf"^\s*{re.escape(site)}"))


def test_a_stranger_sees_which_layer_is_to_blame(
    page: Page, traffic: Traffic, demo: Path, screenshots: Path
) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    page.emulate_media(color_scheme="light")
    opened(page, demo)
    assert page.inner_text("h1") == f"The drift starts at {CULPRIT}"
    head = page.inner_text(".headline")
    assert "Fail" in head and "SiLU → GELU · in its output: relative_l2" in head
    assert "computes gelu" in head and "`" not in head
    # A fact is said once: the models' classes, not their tensors' again.
    assert head.count(f"class of {CULPRIT}") == 1 and head.count("SiLU\tGELU") == 1
    assert "264 of 264 tensors" in head and "bfloat16" in head
    assert chosen(page) == CULPRIT
    assert "the drift starts here" in page.inner_text("#site")
    assert "code of layers.5.mlp" in page.inner_text("#site .neighbours")
    assert page.locator(".pictures canvas").count() == 1
    assert page.locator(".pictures .histogram").count() == 2
    assert "act_fn" in page.inner_text(".tree-row.first")
    page.screenshot(path=screenshots / "report-light.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=screenshots / "report-dark.png", full_page=True)
    assert only_itself(traffic, demo)


def test_a_site_is_chosen_in_the_tree_by_mouse_and_keys(page: Page, demo: Path) -> None:
    opened(page, demo)
    page.click(".tree-row[aria-label^='down_proj'] .name")
    assert chosen(page) == "layers.5.mlp.down_proj"
    assert page.evaluate("location.hash") == "#site=layers.5.mlp.down_proj"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert chosen(page) == "layers.5.mlp.up_proj"
    page.keyboard.press("ArrowLeft")  # to its parent, which folds, and is chosen
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert chosen(page) == "layers.5.mlp"
    assert page.evaluate("!document.querySelector('.tree-row.first')")
    # Search, and the first hit by Enter.
    page.click("#modules input")
    page.keyboard.insert_text("7 rmsnorm")
    expect(page.locator("#modules .controls .quiet")).to_contain_text("2 found")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert chosen(page) == "layers.7.post_attention_layernorm"
    # A chip leads to the neighbour.
    page.goto(demo.resolve().as_uri() + f"#site={CULPRIT}")
    comes_up(page, CULPRIT)
    page.click(".neighbours a.chip")
    assert chosen(page) == "layers.5.mlp.gate_proj"


def test_rows_are_filtered_sorted_searched_and_copied(page: Page, demo: Path) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    opened(page, demo)
    assert page.inner_text("#tensors .told") == "264 rows"
    assert page.locator(".grid .grid-row").count() < 60
    page.click(".chips .fail")
    assert page.inner_text("#tensors .told") == "10 of 264 rows"
    # In order of execution the first failing row is the culprit.
    assert CULPRIT in page.inner_text("[data-index='0']")
    page.click(".grid-head > div:nth-child(5) button")
    assert page.inner_text("[aria-sort=descending]").startswith("of")
    assert "down_proj" in page.inner_text("[data-index='0']")
    page.click("#tensors input[type=search]")
    page.keyboard.insert_text("layers.6 relative_l2>0.0679")
    expect(page.locator("#tensors .told")).to_have_text("1 of 264 rows")
    page.click(".grid [data-index='0'] .c-site")
    assert chosen(page) == "layers.6.mlp.down_proj"
    page.evaluate(
        "void Object.defineProperty(navigator, 'clipboard', {configurable: true, value: "
        "{writeText: async (text) => { window.copied = text; }}})"
    )
    page.click(".copy")
    (cells,) = csv.DictReader(io.StringIO(until(page, "window.copied")))
    assert list(cells)[:5] == ["site", "port", "slot", "step", "rank"]
    assert cells["site"] == "layers.6.mlp.down_proj" and float(cells["relative_l2"]) > 0.0679


def test_a_link_to_a_site_opens_it_and_a_wrong_one_does_no_harm(page: Page, demo: Path) -> None:
    opened(page, demo, "#site=layers.2.self_attn.q_proj")
    assert chosen(page) == "layers.2.self_attn.q_proj"
    page.evaluate("void (location.hash = '#site=lm_head')")
    comes_up(page, "lm_head")
    page.click("h1 a")
    comes_up(page, CULPRIT)
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-ready", "yes")
    assert chosen(page) == CULPRIT
    opened(page, demo, "#site=%3Cimg%20src%3Dx%3E&row=99999")
    assert page.locator("img").count() == 0


def test_the_chart_is_read_zoomed_and_clicked(page: Page, demo: Path) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    opened(page, demo)
    page.mouse.move(*point(page, ".plot .u-over", across=0.5, down=0.5))
    assert "layers.3" in page.inner_text(".tip") or "layers.4" in page.inner_text(".tip")
    assert "allowed" in page.inner_text(".tip") and "normal up to" in page.inner_text(".tip")
    drag(page, point(page, ".plot .u-over", across=0.66), point(page, ".plot .u-over", across=0.72))
    page.mouse.move(*point(page, ".plot .u-over", across=0.5, down=0.5))
    assert "layers.5" in page.inner_text(".tip")
    page.mouse.click(*point(page, ".plot .u-over", across=0.5, down=0.3))
    assert chosen(page).startswith("layers.5")
    page.evaluate("document.querySelector('.plot').focus()")
    page.keyboard.press("0")
    page.keyboard.press("Home")
    assert "embed_tokens" in page.inner_text(".tip")
    page.keyboard.press("Enter")
    assert chosen(page) == "embed_tokens"
    assert page.locator(".depth button:disabled").count() == 1  # backward


def test_every_width_and_theme_can_be_read_and_nothing_jumps(
    page: Page, demo: Path, screenshots: Path
) -> None:
    for width, height, theme in ((375, 812, "light"), (1440, 900, "dark"), (3840, 2160, "light")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme)
        page.goto("about:blank")
        opened(page, demo)
        jumped = page.evaluate(MOVED)
        assert jumped < 0.02, f"the layout moved by {jumped} at {width} px"
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{wide} px wide at {width}"
        assert page.evaluate(CONTRAST) == [], f"{theme} at {width} px"
        assert page.evaluate(NAMELESS) == []
        page.screenshot(path=screenshots / f"report-{width}-{theme}.png", full_page=width < 3000)
    page.emulate_media(color_scheme="light", media="print")
    page.evaluate("void dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".printed tbody tr").count() >= 60
    assert not page.evaluate("document.querySelector('.grid').checkVisibility()")
    page.set_viewport_size({"width": 900, "height": 1200})
    page.screenshot(path=screenshots / "report-print.png", full_page=True)


def test_names_of_strangers_stay_text_in_the_page(
    page: Page, traffic: Traffic, tmp_path: Path
) -> None:
    key = TensorKey.of(HOSTILE, "output", HOSTILE)
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    ours = run_of({key: values}, name=HOSTILE, classes={HOSTILE: HOSTILE})
    theirs = run_of({key: values * 3}, name=HOSTILE, classes={HOSTILE: HOSTILE})
    path = tmp_path / "hostile.html"
    report(ours, theirs, path, title=HOSTILE)
    opened(page, path)
    assert HOSTILE in page.inner_text("h1") and HOSTILE in page.inner_text("#site")
    assert HOSTILE in page.inner_text("#tensors .grid") and "onerror" in page.title()
    assert page.locator("img, iframe, object").count() == 0
    page.click("h1 a")
    comes_up(page, HOSTILE)
    assert only_itself(traffic, path)


def test_names_that_never_end_do_not_make_the_page_wide(page: Page, tmp_path: Path) -> None:
    name = "a." * 500 + "long" * 1000
    key = TensorKey.of(name, "output", name)
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    path = tmp_path / "long.html"
    about: dict[str, Any] = {"name": name[:300].replace(".", ""), "classes": {name: name[:300]}}
    report(run_of({key: values}, **about), run_of({key: values * 3}, **about), path)
    for width in (1440, 375):
        page.set_viewport_size({"width": width, "height": 900})
        opened(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator(".bar .theme").bounding_box()  # always there, in one line
        assert box and box["x"] + box["width"] < width and box["height"] < 44


def test_both_passes_and_many_steps_are_shown(page: Page, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sides: list[dict[Any, Any]] = [{}, {}]
    for step in range(6):
        for layer in range(3):
            values = rng.standard_normal((4, 16)).astype(np.float32)
            for side, kind in enumerate((np.float32, ml_dtypes.bfloat16)):
                bad = 1.5 if side and step > 2 and layer == 1 else 1.0
                for port in ("output", "grad_output"):
                    key = TensorKey.of(f"layers.{layer}", port, step=step)  # type: ignore[arg-type]
                    sides[side][key] = (values * bad).astype(kind)
    path = tmp_path / "steps.html"
    report(run_of(sides[0]), run_of(sides[1]), path)
    opened(page, path)
    assert "layers.1" in page.inner_text("h1")
    assert page.locator(".depth button:disabled").count() == 0
    assert page.evaluate("document.querySelector('.depth select').value") == "3"
    page.click(".depth .segmented button:nth-child(2)")
    assert "Dashed" in page.inner_text(".depth .remark")
    page.mouse.move(*point(page, ".plot .u-over", across=0.5))
    assert "grad_output" in page.inner_text(".tip")
    page.mouse.move(*point(page, "#decoder canvas", across=0.9, down=0.25))
    # Nothing says that these steps are tokens: they may as well be iterations of training.
    assert page.inner_text("#decoder h2") == "Steps" and "Token" not in page.inner_text("#decoder")
    assert "layers.1, step 5" in page.inner_text("#decoder .told")
    names, drawn = (
        page.locator(f"#decoder {part}").first.bounding_box() for part in (".map-rows", "canvas")
    )
    assert names and drawn and names["height"] <= drawn["height"] + 1  # no empty rows
    labels = page.locator("#decoder .map-rows span").all_inner_texts()
    layers = [f"layers.{layer}" for layer in range(3)]
    # The gradients stand in rows of their own below the outputs.
    assert labels == [*layers, *(f"{layer} backward" for layer in layers)]
    assert page.locator("#decoder .map-steps span").all_inner_texts() == list("012345")
    assert "outside" in page.inner_text("#decoder .told")
    page.mouse.click(*point(page, "#decoder canvas", across=0.9, down=0.9))  # of the gradients
    assert chosen(page) == "layers.2"


def test_the_depth_opens_on_the_pass_in_which_the_drift_begins(page: Page, tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
    sides: list[dict[Any, Any]] = [{}, {}]
    ports = ("output", "param_grad", "optimizer_grad")
    for side in (0, 1):
        for step in range(3):
            for port in ports:
                for slot in ("bias", "weight"):
                    key = TensorKey.of("layers.1", port, slot, step=step)  # type: ignore[arg-type]
                    # Clipped where it should not be: the optimizer is given something else.
                    bad = side and (port, slot) == ("optimizer_grad", "weight")
                    sides[side][key] = values * (0.5 if bad else 1.0)
    path = tmp_path / "optimizer.html"
    report(run_of(sides[0]), run_of(sides[1]), path)
    opened(page, path)
    pressed = page.locator(".depth .segmented button[aria-pressed=true]").first
    assert pressed.inner_text() == "optimizer"
    assert "Gradients as the optimizer sees them" in page.inner_text(".depth .remark")
    page.mouse.move(*point(page, ".plot .u-over", across=0.98))
    assert "optimizer_grad" in page.inner_text(".tip") and "0.5" in page.inner_text(".tip")
    assert "layers.1 optimizer" in page.inner_text("#decoder .map-rows")
    page.click(".depth .segmented button:nth-child(1)")
    assert "optimizer" not in page.inner_text(".depth .remark")


LABELS_TOUCH = """() => [".map-rows span", ".map-steps span"].flatMap((kind) => {
    const boxes = [...document.querySelectorAll(kind)].map((each) => each.getBoundingClientRect());
    const cover = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 &&
        a.top < b.bottom - 3 && b.top < a.bottom - 3;
    return boxes.filter((box, at) => box.left < 0 || box.right > innerWidth + 1 ||
        boxes.slice(at + 1).some((other) => cover(box, other))).map((box) => `${kind} ${box.top}`);
})"""


def test_labels_of_the_map_neither_touch_nor_leave_the_window(page: Page, tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal((2, 8)).astype(np.float32)
    keys = [
        TensorKey.of(
            f"model.language_model.layers.{layer}.self_attn.rotary.{part}", "output", step=s
        )
        for s in range(300)
        for layer in range(20)
        for part in ("q_norm", "k_norm")
    ]
    ours = dict.fromkeys(keys, values)
    theirs = {key: values * (2 if ".7." in key.site else 1) for key in keys}
    path = tmp_path / "many.html"
    report(run_of(ours), run_of(theirs), path)
    for width in (375, 1440, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        opened(page, path)
        assert page.locator("#decoder .map-rows span").count() >= 10
        assert page.evaluate(LABELS_TOUCH) == [], width


def test_nan_is_not_drawn_as_no_error(page: Page, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    ours = {TensorKey.of(f"l.{layer}", "output"): values for layer in range(5)}
    theirs = dict(ours)
    theirs[TensorKey.of("l.3", "output")] = np.full_like(values, np.nan)
    theirs[TensorKey.of("l.4", "output")] = values[:4]
    path = tmp_path / "nan.html"
    report(run_of(ours), run_of(theirs), path)
    opened(page, path)
    assert "Triangles at the top: NaN" in page.inner_text(".depth .remark")
    # The floor below a site: the line's colour where there is no error, paper where all is NaN.
    floor = """(place) => {
      const canvas = document.querySelector('.plot canvas');
      const over = document.querySelector('.u-over').getBoundingClientRect();
      const box = canvas.getBoundingClientRect();
      const ratio = canvas.width / box.width;
      const x = (over.left - box.left + over.width * place) * ratio;
      const y = (over.bottom - box.top) * ratio - 2;
      const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
      copy.drawImage(canvas, x, y, 1, 1, 0, 0, 1, 1);
      return [...copy.getImageData(0, 0, 1, 1).data].join();
    }"""
    exact, nan = (page.evaluate(floor, place) for place in (0.4, 0.97))  # l.1 and l.3
    assert exact != nan
    cut = "(cell) => cell.scrollWidth > cell.clientWidth"
    assert not page.evaluate(f"({cut})(document.querySelector('.is-incomparable .c-status'))")


def test_a_page_without_its_data_says_so(page: Page, demo: Path, tmp_path: Path) -> None:
    text = demo.read_text(encoding="utf-8")
    start, _, rest = text.partition('id="data">')
    path = tmp_path / "cut.html"
    path.write_text(start + 'id="data">AAAA' + rest[rest.index("</script>") :], encoding="utf-8")
    opened(page, path)
    assert "cannot show its data" in page.inner_text("[role=alert]")
    assert CULPRIT in page.inner_text("h1")


@pytest.mark.slow
def test_fifty_thousand_rows_open_in_two_seconds(
    page: Page, traffic: Traffic, tmp_path: Path
) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.report_page import big_table

    path = tmp_path / "big.html"
    report(big_table(), output=path, diagnosis=False)
    times: list[float] = []
    for _ in range(3):
        page.goto("about:blank")
        opened(page, path)
        times.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime") / 1000)
    assert min(times) < 2.0, times
    page.click("#tensors input[type=search]")
    page.keyboard.insert_text("layers.40 act_fn")
    expect(page.locator("#tensors .told")).to_have_text(re.compile("of 50,000 rows$"))
    assert page.locator(".grid .grid-row").count() < 60
    assert only_itself(traffic, path)


def test_the_dataflow_around_the_first_divergence(page: Page, demo: Path) -> None:
    opened(page, demo)
    flow = page.locator("#flow")
    names = flow.locator(".flow-node:not(.between) .flow-name").all_text_contents()
    assert names == ["gate_proj", "act_fn", "up_proj", "down_proj"]
    assert "act_fn" in (page.text_content(".flow-node.first") or "")
    assert "starts here" in (flow.text_content() or "")
    # gate_proj feeds act_fn, and what act_fn gives goes on: in the colour of an error.
    assert flow.locator(".flow-edge:not(.assumed)").count() >= 4
    assert flow.locator(".flow-edge.bad").count() >= 1
    nodes = flow.locator(".flow-node:not(.between)")
    fill = "e => e.querySelector('rect').style.fill"
    gate, activation, up, _ = (nodes.nth(index).evaluate(fill) for index in range(4))
    assert gate == up != activation
    # A click shows the part; the path leads out, and a click on a module into it.
    flow.locator(".flow-node", has_text="gate_proj").click()
    comes_up(page, "layers.5.mlp.gate_proj")
    flow.locator(".flow-path button", has_text="SmallLlama").click()
    layers = flow.locator(".flow-name").all_text_contents()
    assert layers[:3] == ["embed_tokens", "layers.0", "layers.1"] and layers[-1] == "lm_head"
    flow.locator(".flow-node.first").press("Enter")
    assert "self_attn" in flow.locator(".flow-name").all_text_contents()


def test_parts_are_coloured_by_the_step_in_which_the_drift_starts(
    page: Page, tmp_path: Path
) -> None:
    """A generated text goes another way after the fault: that colours no healthy part."""
    rng = np.random.default_rng(4)
    sides: list[dict[Any, Any]] = [{}, {}]
    for step in range(2):
        for layer in range(3):
            values = rng.standard_normal((4, 16)).astype(np.float32)
            for side in (0, 1):
                bad = side and (step or layer)
                key = TensorKey.of(f"layers.{layer}", "output", step=step)
                sides[side][key] = values * (1.5 if bad else 1.0)
    path = tmp_path / "steps.html"
    report(run_of(sides[0]), run_of(sides[1]), path)
    opened(page, path)
    abouts = page.locator("#flow .flow-node").evaluate_all(
        "nodes => nodes.map((node) => node.getAttribute('aria-label'))"
    )
    healthy, first, _ = abouts
    assert "0× of its limit" in healthy and "starts here" not in healthy
    assert "the drift starts here" in first
    assert "in step 0" in page.inner_text("#flow")
    # The tree says the same of the same modules.
    assert "in step 0" in page.inner_text("#modules h2")
    heats = page.locator("#modules .tree-row .heat").all_inner_texts()
    assert heats[-3] == "0×" and "0×" not in heats[-2:]
    assert [bad.strip("▲ ") for bad in page.locator(".tree-row .bads").all_inner_texts()][-3:] == [
        *("", "1", "1")
    ]


def test_a_search_that_finds_nothing_is_answered(page: Page, demo: Path) -> None:
    opened(page, demo)
    search = page.locator("#tensors input[type=search]")
    search.fill("no-such-layer")
    expect(page.locator("#tensors .told")).to_have_text("0 of 264 rows")
    grid = page.locator("#tensors .grid")
    assert "No row matches “no-such-layer”" in (grid.get_attribute("data-empty") or "")
    search.fill("relative_l3>0.1")
    expect(page.locator("#tensors .told")).to_contain_text("there is no figure “relative_l3”")
    search.fill("relative_l2>much")
    expect(page.locator("#tensors .told")).to_contain_text("“much” is no number")
    page.locator("#modules input[type=search]").fill("zebra")
    expect(page.locator("#modules .controls")).to_contain_text("nothing is called “zebra”")


BEYOND_THE_EDGE = """() => [...document.querySelectorAll("body *")].filter((element) =>
    element.getBoundingClientRect().right > innerWidth + 1 &&
    !element.closest(".flow-box, .scroll-x, .grid, .tree-box, .bar")
).map((element) => `${element.tagName} ${element.className}`)"""
CUT_WORDS = """() => [...document.querySelectorAll('.flow-box svg text')].filter((text) => {
    const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
    return box.x < 0 || box.x + box.width > view.width;
}).map((text) => text.textContent)"""
# The graph may be wider than its box; what it is about can be read without scrolling.
HIDDEN_MARK = """() => [...document.querySelectorAll('.flow-mark')].filter((text) => {
    const words = text.getBoundingClientRect();
    const box = text.closest('.flow-box').getBoundingClientRect();
    return words.left < box.left || words.right > box.right
        || words.top < box.top || words.bottom > box.bottom;
}).map((text) => text.textContent)"""


@pytest.mark.parametrize("width", [375, 1440, 2560])
def test_pages_fit_every_window_in_both_themes(
    page: Page, demo: Path, screenshots: Path, width: int
) -> None:
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        opened(page, demo)
        # Charts get their width a moment after the page.
        page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(BEYOND_THE_EDGE) == []
        assert page.evaluate(CUT_WORDS) == []
        assert page.evaluate(HIDDEN_MARK) == []
        page.screenshot(path=screenshots / f"report-{theme}-{width}.png", full_page=True)
