"""`driftline compare -gp G -mp M`: the seed's report, against what the original printed.

The tests of `DIFFERENCES` hold the table "figures" of docs/seed-differences.md.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline.cli.main import main
from driftline.dialects.ait.compare_report import COLUMNS
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

DATA = Path(__file__).parents[1] / "data" / "ascend"
PAIRS = DATA / "metrics" / "pairs"
UPSTREAM: dict[str, dict[str, Any]] = json.loads(
    (DATA / "metrics" / "upstream_metrics.json").read_text()
)
CURRENT = UPSTREAM["current_compare"]
ERRORS = (
    "max_relative_error",
    "mean_relative_error",
    "max_absolute_error",
    "mean_absolute_error",
    "relative_euclidean_distance",
)
FIGURES = (
    *(f"{side}_{what}_value" for side in ("golden", "my") for what in ("max", "min", "mean")),
    "cosine_similarity",
    *ERRORS,
)
SOUND = (
    *("both_zero", "constant_golden", "identical", "logits_1000"),
    *("opposite_sign", "scaled_by_two", "single_element"),
)
"""Pairs on which the original's formulas are sound."""

Report = Callable[..., tuple[int, list[dict[str, str]]]]


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Run the seed's spelling; gives the exit code and the lines of the report."""

    def run(golden: Path, mine: Path, *more: str) -> tuple[int, list[dict[str, str]]]:
        folder = tmp_path / "out"
        before = set(folder.glob("*"))
        code = main(["compare", "-gp", str(golden), "-mp", str(mine), "-o", str(folder), *more])
        assert "Traceback" not in capsys.readouterr().err
        (path,) = set(folder.glob("*")) - before
        assert re.fullmatch(r"ait_cmp_report_\d{14}\.csv", path.name)
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            assert tuple(reader.fieldnames or ()) == COLUMNS
            return code, list(reader)

    return run


@pytest.fixture
def golden_pair(report: Report) -> Callable[[str], dict[str, str]]:
    def row(name: str) -> dict[str, str]:
        (line,) = report(PAIRS / f"{name}.golden.npy", PAIRS / f"{name}.my.npy")[1]
        assert line["golden_data_path"] == str(PAIRS / f"{name}.golden.npy")
        return line

    return row


def test_the_22_columns_are_the_seeds_in_its_order() -> None:
    assert len(COLUMNS) == 22
    assert COLUMNS[:3] == ("token_id", "data_id", "golden_data_path")
    assert COLUMNS[8] == "my_data_path"
    assert COLUMNS[14:] == (
        "cosine_similarity",
        "max_relative_error",
        "mean_relative_error",
        "max_absolute_error",
        "mean_absolute_error",
        "kl_divergence",
        "relative_euclidean_distance",
        "cmp_fail_reason",
    )


@pytest.mark.parametrize("name", SOUND)
def test_figures_agree_with_the_original_where_its_formulas_are_sound(
    golden_pair: Callable[[str], dict[str, str]], name: str
) -> None:
    line, upstream = golden_pair(name), CURRENT[name]
    for column in FIGURES:
        assert float(line[column]) == pytest.approx(upstream[column], rel=1e-6), column
    for column in ("golden_dtype", "golden_shape", "my_dtype", "my_shape", "cmp_fail_reason"):
        assert line[column] == upstream[column]


@pytest.mark.parametrize("name", SOUND)
def test_kl_is_the_originals_without_the_rounding_of_float32(
    golden_pair: Callable[[str], dict[str, str]], name: str
) -> None:
    line = golden_pair(name)
    assert float(line["kl_divergence"]) == pytest.approx(
        CURRENT[name]["kl_divergence"], rel=2e-4, abs=2e-7
    )
    # The original's own checker computes the same formula in float64.
    exact = UPSTREAM["current_opcheck"][name]["res"][0]["kl_div"]
    assert float(line["kl_divergence"]) == pytest.approx(float(exact), rel=1e-6, abs=1e-15)


# --- DIFFERENCES: where the original is blind ---------------------------------------------------


def test_errors_where_golden_is_zero_count(golden_pair: Callable[[str], dict[str, str]]) -> None:
    assert {CURRENT["golden_zero"][column] for column in ERRORS} == {0.0}  # ones against zeros!
    line = golden_pair("golden_zero")
    assert float(line["max_absolute_error"]) == float(line["mean_absolute_error"]) == 1.0
    assert float(line["max_relative_error"]) == math.inf
    assert float(line["relative_euclidean_distance"]) == math.inf
    both = golden_pair("bool_pair")
    assert (CURRENT["bool_pair"]["mean_absolute_error"], both["mean_absolute_error"]) == (
        0.25,
        "0.5",
    )
    for column in ("cosine_similarity", "max_absolute_error", "relative_euclidean_distance"):
        assert float(both[column]) == pytest.approx(CURRENT["bool_pair"][column], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("golden_has_inf", "1 element is NaN or Inf on one side only, the first at index 1"),
        ("my_has_nan", "1 element is NaN or Inf on one side only, the first at index 1"),
        ("both_have_nan_same_place", "NaN, Inf or a mask's lowest value on both sides"),
    ],
)
def test_nan_and_inf_are_counted_and_the_rest_is_measured(
    golden_pair: Callable[[str], dict[str, str]], name: str, said: str
) -> None:
    upstream = CURRENT[name]
    assert "cosine_similarity" not in upstream
    line = golden_pair(name)
    assert said in line["cmp_fail_reason"]
    assert float(line["cosine_similarity"]) == pytest.approx(1.0)
    for side in ("golden", "my"):
        for what in ("max", "min", "mean"):
            column = f"{side}_{what}_value"
            expected = float(upstream[column])
            assert float(line[column]) == pytest.approx(expected, nan_ok=True), column


def test_one_sided_nan_fails_and_the_same_nan_on_both_sides_does_not(report: Report) -> None:
    for name, code in (("my_has_nan", 1), ("golden_has_inf", 1), ("both_have_nan_same_place", 0)):
        assert report(PAIRS / f"{name}.golden.npy", PAIRS / f"{name}.my.npy")[0] == code


def test_other_shapes_are_a_row_with_a_reason(golden_pair: Callable[[str], dict[str, str]]) -> None:
    line = golden_pair("count_mismatch")
    assert line["cosine_similarity"] == ""
    assert line["cmp_fail_reason"] == "the shapes differ: 6 against 8"
    for column in FIGURES[:6]:
        assert float(line[column]) == pytest.approx(CURRENT["count_mismatch"][column])


def test_a_transposed_tensor_is_not_compared_as_if_fine(report: Report, tmp_path: Path) -> None:
    values = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "a.npy", values)
    np.save(tmp_path / "b.npy", values.reshape(3, 2))
    code, (line,) = report(tmp_path / "a.npy", tmp_path / "b.npy")
    assert code == 2
    assert "shapes differ" in line["cmp_fail_reason"]


def test_empty_tensors_do_not_end_the_run(golden_pair: Callable[[str], dict[str, str]]) -> None:
    assert "raises" in CURRENT["empty"]
    line = golden_pair("empty")
    assert (line["cosine_similarity"], line["max_absolute_error"]) == ("1.0", "0.0")
    assert line["golden_shape"] == "[0, 4]"


def test_int64_is_not_squeezed_through_float32(report: Report, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([2**24 + 1, 2**53 + 1]))
    np.save(tmp_path / "b.npy", np.array([2**24, 2**53]))
    code, (line,) = report(tmp_path / "a.npy", tmp_path / "b.npy")
    assert code == 1
    assert float(line["max_absolute_error"]) == 1.0


def test_a_mask_of_lowest_values_keeps_its_extremes(report: Report, tmp_path: Path) -> None:
    mask = np.array([0.0, -65504.0], np.float16)
    np.save(tmp_path / "a.npy", mask)
    code, (line,) = report(tmp_path / "a.npy", tmp_path / "a.npy")
    assert code == 0
    assert float(line["golden_min_value"]) == -65504.0
    assert float(line["golden_mean_value"]) == -32752.0


# --- runs and dumps -----------------------------------------------------------------------------


def test_the_original_rows_of_torch_against_atb_are_there_with_their_figures(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DATA)
    code, lines = report(Path("mini_torch"), Path("mini_atb"))
    assert code == 1
    ours = {(line["golden_data_path"], line["my_data_path"]): line for line in lines}
    with (DATA / "expect_compare" / "torch_vs_atb.api.csv").open(newline="") as stream:
        expected = list(csv.DictReader(stream))
    for line in expected:
        found = ours[line["golden_data_path"], line["my_data_path"]]
        for column in ("token_id", "golden_shape", "my_shape", "golden_dtype", "cmp_fail_reason"):
            assert found[column] == line[column]
        for column in FIGURES:
            assert float(found[column]) == pytest.approx(float(line[column]), rel=1e-6), column


def test_every_tensor_is_in_the_report_and_every_row_without_figures_has_a_reason(
    report: Report,
) -> None:
    lines = report(DATA / "mini_torch", DATA / "mini_atb")[1]
    assert [line["data_id"] for line in lines] == [str(n) for n in range(len(lines))]
    alone = [line for line in lines if not line["cosine_similarity"]]
    assert alone
    for line in alone:
        assert line["cmp_fail_reason"]
        assert line["golden_data_path"] or line["my_data_path"]
    for line in lines:
        for side in ("golden", "my"):
            if line[f"{side}_data_path"]:
                assert Path(line[f"{side}_data_path"]).is_file()


@pytest.mark.parametrize("quantised", [False, True])
def test_atb_against_atb_names_the_operation_with_the_planted_error(
    report: Report, tmp_path: Path, quantised: bool
) -> None:
    model, prompt = toy_decoder(layers=2), np.array([1, 5, 2])
    good = atb_twin(tmp_path / "good", model, prompt).output
    bad = atb_twin(
        tmp_path / "bad", model, prompt, error=Error(layer=1), quantised=quantised
    ).output
    code, lines = report(good, bad)
    assert code == 1
    compared = [line for line in lines if line["cosine_similarity"]]
    assert len(compared) >= 10
    wrong = [line for line in compared if float(line["relative_euclidean_distance"]) > 0.1]
    assert "_LinearOperation/" in wrong[0]["my_data_path"]


def test_torch_against_atb_of_two_layers(report: Report, tmp_path: Path) -> None:
    model, prompt = toy_decoder(layers=2), np.array([1, 5, 2])
    code, lines = report(
        torch_twin(tmp_path / "torch", model, prompt),
        atb_twin(tmp_path / "atb", model, prompt).output,
    )
    assert code == 0
    assert sum(1 for line in lines if line["cosine_similarity"]) >= 10


def own_run(path: Path, *, scale: float = 1.0, sites: tuple[str, ...] = ("a", "b", "c")) -> Path:
    writer = RunWriter(path)
    for step in (0, 1):
        for site in sites:
            values = np.arange(1, 5, dtype=np.float32) * (scale if site == "b" else 1.0)
            record_into(writer, TensorKey.of(site, "output", step=step), values)
    writer.close()
    return path


def test_our_own_runs_have_steps_as_tokens_and_addresses_as_paths(
    report: Report, tmp_path: Path
) -> None:
    ref = own_run(tmp_path / "ref")
    code, lines = report(ref, own_run(tmp_path / "cand", scale=2.0, sites=("a", "b", "x")))
    assert code == 1
    by_path = {line["golden_data_path"] or line["my_data_path"]: line for line in lines}
    wrong = by_path[f"{ref}/rank0/step1/b/output/0"]
    assert (wrong["token_id"], wrong["max_relative_error"]) == ("1", "1.0")
    gone = by_path[f"{ref}/rank0/step0/c/output/0"]
    assert gone["cmp_fail_reason"]
    assert gone["my_shape"] == ""
    assert gone["golden_max_value"] == "4.0"


def test_a_file_of_several_tensors_names_each(report: Report, tmp_path: Path) -> None:
    torch.save({"q": torch.ones(2), "k": torch.ones(3)}, tmp_path / "a.pt")
    lines = report(tmp_path / "a.pt", tmp_path / "a.pt")[1]
    assert {line["my_data_path"] for line in lines} == {f"{tmp_path / 'a.pt'}:{n}" for n in "qk"}


# --- the command --------------------------------------------------------------------------------


def test_the_default_folder_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.ones(2))
    assert main(["compare", "--golden-path", "a.npy", "--my-path", "a.npy"]) == 0
    (path,) = tmp_path.glob("*.csv")
    said = capsys.readouterr()
    assert f"the report is in {path.name}" in said.err
    assert said.out.startswith("PASS")


def test_reports_of_one_second_do_not_overwrite_each_other(report: Report, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(2))
    for _ in range(3):
        report(tmp_path / "a.npy", tmp_path / "a.npy", "-q")
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.parametrize(
    ("level", "out", "err"),
    [
        ("error", False, False),
        ("warning", False, False),
        ("warn", False, False),
        ("info", True, True),
        ("debug", True, True),
    ],
)
def test_the_log_level_says_how_much_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, out: bool, err: bool
) -> None:
    np.save(tmp_path / "a.npy", np.ones(2))
    a = str(tmp_path / "a.npy")
    assert main(["compare", "-gp", a, "-mp", a, "-o", str(tmp_path / "out"), "-l", level]) == 0
    said = capsys.readouterr()
    assert (bool(said.out), bool(said.err)) == (out, err)
    assert ("  pair " in said.err) == (level == "debug")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-l", "loud"), "takes debug, info"),
        (("-o", "FILE"), "is a file; -o takes a folder"),
        (("-o", "FILE/deeper"), "cannot write the report"),
    ],
)
def test_bad_words_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str], said: str
) -> None:
    np.save(tmp_path / "a.npy", np.ones(2))
    a = str(tmp_path / "a.npy")
    more = [word.replace("FILE", a) for word in words]
    assert main(["compare", "-gp", a, "-mp", a, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_limit_on_kl_can_be_given(report: Report) -> None:
    pair = (PAIRS / "logits_1000.golden.npy", PAIRS / "logits_1000.my.npy")
    assert report(*pair, "--max", "kl=0.001")[0] == 0
    assert report(*pair, "--max", "kl=0.0001")[0] == 1
