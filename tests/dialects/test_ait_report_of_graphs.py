"""ait's report of a GE dump against an FX dump: every line that the original printed is there."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.alignment.align import AlignOptions, align_runs
from driftline.dialects.ait.compare_report import METRICS, write_report
from driftline.formats.ascend.ge.graph_text import GraphNode
from driftline.formats.registry import open_run
from support.ge import GeDump, write_fx

DATA = Path(__file__).parents[1] / "data" / "ascend"
FIGURES = (
    *("golden_max_value", "golden_min_value", "golden_mean_value"),
    *("my_max_value", "my_min_value", "my_mean_value", "cosine_similarity"),
    *("max_relative_error", "mean_relative_error", "max_absolute_error", "mean_absolute_error"),
    "relative_euclidean_distance",
)


def reported(golden: Path, mine: Path, folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    reference, candidate = open_run(golden), open_run(mine)
    plan = align_runs(reference, candidate, AlignOptions())
    table = driftline.compare(reference, candidate, metrics=METRICS)
    path = write_report(table, plan, reference, candidate, folder)
    with path.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["data_id"] for line in lines] == [str(at) for at in range(len(lines))]
    return {(line["golden_data_path"], line["my_data_path"]): line for line in lines}


def test_every_line_of_the_original_report_is_there_with_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DATA)
    ours = reported(Path("fx_dump"), Path("ge_dump"), tmp_path)
    with (DATA / "expect_compare" / "ge_vs_fx.csv").open(newline="") as stream:
        expected = list(csv.DictReader(stream))
    assert len(expected) == 8
    for line in expected:
        found = ours[line["golden_data_path"], line["my_data_path"]]
        for column in ("token_id", "golden_shape", "my_shape", "cmp_fail_reason"):
            assert found[column] == line[column]
        for column in FIGURES:
            assert float(found[column]) == pytest.approx(float(line[column]), rel=1e-6), column
        # The original's softmax in float32 leaves a few 1e-8 where nothing differs.
        assert float(found["kl_divergence"]) == pytest.approx(
            float(line["kl_divergence"]), abs=1e-7
        )


def test_a_conversion_that_changes_its_values_has_its_figures(tmp_path: Path) -> None:
    x = np.arange(4, dtype=np.float32)
    dump = GeDump(tmp_path / "ge")
    dump.operator("Cast", "Cast_1", [x], [(x * 2).astype(np.float16)])
    dump.operator("Neg", "Neg_1", [x], [-x])
    dump.graph_text([GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.OUTPUT.0",))])
    write_fx(tmp_path / "fx" / "gm_20240130064200000001_dump" / "1", "neg", "aten.neg", [x], [-x])
    ours = reported(tmp_path / "fx", tmp_path / "ge", tmp_path)
    (line,) = (line for (golden, _), line in ours.items() if ",inputs,0" in golden)
    assert float(line["max_absolute_error"]) == 3
    assert float(line["relative_euclidean_distance"]) == 1
    table = driftline.compare(tmp_path / "fx", tmp_path / "ge")
    assert table.verdict == "fail"
    assert table.first is not None
    assert (table.first.site, table.first.by) == ("Cast_1", "conversion")
    assert not [row for row in table.rows if row.site == "Cast_1" and row.status == "extra"]


@pytest.mark.parametrize("kind", ["float16", "int32", "bool"])
def test_a_conversion_is_checked_between_dumps_of_equal_names_if_it_should_keep_its_values(
    tmp_path: Path, kind: str
) -> None:
    x = np.array([0.5, -1.25, 3.0, 7.75], np.float32)

    def dump(name: str, *given: np.ndarray[Any, Any]) -> Path:
        made = GeDump(tmp_path / name)
        made.operator("Neg", "Neg_1", [x], [-x])
        for gave in given:
            made.operator("Cast", "trans_Cast_7", [x], [gave])
        made.graph_text([GraphNode("Neg_1", "Neg", (("x", 0),), ("neg-aten.neg.OUTPUT.0",))])
        return tmp_path / name

    plain, right = dump("plain"), dump("right", x.astype(kind))
    for table in (driftline.compare(plain, right), driftline.compare(right, plain)):
        assert table.verdict == "pass", table.finding
        checked = [row for row in table.rows if row.by == "conversion"]
        assert len(checked) == (1 if kind == "float16" else 0)
    if kind == "float16":
        table = driftline.compare(plain, dump("wrong", (x * 2).astype(kind)))
        assert [row.site for row in table.failing] == ["trans_Cast_7"]
