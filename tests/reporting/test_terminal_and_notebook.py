"""A comparison on terminals of any width, without colours, in ASCII, and in a notebook."""

from __future__ import annotations

import io
from html.parser import HTMLParser

import numpy as np
import pytest

import driftline
from driftline.comparison.pipeline import align, compare
from driftline.comparison.table.table import Table
from driftline.diagnosis.result import Diagnosis, SiteFinding
from driftline.reporting import terminal
from driftline.reporting.formatting import group_of, spark
from driftline.reporting.terminal import columns
from driftline.reporting.view import Curve
from driftline.reporting.views import comparison
from driftline.testing.runs import run_of

HOSTILE = "</script><img src=x onerror=alert(1)>"


def planted(layers: int = 6, bad: int = 3, name: str = "model") -> Table:
    """A decoder whose gate of one layer is doubled, and everything after it."""
    dice = np.random.default_rng(3)
    ours, theirs, classes = {}, {}, {}
    scale = 1.0
    for layer in range(layers):
        for part, kind in (("norm", "RMSNorm"), ("mlp.gate", "Linear"), ("mlp.act", "SiLU")):
            site = f"{name}.layers.{layer}.{part}"
            classes[site] = kind
            values = dice.standard_normal((2, 6)).astype(np.float32)
            scale = 2.0 if layer == bad and part == "mlp.gate" else scale
            ours[site] = values
            theirs[site] = values * np.float32(scale * (1 + 1e-7 * 4 ** min(layer, 6)))
    return compare(run_of(ours, classes=classes), run_of(theirs, classes=classes))


def painted(width: int, **how: bool) -> str:
    return terminal.paint(comparison.view(planted()), width=width, **how)


def test_a_narrow_terminal_gets_what_matters_and_no_line_is_wider() -> None:
    text = painted(44)
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("status"))
    assert lines[at].split() == ["status", "site", "value", "limit"]
    assert all(columns(line) <= 44 for line in lines[at : at + 9])
    assert "      ├─ █ gate  fail  1  ◀ starts here" in lines
    assert all(columns(line) <= 44 for line in lines)


def test_the_whole_report_of_a_small_model_reads_like_this() -> None:
    # Digits that the instruction set decides are left out.
    assert painted(72) == SNAPSHOT


SNAPSHOT = """\
FAIL: the drift starts at 'model.layers.3.mlp.gate' (Linear), in its
output: relative_l2 1, allowed <= 0.0001 for float32, largest error at
(0, 4); 8 of 18 compared tensors fail

█ model
└─ █ layers.3
   └─ █ mlp
      ├─ █ gate  Linear  fail  1  ◀ starts here
      └─ █ act   SiLU    fail  1

relative_l2 along the depth: 18 sites, 1.22e-07 to 1
▁▁▁▁▁▁▂▂▂▂████████
          ▲ model.layers.3.mlp.gate

Worst first (8 of 18 compared tensors failing)
status  site                     port    slot  value   limit
fail    model.layers.5.mlp.gate  output  0         1  0.0001
fail    model.layers.5.mlp.act   output  0         1  0.0001
fail    model.layers.5.norm      output  0         1  0.0001
fail    model.layers.4.mlp.gate  output  0         1  0.0001
fail    model.layers.4.norm      output  0         1  0.0001
fail    model.layers.4.mlp.act   output  0         1  0.0001
fail    model.layers.3.mlp.act   output  0         1  0.0001
fail    model.layers.3.mlp.gate  output  0         1  0.0001
... and 10 more (--all shows every row)

coverage: 18 of 18 tensors compared
limits for the lower precision of the two dtypes
"""


@pytest.mark.parametrize("width", range(30, 220, 7))
def test_the_table_fits_every_width(width: int) -> None:
    lines = painted(width).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("status"))
    table = lines[at : lines.index("", at) - 1]
    assert max(map(columns, table)) <= width
    assert "status" in lines[at] and "value" in lines[at]


def test_chinese_names_stay_in_their_columns() -> None:
    lines = terminal.paint(comparison.view(planted(name="模型")), width=90).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("status"))
    column = (
        lines[at].index("relative_l2") if "relative_l2" in lines[at] else lines[at].index("port")
    )
    for line in lines[at + 1 : at + 6]:
        seen = 0
        for n, letter in enumerate(line):
            if seen == column:
                assert line[n - 1] == " " != letter
                break
            seen += columns(letter)
    assert max(map(columns, lines[at : at + 6])) <= 90


def test_a_stream_without_unicode_gets_the_same_lines_in_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    terminal.show(comparison.view(planted()), stream)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "`- # layers.3" in text and "< starts here" in text
    assert "########" in text and "^ model.layers.3.mlp.gate" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal_and_never_where_they_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    shown, plain = Terminal(), io.StringIO()
    for stream in (shown, plain):
        terminal.show(comparison.view(planted()), stream)
    assert "\x1b[31m" in shown.getvalue() and "\x1b" not in plain.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    refused = Terminal()
    terminal.show(comparison.view(planted()), refused)
    assert refused.getvalue() == plain.getvalue()


def test_the_line_of_errors_points_at_the_first_divergence() -> None:
    (curve,) = [b for b in comparison.view(planted()).blocks if isinstance(b, Curve)]
    assert len(curve.values) == 18 and curve.label == "model.layers.3.mlp.gate"
    assert curve.marked == 10 and curve.values[10] == pytest.approx(1, rel=1e-3)
    bars, pointer = terminal.curve(curve, 80)
    assert bars[9] < bars[10] == "█" and pointer.index("▲") == 10


def test_a_line_of_more_sites_than_columns_shows_the_worst_of_each_group() -> None:
    values = [1e-6] * 1000
    values[777] = 1.0
    bars = spark(values, 50, errors=True)
    assert len(bars) == 50 and bars.count("█") == 1
    assert bars.index("█") == group_of(777, 1000, 50)
    assert spark([float("nan"), 1.0, None, 2.0], errors=True) == "!▁ █"


def test_backward_has_a_line_of_its_own() -> None:
    from driftline.runs.records import TensorKey

    table = planted()
    backward = [
        row._replace(key=TensorKey.of(row.site, "grad_input"), order=100 - row.order)
        for row in reversed(table.rows)
    ]
    view = comparison.view(table.with_rows([*table.rows, *backward]))
    titles = [block.title for block in view.blocks if isinstance(block, Curve)]
    assert [" backward" in title for title in titles] == [False, True]


class Reader(HTMLParser):
    """What a browser would make of it: elements, attributes, text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def subjects() -> dict[str, object]:
    table = planted(name=HOSTILE.replace(".", ""))
    run = run_of({HOSTILE: np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)})
    other = run_of({HOSTILE: np.ones((2, 2), np.float32), f"c{HOSTILE}": np.ones(3, np.float32)})
    site = SiteFinding(HOSTILE, 0, "introduced", cause=HOSTILE, error=0.5)
    diagnosis = Diagnosis("fail", (f"It is {HOSTILE}.",), (site,), first_site=HOSTILE)
    return {"table": table, "run": run, "plan": align(run, other), "diagnosis": diagnosis}


@pytest.mark.parametrize("what", ["table", "run", "plan", "diagnosis"])
def test_a_notebook_shows_it_whole_and_names_stay_text(what: str) -> None:
    html = subjects()[what]._repr_html_()  # type: ignore[attr-defined]
    seen = read(html)
    assert seen.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td", "pre"}
    assert seen.attributes <= {"class", "style"}, "nothing that runs, nothing that loads"
    assert "onerror=alert(1)>" in seen.text and "<img" not in html
    assert "url(" not in html and "http" not in html
    assert len(html) < 40_000


def test_a_large_comparison_is_a_small_cell() -> None:
    assert len(planted(layers=300)._repr_html_()) < 40_000


def test_the_plan_of_a_notebook_shows_first_what_was_concluded() -> None:
    ours = run_of({f"model.{n}": np.ones((n + 1, 2), np.float32) for n in range(30)})
    theirs = run_of({f"model.{n}": np.ones((n + 1, 2), np.float32) for n in range(29)})
    seen = read(driftline.align(ours, theirs)._repr_html_())
    assert "29 pairs" in seen.text and "Only in the reference" in seen.text
    assert "... and 19 more" in seen.text
