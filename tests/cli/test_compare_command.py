"""`driftline compare`: what it prints, what it writes, what it returns."""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import driftline as package
from driftline.runs.records import TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

Command = Callable[..., Any]
CULPRIT = "model.layers.1.mlp.act"


def test_a_fault_is_named_in_the_first_line_and_the_exit_code_is_1(
    driftline: Command, reference: Path, faulty: Path
) -> None:
    said = driftline("compare", reference, faulty)
    assert said.code == 1
    assert said.err == ""
    assert said.out.startswith("FAIL")
    assert CULPRIT in said.out.splitlines()[0]


def test_two_agreeing_runs_pass_with_exit_code_0(
    driftline: Command, reference: Path, clean: Path
) -> None:
    said = driftline("compare", reference, clean)
    assert (said.code, said.out[:4]) == (0, "PASS")
    assert "12 of 12 tensors compared" in said.out


def test_the_seeds_spellings_of_the_two_paths_are_taken(
    driftline: Command,
    reference: Path,
    faulty: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # with both of them a report is written there
    assert driftline("compare", "-gp", reference, "-mp", faulty).code == 1
    assert driftline("compare", "--golden-path", reference, "--my-path", faulty).code == 1
    assert driftline("compare", f"-gp={reference}", f"-mp={reference}").code == 0
    assert driftline("compare", "-gp", reference, faulty).code == 1
    assert driftline("compare", reference, "-mp", faulty).code == 1
    said = driftline("compare", reference, faulty, "-gp", reference)
    assert said.code == 2
    assert "one path too many" in said.err


def test_steps_of_one_side_alone_do_not_make_two_models(driftline: Command, tmp_path: Path) -> None:
    """More steps here, operators there: what both have is one model, and says so."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for name, steps, operators in (("ref", 3, 0), ("cand", 1, 2)):
        writer = RunWriter(tmp_path / name)
        for step in range(steps):
            for site in ("a", "b", *(f"a/aten.add_{n}" for n in range(operators))):
                record_into(writer, TensorKey.of(site, "output", step=step), values)
        writer.close()
    said = driftline("compare", tmp_path / "ref", tmp_path / "cand")
    assert "4 missing, 2 extra" in said.out and "the candidate has no step 1" in said.out
    assert "are these runs of one model?" not in said.out
    # Two models, which share a name by chance: the same words are right.
    writer = RunWriter(tmp_path / "another")
    for site in ("a", *(f"other.{n}" for n in range(3))):
        record_into(writer, TensorKey.of(site, "output"), values[:, : 3 if site == "a" else 2])
    writer.close()
    said = driftline("compare", tmp_path / "ref", tmp_path / "another", "--step", 0)
    assert "are these runs of one model?" in said.out


def test_json_follows_the_documented_schema(
    driftline: Command, reference: Path, faulty: Path
) -> None:
    table = json.loads(driftline("compare", reference, faulty, "--format", "json").out)
    assert table["schema"] == "driftline.table/1"
    assert table["verdict"] == "fail"
    assert table["first_site"] == CULPRIT
    assert table["coverage"]["compared"] == 12
    assert table["coverage"]["missing"] == table["coverage"]["incomparable"] == 0
    assert len(table["rows"]) == 12
    row = next(r for r in table["rows"] if r["site"] == CULPRIT)
    assert {"site", "port", "slot", "step", "rank", "visit", "status", "reason"} <= set(row)
    assert row["status"] == "fail"
    assert row["relative_l2"] == pytest.approx(1.0)


def test_json_is_the_table_that_the_python_door_gives(
    driftline: Command, reference: Path, faulty: Path
) -> None:
    printed = json.loads(driftline("compare", reference, faulty, "--format", "json").out)
    assert printed == package.compare(reference, faulty).as_json()


def test_csv_has_a_line_per_row_and_every_digit(
    driftline: Command, reference: Path, faulty: Path
) -> None:
    said = driftline("compare", reference, faulty, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert len(rows) == 12
    assert {row["status"] for row in rows} == {"pass", "fail"}
    assert float(rows[0]["relative_l2"]) == 0.0


def test_markdown_escapes_what_would_be_markup(tmp_path: Path, driftline: Command) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        np.savez(tmp_path / f"{name}.npz", **{"x|<i>_y_": np.ones(3) * factor, "z": np.ones(1)})
    said = driftline("compare", tmp_path / "a.npz", tmp_path / "b.npz", "--format", "markdown")
    assert "x\\|&lt;i&gt;\\_y\\_" in said.out
    assert "<i>" not in said.out.replace("`x|<i>_y_`", "")  # in code it is no markup


def test_the_table_is_written_and_read_back(
    driftline: Command, reference: Path, faulty: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = driftline("compare", reference, faulty, "-o", out)
    assert said.code == 1
    assert str(out) in said.err
    assert sorted(p.name for p in out.iterdir()) == ["rows.csv", "rows.parquet", "table.json"]
    assert package.open_table(out).first_site == CULPRIT
    shown = driftline("show", out)
    assert (shown.code, shown.out) == (0, said.out)
    assert driftline("show", out, "--format", "csv").out == (out / "rows.csv").read_text()
    as_json = json.loads(driftline("show", out / "table.json", "--format", "json").out)
    assert as_json["first_site"] == CULPRIT


def test_output_that_exists_is_refused_before_anything_is_read(
    driftline: Command, reference: Path, faulty: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    said = driftline("compare", "no_such_run", faulty, "-o", out)
    assert said.code == 2
    assert "is not empty" in said.err and "--force" in said.err
    assert driftline("compare", reference, faulty, "-o", out, "--force").code == 1
    assert (out / "precious").read_text() == "x"
    rows = tmp_path / "rows.csv"
    rows.write_text("mine")
    assert driftline("compare", reference, faulty, "--csv", rows).code == 2
    assert rows.read_text() == "mine"
    assert driftline("compare", reference, faulty, "--csv", rows, "--force").code == 1
    assert len(rows.read_text().splitlines()) == 13


def test_quiet_says_nothing_but_the_exit_code(
    driftline: Command, reference: Path, faulty: Path
) -> None:
    said = driftline("compare", reference, faulty, "--quiet")
    assert (said.code, said.out, said.err) == (1, "", "")


def test_a_dry_run_prints_the_pairs_and_reads_no_tensor(
    driftline: Command, reference: Path, faulty: Path
) -> None:
    for shard in faulty.glob("rank0/tensors-*"):
        shard.write_bytes(shard.read_bytes()[:-8])
    said = driftline("compare", reference, faulty, "--dry-run")
    assert said.code == 0
    assert said.out.splitlines()[0].startswith("12 pairs")
    assert CULPRIT in said.out


def test_limits_of_the_user_take_the_place_of_the_defaults(
    driftline: Command, reference: Path, faulty: Path, clean: Path
) -> None:
    assert driftline("compare", reference, faulty, "--max", "relative_l2=1.5").code == 0
    assert driftline("compare", reference, clean, "--max", "max_abs_error=1e-9").code == 1
    assert driftline("compare", reference, faulty, "--min", "cosine=0.99").code == 0
    assert driftline("compare", reference, clean, "--rtol", "0", "--atol", "1e-9").code == 1
    assert driftline("compare", reference, clean, "--rtol", "0", "--atol", "1e-3").code == 0


def test_a_limit_on_the_wrong_side_is_refused_with_the_right_one(
    driftline: Command, reference: Path, clean: Path
) -> None:
    said = driftline("compare", reference, clean, "--max", "cosine=0.9")
    assert said.code == 2
    assert "--min cosine=0.9" in said.err


def test_a_metric_of_the_user_is_measured(
    driftline: Command, reference: Path, faulty: Path, tmp_path: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "def worst(reference, candidate):\n    return abs(candidate - reference).max()\n"
    )
    said = driftline("compare", reference, faulty, "--metric", f"{code}:worst", "--format", "json")
    rows = json.loads(said.out)["rows"]
    assert all(row["worst"] == pytest.approx(row["max_abs_error"]) for row in rows)
    said = driftline("compare", reference, faulty, "--metric", f"{code}:wrost")
    assert said.code == 2 and "did you mean 'worst'" in said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--metric", "cosin"), "did you mean 'cosine'"),
        (("--max", "relativ_l2=1"), "did you mean 'relative_l2'"),
        (("--site", "model.layer.*.norm"), "no site matches 'model.layer.*.norm'"),
        (("--port", "outptu"), "did you mean 'output'"),
        (("--step", "7"), "has no step 7"),
        (("--rank", "1"), "has no rank 1"),
        (("--step", "x"), "--step takes numbers"),
        (("--step", "5-3"), "write 3-5"),
        (("--threads", "0"), "--threads takes 1 or more, not 0"),
        (("--rtol", "much"), "--rtol takes a number, not 'much'"),
        (("--rtol", "-1"), "rtol is -1.0"),
        (("--min-coverage", "95"), "between 0 and 1"),
        (("--max", "relative_l2"), "--max relative_l2=0.01"),
    ],
)
def test_what_cannot_mean_anything_is_refused_with_a_way_out(
    driftline: Command, reference: Path, clean: Path, words: tuple[str, ...], says: str
) -> None:
    said = driftline("compare", reference, clean, *words)
    assert said.code == 2
    assert said.out == ""
    assert says in said.err
    assert said.err.startswith("driftline: ")


def test_globs_ports_and_steps_choose_the_rows(
    driftline: Command, make_run: Callable[..., Path]
) -> None:
    ref, cand = make_run("r", steps=3), make_run("c", steps=3)

    def rows(*words: str) -> list[dict[str, object]]:
        return json.loads(driftline("compare", ref, cand, "--format", "json", *words).out)["rows"]

    assert len(rows()) == 36
    assert {row["site"] for row in rows("--site", "*.0.norm")} == {"model.layers.0.norm"}
    assert {row["step"] for row in rows("--step", "1-2")} == {1, 2}
    assert {row["step"] for row in rows("--step", "0", "--step", "2")} == {0, 2}
    assert len(rows("--port", "output", "--site", "*.norm", "--site", "*.act")) == 18


def test_missing_tensors_are_listed_and_too_many_are_incomplete_unless_fewer_are_asked_for(
    driftline: Command, reference: Path, tmp_path: Path
) -> None:
    index = reference / "rank0" / "index.jsonl"
    half = tmp_path / "half"
    half.mkdir()
    import shutil

    shutil.copytree(reference, half, dirs_exist_ok=True)
    lines = index.read_text().splitlines(keepends=True)
    (half / "rank0" / "index.jsonl").write_text("".join(lines[:6]))
    # Half of a model that was never looked at is no pass, unless somebody asks for no more.
    said = driftline("compare", reference, half)
    assert (said.code, said.out.split(":")[0]) == (2, "INCOMPLETE")
    assert "only 55.6% of the 9 calls of leaf modules of the reference are covered" in said.out
    said = driftline("compare", reference, half, "--min-coverage", "0.5")
    assert (said.code, said.out[:4]) == (0, "PASS")
    assert "6 of 12 tensors compared, 6 missing" in said.out
    assert "Missing: in the reference only (6)" in said.out
    assert "... and 1 more (--all shows every one)" in said.out
    assert driftline("compare", reference, half, "--min-coverage", "0.9").code == 2
    everything = driftline("compare", reference, half, "--all").out
    assert everything.count("only in the reference") == 6


@pytest.mark.parametrize("other", ["b.pt", "b.safetensors", "b.npz"])
def test_lone_tensors_pair_whatever_their_files_call_them(
    driftline: Command, tmp_path: Path, other: str
) -> None:
    values = np.linspace(-1, 1, 50, dtype=np.float32)
    np.save(tmp_path / "a.npy", values)
    shifted = np.roll(values, 1)
    torch.save(torch.from_numpy(shifted), tmp_path / "b.pt")
    save_file({"y": torch.from_numpy(shifted)}, tmp_path / "b.safetensors")
    np.savez(tmp_path / "b.npz", z=shifted)
    said = driftline("compare", tmp_path / "a.npy", tmp_path / other)
    assert said.code == 1 and said.out.startswith("FAIL")
    assert driftline("compare", tmp_path / "a.npy", tmp_path / "a.npy").code == 0


def test_a_path_that_is_not_there_is_a_sentence(driftline: Command, reference: Path) -> None:
    said = driftline("compare", reference, reference.parent / "reff")
    assert said.code == 2
    assert "there is no" in said.err and "did you mean" in said.err
    assert len(said.err.splitlines()) == 2


def test_a_folder_that_is_no_run_is_a_sentence(
    driftline: Command, reference: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    said = driftline("compare", reference, tmp_path / "empty")
    assert said.code == 2
    assert "is no run" in said.err


def test_a_table_given_as_a_run_is_told_apart(
    driftline: Command, reference: Path, faulty: Path, tmp_path: Path
) -> None:
    driftline("compare", reference, faulty, "-o", tmp_path / "out")
    said = driftline("compare", reference, tmp_path / "out")
    assert said.code == 2
    assert "is a comparison table, not a run" in said.err


def test_a_run_of_a_newer_schema_is_refused(
    driftline: Command, reference: Path, clean: Path
) -> None:
    manifest = json.loads((clean / "run.json").read_text())
    manifest["schema"] = 99
    (clean / "run.json").write_text(json.dumps(manifest))
    said = driftline("compare", reference, clean)
    assert said.code == 2
    assert "99" in said.err


def test_a_truncated_shard_costs_its_tensors_and_no_more(
    driftline: Command, reference: Path, clean: Path
) -> None:
    shard = next(clean.glob("rank0/tensors-*"))
    shard.write_bytes(shard.read_bytes()[:-128])
    said = driftline("compare", reference, clean)
    assert said.code == 2  # what cannot be read is no pass
    assert said.out.startswith("INCOMPLETE: 2 tensors could not be read")
    assert "ends before its last byte" in said.out


def test_runs_without_a_common_name_are_refused(
    driftline: Command, reference: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    said = driftline("compare", reference, tmp_path / "a.npy")
    assert said.code == 2
    assert "share no tensor" in said.err


def test_nothing_comparable_is_exit_code_2(driftline: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    np.save(tmp_path / "b.npy", np.ones(4))
    said = driftline("compare", tmp_path / "a.npy", tmp_path / "b.npy")
    assert said.code == 2
    assert "the shapes differ: 3 against 4" in said.out


def test_hostile_files_are_one_sentence_and_exit_code_2(driftline: Command, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (Path.mkdir, (tmp_path / "it_ran",))

    torch.save(Bomb(), tmp_path / "bomb.pt")
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    np.save(tmp_path / "a.npy", np.ones(3))
    for name, says in (("bomb.pt", "was not loaded"), ("huge.safetensors", "claims a header")):
        for words in (("compare", tmp_path / "a.npy", tmp_path / name), ("show", tmp_path / name)):
            said = driftline(*words)
            assert said.code == 2
            assert says in said.err
            assert "Traceback" not in said.err
    assert not (tmp_path / "it_ran").exists()


def test_names_that_would_steer_the_terminal_are_escaped_in_messages_and_plans_too(
    driftline: Command, tmp_path: Path
) -> None:
    steering = "\x1b]0;owned\x07\u202e\nname"
    np.savez(tmp_path / "odd.npz", **{f"{steering}{n}": np.ones(2) for n in range(2)})
    np.savez(tmp_path / "plain.npz", a=np.ones(2), b=np.ones(2))
    odd, plain = tmp_path / "odd.npz", tmp_path / "plain.npz"
    for words in ((odd, plain), (odd, odd, "--site", "none"), (odd, odd, "--dry-run")):
        said = driftline("compare", *words)
        everything = said.out + said.err
        assert "\\x1b]0;owned\\x07\\u202e\\nname" in everything
        assert all(line.isprintable() for line in everything.split("\n"))
