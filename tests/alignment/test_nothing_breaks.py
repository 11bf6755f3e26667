"""Whatever two runs hold, alignment gives a plan or a reason, and every pair a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import driftline
from driftline.alignment.normalise.view import AlignedView
from driftline.errors import DriftlineError
from driftline.runs.records import TensorKey
from driftline.runs.run import Run
from driftline.testing.runs import run_of

NAMES = [
    *("model/input/input_ids", "model/input/attention_mask", "model.a", "model.a/input/x"),
    *("fc/param/weight", "fc/param/weight_scale", "fc/param_grad/weight", "0_Graph.b", "1_Graph.b"),
]
DTYPES = ["float32", "float16", "int8", "int64", "bool", "uint8", "float64", "complex64"]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    tensors: dict[Any, Any] = {}
    several = draw(st.integers(1, 2))
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(NAMES))
        site, _, rest = name.partition("/")
        port, _, slot = rest.partition("/")
        key = TensorKey.of(
            site,
            port or "output",  # type: ignore[arg-type]
            slot or "0",
            step=draw(st.integers(0, 2)),
            rank=draw(st.integers(0, several - 1)),
        )
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        seed = draw(st.integers(0, 3))
        values = np.random.default_rng(seed).integers(0, 3, shape)
        tensors[key] = values.astype(draw(st.sampled_from(DTYPES)))
    whole = run_of(tensors)
    # A run in memory has one rank; a view of it may have more.
    keys = list(tensors)
    records = [record._replace(key=key) for record, key in zip(whole.records, keys, strict=True)]
    origins = dict(zip(keys, whole.records, strict=True))
    return AlignedView(whole, records, origins)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), reference=runs(), candidate=runs())
def test_every_pair_of_runs_gives_rows_or_a_sentence(
    data: st.DataObject, reference: Run, candidate: Run
) -> None:
    options: dict[str, Any] = {}
    if data.draw(st.booleans()):
        options["masks"] = "captured"
    if data.draw(st.booleans()):
        rule = data.draw(st.sampled_from(["shard(0)", "shard(-1)", "replicate", "partial(sum)"]))
        options["placements"] = [f"*={rule}"]
    if data.draw(st.integers(0, 3)) == 0:
        options["step_map"] = {0: data.draw(st.integers(0, 2))}
    try:
        plan = driftline.align(reference, candidate, **options)
        table = driftline.compare(reference, candidate, threads=1, **options)
    except DriftlineError:
        return
    assert list(plan.lines())
    paired = [row for row in table.rows if row.status not in ("missing", "extra")]
    assert len(paired) == len(plan.pairs)
    for row in paired:
        assert row.compared or row.reason


def test_a_mask_of_random_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.npy").write_bytes(bytes(range(200)))
    run = run_of({"a": np.ones((2, 3))})
    try:
        driftline.compare(run, run, masks=[tmp_path / "m.npy"])
    except DriftlineError as refused:
        assert "m.npy" in str(refused)
    else:
        raise AssertionError("it was taken for a mask")
