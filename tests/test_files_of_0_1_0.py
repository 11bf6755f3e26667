"""Runs, tables, parts, plans, thresholds and evidence that 0.1.0 wrote are still read.

The files are in `data/written_by_0_1_0`, with the script that made them. Everything here goes
through the public functions and the command line, and asserts what the files hold: a version that
reads them as empty, or judges them otherwise, fails.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import driftline
from driftline.cli.main import main
from old_files import DATA, unpack

OUTPUT_SUM = 2.9660353
"""Of the network's output in float32, which every engine agrees on to six digits."""
FAULTY_SUM = 2.9096657
GUILTY = "layers.1.act"
STEM = "tiny-llama_max-new-tokens-4_batch-size-1_seq-length-16_dtype-fp16"
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("old") / "network")


@pytest.fixture
def command(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """A command line in the folder of the files: its exit code, and what it printed."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "160")

    def run(line: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(line.split())
        texts = capsys.readouterr()
        return code, texts.out + texts.err

    return run


# Runs


@pytest.mark.parametrize(
    ("name", "count", "framework", "expected"),
    [
        ("ref", 52, "torch", OUTPUT_SUM),
        ("faulty", 52, "torch", FAULTY_SUM),
        ("train", 92, "torch", OUTPUT_SUM),
        ("train_faulty", 92, "torch", FAULTY_SUM),
        ("sample", 26, "torch", OUTPUT_SUM),
        ("killed", 26, "torch", OUTPUT_SUM),
        ("compiled", 48, "torch", OUTPUT_SUM),
        ("inductor", 21, "torch", OUTPUT_SUM),
        ("ranks", 52, "torch", OUTPUT_SUM),
        ("onnx", 68, "onnxruntime", OUTPUT_SUM),
        ("paddle", 92, "paddle", OUTPUT_SUM),
    ],
)
def test_the_tensors_of_a_run_are_read(
    place: Path, name: str, count: int, framework: str, expected: float
) -> None:
    run = driftline.open_run(place / "runs" / name)
    assert len(run) == count
    assert {facts["framework"] for facts in run.processes()} == {framework}
    tensor = run.get("(root)")
    assert tensor.record.dtype == "float32" and tensor.record.shape == (2, 3, 11)
    assert float(np.sum(tensor.raw(), dtype=np.float64)) == pytest.approx(expected, rel=1e-6)


def test_a_training_run_has_its_gradients_and_parameters(place: Path) -> None:
    run = driftline.open_run(place / "runs" / "train")
    ports = {record.key.port for record in run.records}
    assert ports == {
        "input", "output", "grad_input", "grad_output", "param", "param_grad", "optimizer_grad"
    }  # fmt: skip
    weight = run.get("layers.0.up", "param", "weight")
    kept = np.load(place / "weights.npz")["layers.0.up.weight"]
    np.testing.assert_array_equal(weight.raw().reshape(16, 8), kept)


def test_a_bfloat16_run_is_read_as_its_bits(place: Path) -> None:
    tensor = driftline.open_run(place / "runs" / "bf16").get("(root)", step=1)
    assert tensor.record.dtype == "bfloat16"
    values = (tensor.raw().astype(np.uint32) << 16).view(np.float32)
    assert float(values.sum()) == pytest.approx(OUTPUT_SUM, rel=0.02)


def test_a_run_of_summaries_has_its_figures(place: Path) -> None:
    run = driftline.open_run(place / "runs" / "summary")
    summary = run.get("embed").record.summary
    assert len(run) == 26 and {record.kept for record in run.records} == {"summary"}
    assert summary is not None and summary.count == 48
    assert summary.l2 == pytest.approx(6.614608648944704, rel=1e-12)
    assert summary.sketch is not None and len(summary.sketch) == 64


@pytest.mark.parametrize(("name", "kept"), [("digest", "digest"), ("described", "describe")])
def test_a_run_without_values_has_its_names(place: Path, name: str, kept: str) -> None:
    run = driftline.open_run(place / "runs" / name)
    assert len(run) == 26 and {record.kept for record in run.records} == {kept}
    digest = run.get("embed").record.digest
    assert (digest or "").startswith("xxh3-128:") == (kept == "digest")


def test_a_killed_run_says_that_it_was_not_closed(place: Path) -> None:
    (facts,) = driftline.open_run(place / "runs" / "killed").processes()
    assert facts["sealed"] is False


def test_sheets_of_calls_kernels_times_and_graphs_are_read(place: Path) -> None:
    types = driftline.open_run(place / "runs" / "types")
    assert set(types.sheets()) == {
        "calls.jsonl", "kernel_tensors_0.csv", "operation_statistic_0.csv",
        "operation_statistic_0.txt", "operation_tensors_0.csv",
    }  # fmt: skip
    calls = [json.loads(line) for line in types.sheet("calls.jsonl").splitlines()]
    assert "layers.1.act/aten.gelu" in {call["site"] for call in calls}
    graphs = driftline.open_run(place / "runs" / "compiled").sheet("graphs.jsonl")
    assert json.loads(graphs.splitlines()[0])["engine"] == "fx"
    graphs = driftline.open_run(place / "runs" / "inductor").sheet("graphs.jsonl")
    assert json.loads(graphs.splitlines()[0])["engine"] == "inductor"


@pytest.mark.parametrize(
    ("folder", "count", "site"),
    [
        ("runs/ait/ait_dump", 10, "head"),
        ("hooks/ait", 10, "layers.0.up"),
        ("hooks/first", 6, "layer_norm_1"),
        ("errors/errcheck_20261118_053004", 3, "1/aten.div"),
        (f"decoder/metrics/{STEM}.cpu_validation_info.0.out", 5, "topk_logits"),
        (f"decoder/saved/{STEM}.aiu_validation_info.0.out", 5, "tokens"),
    ],
)
def test_trees_of_other_layouts_are_read(place: Path, folder: str, count: int, site: str) -> None:
    run = driftline.open_run(place / folder)
    assert len(run) == count
    assert site in run.sites()
    assert all(tensor.raw().size for tensor in run.tensors())


# Comparisons of runs


@pytest.mark.parametrize(
    ("reference", "candidate", "verdict", "site"),
    [
        ("ref", "faulty", "fail", GUILTY),
        ("ref", "bf16", "pass", ""),
        ("train", "train_faulty", "fail", GUILTY),
        ("summary", "summary_faulty", "fail", GUILTY),
        ("train", "paddle", "pass", ""),
        ("ref", "onnx", "pass", ""),
        ("ref", "ranks", "pass", ""),
        ("ref", "killed", "incomplete", ""),
        ("compiled", "inductor", "pass", ""),
    ],
)
def test_old_runs_are_judged_by_what_they_hold(
    place: Path, reference: str, candidate: str, verdict: str, site: str
) -> None:
    table = driftline.compare(place / "runs" / reference, place / "runs" / candidate)
    assert (table.verdict, table.first_site) == (verdict, site)


@pytest.mark.parametrize("name", ["ref", "bf16", "train", "onnx", "paddle", "ranks", "sample"])
def test_no_byte_of_an_old_run_is_found_changed(command: Command, name: str) -> None:
    code, text = command(f"show runs/{name} --verify")
    assert code == 0, text


# Tables, parts and plans


@pytest.mark.parametrize(
    ("name", "verdict", "site", "failing"),
    [("faulty", "fail", GUILTY, 14), ("clean", "pass", "", 0)],
)
def test_a_table_is_read_with_its_rows(
    place: Path, name: str, verdict: str, site: str, failing: int
) -> None:
    table = driftline.open_table(place / "tables" / name)
    assert (table.verdict, table.first_site, len(table.rows)) == (verdict, site, 52)
    assert len(table.failing) == failing
    made = driftline.compare(
        place / "runs" / "ref", place / "runs" / ("faulty" if failing else "bf16")
    )
    for row, again in zip(table.rows, made.rows, strict=True):
        assert (row.key, row.status, row.limit) == (again.key, again.status, again.limit)
        # 0.1.0 summed in float32 lanes: its figures carry an error of about 1e-8.
        assert row.metrics["relative_l2"] == pytest.approx(again.metrics["relative_l2"], rel=1e-6)


def test_the_rows_of_a_table_agree_in_csv_and_parquet(place: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    table = driftline.open_table(place / "tables" / "faulty")
    rows = list(csv.DictReader((place / "tables" / "faulty" / "rows.csv").open()))
    columns = parquet.read_table(place / "tables" / "faulty" / "rows.parquet")
    assert [row["site"] for row in rows] == columns["site"].to_pylist()
    assert [row["status"] for row in rows] == [row.status for row in table.rows]
    assert columns["sqnr"].to_pylist() == [row.metrics.get("sqnr") for row in table.rows]
    # The columns of today are those of 0.1.0, perhaps with more behind them.
    made = driftline.compare(place / "runs/ref", place / "runs/faulty", metrics=["sqnr"])
    made.write(tmp_path / "made")
    again = parquet.read_table(tmp_path / "made" / "rows.parquet")
    assert [name for name in columns.column_names if name not in again.column_names] == []


def test_parts_are_merged_to_the_table_of_one_process(place: Path) -> None:
    merged = driftline.merge([place / "parts"])
    table = driftline.compare(place / "runs" / "ref", place / "runs" / "faulty")
    assert (merged.verdict, merged.first_site) == ("fail", GUILTY)
    assert [(row.key, row.status) for row in merged.rows] == [
        (row.key, row.status) for row in table.rows
    ]


@pytest.mark.parametrize(
    ("name", "reference", "candidate", "pairs", "recipes", "verdict"),
    [
        ("paddle", "train", "paddle", 92, 15, "pass"),
        ("ranks", "ref", "ranks", 44, 8, "pass"),
        ("onnx", "ref", "onnx", 26, 0, "pass"),
        ("names", "train", "train_faulty", 92, 0, "fail"),
    ],
)
def test_a_saved_plan_is_followed(
    place: Path,
    name: str,
    reference: str,
    candidate: str,
    pairs: int,
    recipes: int,
    verdict: str,
) -> None:
    runs = (place / "runs" / reference, place / "runs" / candidate)
    file = place / "plans" / f"{name}.toml"
    plan = driftline.align(*runs, plan=file)
    assert len(plan.pairs) == pairs
    assert sum(pair.candidate_recipe is not None for pair in plan.pairs) == recipes
    assert driftline.compare(*runs, plan=file).verdict == verdict


# Thresholds and expectations


def test_calibrated_thresholds_are_read_and_judge(place: Path) -> None:
    thresholds = driftline.load_thresholds(place / "thresholds" / "layers.json")
    assert thresholds.metrics == ("relative_l2", "cosine")
    assert len(thresholds.sites) == 13
    (first, *_) = thresholds.entries
    assert (first.site, first.port, first.statistic, first.samples) == ("embed", "output", "p99", 2)
    assert first.value == pytest.approx(0.0030685454557738503, rel=1e-12)
    clean = driftline.check(place / "tables" / "clean", thresholds=thresholds)
    faulty = driftline.check(place / "tables" / "faulty", thresholds=thresholds)
    assert (clean.verdict, faulty.verdict, faulty.first_site) == ("pass", "fail", GUILTY)


def test_thresholds_of_a_decoder_are_read(place: Path, command: Command) -> None:
    tokens = driftline.load_thresholds(place / "thresholds" / "tiny-llama-thresholds.json")
    assert set(tokens.metrics) == {"diff_mean", "ce"}
    code, text = command("check decoder/layers --thresholds decoder/tiny-llama-thresholds.json")
    assert code == 0 and "32 of 32 tensors compared" in text, text


def test_an_expectation_is_checked_and_notices_a_fault(
    place: Path, tmp_path: Path, warm_python: str
) -> None:
    for name in ("network.py", "expecting.py"):
        shutil.copy(place / name, tmp_path)
    shutil.copytree(place / "expectations", tmp_path / "expectations")

    def outcome() -> tuple[int, str]:
        done = subprocess.run(
            [
                warm_python, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                "--driftline-expectations-dir=expectations", "expecting.py",
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    assert outcome()[0] == 0
    program = tmp_path / "expecting.py"
    program.write_text(program.read_text().replace("build()", "build(fault=True)"))
    code, text = outcome()
    assert code == 1 and "1 failed" in text


# Evidence


def test_replay_and_noise_judge_a_clean_candidate(place: Path) -> None:
    diagnosis = driftline.diagnose(
        place / "runs/ref",
        place / "runs/bf16",
        replay=place / "replayed",
        noise=[place / "noise"],
    )
    assert diagnosis.verdict == "pass"
    assert diagnosis.evidence["judged_by"] == {"replay": 13}
    assert diagnosis.evidence["noise_runs"]["used"] == ["bfloat16", "bfloat16-dither"]


def test_a_bisection_proves_what_a_site_explains(place: Path) -> None:
    runs = (place / "runs/ref", place / "runs/faulty")
    estimated = driftline.diagnose(*runs)
    proven = driftline.diagnose(*runs, bisect=place / "bisect.json")
    assert (proven.verdict, proven.first_site, proven.explains) == ("fail", GUILTY, 1.0)
    assert proven.evidence["explains_by"] != estimated.evidence["explains_by"]


def test_a_diagnosis_is_what_it_was(place: Path) -> None:
    kept = json.loads((place / "diagnosis.json").read_text())
    now = driftline.diagnose(place / "runs/ref", place / "runs/faulty").as_json()
    assert set(kept) <= set(now)
    for name in ("schema", "verdict", "first_site", "cause"):
        assert now[name] == kept[name]


def test_a_reproducer_still_runs(place: Path, warm_python: str) -> None:
    done = subprocess.run(
        [warm_python, "repro.py"],
        cwd=place / "repro", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert GUILTY in done.stdout + (place / "repro" / "repro.json").read_text()


# The command line


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("compare runs/ref runs/faulty", 1, f"the drift starts at '{GUILTY}'"),
        ("compare runs/train runs/paddle", 0, "15 transpose"),
        ("compare runs/ref runs/bf16 --thresholds thresholds/layers.json", 0, "PASS"),
        ("merge parts", 1, "14 of 52 compared tensors fail"),
        ("check tables/faulty --thresholds thresholds/layers.json", 1, GUILTY),
        ("check tables/faulty --max relative_l2=0.5", 0, "PASS"),
        ("diagnose tables/faulty", 1, f"the drift starts at {GUILTY}"),
        ("diagnose runs/ref runs/faulty", 1, "scale"),
        ("diagnose runs/ref runs/bf16 --replay replayed --noise noise", 0, "13 clean"),
        ("show runs/types", 0, "aten::native_layer_norm"),
        ("show tables/faulty", 0, GUILTY),
        ("show thresholds/layers.json", 0, "layers.1.down"),
        ("opcheck -i runs/ops", 0, "13 operators checked, all right"),
        ("labels --from cmp_dump_data", 1, "no acl label belongs to it"),
        ("check-hooks --pathA hooks/first --pathB hooks/second", 0, "4 tensors compared"),
        ("topology runs/types --to model-explorer -o types.json", 0, "types.json"),
        ("convert runs/ranks -o converted", 0, "52 tensors"),
    ],
)
def test_commands_read_old_files(command: Command, line: str, code: int, part: str) -> None:
    ended, text = command(line)
    assert ended == code, text
    assert part in text


@pytest.mark.parametrize(
    "sources",
    [
        "runs/ref runs/faulty",
        "tables/faulty",
        "decoder/metrics",
        "decoder/layers",
        "decoder/validated",
        "opcheck.json",
    ],
)
def test_a_report_is_made_of_old_files(
    command: Command, place: Path, tmp_path: Path, sources: str
) -> None:
    code, text = command(f"report {sources} -o {tmp_path / 'page.html'}")
    assert code == 0, text
    assert (tmp_path / "page.html").stat().st_size > 10_000


# Decoders


@pytest.fixture
def decoder(place: Path) -> Path:
    """The model and the prompts, where the commands of 0.1.0 had them."""
    fixtures = DATA / "aiu" / "fixtures"
    shutil.copytree(fixtures / "tiny-llama", place / "tiny-llama", dirs_exist_ok=True)
    shutil.copy(fixtures / "share_gpt_tiny.json", place / "prompts.json")
    return place / "decoder"


def test_thresholds_are_made_of_old_metric_files(command: Command, tmp_path: Path) -> None:
    code, text = command(
        "thresholds --models tiny-llama --metrics diff_mean ce --file_base decoder/metrics "
        f"-o {tmp_path}"
    )
    assert code == 0 and "found 1 metric files" in text, text
    made = driftline.load_thresholds(tmp_path / "tiny-llama-thresholds.json")
    kept = driftline.load_thresholds("thresholds/tiny-llama-thresholds.json")
    assert [entry.value for entry in made.entries] == [entry.value for entry in kept.entries]


def test_an_old_metrics_folder_is_done(command: Command, decoder: Path) -> None:
    file = decoder / "metrics" / f"{STEM}.ce.csv"
    before = file.stat().st_mtime_ns
    code, text = command(
        "metrics --model_path=tiny-llama --sharegpt_path=prompts.json --min_pad_length=16 "
        "--max_new_tokens=4 --logits topk -o decoder/metrics"
    )
    assert code == 0, text
    rows = list(csv.reader(io.StringIO(file.read_text())))
    assert len(rows) > 1 and file.stat().st_mtime_ns == before


def test_saved_outputs_of_a_validation_are_used_again(command: Command, decoder: Path) -> None:
    saved = decoder / "saved" / f"{STEM}.cpu_validation_info.0.out" / "0.pt"
    before = saved.stat().st_mtime_ns
    code, text = command(
        "validate --model_paths=tiny-llama --sharegpt_path=prompts.json --batch_sizes=1 "
        "--seq_lengths=16 --max_new_tokens=4 --cumulative_test_tokens_per_sequence=4 "
        "--force_validation_level_1 --validation_info_dir decoder/saved"
    )
    assert code == 0, text
    assert saved.stat().st_mtime_ns == before
