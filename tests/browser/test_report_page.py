"""`driftline report` in a real browser: the demo's report as a stranger uses it, and odd ones.

One Chromium for all of them. Every test demands a silent console (the fixture does), and those that
open a report demand that nothing but the file itself was asked for.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from driving import Tab

from driftline.pages.assemble import report
from driftline.runs.key import TensorKey
from driftline.runs.memory import MemorySink
from driftline.testing.runs import run_of

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "infer.py"
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


def opened(tab: Tab, page: Path, fragment: str = "") -> None:
    tab.go(page.resolve().as_uri() + fragment)
    tab.wait("document.documentElement.dataset.ready === 'yes'")


def only_itself(tab: Tab, page: Path) -> bool:
    return {url.partition("#")[0] for url in tab.requests} == {page.resolve().as_uri()}


def chosen(tab: Tab) -> str:
    return tab.text("#site h3").replace("#", "").strip()


def comes_up(tab: Tab, site: str) -> None:
    """A link is followed after the click that asked for it."""
    tab.wait(f"document.querySelector('#site h3').innerText.startsWith({json.dumps(site)})")


def rows_shown(tab: Tab) -> str:
    return tab.text("#tensors .told")


def test_a_stranger_sees_which_layer_is_to_blame(tab: Tab, demo: Path, screenshots: Path) -> None:
    tab.size(1440, 900)
    tab.theme("light")
    opened(tab, demo)
    assert tab.text("h1") == f"The drift starts at {CULPRIT}"
    head = tab.text(".headline")
    assert "Fail" in head and "SiLU → GELU · in its output: relative_l2" in head
    assert "computes gelu" in head
    assert "264 of 264 tensors" in head and "bfloat16" in head
    assert chosen(tab) == CULPRIT
    assert "the drift starts here" in tab.text("#site")
    assert tab.eval("document.querySelectorAll('.pictures canvas').length") == 1
    assert tab.eval("document.querySelectorAll('.pictures .histogram').length") == 2
    assert "act_fn" in tab.text(".tree-row.first")
    tab.picture(screenshots / "report-light.png", whole=True)
    tab.theme("dark")
    tab.picture(screenshots / "report-dark.png", whole=True)
    assert only_itself(tab, demo)


def test_a_site_is_chosen_in_the_tree_by_mouse_and_keys(tab: Tab, demo: Path) -> None:
    opened(tab, demo)
    tab.click(".tree-row[aria-label^='down_proj'] .name")
    assert chosen(tab) == "layers.5.mlp.down_proj"
    assert tab.eval("location.hash") == "#site=layers.5.mlp.down_proj"
    tab.press("ArrowUp")
    tab.press("Enter")
    assert chosen(tab) == "layers.5.mlp.up_proj"
    tab.press("ArrowLeft")  # to its parent, which folds, and is chosen
    tab.press("ArrowLeft")
    tab.press("Enter")
    assert chosen(tab) == "layers.5.mlp"
    assert tab.eval("!document.querySelector('.tree-row.first')")
    # Search, and the first hit by Enter.
    tab.click("#modules input")
    tab.write("7 rmsnorm")
    tab.wait("document.querySelector('#modules .controls .quiet').innerText.includes('2 found')")
    tab.press("ArrowDown")
    tab.press("End")
    tab.press("Enter")
    assert chosen(tab) == "layers.7.post_attention_layernorm"
    # A chip leads to the neighbour.
    tab.go(demo.resolve().as_uri() + f"#site={CULPRIT}")
    comes_up(tab, CULPRIT)
    tab.click(".neighbours a.chip")
    assert chosen(tab) == "layers.5.mlp.gate_proj"


def test_rows_are_filtered_sorted_searched_and_copied(tab: Tab, demo: Path) -> None:
    tab.size(1440, 900)
    opened(tab, demo)
    assert rows_shown(tab) == "264 rows"
    assert tab.eval("document.querySelectorAll('.grid .grid-row').length") < 60
    tab.click(".chips .fail")
    assert rows_shown(tab) == "10 of 264 rows"
    # In order of execution the first failing row is the culprit.
    assert CULPRIT in tab.text("[data-index='0']")
    tab.click(".grid-head > div:nth-child(5) button")
    assert tab.eval("document.querySelector('[aria-sort=descending]').innerText").startswith("of")
    assert "down_proj" in tab.text("[data-index='0']")
    tab.click("#tensors input[type=search]")
    tab.write("layers.6 relative_l2>0.0679")
    tab.wait("document.querySelector('#tensors .told').innerText === '1 of 264 rows'")
    tab.click(".grid [data-index='0'] .c-site")
    assert chosen(tab) == "layers.6.mlp.down_proj"
    tab.eval(
        "void Object.defineProperty(navigator, 'clipboard', {configurable: true, value: "
        "{writeText: async (text) => { window.copied = text; }}})"
    )
    tab.click(".copy")
    (cells,) = csv.DictReader(io.StringIO(tab.wait("window.copied")))
    assert list(cells)[:5] == ["site", "port", "slot", "step", "rank"]
    assert cells["site"] == "layers.6.mlp.down_proj" and float(cells["relative_l2"]) > 0.0679


def test_a_link_to_a_site_opens_it_and_a_wrong_one_does_no_harm(tab: Tab, demo: Path) -> None:
    opened(tab, demo, "#site=layers.2.self_attn.q_proj")
    assert chosen(tab) == "layers.2.self_attn.q_proj"
    tab.eval("void (location.hash = '#site=lm_head')")
    comes_up(tab, "lm_head")
    tab.click("h1 a")
    comes_up(tab, CULPRIT)
    tab.reload()
    tab.wait("document.documentElement.dataset.ready === 'yes'")
    assert chosen(tab) == CULPRIT
    opened(tab, demo, "#site=%3Cimg%20src%3Dx%3E&row=99999")
    assert tab.eval("document.querySelectorAll('img').length") == 0


def test_the_chart_is_read_zoomed_and_clicked(tab: Tab, demo: Path) -> None:
    tab.size(1440, 900)
    opened(tab, demo)
    tab.hover(".plot .u-over", across=0.5, down=0.5)
    assert "layers.3" in tab.text(".tip") or "layers.4" in tab.text(".tip")
    assert "allowed" in tab.text(".tip") and "normal up to" in tab.text(".tip")
    tab.drag(".plot .u-over", (0.66, 0.5), (0.72, 0.5))
    tab.hover(".plot .u-over", across=0.5, down=0.5)
    assert "layers.5" in tab.text(".tip")
    tab.click(".plot .u-over", across=0.5, down=0.3)
    assert chosen(tab).startswith("layers.5")
    tab.eval("document.querySelector('.plot').focus()")
    tab.press("0")
    tab.press("Home")
    assert "embed_tokens" in tab.text(".tip")
    tab.press("Enter")
    assert chosen(tab) == "embed_tokens"
    assert tab.eval("document.querySelectorAll('.depth button:disabled').length") == 1  # backward


def test_every_width_and_theme_can_be_read_and_nothing_jumps(
    tab: Tab, demo: Path, screenshots: Path
) -> None:
    for width, height, theme in ((375, 812, "light"), (1440, 900, "dark"), (3840, 2160, "light")):
        tab.size(width, height)
        tab.theme(theme)
        tab.go("about:blank")
        opened(tab, demo)
        jumped = tab.eval(MOVED)
        assert jumped < 0.02, f"the layout moved by {jumped} at {width} px"
        wide = tab.eval("document.documentElement.scrollWidth")
        assert wide <= width, f"{wide} px wide at {width}"
        assert tab.eval(CONTRAST) == [], f"{theme} at {width} px"
        assert tab.eval(NAMELESS) == []
        tab.picture(screenshots / f"report-{width}-{theme}.png", whole=width < 3000)
    tab.theme("light", media="print")
    tab.eval("void dispatchEvent(new Event('beforeprint'))")
    assert tab.eval("document.querySelectorAll('.printed tbody tr').length") >= 60
    assert not tab.eval("document.querySelector('.grid').checkVisibility()")
    tab.size(900, 1200)
    tab.picture(screenshots / "report-print.png", whole=True)


def test_names_of_strangers_stay_text_in_the_page(tab: Tab, tmp_path: Path) -> None:
    key = TensorKey.of(HOSTILE, "output", HOSTILE)
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    ours = run_of({key: values}, name=HOSTILE, classes={HOSTILE: HOSTILE})
    theirs = run_of({key: values * 3}, name=HOSTILE, classes={HOSTILE: HOSTILE})
    page = tmp_path / "hostile.html"
    report(ours, theirs, page, title=HOSTILE)
    opened(tab, page)
    assert HOSTILE in tab.text("h1") and HOSTILE in tab.text("#site")
    assert HOSTILE in tab.text("#tensors .grid") and tab.eval("document.title.includes('onerror')")
    assert tab.eval("document.querySelectorAll('img, iframe, object').length") == 0
    tab.click("h1 a")
    comes_up(tab, HOSTILE)
    assert only_itself(tab, page)


def test_names_that_never_end_do_not_make_the_page_wide(tab: Tab, tmp_path: Path) -> None:
    name = "a." * 5000 + "z"
    key = TensorKey.of(name, "output", name)
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    page = tmp_path / "long.html"
    about: dict[str, Any] = {"name": name[:300].replace(".", ""), "classes": {name: name[:300]}}
    report(run_of({key: values}, **about), run_of({key: values * 3}, **about), page)
    for width in (1440, 375):
        tab.size(width, 900)
        opened(tab, page)
        assert tab.eval("document.documentElement.scrollWidth") <= width
        left, _, wide, tall = tab.place(".bar .theme")  # always there, in one line
        assert left + wide < width and tall < 44


def test_both_passes_and_many_steps_are_shown(tab: Tab, tmp_path: Path) -> None:
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
    page = tmp_path / "steps.html"
    report(run_of(sides[0]), run_of(sides[1]), page)
    opened(tab, page)
    assert "layers.1" in tab.text("h1")
    assert tab.eval("document.querySelectorAll('.depth button:disabled').length") == 0
    assert tab.eval("document.querySelector('.depth select').value") == "3"
    tab.click(".depth .segmented button:nth-child(2)")
    assert "Dashed" in tab.text(".depth .remark")
    tab.hover(".plot .u-over", across=0.5)
    assert "grad_output" in tab.text(".tip")
    tab.hover("#decoder canvas", across=0.9, down=0.5)
    # Nothing says that these steps are tokens: they may as well be iterations of training.
    assert tab.text("#decoder h2") == "Steps" and "Token" not in tab.text("#decoder")
    assert "layers.1, step 5" in tab.text("#decoder .told")
    assert tab.place("#decoder .map-y")[3] <= tab.place("#decoder canvas")[3] + 1  # no empty rows
    assert "outside" in tab.text("#decoder .told")
    tab.click("#decoder canvas", across=0.9, down=0.9)
    assert chosen(tab) == "layers.2"


def test_nan_is_not_drawn_as_no_error(tab: Tab, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    ours = {TensorKey.of(f"l.{layer}", "output"): values for layer in range(5)}
    theirs = dict(ours)
    theirs[TensorKey.of("l.3", "output")] = np.full_like(values, np.nan)
    theirs[TensorKey.of("l.4", "output")] = values[:4]
    page = tmp_path / "nan.html"
    report(run_of(ours), run_of(theirs), page)
    opened(tab, page)
    assert "Triangles at the top: NaN" in tab.text(".depth .remark")
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
    at = {site: tab.eval(f"({floor})({place})") for site, place in (("l.1", 0.4), ("l.3", 0.97))}
    assert at["l.1"] != at["l.3"]
    cut = "(cell) => cell.scrollWidth > cell.clientWidth"
    assert not tab.eval(f"({cut})(document.querySelector('.is-incomparable .c-status'))")


def test_a_page_without_its_data_says_so(tab: Tab, demo: Path, tmp_path: Path) -> None:
    text = demo.read_text(encoding="utf-8")
    start, _, rest = text.partition('id="data">')
    page = tmp_path / "cut.html"
    page.write_text(start + 'id="data">AAAA' + rest[rest.index("</script>") :], encoding="utf-8")
    opened(tab, page)
    assert "cannot show its data" in tab.text("[role=alert]")
    assert CULPRIT in tab.text("h1")


@pytest.mark.slow
def test_fifty_thousand_rows_open_in_two_seconds(tab: Tab, tmp_path: Path) -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.report_page import big_table

    page = tmp_path / "big.html"
    report(big_table(), output=page, diagnosis=False)
    times: list[float] = []
    for _ in range(3):
        tab.go("about:blank")
        opened(tab, page)
        times.append(tab.eval("performance.getEntriesByName('ready')[0].startTime") / 1000)
    assert min(times) < 2.0, times
    tab.click("#tensors input[type=search]")
    tab.write("layers.40 act_fn")
    tab.wait("/of 50,000 rows$/.test(document.querySelector('#tensors .told').innerText)")
    assert tab.eval("document.querySelectorAll('.grid .grid-row').length") < 60
    assert only_itself(tab, page)
