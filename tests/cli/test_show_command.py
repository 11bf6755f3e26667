"""`driftline show`: a run, a table, a tensor file; for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Say = Callable[..., Any]


def test_a_run_shows_its_modules_with_the_ids_that_dump_takes(
    driftline: Say, reference: Path
) -> None:
    said = driftline("show", reference)
    assert said.code == 0
    lines = said.out.splitlines()
    assert any(line.split()[:3] == ["0_0_0_1_1", "act", "SiLU"] for line in lines)
    assert "12 tensors" in said.out
    assert "python infer.py" in said.out


def test_equal_layers_are_folded_unless_everything_is_asked_for(
    driftline: Say, reference: Path
) -> None:
    assert "1 … 2  (like 0)" in driftline("show", reference).out
    everything = driftline("show", reference, "--all").out
    assert "like 0" not in everything
    assert "0_0_2_1_1" in everything


def test_tensors_are_listed_with_their_statistics(driftline: Say, tmp_path: Path) -> None:
    values = np.array([1.0, -3.0, np.nan, np.inf], np.float32)
    np.savez(tmp_path / "a.npz", x=values, y=np.arange(4))
    said = driftline("show", tmp_path / "a.npz", "--tensors")
    row = next(line for line in said.out.splitlines() if "/x/" in line).split()
    assert row[1:7] == ["float32", "4", "-3", "1", "-1", "2"]


def test_a_site_glob_lists_only_what_matches(driftline: Say, reference: Path) -> None:
    said = driftline("show", reference, "--site", "*.1.mlp*")
    assert said.code == 0
    assert "model.layers.1.mlp.act" in said.out
    assert "model.layers.0" not in said.out


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest(
    driftline: Say, reference: Path
) -> None:
    said = driftline("show", reference, "--site", "model.layers.0.nrom")
    assert said.code == 2
    assert "did you mean 'model.layers.0.norm'" in said.err


def test_json_holds_the_manifest_the_modules_and_what_is_missing(
    driftline: Say, reference: Path
) -> None:
    shown = json.loads(driftline("show", reference, "--format", "json").out)
    assert shown["schema"] == "driftline.show/1"
    assert shown["manifest"]["command"] == ["python", "infer.py"]
    assert shown["tensors"] == 12
    assert {"ids": "0_0_0_0", "site": "model.layers.0.norm", "class": "RMSNorm", "tensors": 1} in (
        shown["modules"]
    )
    assert shown["losses"] == []
    listing = json.loads(
        driftline("show", reference, "--format", "json", "--site", "*.0.norm", "--tensors").out
    )["listing"]
    assert [row["site"] for row in listing] == ["model.layers.0.norm"]
    assert isinstance(listing[0]["l2"], float)


def test_csv_has_a_line_per_tensor(driftline: Say, reference: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(driftline("show", reference, "--format", "csv").out)))
    assert len(rows) == 12
    assert rows[0]["site"] == "model.layers.0.norm"
    assert rows[0]["l2"] == ""
    rows = list(
        csv.DictReader(
            io.StringIO(driftline("show", reference, "--format", "csv", "--tensors").out)
        )
    )
    assert float(rows[0]["l2"]) > 0


def test_markdown_is_a_table(driftline: Say, reference: Path) -> None:
    assert (
        "| ids | module | class | tensors |"
        in driftline("show", reference, "--format", "markdown").out
    )


def test_what_a_killed_process_lost_is_said(driftline: Say, reference: Path) -> None:
    index = reference / "rank0" / "index.jsonl"
    index.write_text(index.read_text()[:-40])
    said = driftline("show", reference)
    assert said.code == 0
    assert "missing: rank0/index.jsonl:12" in said.out


def test_a_damaged_module_tree_costs_the_ids_only(driftline: Say, reference: Path) -> None:
    (reference / "rank0" / "topology.json").write_text('{"roots": [{"site": 3}]}')
    said = driftline("show", reference)
    assert said.code == 0
    assert "model.layers.2.mlp" in said.out


def test_names_cannot_steer_the_terminal(driftline: Say, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"\x1b[2Jx": np.ones(1), "y": np.ones(1)})
    said = driftline("show", tmp_path / "a.npz")
    assert "\x1b" not in said.out
    assert "\\x1b[2Jx" in said.out


@pytest.mark.parametrize("name", ["nothing", "notes.txt", "folder"])
def test_what_cannot_be_shown_is_a_sentence(driftline: Say, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    said = driftline("show", tmp_path / name)
    assert said.code == 2
    assert said.err.startswith("driftline: ")
    assert "Traceback" not in said.err


def test_a_table_of_a_newer_schema_is_refused(driftline: Say, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"schema": "driftline.table/9", "rows": []}')
    said = driftline("show", tmp_path)
    assert said.code == 2
    assert "driftline.table/9" in said.err


def test_a_file_of_a_run_points_to_its_folder(driftline: Say, reference: Path) -> None:
    for name in ("run.json", "rank0/index.jsonl"):
        said = driftline("show", reference / name)
        assert said.code == 2
        assert f"give the run's folder: {reference}" in said.err


def test_a_terminal_that_cannot_write_a_name_shows_its_code(
    reference: Path, faulty: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", größe=np.ones(1), 層=np.ones(1))
    for words in (("show", tmp_path / "a.npz"), ("compare", reference, faulty)):
        done = subprocess.run(
            [sys.executable, "-m", "driftline", *map(str, words)],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )
        assert done.returncode in (0, 1)
        assert done.stderr == b""
        if words[0] == "show":
            assert b"\\u" in done.stdout
        else:  # our own signs have their likeness in ASCII
            assert b"\\u" not in done.stdout and b"`- # layers.1" in done.stdout


def test_verify_names_the_tensors_whose_bytes_changed_on_disk(
    reference: Path, driftline: Say
) -> None:
    clean = driftline("show", reference, "--verify")
    assert clean.code == 0 and "their bytes are what was captured" in clean.out
    shard = next(reference.glob("rank0/tensors-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged = driftline("show", reference, "--verify")
    assert damaged.code == 1 and "its bytes have digest" in damaged.out


def test_compare_sees_bytes_that_changed_on_disk_although_the_digests_agree(
    reference: Path, tmp_path: Path, driftline: Say
) -> None:
    twin = shutil.copytree(reference, tmp_path / "twin")
    shard = next(twin.glob("rank0/tensors-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 0x40
    shard.write_bytes(data)
    assert driftline("compare", reference, twin).code == 1


def test_what_is_lost_is_not_counted_as_kept(driftline: Say, tmp_path: Path) -> None:
    np.save(tmp_path / "fine.npy", np.ones(3))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    said = driftline("show", tmp_path)
    assert "1 lost, 1 full" in said.out
    assert "missing: broken.npy" in said.out


def test_a_file_of_tensors_shows_what_each_is_and_how_many_bytes_they_are(
    driftline: Say, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", one=np.ones((3, 4), np.float32), two=np.ones(5, np.float16))
    said = driftline("show", tmp_path / "a.npz")
    assert said.code == 0
    lines = [line.split() for line in said.out.splitlines()]
    assert ["one", "float32", "3x4", "full"] in lines
    assert ["two", "float16", "5", "full"] in lines
    assert ["bytes", "58", "B"] in lines
