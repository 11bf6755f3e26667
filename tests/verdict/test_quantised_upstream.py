"""What lies behind a quantised operator carries its rounding, and no more than that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import driftline
from driftline.comparison.table.row import Row
from driftline.comparison.verdict.inheritance import Quantised
from driftline.runs.records import TensorKey
from driftline.testing.runs import run_of
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

PROMPT = np.array([3, 1, 4, 1, 5])


def _twins(folder: Path, error: Error | None = None) -> tuple[Path, Path]:
    model = toy_decoder(layers=3)
    atb_twin(folder / "float", model, PROMPT)
    atb_twin(folder / "int8", model, PROMPT, quantised=True, error=error)
    return folder / "float", folder / "int8"


def test_a_clean_int8_twin_passes_against_the_float_one_and_the_other_way_round(tmp_path: Path):
    ours, theirs = _twins(tmp_path)
    for table in (driftline.compare(ours, theirs), driftline.compare(theirs, ours)):
        # Nothing fails; whether two runs could have shown a fault of 20 % is another question.
        assert table.verdict == "pass" or "too noisy to tell" in table.finding, table.finding
        assert all(row.status != "fail" for row in table.rows)
        limits = {row.key.site: row.limit_from for row in table.rows if row.key.port == "output"}
        assert limits["0_WordEmbedding"] == "float16"  # nothing was quantised before it
        assert limits["2_Decoder_layer"] == "int8 upstream"


def test_a_torch_dump_against_an_int8_twin_passes_too(tmp_path: Path):
    torch_twin(tmp_path / "torch", toy_decoder(layers=3), PROMPT)
    _, theirs = _twins(tmp_path)
    assert driftline.compare(tmp_path / "torch", theirs).verdict == "pass"


@pytest.mark.parametrize("factor", [1.25, 1.08])
def test_an_error_planted_in_the_int8_twin_is_named(tmp_path: Path, factor: float):
    table = driftline.compare(*_twins(tmp_path, Error(layer=1, factor=factor)))
    assert table.verdict == "fail"
    assert table.first is not None
    assert table.first.key.site == "2_Decoder_layer.1_LinearOperation"


def _row(slot: str, dtype: str, side: str, port: str = "input") -> Row:
    key = TensorKey.of("attention", port, slot)  # type: ignore[arg-type]
    if side == "both":
        return Row(key, "unjudged", reference_dtype=dtype, candidate_dtype=dtype)
    if side == "missing":
        return Row(key, "missing", reference_dtype=dtype, reference_shape=(4, 4))
    return Row(key, "extra", candidate_dtype=dtype, candidate_shape=(4, 4))


def test_a_mask_of_integers_quantises_nothing():
    result = _row("0", "float32", "both", "output")
    mask = [_row("attention_mask", "float32", "missing"), _row("attention_mask", "int8", "extra")]
    weight = [_row("weight", "float32", "missing"), _row("qweight", "int8", "extra")]
    assert Quantised([result, *mask]).at(result) == ""
    assert Quantised([result, *weight]).at(result) == "int8"
    assert Quantised([result, weight[1]]).at(result) == ""  # in the place of no float


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize(("spread", "most"), [("normal", 0.013), ("uniform", 0.0045)])
def test_what_8_bits_lose_is_what_the_page_says(axis: int | None, spread: str, most: float) -> None:
    rng = np.random.default_rng(0)
    exact = (
        rng.standard_normal((256, 512)) if spread == "normal" else rng.uniform(-1, 1, (256, 512))
    )
    values = exact.astype(np.float32)
    scale = np.abs(values).max(axis=axis, keepdims=True) / 127
    codes = np.rint(values / scale).astype(np.int8)
    stored = scale.reshape(1) if axis is None else scale
    theirs = run_of({"fc/param/weight": codes, "fc/param/weight_scale": stored.astype(np.float32)})
    table = driftline.compare(run_of({"fc/param/weight": values}), theirs)
    (row,) = (row for row in table.rows if row.compared)
    assert 0.003 < row.metrics["relative_l2"] < most
    # The limit follows from the scales: two and a half times what rounding alone does.
    assert row.status == "pass"
    assert 0.35 < row.severity < 0.45
