"""noise, bisect and repeat as a user runs them, with programs that are started for real."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from driftline.diagnosis.experiments.live.repeat import dithered, rounded_once
from driftline.formats.registry import open_run


def test_noise_makes_runs_in_the_candidates_format_and_keeps_failures_with_reasons(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--dtype", "bfloat16")
    folder = tmp_path / "noise"
    said = driftline(
        "noise",
        "--like",
        candidate,
        "-o",
        folder,
        "--variant",
        "plain",
        "fused",
        "eager",
        "dither",
        "--",
        sys.executable,
        program,
        "--hf-token=Zq7",
    )
    assert said.code == 0, said.err
    assert "Zq7" not in (folder / "noise.json").read_text()
    found = json.loads((folder / "noise.json").read_text())
    variants = {v["name"]: v for v in found["variants"]}
    assert [variants[name]["status"] for name in variants] == ["made", "made", "failed", "made"]
    assert variants["bfloat16-eager"]["reason"].endswith("has no other attention to switch to")
    assert "Error" not in variants["bfloat16-eager"]["reason"]
    assert not (folder / "bfloat16-eager").exists()
    runs = {name: open_run(folder / v["folder"]) for name, v in variants.items() if v["folder"]}
    for run in runs.values():
        assert {r.dtype for r in run.records if r.key.port == "output"} == {"bfloat16"}
    plain = {r.key: r.digest for r in runs["bfloat16"].records}
    # The plain variant is what the program itself gives in that format.
    captured = {r.key: r.digest for r in open_run(candidate).records if r.key.port == "output"}
    assert {key: plain[key] for key in captured} == captured
    first = next(r.key.site for r in runs["bfloat16-dither"].records if r.digest != plain[r.key])
    assert first == "embed"
    fused = [r.key.site for r in runs["bfloat16-fused"].records if r.digest != plain[r.key]]
    assert fused[0] == "layers.0.norm1"


def test_a_model_of_float_inputs_without_other_attention_is_executed_all_the_same(
    driftline: Callable, tmp_path: Path
) -> None:
    program = tmp_path / "floats.py"
    program.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\nfor _ in range(2): model(torch.ones(2, 4))\n"
    )
    said = driftline(
        *("noise", "-o", tmp_path / "n", "--variant", "eager", "--", sys.executable, program)
    )
    assert "Linear has no other attention to switch to" in said.err
    assert "Traceback" not in said.err


@pytest.mark.slow
def test_noise_refuses_what_means_nothing(
    program: Path, driftline: Callable, tmp_path: Path
) -> None:
    for words, text in (
        (("--variant", "plian"), "plain"),
        (("--dtype", "int8"), "float32"),
    ):
        said = driftline("noise", "-o", tmp_path / "n", *words, "--", sys.executable, program)
        assert said.code == 2
        assert text in said.err
    said = driftline(
        "noise",
        "-o",
        tmp_path / "n",
        "--variant",
        "plain",
        "--",
        sys.executable,
        program,
        "--fault",
        "exit",
    )
    assert said.code == 2
    assert "status 3" in said.err


def test_moved_by_a_last_place_is_moved_by_no_more() -> None:
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        values = torch.randn(1000, generator=draw).to(dtype)
        values[4:20] = info.smallest_normal * torch.linspace(-0.9, 0.9, 16)  # subnormal ones, too
        values[:4] = torch.tensor([0.0, float("inf"), float("nan"), info.max])
        moved = dithered(values, draw)
        far = (moved.double() - values.double())[4:].abs()
        assert (far > 0).sum() > 500
        # Steps of subnormal numbers do not get smaller with them.
        size = values[4:].double().abs().clamp(min=info.smallest_normal)
        assert (far <= size * info.eps).all()
        assert moved[0] == 0
        assert torch.isinf(moved[1])
        assert torch.isnan(moved[2])
        assert torch.isfinite(moved[3])


def test_rounded_once_is_the_wide_result_rounded() -> None:
    norm = torch.nn.LayerNorm(16).to(torch.bfloat16)
    x = torch.randn(4, 16).to(torch.bfloat16)
    call = torch.nn.Module.__call__
    wide = torch.nn.functional.layer_norm(x.float(), (16,), norm.weight.float(), norm.bias.float())
    with torch.no_grad():
        assert torch.equal(rounded_once(call, norm, (x,), {}), wide.to(torch.bfloat16))
    assert norm.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("fault", "site", "own_code"),
    [
        pytest.param("down", "layers.1.down", False, marks=pytest.mark.slow),
        pytest.param("scale", "layers.1.attn", True, marks=pytest.mark.slow),
    ],
)
def test_bisect_names_the_block_that_makes_the_error_in_few_executions(
    fault: str, site: str, own_code: bool, program: Path, dumped: Callable, driftline: Callable
) -> None:
    reference = dumped("--layers", "4")
    said = driftline(
        "bisect",
        "--reference-run",
        reference,
        "--format",
        "json",
        "--",
        sys.executable,
        program,
        "--layers",
        "4",
        "--fault",
        fault,
    )
    assert said.code == 1, said.err
    found = json.loads(said.out)
    assert (found["site"], found["own_code"]) == (site, own_code)
    assert found["verdict"] == "found"
    assert found["explains"] > 0.9
    assert found["executions"] == len(found["tries"]) <= 10


def test_bisect_says_that_there_is_no_error(
    program: Path, dumped: Callable, driftline: Callable
) -> None:
    said = driftline("bisect", "--reference-run", dumped(), "--", sys.executable, program)
    assert said.code == 0, said.err
    assert "no error" in said.out
    assert "1 executions" in said.out


@pytest.mark.slow
def test_bisect_refuses_what_cannot_be_searched(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    reference = dumped()
    words = ("bisect", "--reference-run", reference)
    for options, code, text in (
        (("--metric", "relativ_l2"), "", "relative_l2"),
        (("--output-site", "hed"), "", "head"),
        ((), "import torch", "no module was called"),
        ((), "import torch; raise SystemExit(4)", "status 4"),
    ):
        command = ("-c", code) if code else (program,)
        said = driftline(*words, *options, "--", sys.executable, *command)
        assert said.code == 2
        assert text in said.err
        assert "Traceback" not in said.err


@pytest.mark.slow
def test_repeat_finds_a_deterministic_program_so(program: Path, driftline: Callable) -> None:
    said = driftline(
        "repeat", "-k", "2", "--vary", "order", "--format", "json", "--", sys.executable, program
    )
    found = json.loads(said.out)
    assert found["deterministic"] is True
    assert found["executions"] == 3
    assert all(side["tensors"] > 20 for side in found["questions"])
    assert said.code == (0 if found["questions"][1]["same"] else 1)


def test_repeat_names_the_first_site_that_differs(program: Path, driftline: Callable) -> None:
    said = driftline("repeat", "-k", "2", "--", sys.executable, program, "--fault", "random")
    assert said.code == 1, said.err
    assert "not deterministic: first at layers.1.act" in said.out


def test_repeat_names_the_site_where_a_batch_matters(program: Path, driftline: Callable) -> None:
    said = driftline(
        "repeat", "-k", "2", "--vary", "batch", "--", sys.executable, program, "--fault", "batch"
    )
    assert said.code == 1, said.err
    assert "deterministic" in said.out
    assert "not batch-invariant" in said.out
    assert "first at layers.1.norm2" in said.out


@pytest.mark.slow
def test_repeat_says_what_it_cannot_ask(program: Path, driftline: Callable) -> None:
    said = driftline(
        "repeat", "-k", "2", "--vary", "batch", "--", sys.executable, program, "--batch", "1"
    )
    assert said.code == 0
    assert "batch: not known" in said.out
    for words, text in ((("-k", "1"), "at least 2"), (("--vary", "bach"), "batch")):
        said = driftline("repeat", *words, "--", sys.executable, program)
        assert said.code == 2
        assert text in said.err
