"""The same tensor under different ports: weights that an operator library has as inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import driftline
from driftline.alignment.plan import Pair, Plan
from driftline.runs.run import Run
from driftline.testing.runs import run_of
from support.atb_twins import atb_twin
from support.toy_decoder import ToyDecoder, toy_decoder

PROMPT = np.arange(6).reshape(1, 6)


def sides(tmp_path: Path, spoil: str = "") -> tuple[Run, Run]:
    model = toy_decoder(layers=2)
    with torch.no_grad(), driftline.capture(model, tmp_path / "t", levels=("modules", "params")):
        model(torch.from_numpy(PROMPT))
    if spoil:
        with torch.no_grad():
            model.get_parameter(spoil).mul_(1.5)
    atb_twin(tmp_path / "a", model, PROMPT, dtype=np.float32)
    return driftline.open_run(tmp_path / "t"), driftline.open_run(tmp_path / "a")


def weights(plan: Plan) -> dict[str, Pair]:
    return {
        f"{pair.reference.key.site}.{pair.reference.key.slot}": pair
        for pair in plan.pairs
        if pair.reference.key.port == "param"
    }


def parameters(model: ToyDecoder) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_weights_that_are_inputs_pair_with_parameters(tmp_path: Path) -> None:
    torch_run, atb_run = sides(tmp_path)
    plan = driftline.align(torch_run, atb_run)
    found = weights(plan)
    assert set(found) == parameters(toy_decoder(layers=2))
    assert {pair.candidate.key.port for pair in found.values()} == {"input"}
    assert max(pair.confidence for pair in found.values()) <= 0.8
    table = driftline.compare(torch_run, atb_run, plan=plan)
    assert table.verdict == "pass", table.finding
    back = driftline.compare(atb_run, torch_run)
    assert back.verdict == "pass", back.finding


def test_a_wrong_weight_is_found_at_the_weight(tmp_path: Path) -> None:
    torch_run, atb_run = sides(tmp_path, "layers.1.mlp.down_proj.weight")
    table = driftline.compare(torch_run, atb_run)
    failing = [row for row in table.failing if row.port == "param"]
    assert [(row.site, row.slot) for row in failing] == [("layers.1.mlp.down_proj", "weight")]


S = np.linspace(-1, 1, 32, dtype=np.float32).reshape(1, 4, 8)
W = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)


def test_a_matrix_that_lies_the_other_way_is_turned_and_a_stranger_stays_alone() -> None:
    wide = (S @ W.T).astype(np.float32)
    ours = run_of(
        {"fc/param/weight": W, "fc/param/bias": W[:, 0], "fc/input": S, "fc": wide},
        classes={"fc": "Linear"},
    )
    theirs = run_of(
        {"0_Op/input/0": S, "0_Op/input/1": np.ascontiguousarray(W.T), "0_Op": wide},
        classes={"0_Op": "LinearOperation"},
    )
    plan = driftline.align(ours, theirs)
    (pair,) = weights(plan).values()
    assert "transpose" in str(pair.candidate_recipe)
    assert [record.key.slot for record in plan.missing] == ["bias"]
    assert driftline.compare(ours, theirs, plan=plan).verdict == "pass"


def attention(inputs: bool, between: bool = False, factor: float = 1.0) -> tuple[Run, Run]:
    wide = np.concatenate([S, S], -1)
    ours = {"n": S, "q": S, "k": S * 2, "v": S * 3, "o/input": S * 4, "o": wide}
    kinds = {"n": "LayerNorm", "q": "Linear", "k": "Linear", "v": "Linear", "o": "Linear"}
    theirs = {"0_N": S, "1_L": S, "2_L": S * 2, "3_L": S * 3, "4_A": S * 4 * factor}
    if between:
        theirs["5_E"] = S * 5
    if inputs:
        theirs["6_L/input"] = S * 4
    theirs["6_L"] = wide
    classes = {"0_N": "LayerNormOperation", "4_A": "SelfAttentionOperation", "5_E": "TransposeOp"}
    classes |= dict.fromkeys(("1_L", "2_L", "3_L", "6_L"), "LinearOperation")
    return run_of(ours, classes=kinds), run_of(theirs, classes=classes)


def crossed(plan: Plan) -> list[tuple[str, str]]:
    return [
        (pair.reference.key.site, pair.candidate.key.site)
        for pair in plan.pairs
        if pair.reference.key.port != pair.candidate.key.port
    ]


def test_what_an_attention_makes_is_what_the_projection_reads_if_nothing_else_says_it() -> None:
    ours, theirs = attention(inputs=False)
    assert crossed(driftline.align(ours, theirs)) == [("o", "4_A")]
    assert crossed(driftline.align(theirs, ours)) == [("4_A", "o")]
    assert driftline.compare(ours, theirs).verdict == "pass"
    table = driftline.compare(*attention(inputs=False, factor=1.2))
    assert table.verdict == "fail"
    assert table.first is not None and table.first.candidate_site == "4_A"


def test_it_is_no_pair_where_the_input_was_kept_or_something_lies_between() -> None:
    assert not crossed(driftline.align(*attention(inputs=True)))
    assert not crossed(driftline.align(*attention(inputs=False, between=True)))
