"""Weights packed into words (GPTQ, AWQ) against the floats they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.alignment.plan_file import read_plan, write_plan
from driftline.testing.runs import run_of

RNG = np.random.default_rng(3)
DEEP, WIDE, GROUP = 64, 48, 16
WEIGHT = RNG.normal(size=(WIDE, DEEP)).astype(np.float32)


def words(codes: Any, axis: int, bits: int, order: Any = None) -> Any:
    """Codes packed as a careful reader of the formats would write it: bit by bit."""
    per_word = 32 // bits
    order = list(range(per_word)) if order is None else order
    parts = np.moveaxis(codes, axis, -1).reshape(
        *np.moveaxis(codes, axis, -1).shape[:-1], -1, per_word
    )
    packed = np.zeros(parts.shape[:-1], np.uint32)
    for place, element in enumerate(order):
        packed |= parts[..., element].astype(np.uint32) << np.uint32(bits * place)
    return np.moveaxis(packed, -1, axis).view(np.int32)


def quantised(groups: Any, bits: int = 4) -> tuple[Any, Any, Any]:
    """Codes [in, out], scales and zero points [groups, out] of the weight."""
    turned = WEIGHT.T
    count = int(groups.max()) + 1
    low = np.stack([turned[groups == g].min(0) for g in range(count)])
    high = np.stack([turned[groups == g].max(0) for g in range(count)])
    scales = (high - low) / (2**bits - 1)
    zeros = np.clip(np.rint(-low / scales), 1, 2**bits - 1)
    codes = np.clip(np.rint(turned / scales[groups] + zeros[groups]), 0, 2**bits - 1)
    return codes.astype(np.uint32), scales.astype(np.float16), zeros.astype(np.uint32)


def gptq(*, shuffled: bool = False, bits: int = 4) -> dict[str, Any]:
    groups = np.arange(DEEP) // GROUP
    if shuffled:
        groups = RNG.permutation(groups)
    codes, scales, zeros = quantised(groups, bits)
    return {
        "qweight": words(codes, 0, bits),
        "qzeros": words(zeros - 1, 1, bits),
        "scales": scales,
        "g_idx": groups.astype(np.int32),
    }


def awq() -> dict[str, Any]:
    codes, scales, zeros = quantised(np.arange(DEEP) // GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words(codes, 1, 4, order),
        "qzeros": words(zeros, 1, 4, order),
        "scales": scales,
    }


KINDS: dict[str, Any] = {
    "GPTQ": gptq,
    "GPTQ, inputs in another order": lambda: gptq(shuffled=True),
    "GPTQ of 8 bits": lambda: gptq(bits=8),
    "AWQ": awq,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_in_a_file_is_compared_with_the_float_one(
    tmp_path: Path, kind: str
) -> None:
    packed = KINDS[kind]()
    name = "layers.0.q_proj"
    np.savez(tmp_path / "float.npz", **{f"{name}.weight": WEIGHT, f"{name}.bias": WEIGHT[:, 0]})
    parts = {f"{name}.{part}": values for part, values in packed.items()}
    np.savez(tmp_path / "packed.npz", **parts, **{f"{name}.bias": WEIGHT[:, 0]})
    table = driftline.compare(tmp_path / "float.npz", tmp_path / "packed.npz")
    assert table.verdict == "pass", table.finding
    assert {row.status for row in table.rows} == {"pass"} and len(table.rows) == 2
    row = next(row for row in table.rows if row.key.site.endswith("weight"))
    assert "unpack(" in row.candidate_recipe and "transpose" in row.candidate_recipe
    assert row.metrics["relative_l2"] < (0.01 if "8 bits" in kind else 0.1)
    packed["scales"] = packed["scales"] * np.float16(1.5)
    parts = {f"{name}.{part}": values for part, values in packed.items()}
    np.savez(tmp_path / "wrong.npz", **parts, **{f"{name}.bias": WEIGHT[:, 0]})
    table = driftline.compare(tmp_path / "wrong.npz", tmp_path / "float.npz")
    assert table.verdict == "fail"


def test_a_packed_module_under_another_name_pairs_by_structure_and_its_plan_can_be_saved(
    tmp_path: Path,
) -> None:
    x = RNG.normal(size=(2, 5, DEEP)).astype(np.float32)
    made = (x @ WEIGHT.T).astype(np.float32)
    here = run_of(
        {"norm": x, "fc/input/0": x, "fc/param/weight": WEIGHT, "fc": made},
        classes={"norm": "RMSNorm", "fc": "Linear"},
    )
    parts = {f"dense/param/{name}": values for name, values in gptq(shuffled=True).items()}
    there = run_of(
        {"scale": x, "dense/input/0": x, **parts, "dense": made},
        classes={"scale": "RMSNorm", "dense": "QuantLinear"},
    )
    plan = driftline.align(here, there)
    table = driftline.compare(here, there, plan=plan)
    assert table.verdict == "pass", table.finding
    assert not [row for row in table.rows if not row.compared]
    write_plan(plan, tmp_path / "plan.toml")
    again = read_plan(tmp_path / "plan.toml", here, there)
    assert [p.candidate_recipe for p in again.pairs] == [p.candidate_recipe for p in plan.pairs]


def test_zero_points_of_the_second_version_are_not_moved() -> None:
    groups = np.arange(DEEP) // GROUP
    scales = (np.abs(WEIGHT.T).reshape(-1, GROUP, WIDE).max(1) / 7).astype(np.float16)
    codes = np.clip(np.rint(WEIGHT.T / scales[groups]) + 8, 0, 15).astype(np.uint32)
    for stored in (7, 8):
        there = run_of(
            {
                "a.qweight": words(codes, 0, 4), "a.scales": scales,
                "a.qzeros": words(np.full((DEEP // GROUP, WIDE), stored, np.uint32), 1, 4),
            }
        )  # fmt: skip
        table = driftline.compare(run_of({"a.weight": WEIGHT}), there)
        assert table.verdict == "pass", table.finding
        # Steps of four bits hide it, no error arrives: a replay would not tell more.
        assert "a fault of 20% would show at no site" in table.finding


def test_weights_that_both_sides_packed_alike_are_equal_or_not() -> None:
    parts = {f"a.{name}": values for name, values in gptq().items()}
    wrong = {**parts, "a.qweight": parts["a.qweight"] ^ 1}
    table = driftline.compare(run_of(parts), run_of(wrong))
    assert [row.key.site for row in table.rows if row.status == "fail"] == ["a.qweight"]


def test_parts_that_fit_no_layout_stay_as_they_are() -> None:
    parts = {f"a.{name}": values for name, values in gptq().items()}
    parts["a.scales"] = parts["a.scales"][:, :-1]
    plan = driftline.align(
        run_of({"a.weight": WEIGHT, "b": WEIGHT}), run_of({**parts, "b": WEIGHT})
    )
    assert {record.key.site for record in plan.missing} == {"a.weight"}
    assert len(plan.extra) == 4
