"""W8A8 operators: codes become numbers by the operators that made them and that take them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import driftline
from driftline.testing.runs import run_of
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

PROMPT = np.array([[3, 1, 4, 1, 5]])
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packed": True},
        {"fused": True, "packed": True},
        {"scaled": "input"},
        {"scaled": "input", "fused": True},
        {"scaled": "token"},
        {"scaled": "token", "fused": True, "packed": True},
    ],
)
def test_every_tensor_of_float_operators_is_compared_with_the_quantised_ones(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = toy_decoder(layers=2)
    atb_twin(tmp_path / "float", model, PROMPT)
    atb_twin(tmp_path / "int8", model, PROMPT, quantised=True, **options)
    table = driftline.compare(tmp_path / "float", tmp_path / "int8")
    assert table.verdict == "pass", table.finding
    assert all(row.compared for row in table.rows if row.status != "extra")
    assert not any(row.status in ("missing", "incomparable") for row in table.rows)
    rows = [row for row in table.rows if row.candidate_dtype == "int8" and row.compared]
    assert len(rows) == 2 * 7 * 3  # input, weight, and the weight as the layer takes it
    weights = [row.metrics["relative_l2"] for row in rows if row.key.slot != "0"]
    assert 0.001 < max(weights) < 0.02


def test_a_wrong_scale_of_a_weight_is_found_at_that_weight(tmp_path: Path) -> None:
    model = toy_decoder(layers=2)
    atb_twin(tmp_path / "float", model, PROMPT)
    atb_twin(tmp_path / "int8", model, PROMPT, quantised=True)
    path = next(tmp_path.glob("int8/*/tensors/*/0/1_Decoder_layer/2_*/before/intensor2.bin"))
    whole = path.read_bytes()
    head, mark, data = whole.partition(b"$End=1\n")
    scales = np.frombuffer(data, np.float32) * np.float32(1.5)
    path.write_bytes(head + mark + scales.tobytes())
    table = driftline.compare(tmp_path / "float", tmp_path / "int8")
    failing = [row for row in table.rows if row.status == "fail"]
    assert failing
    assert {row.candidate_site for row in failing} <= {
        "1_Decoder_layer.2_LinearOperation",
        "",
    }
    assert any(row.key.site == "1_Decoder_layer.1_LinearOperation" for row in failing)


def test_an_error_in_a_quantised_layer_is_named_against_modules(tmp_path: Path) -> None:
    model = toy_decoder(layers=3)
    torch_twin(tmp_path / "torch", model, PROMPT)
    wrong = Error(1, "LinearOperation", 3, 1.4)
    atb_twin(tmp_path / "bad", model, PROMPT, quantised=True, packed=True, error=wrong)
    table = driftline.compare(tmp_path / "torch", tmp_path / "bad")
    assert table.first is not None
    assert table.first.key.site == "layers.1.self_attn.o_proj"


def operators(x: Any, weight: Any, **changes: Any) -> Any:
    """A norm that quantises, then a product: as a run without any topology."""
    steps = np.abs(weight).max(1) / 127
    codes = np.rint(weight / steps[:, None]).astype(np.int8)
    scale, zero = np.float32(np.abs(x).max() / 127), 3
    small = np.clip(np.rint(x / scale) + zero, -128, 127).astype(np.int8)
    made = (small.astype(np.float32) - zero) * scale @ (codes * steps[:, None]).T
    return run_of(
        {
            "0_RmsNormOperation/input/0": x,
            "0_RmsNormOperation/input/1": np.ones(x.shape[-1], np.float32),
            "0_RmsNormOperation/input/2": np.zeros(x.shape[-1], np.float32),
            "0_RmsNormOperation/input/3": np.array([scale]),
            "0_RmsNormOperation/input/4": np.array([zero], np.int8),
            "0_RmsNormOperation": small,
            "1_LinearOperation/input/0": small,
            "1_LinearOperation/input/1": codes,
            "1_LinearOperation/input/2": np.zeros(len(weight), np.int32),
            "1_LinearOperation/input/3": (steps * scale).astype(np.float32),
            "1_LinearOperation": made.astype(np.float32),
            "2_SelfAttentionOperation/input/0": made.astype(np.float32),
            "2_SelfAttentionOperation": made.astype(np.float32),
        }
        | changes,
        classes={
            "0_RmsNormOperation": "RmsNormOperation",
            "1_LinearOperation": "LinearOperation",
            "2_SelfAttentionOperation": "SelfAttentionOperation",
        },
    )


def test_a_norm_that_quantises_gives_the_scale_and_the_zero_point() -> None:
    x = RNG.standard_normal((2, 5, 32)).astype(np.float32)
    weight = RNG.standard_normal((48, 32)).astype(np.float32)
    reference = run_of(
        {
            "norm": x, "fc/input/0": x, "fc/param/weight": weight, "fc": x @ weight.T,
        },
        classes={"norm": "RMSNorm", "fc": "Linear"},
    )  # fmt: skip
    table = driftline.compare(reference, operators(x, weight))
    rows = {(row.key.site, row.key.port): row for row in table.rows if row.compared}
    assert rows["fc", "input"].candidate_recipe.startswith("dequantise(axis 0, times ")
    assert "minus 3.0" in rows["fc", "input"].candidate_recipe
    assert {row.status for row in rows.values()} == {"pass"}
    assert set(rows) >= {("fc", "param"), ("fc", "output")}


def test_without_the_scale_of_the_input_a_product_of_scales_is_not_taken_for_one() -> None:
    x = RNG.standard_normal((2, 5, 32)).astype(np.float32)
    weight = RNG.standard_normal((48, 32)).astype(np.float32)
    reference = run_of(
        {"norm": x, "fc/input/0": x, "fc/param/weight": weight, "fc": x @ weight.T},
        classes={"norm": "RMSNorm", "fc": "Linear"},
    )
    nothing = {"0_RmsNormOperation/input/3": np.zeros(32, np.float32)}
    table = driftline.compare(reference, operators(x, weight, **nothing))
    rows = {(row.key.site, row.key.port): row for row in table.rows}
    assert rows["fc", "param"].status == "incomparable"
    assert "nothing says the input's" in rows["fc", "param"].reason
    assert rows["fc", "output"].status == "pass"


def test_the_plan_of_quantised_operators_can_be_saved_and_given_back(tmp_path: Path) -> None:
    from driftline.alignment.plan_file import write_plan

    model = toy_decoder(layers=2)
    atb_twin(tmp_path / "float", model, PROMPT)
    atb_twin(tmp_path / "int8", model, PROMPT, quantised=True, packed=True, fused=True)
    plan = driftline.align(tmp_path / "float", tmp_path / "int8")
    write_plan(plan, tmp_path / "plan.toml")
    text = (tmp_path / "plan.toml").read_text()
    assert "lowfloat" in text and "dequantise(axis 0, times " in text
    again = driftline.align(tmp_path / "float", tmp_path / "int8", plan=tmp_path / "plan.toml")
    assert [pair.candidate_recipe for pair in again.pairs] == [
        pair.candidate_recipe for pair in plan.pairs
    ]
    assert driftline.compare(tmp_path / "float", tmp_path / "int8", plan=again).verdict == "pass"


@pytest.mark.parametrize("turned", [False, True])
def test_a_square_weight_of_codes_takes_its_scales_along_the_axis_its_operator_says(
    turned: bool,
) -> None:
    weight = RNG.normal(size=(8, 8)).astype(np.float32) * np.arange(1, 9)[:, None]
    scale = (np.abs(weight).max(1) / 127).astype(np.float32)
    codes = np.rint(weight / scale[:, None]).astype(np.int8)
    x = RNG.normal(size=(4, 8)).astype(np.float16)
    site = "0_LinearOperation"
    result = (x @ weight.T).astype(np.float16)

    def made(matrix: Any, **more: Any) -> Any:
        tensors = {f"{site}/input/0": x, f"{site}/input/1": matrix, **more}
        run = run_of({**tensors, f"{site}/output/0": result}, classes={site: "LinearOperation"})
        root = {"site": site, "param": {"transposeB": not turned}}
        run.topology = lambda rank=0, process=0: {"roots": [root]}  # type: ignore[method-assign]
        return run

    def lying(matrix: Any) -> Any:
        return np.ascontiguousarray(matrix.T) if turned else matrix

    here = made(lying(weight))
    there = made(lying(codes), **{f"{site}/input/2": scale})
    table = driftline.compare(here, there)
    row = next(row for row in table.rows if row.key.slot == "1")
    assert row.metrics["relative_l2"] < 0.02


def _layers(count: int, quantised: bool) -> Any:
    tensors: dict[str, Any] = {}
    classes: dict[str, str] = {}
    roots: list[Any] = []
    weight = np.ones((4, 6), np.int8 if quantised else np.float32)
    for at in range(count):
        layer, quant, product = f"{at}_Layer", f"{at}_Layer.0_Elewise", f"{at}_Layer.1_Linear"
        classes |= {layer: "Layer", quant: "ElewiseOperation", product: "LinearOperation"}
        tensors[f"{layer}/input/0"] = weight
        if quantised:
            tensors[f"{product}/input/2"] = np.ones(4, np.float32)
        tensors[f"{product}/input/0"] = np.ones((2, 6), np.float32)
        tensors[f"{product}/input/1"] = weight
        tensors[f"{product}/output/0"] = np.ones((2, 4), np.float32)
        roots += [
            {"site": layer, "inputs": [f"w{at}"]},
            {"site": product, "inputs": [f"x{at}", f"w{at}", f"s{at}"]},
        ]
    run = run_of(tensors, classes=classes)
    run.topology = lambda rank=0, process=0: {"roots": roots}  # type: ignore[method-assign]
    return run


def test_many_quantised_layers_take_work_in_proportion() -> None:
    used: list[int] = []
    for layers in (30, 300):
        here, there = _layers(layers, False), _layers(layers, True)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            plan = driftline.align(here, there)
        finally:
            sys.setprofile(None)
        handed_on = [p for p in plan.pairs if p.reference.key.site.endswith("Layer")]
        assert len(handed_on) == layers
        assert all(pair.candidate_recipe is not None for pair in handed_on)
        used.append(calls)
    assert used[1] < 13 * used[0]


TWINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fused": True},
    "int8": {"quantised": True},
    "int8 fused": {"quantised": True, "fused": True, "packed": True},
    "per token": {"quantised": True, "scaled": "token", "fused": True},
    "without parameters": {"generation": "G1"},
}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turned")
    model = toy_decoder(layers=2)
    for name, options in TWINS.items():
        atb_twin(folder / name, model, PROMPT, **options)
        atb_twin(folder / f"{name} turned", model, PROMPT, turned=True, **options)
    for path in folder.glob("without parameters*/**/*.json"):  # topology and op_param
        path.unlink()
    return folder


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("plain", "plain turned"),
        ("plain turned", "plain"),
        ("plain", "fused turned"),
        ("fused turned", "plain"),
        ("fused", "fused turned"),
        ("plain", "int8 turned"),
        ("int8 turned", "plain"),
        ("int8", "int8 turned"),
        ("plain", "int8 fused turned"),
        ("plain turned", "int8 fused"),
        ("fused", "int8 turned"),
        ("fused", "per token turned"),
        ("plain", "without parameters turned"),
        ("int8", "without parameters turned"),
        ("fused", "without parameters turned"),
        ("without parameters", "without parameters turned"),
    ],
)
def test_matrices_that_lie_the_other_way_are_turned_square_ones_too(
    twins: Path, here: str, there: str
) -> None:
    table = driftline.compare(twins / here, twins / there)
    assert table.verdict == "pass", table.finding
    assert not [row for row in table.rows if row.status == "incomparable"]
    turned = [row for row in table.rows if "transpose(1,0)" in row.candidate_recipe]
    assert {row.reference_shape for row in turned} >= {(32, 32)}


@pytest.mark.parametrize("there", ["plain turned", "int8 turned", "fused turned"])
def test_a_wrong_square_weight_that_lies_the_other_way_fails(tmp_path: Path, there: str) -> None:
    model = toy_decoder(layers=2)
    atb_twin(tmp_path / "here", model, PROMPT)
    with torch.no_grad():
        weight = model.layers[1].self_attn.o_proj.weight
        weight.copy_(weight.T.clone())  # as it would be if only its layout had been forgotten
    options = TWINS[there.removesuffix(" turned")]
    atb_twin(tmp_path / "there", model, PROMPT, turned=True, **options)
    table = driftline.compare(tmp_path / "here", tmp_path / "there")
    site = "2_Decoder_layer.5_LinearOperation"
    failing = [row for row in table.rows if row.status == "fail" and row.key.site == site]
    assert any((row.key.port, row.key.slot) == ("input", "1") for row in failing)
    assert any(row.key.port == "output" for row in failing)  # a wrong weight excuses no output
    assert not [
        row
        for row in table.rows
        if row.status == "fail" and row.key.port == "input" and row.reference_shape == (32, 32)
        if row.key.site not in (site, "2_Decoder_layer")
    ]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("int8", "int8 fused"),  # scales as floats, and in words of 64 bits
        ("int8", "per token"),  # one scale for both matrices, and one for the weight alone
        ("per token turned", "int8 fused"),
        ("int8", "by input"),  # layers take further inputs, so their numbers mean nothing
        ("by input", "per token"),
    ],
)
def test_two_ways_to_quantise_are_compared_by_what_their_codes_mean(
    twins: Path, here: str, there: str
) -> None:
    if not (twins / "by input").exists():
        atb_twin(twins / "by input", toy_decoder(layers=2), PROMPT, quantised=True, scaled="input")
    table = driftline.compare(twins / here, twins / there)
    assert table.verdict == "pass", table.finding
    assert not [row for row in table.rows if row.status == "incomparable"]
    codes = [row for row in table.rows if row.compared and row.candidate_dtype == "int8"]
    computed = [row for row in codes if "dequantise" in row.candidate_recipe]
    assert computed and all("dequantise" in row.reference_recipe for row in computed)
    assert {row.limit_from for row in computed} == {"int8 with scales"}
    assert len(codes) > len(computed)  # weights: equal or not


def test_codes_with_a_wrong_scale_fail_though_they_are_equal(tmp_path: Path) -> None:
    model = toy_decoder(layers=2)
    for name in ("here", "there"):
        atb_twin(tmp_path / name, model, PROMPT, quantised=True)
    param = next(tmp_path.glob("there/*/tensors/*/0/2_Decoder_layer/8_*/op_param.json"))
    said = json.loads(param.read_text())
    said["quantParam"]["inputScale"] *= 1.5
    param.write_text(json.dumps(said))
    for path in tmp_path.glob("*/*/*/*/*.json"):
        path.unlink()  # the topology says it too, and comes first
    table = driftline.compare(tmp_path / "here", tmp_path / "there")
    failing = {(row.key.site, row.key.port) for row in table.rows if row.status == "fail"}
    assert ("2_Decoder_layer.8_ElewiseOperation", "output") in failing
    assert ("2_Decoder_layer.9_LinearOperation", "input") in failing


def test_one_scale_for_both_matrices_without_the_inputs_is_said(tmp_path: Path) -> None:
    model = toy_decoder(layers=2)
    atb_twin(tmp_path / "float", model, PROMPT)
    atb_twin(tmp_path / "int8", model, PROMPT, quantised=True)
    for folder in tmp_path.glob("int8/*/tensors/*/0/*_Decoder_layer/*_ElewiseOperation"):
        shutil.rmtree(folder)
    table = driftline.compare(tmp_path / "float", tmp_path / "int8")
    rows = [row for row in table.rows if row.status == "incomparable" and row.key.slot == "1"]
    assert rows
    assert all("one scale for the weight and the input" in row.reason for row in rows)
    assert all("nothing says the input's" in row.reason for row in rows)
