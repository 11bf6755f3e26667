"""Rows that evidence is looked for: a long table knows whether there are any without reading it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from driftline.comparison.evidence.rules import any_needs_evidence, needs_evidence
from driftline.comparison.table.row import Row
from driftline.comparison.table.row_spool import keep
from driftline.runs.records import TensorKey

PORTS = ("input", "output", "param", "grad_input", "optimizer_grad")
TYPES = ("float32", "bfloat16", "float16", "int64")


@st.composite
def _rows(draw: st.DrawFn) -> Row:
    site = draw(st.sampled_from(["layer", "layer/aten.mul"]))
    key = TensorKey.of(site, draw(st.sampled_from(PORTS)), step=draw(st.integers(0, 3)))
    error = draw(st.sampled_from([0.0, 1e-8, 1e-6, 5e-5, 1e-3, 0.5, float("inf"), float("nan")]))
    return Row(
        key,
        "unjudged",
        class_name=draw(st.sampled_from(["LayerNorm", "Linear", "Softmax"])),
        basis=draw(st.sampled_from(["values", "summary"])),
        metrics={"relative_l2": error},
        reference_dtype=draw(st.sampled_from(TYPES)),
        candidate_dtype=draw(st.sampled_from(TYPES)),
    )


@given(st.lists(_rows(), max_size=12))
def test_no_row_is_asked_where_the_largest_errors_say_so(rows: list[Row]):
    kept = keep(rows)
    assert any_needs_evidence(
        kept.largest, after_the_first_step=kept.after_the_first_step
    ) or not any(map(needs_evidence, rows))


def test_a_table_whose_errors_are_all_small_is_not_asked():
    key = TensorKey.of("layer/aten.mul", "output")
    types = {"reference_dtype": "float32", "candidate_dtype": "float32"}
    near, far = (
        keep([Row(key, "unjudged", basis="values", metrics={"relative_l2": error}, **types)])
        for error in (5e-5, 5e-3)
    )
    assert not any_needs_evidence(near.largest, after_the_first_step=near.after_the_first_step)
    assert any_needs_evidence(far.largest, after_the_first_step=far.after_the_first_step)
