"""The doors: the JSON document, the command line, a table, the repro, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_bugs import BUGS
from small_models import array_run, llama, replayed, tokens, twin

import driftline
from driftline.cli.main import main
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.diagnosis.api import diagnose, diagnose_table
from driftline.diagnosis.evidence.files import open_noise, open_replay
from driftline.errors import DriftlineError
from driftline.runs.memory import MemorySink
from driftline.runs.records import TensorKey
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter

FIELDS = [
    *("schema", "verdict", "first_site", "first_key", "introduced", "culprits", "cause"),
    *("confidence", "false_alarm_rate", "explains", "finding", "evidence", "sites", "coverage"),
    *("needs", "differences"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on disk: reference, a candidate with a bug, a clean one, a replay of the buggy one."""
    place = tmp_path_factory.mktemp("diagnose")
    reference, ids = llama(0), tokens(0)
    models = {
        "ref": reference,
        "cand": twin(reference, torch.bfloat16, BUGS["relu"].plant),
        "clean": twin(reference, torch.bfloat16),
        "noise": llama(0, attention="eager").to(torch.bfloat16),
    }
    for name, model in models.items():
        levels = ("modules", "params") if name == "ref" else ("modules",)
        with torch.no_grad(), driftline.capture(model, place / name, levels=levels):
            model(input_ids=ids)
    replay = replayed(reference, driftline.open_run(place / "cand"), ids)
    kept = place / "replay"
    for name, run in (("exact", replay.exact), ("native", replay.native)):
        assert run is not None
        _stored(run, kept / name)
    about = {"schema": 1, "sites": {"lm_head": {"status": "skipped", "reason": "not asked for"}}}
    (kept / "replay.json").write_text(json.dumps(about))
    (place / "noises").mkdir()
    (place / "noise").rename(place / "noises" / "eager")
    listed = {"schema": 1, "variants": [{"name": "eager", "folder": "eager"}]}
    (place / "noises" / "noise.json").write_text(json.dumps(listed))
    return place


def _stored(run: Run, path: Path) -> None:
    from driftline.runs.provenance import create_run

    create_run(path)
    writer = RunWriter(path)
    for record in run.records:
        writer.put(record, run.raw(record).view(np.uint8))
    writer.close()


def test_the_json_document_has_every_field_and_no_number_json_cannot_hold(folder: Path) -> None:
    found = driftline.diagnose(folder / "ref", folder / "cand", replay=folder / "replay")
    shown = found.as_json()
    assert list(shown) == FIELDS
    text = json.dumps(shown, allow_nan=False)
    assert json.loads(text)["schema"] == "driftline.diagnosis/1"
    assert shown["first_site"] == "model.layers.2.mlp.act_fn"
    assert shown["first_key"] == "rank0/step0/model.layers.2.mlp.act_fn/output/0"
    assert shown["introduced"] is True
    assert shown["cause"] == "activation"
    keys = {"site", "order", "status", "error", "noise", "ratio", "projection", "z", "cause"}
    assert all(keys <= set(site) for site in shown["sites"])
    orders = [site["order"] for site in shown["sites"]]
    assert orders == sorted(orders)
    assert found.site("lm_head").status == "unknown"
    assert 0.9 < shown["explains"] <= 1.0


def test_the_command_prints_three_sentences_and_exits_by_the_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["diagnose", str(folder / "ref"), str(folder / "cand")]
    assert main([*words, "--replay", str(folder / "replay")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the drift starts at model.layers.2.mlp.act_fn, cause: activation" in said
    assert "computes relu where the reference computes silu" in said
    assert main([*words, "--noise", str(folder / "noises")]) == 1
    assert "noise runs" in capsys.readouterr().out
    clean = ["diagnose", str(folder / "ref"), str(folder / "clean")]
    assert main([*clean, "--noise", str(folder / "noises" / "eager"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
    assert main([*clean, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main([*words, "--format", "markdown", "--all"]) == 1
    assert "model.layers.3.mlp" in capsys.readouterr().out


def test_a_stored_comparison_is_diagnosed_without_its_tensors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = driftline.compare(folder / "ref", folder / "cand")
    table.write(tmp_path / "table")
    assert main(["diagnose", str(tmp_path / "table"), "--format", "json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["first_site"] == "model.layers.2.mlp.act_fn"
    assert shown["cause"] == "unknown"
    assert any("give the two runs" in need for need in shown["needs"])


def test_the_repro_runs_by_itself_and_shows_the_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["diagnose", str(folder / "ref"), str(folder / "cand"), "-q"]
    target = tmp_path / "repro"
    assert main([*words, "--replay", str(folder / "replay"), "--repro", str(target)]) == 1
    assert "repro.py" in capsys.readouterr().err
    ran = subprocess.run(
        [sys.executable, str(target / "repro.py")], capture_output=True, text=True, check=True
    )
    assert "candidate 0: relative error 0." in ran.stdout
    assert "the reference's module on the candidate's input" in ran.stdout
    names = json.loads((target / "repro.json").read_text())["tensors"]
    assert {"candidate.input.input", "candidate.output.0", "exact.output.0"} <= set(names)
    assert main([*words, "--repro", str(target)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*words, "--repro", str(target), "--force"]) == 1
    clean = ["diagnose", str(folder / "ref"), str(folder / "clean"), "-q"]
    assert main([*clean, "--repro", str(tmp_path / "none")]) == 0  # the finding's own exit code
    assert "no site is guilty" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_repro_holds_the_weights_where_they_were_captured(folder: Path, tmp_path: Path) -> None:
    from driftline.diagnosis.repro import write_repro

    ours, theirs = driftline.open_run(folder / "ref"), driftline.open_run(folder / "clean")
    found = diagnose(ours, theirs)
    guilty = type(found)(
        "fail",
        ("made up",),
        found.sites,
        "model.layers.1.mlp.up_proj",
        "rank0/step0/model.layers.1.mlp.up_proj/output/0",
    )
    write_repro(guilty, ours, theirs, tmp_path / "repro")
    about = json.loads((tmp_path / "repro" / "repro.json").read_text())
    assert about["weights"] == "captured"
    weight = np.load(tmp_path / "repro" / about["tensors"]["param.weight"]["file"])
    x = np.load(tmp_path / "repro" / about["tensors"]["reference.input.input"]["file"])
    y = np.load(tmp_path / "repro" / about["tensors"]["reference.output.0"]["file"])
    assert np.allclose(x @ weight.T, y, atol=1e-5)


def _table(sites: int) -> Table:
    rng = np.random.default_rng(0)
    rows = []
    for at in range(sites):
        name = f"model.layers.{at // 10}.part{at % 10}"
        bad = at >= 7003
        for order, port in ((2 * at, "input"), (2 * at + 1, "output")):
            error = 0.004 * (1 + 0.1 * rng.random())
            if bad and (port == "output" or at > 7003):
                error = 0.2
            rows.append(
                Row(
                    TensorKey.of(name, port),
                    "unjudged",
                    order=order,
                    class_name="Linear",
                    reference_dtype="float32",
                    candidate_dtype="bfloat16",
                    basis="values",
                    metrics={"relative_l2": error, "projection": 0.0, "one_sided": 0},
                )
            )
    return Table(tuple(rows))


def test_work_grows_as_the_table_does() -> None:
    """Counted, not timed: twice the sites are twice the calls of functions. Seconds are the
    business of `make bench`."""

    def calls(table: Any) -> int:
        count = 0

        def counted(frame: Any, event: str, given: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counted)
        try:
            found = diagnose_table(table)
        finally:
            sys.setprofile(None)
        assert len(found.sites) == len(table.rows) // 2
        return count

    assert calls(_table(2000)) < 2.3 * calls(_table(1000))


def test_the_first_of_ten_thousand_sites_is_named() -> None:
    found = diagnose_table(_table(10_000))
    assert found.first_site == "model.layers.700.part3"
    assert len(found.sites) == 10_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: (p / "replay.json").unlink(), "no replay.json"),
        (lambda p: (p / "replay.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "replay.json").write_text("[1]"), "cannot be read"),
        (lambda p: (p / "replay.json").write_text('{"schema": 7}'), "schema 7"),
        (lambda p: (p / "replay.json").write_text('{"sites": 3}'), "no object"),
        (lambda p: (p / "exact").rename(p / "elsewhere"), "no run 'exact'"),
    ],
)
def test_a_damaged_replay_is_a_sentence(
    folder: Path, tmp_path: Path, change: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = tmp_path / "replay"
    shutil.copytree(folder / "replay", copy)
    change(copy)
    words = ["diagnose", str(folder / "ref"), str(folder / "cand"), "--replay", str(copy)]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_replay_of_another_run_is_refused(folder: Path) -> None:
    replay = open_replay(folder / "replay")
    other = array_run({TensorKey.of("x", "output"): np.ones((2, 3), np.float32)})
    with pytest.raises(DriftlineError, match="in common"):
        diagnose(other, other, replay=replay)


def test_noise_folders_do_not_lead_elsewhere(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "noise"
    place.mkdir()
    leads = {"schema": 1, "variants": [{"name": "x", "folder": str(folder / "clean")}]}
    (place / "noise.json").write_text(json.dumps(leads))
    with pytest.raises(DriftlineError, match="no run"):
        open_noise([place])
    (place / "noise.json").write_text('{"variants": [3]}')
    with pytest.raises(DriftlineError, match="no object"):
        open_noise([place])


def test_one_path_that_is_no_comparison_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(folder / "ref")]) == 2
    assert "only one run" in capsys.readouterr().err
    assert main(["diagnose", str(folder / "ref"), str(folder / "nowhere")]) == 2
    assert main(["diagnose", str(folder / "ref"), str(folder / "cand"), "--threads", "0"]) == 2


def test_nothing_in_common_and_empty_runs_are_sentences() -> None:
    a = array_run({TensorKey.of("x", "output"): np.ones((2, 3), np.float32)})
    b = array_run({TensorKey.of("y", "output"): np.ones((7, 5), np.float32)})
    for pair in ((a, b), (a, MemorySink().run())):
        try:
            assert diagnose(*pair).verdict == "incomparable"
        except DriftlineError as told:
            assert str(told)


def test_equal_runs_pass_also_if_they_hold_integers_alone() -> None:
    a = array_run({TensorKey.of("x", "output"): np.ones((2, 3), np.float32)})
    assert diagnose(a, a).verdict == "pass"
    ints = array_run({TensorKey.of("x", "output"): np.ones((2, 3), np.int64)})
    assert diagnose(ints, ints).verdict == "pass"


def test_weights_that_differ_are_named_before_anything_they_cause() -> None:
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)

    def run(weight: np.ndarray) -> Run:
        return array_run(
            {
                TensorKey.of("fc", "param", "weight"): weight,
                TensorKey.of("fc", "input"): x,
                TensorKey.of("fc", "output"): x @ weight.T,
            }
        )

    found = diagnose(run(w), run(w * np.float32(1.01)))
    assert found.first_site == "fc"
    assert "weights differ" in found.sentences[0]
    assert found.cause == "scale"
    rounded_weight = w.astype(np.float16).astype(np.float32)
    assert diagnose(run(w), run(w)).verdict == "pass"
    assert diagnose(run(w), run(rounded_weight)).verdict == "fail"


def test_sites_of_which_nothing_is_known_do_not_push_out_the_others() -> None:
    from driftline.diagnosis.result import Diagnosis, SiteFinding
    from driftline.reporting.view import Grid
    from driftline.reporting.views.diagnosis import view

    statuses = ("unknown", "unknown", "introduced", "inherited", "unknown", "clean")
    sites = tuple(SiteFinding(f"s{at}", at, status) for at, status in enumerate(statuses))
    found = view(Diagnosis("fail", ("It starts at s2.",), sites, first_site="s2"), most=3)
    (grid,) = [block for block in found.blocks if isinstance(block, Grid)]
    assert [line.values[0] for line in grid.lines] == ["s0", "s2", "s3"]
