"""Torch modules against ATB operators: the built-in knowledge of their classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.alignment.plan import Plan
from driftline.testing.runs import run_of
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

PROMPT = np.array([[3, 1, 4, 1, 5]])


def partner(plan: Plan, site: str) -> str:
    return next(p.candidate.key.site for p in plan.pairs if p.reference.key.site == site)


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_torch_decoder_of_two_layers_aligns_with_its_atb_twin(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = toy_decoder(layers=2)
    torch_twin(tmp_path / "torch", model, PROMPT)
    atb_twin(tmp_path / "atb", model, PROMPT, **options)
    plan = driftline.align(tmp_path / "torch", tmp_path / "atb")
    leaves = {
        r.key.site
        for r in driftline.open_run(tmp_path / "torch").records
        if r.class_name in ("Linear", "RMSNorm", "Embedding", "SiLU")
    }
    assert leaves <= {p.reference.key.site for p in plan.pairs}
    fused = partner(plan, "layers.1.self_attn.q_proj") == partner(plan, "layers.1.self_attn.v_proj")
    assert fused == bool(options)
    table = driftline.compare(tmp_path / "torch", tmp_path / "atb", plan=plan)
    assert table.verdict == "pass", table.finding
    assert not any(row.status == "incomparable" for row in table.rows)


@pytest.mark.parametrize(
    ("error", "site"),
    [
        (Error(layer=1), "layers.1.self_attn.q_proj"),
        (Error(layer=1, nth=3), "layers.1.self_attn.o_proj"),
        (Error(layer=0, kind="RmsNormOperation", nth=1), "layers.0.post_attention_layernorm"),
        (Error(layer=0, kind="ActivationOperation"), "layers.0.mlp.act_fn"),
    ],
)
def test_an_error_in_an_operator_is_named_at_its_module(
    tmp_path: Path, error: Error, site: str
) -> None:
    model = toy_decoder(layers=2)
    torch_twin(tmp_path / "torch", model, PROMPT)
    atb_twin(tmp_path / "bad", model, PROMPT, error=error)
    table = driftline.compare(tmp_path / "torch", tmp_path / "bad")
    assert table.first is not None
    assert table.first.key.site == site


@pytest.mark.parametrize("options", [{"fused": True}, {"quantised": True}])
def test_operators_with_other_numbers_pair_by_what_they_do(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = toy_decoder(layers=2)
    atb_twin(tmp_path / "a", model, PROMPT)
    atb_twin(tmp_path / "b", model, PROMPT, **options)
    table = driftline.compare(tmp_path / "a", tmp_path / "b", limits={"relative_l2": 0.05})
    assert table.verdict == "pass", table.finding
    assert sum(row.compared for row in table.rows) > 40


def test_a_bias_that_is_added_by_an_operator_of_its_own_belongs_to_the_linear() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    bias = np.ones(4, np.float32)
    ours = run_of({"fc": x + 1, "norm": x}, classes={"fc": "Linear", "norm": "LayerNorm"})
    theirs = run_of(
        {
            "0_LinearOperation": x,
            "1_ElewiseOperation/input/0": x,
            "1_ElewiseOperation/input/1": bias,
            "1_ElewiseOperation": x + bias,
            "2_LayerNormOperation": x,
        },
        classes={
            "0_LinearOperation": "LinearOperation",
            "1_ElewiseOperation": "ElewiseOperation",
            "2_LayerNormOperation": "LayerNormOperation",
        },
    )
    plan = driftline.align(ours, theirs)
    assert partner(plan, "fc") == "1_ElewiseOperation"
    assert driftline.compare(ours, theirs, plan=plan).verdict == "pass"
