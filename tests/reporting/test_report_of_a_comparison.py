"""What a person sees of a comparison: the finding, the worst rows, everything that is missing."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from driftline.comparison.pipeline import compare
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Side, Table
from driftline.reporting import markdown, terminal, writers
from driftline.reporting.view import Grid, Tree, View
from driftline.reporting.views import comparison
from driftline.runs.records import TensorKey
from driftline.testing.runs import run_of


def planted(layers: int = 4, bad: str = "model.layers.2.mlp.act", extra: bool = False) -> Table:
    """A table of a decoder whose site `bad` and everything after it is doubled."""
    dice = np.random.default_rng(3)
    ours, theirs = {}, {}
    classes = {}
    scale = 1.0
    for layer in range(layers):
        for name, class_name in (("norm", "RMSNorm"), ("mlp.up", "Linear"), ("mlp.act", "SiLU")):
            site = f"model.layers.{layer}.{name}"
            classes[site] = class_name
            values = dice.standard_normal((2, 6)).astype(np.float32)
            scale = 2.0 if site == bad else scale
            ours[site], theirs[site] = values, values * np.float32(scale)
    if extra:
        ours["only.here"] = theirs["only.there"] = np.ones(2, np.float32)
        ours["shape"], theirs["shape"] = np.ones(2), np.ones(3)
    return compare(run_of(ours, classes=classes), run_of(theirs, classes=classes))


def painted(table: Table, width: int = 120, *, everything: bool = False) -> str:
    return terminal.paint(comparison.view(table, everything=everything), width=width)


def test_the_first_sentence_names_where_the_drift_starts() -> None:
    first = painted(planted()).splitlines()[0]
    assert first.startswith("FAIL: ") and "model.layers.2.mlp.act" in first


def test_a_tree_shows_where_the_first_divergence_sits() -> None:
    text = painted(planted())
    assert "└─ █ layers.2" in text
    assert "└─ █ act  SiLU    fail  1  ◀ starts here" in text
    assert "├─ ▁ up   Linear  pass" in text


def test_the_worst_rows_come_first() -> None:
    view = comparison.view(planted())
    grid = next(b for b in view.blocks if isinstance(b, Grid))
    statuses = [line.values[0] for line in grid.lines]
    assert statuses == sorted(statuses)  # fail before pass
    severities = [row.severity for row in planted().worst(len(statuses))]
    assert severities == sorted(severities, reverse=True)


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_it_fits_the_width(width: int) -> None:
    deep = planted(bad="model.layers.2.mlp.act")
    key = TensorKey.of("model." + "very_long_name." * 8 + "end", "output", "past_key_values.3.0")
    long = deep.failing[0]._replace(key=key)
    text = painted(deep.with_rows([*deep.rows, long]), width)
    assert max(len(line) for line in text.splitlines()) <= max(width, 90)
    if width >= 90:
        assert max(len(line) for line in text.splitlines()) <= width


def test_wider_terminals_show_more_columns_and_the_essential_ones_never_go() -> None:
    narrow, wide = painted(planted(), 80), painted(planted(), 200)
    for column in ("status", "site", "decided by", "value", "limit"):
        assert column in narrow
    assert "max_abs_error" not in narrow and "max_abs_error" in wide
    assert "SiLU" in wide.split("Worst first")[1]


def test_what_was_not_compared_is_listed_with_its_reason() -> None:
    text = painted(planted(extra=True))
    assert "12 of 15 tensors compared, 1 missing, 1 extra, 1 incomparable" in text
    assert "the shapes differ: 2 against 3" in text
    assert "rank0/step0/only.here/output/0" in text
    assert "rank0/step0/only.there/output/0" in text


def test_long_lists_are_bounded_and_all_means_all() -> None:
    lone = [Row(TensorKey.of(f"s{n}", "output"), "missing", "gone") for n in range(40)]
    table = planted().with_rows([*planted().rows, *lone])
    assert painted(table).count("gone") == comparison.SHOWN_OTHERS
    assert "... and 35 more (--all shows every one)" in painted(table)
    assert painted(table, everything=True).count("gone") == 40


def test_what_a_run_lost_is_said() -> None:
    hurt = planted().changed(candidate=Side("cand", {}, ("rank0: was not closed",)))
    assert "candidate run: rank0: was not closed" in painted(hurt)


def test_steps_and_ranks_are_columns_only_when_there_are_several() -> None:
    one = painted(planted())
    assert " step " not in one and " rank " not in one
    rows = [r._replace(key=r.key._replace(rank=r.order % 2, step=r.order)) for r in planted().rows]
    head = next(x for x in painted(planted().with_rows(rows)).splitlines() if "decided" in x)
    assert "step" in head and "rank" in head


def test_metrics_that_somebody_asked_for_are_always_shown() -> None:
    ours = {"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    table = compare(run_of(ours), run_of(ours), metrics=["kl"], limits={"rmse": 1, "cosine": 0.9})
    head = next(x for x in painted(table, 80).splitlines() if "decided" in x)
    assert "kl" in head
    assert "rmse" in painted(table, 80) and "cosine" in painted(table, 80)


def test_a_passing_table_has_no_tree_and_shows_how_close_it_came() -> None:
    view = comparison.view(planted(bad=""))
    assert not any(isinstance(block, Tree) for block in view.blocks)
    assert painted(planted(bad="")).startswith("PASS")


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    view = comparison.view(planted())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, pipe = Terminal(), io.StringIO()
    terminal.show(view, screen)
    terminal.show(view, pipe)
    assert "\x1b[31m" in screen.getvalue()
    assert "\x1b" not in pipe.getvalue()
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            plain = Terminal()
            terminal.show(view, plain)
            assert "\x1b" not in plain.getvalue()


def test_markdown_has_the_same_finding_and_rows() -> None:
    text = markdown.paint(comparison.view(planted()))
    assert text.startswith("**FAIL: ")
    assert "| fail | model.layers.2.mlp.act | output |" in text


def test_json_rows_stand_on_lines_of_their_own() -> None:
    table = planted()
    stream = io.StringIO()
    writers.table(table, "json", stream)
    assert json.loads(stream.getvalue()) == table.as_json()
    row_lines = [line for line in stream.getvalue().splitlines() if line.startswith('  {"site"')]
    assert len(row_lines) == len(table.rows)
    empty = io.StringIO()
    writers.table(Table(()), "json", empty)
    assert json.loads(empty.getvalue())["rows"] == []


def test_non_finite_numbers_are_words_everywhere() -> None:
    ours = {"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}
    theirs = {"a": np.ones(2, np.float32), "b": np.array([1, np.nan], np.float32)}
    table = compare(run_of(ours), run_of(theirs))
    assert "inf" in painted(table)
    stream = io.StringIO()
    writers.table(table, "json", stream)
    rows = json.loads(stream.getvalue(), parse_constant=pytest.fail)["rows"]
    assert rows[0]["relative_l2"] == "inf"


def test_an_empty_view_paints_nothing() -> None:
    assert terminal.paint(View(())) == ""
