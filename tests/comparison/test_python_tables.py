"""A comparison in Python: what print, repr, a data frame and a notebook show of it."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import driftline
from driftline.comparison.table.table import Table
from driftline.errors import AlreadyThere, BadInput


@pytest.fixture(scope="module")
def table() -> Table:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    candidate = copy.deepcopy(reference)
    candidate[2].weight.data *= 2
    return driftline.compare_models(reference, candidate, torch.randn(3, 8))


def test_print_shows_the_table_of_the_terminal(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = str(table)
    assert text.startswith("FAIL: ")
    assert "├─ █ 2       LayerNorm   fail" in text and "◀ starts here" in text
    assert "Worst first" in text and "coverage: " in text
    assert "\x1b" not in text
    # A reader of Python is not told to write an option.
    assert "--" not in text


def test_repr_is_one_line(table: Table) -> None:
    line = repr(table)
    assert line == "<Table fail, starts at 2: 10 of 10 tensors compared>"
    row = table.worst(1)[0]
    assert repr(row).startswith("<Row fail ") and "\n" not in repr(row)
    assert f"relative_l2 {row.value:.3g}" in repr(row)


def test_rows_have_the_attributes_people_expect(table: Table) -> None:
    rows = table.worst(3)
    assert len(rows) == 3
    first = table.first
    assert first is not None
    assert (first.site, first.port, first.failed, first.passed) == ("2", "output", True, False)
    assert first.metric == "relative_l2" and first.value == first.relative_l2
    assert first.value > first.limit
    assert 0 < first.cosine <= 1 and first.max_abs_error > 0


def test_some_rows_of_a_table(table: Table) -> None:
    outputs = table.only(sites=["[23]"], ports=["output"])
    assert [row.site for row in outputs] == ["2", "3"]
    assert outputs.verdict == table.verdict
    with pytest.raises(BadInput, match="no port of this comparison matches 'outputs'"):
        table.only(ports=["outputs"])


def test_a_table_becomes_arrow_and_pandas(table: Table) -> None:
    arrow = table.to_arrow()
    assert arrow.num_rows == len(table)
    assert arrow.column("site").to_pylist() == [row.site for row in table]
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == arrow.column_names
    worst = frame.sort_values("relative_l2").iloc[-1]
    assert worst["relative_l2"] == max(row.relative_l2 for row in table)


def test_neither_is_imported_before_it_is_asked_for() -> None:
    program = """
import sys, torch, driftline
model = torch.nn.Linear(2, 2)
table = driftline.compare_models(model, model, torch.ones(1, 2))
repr(table), str(table), table.worst(1), table._repr_html_()
assert not {"pandas", "pyarrow", "IPython"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_errors_speak_to_whoever_calls_a_function(table: Table, tmp_path: Path) -> None:
    table.write(tmp_path / "table")
    with pytest.raises(AlreadyThere) as refusal:
        table.write(tmp_path / "table")
    assert refusal.value.__notes__ == ["hint: give another path, or force=True to replace"]
    # The same refusal in a shell has the words of a shell.
    assert refusal.value.hint == "give another -o, or --force to replace"


def test_a_notebook_shows_verdict_depth_and_tree(table: Table) -> None:
    html = table._repr_html_()
    assert "FAIL: " in html
    assert "relative_l2 along the depth" in html and "▲" in html
    assert "◀ starts here" in html
    assert "<script" not in html and "<style" not in html


def test_a_notebook_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    shown: list[str] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            shown.append(content["text/plain"])

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(content["text/plain"])
        return Handle()

    package, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    model = nn.Linear(2, 2)
    driftline.compare_models(model, model, torch.ones(1, 2), keep="summary")
    assert shown[0] == "driftline: running both models"
    assert any(line.endswith("pairs compared") for line in shown)
    assert shown[-1] == ""  # the line is gone when the result is there
