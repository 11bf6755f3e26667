"""`driftline replay` as a user runs it: unchanged programs, real models, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from driftline.formats.registry import open_run

SLOW = pytest.mark.slow  # the library alone takes seconds to import, in every process
ARCHITECTURES = (
    "toy",
    pytest.param("llama", marks=SLOW),
    pytest.param("gpt2", marks=SLOW),
    pytest.param("t5", marks=SLOW),
    pytest.param("moe", marks=SLOW),
)


def replayed(driftline: Callable, program: Path, candidate: Path, folder: Path, *options: str):
    said = driftline("replay", candidate, "-o", folder, "--", sys.executable, program, *options)
    assert said.code == 0, said.err
    return json.loads((folder / "replay.json").read_text()), said


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_clean_candidate_is_its_native_replay_to_the_bit(
    arch: str, program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--arch", arch, "--dtype", "bfloat16")
    report, _ = replayed(driftline, program, candidate, tmp_path / "rep", "--arch", arch)
    assert {entry["status"] for entry in report["sites"].values()} == {"replayed"}
    assert all(entry["reproduced"] for entry in report["sites"].values())
    captured, native = open_run(candidate), open_run(tmp_path / "rep" / "native")
    by_key = {record.key: record for record in captured.records}
    assert len(native) >= len(report["sites"])
    assert all(by_key[record.key].digest == record.digest for record in native.records)
    exact = open_run(tmp_path / "rep" / "exact")
    assert {record.key for record in exact.records} == {record.key for record in native.records}
    assert {record.dtype for record in exact.records if record.dtype != "int64"} == {"float32"}


def test_several_runs_are_replayed_in_one_start_of_the_program(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(dumped("--fault", "scale"))
    second.symlink_to(dumped("--dtype", "bfloat16", "--fault", "eps"))
    alone = {
        run.name: replayed(driftline, program, run, tmp_path / f"alone-{run.name}")[0]
        for run in (first, second)
    }
    starts = tmp_path / "starts"
    counted = tmp_path / "counted.py"
    counted.write_text(
        f"open({str(starts)!r}, 'a').write('started ')\n" + program.read_text(), encoding="utf-8"
    )
    both = tmp_path / "both"
    said = driftline("replay", first, "--also", second, "-o", both, "--", sys.executable, counted)
    assert said.code == 0, said.err
    assert starts.read_text() == "started "
    for run in (first, second):
        folder = both / run.name
        report = json.loads((folder / "replay.json").read_text())
        assert report["sites"] == alone[run.name]["sites"]
        for kind in ("exact", "native"):
            apart = open_run(tmp_path / f"alone-{run.name}" / kind)
            assert [(r.key, r.digest) for r in open_run(folder / kind).records] == [
                (r.key, r.digest) for r in apart.records
            ]
        assert f"--replay {folder}" in said.err


def test_runs_that_are_called_alike_are_not_replayed_into_one_folder(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    run = dumped()
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / run.name
    twin.symlink_to(run)
    said = driftline(
        "replay", run, "--also", twin, "-o", tmp_path / "both", "--", sys.executable, program
    )
    assert said.code == 2 and f"are called '{run.name}'" in said.err


def test_an_epsilon_below_the_noise_stands_alone_after_replay(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--dtype", "bfloat16", "--fault", "eps")
    replayed(driftline, program, candidate, tmp_path / "rep")
    captured, native = open_run(candidate), open_run(tmp_path / "rep" / "native")
    by_key = {record.key: record for record in captured.records}
    wrong = [r.key.site for r in native.records if by_key[r.key].digest != r.digest]
    assert wrong == ["layers.1.norm2"]


def test_a_wrong_attention_scale_is_the_attentions_own(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--fault", "scale")
    replayed(driftline, program, candidate, tmp_path / "rep")
    captured, exact = open_run(candidate), open_run(tmp_path / "rep" / "exact")
    by_key = {record.key: record for record in captured.records}
    wrong = [r.key for r in exact.records if by_key[r.key].digest != r.digest]
    # The attention's own code makes what its output projection is given.
    assert [(key.site, key.port) for key in wrong] == [("layers.1.attn.out", "input")]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_generation_with_a_cache_gives_the_same_tokens_and_replays_every_call(
    arch: str, program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    options = ("--arch", arch, "--tokens", "6")
    candidate = dumped(*options)
    plain, watched = tmp_path / "plain.pt", tmp_path / "watched.pt"
    done = subprocess.run(
        [sys.executable, program, *options, "--save", plain],
        capture_output=True,
        text=True,
        check=True,
    )
    folder = tmp_path / "rep"
    said = driftline(
        "replay",
        candidate,
        "-o",
        folder,
        "--",
        sys.executable,
        program,
        *options,
        "--save",
        watched,
    )
    assert said.code == 0, said.err
    assert torch.equal(torch.load(plain), torch.load(watched))
    assert said.out == done.stdout  # the random numbers after it are the same, too
    captured, native = open_run(candidate), open_run(folder / "native")
    by_key = {record.key: record for record in captured.records}
    same = [by_key[r.key].digest == r.digest for r in native.records]
    assert len(same) > 96
    assert all(same)


def test_attention_dropout_in_training_is_unknown_and_the_rest_is_replayed(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--train")
    report, said = replayed(driftline, program, candidate, tmp_path / "rep", "--train")
    unknown = {s: e["reason"] for s, e in report["sites"].items() if e["status"] == "unknown"}
    assert set(unknown) == {f"layers.{n}.attn" for n in range(2)}
    assert set(unknown.values()) == {"it draws random numbers"}
    assert "unknown: layers.0.attn and 1 more: it draws random numbers" in said.err


def test_another_model_is_refused_by_its_first_clash(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--dtype", "bfloat16")
    folder = tmp_path / "rep"
    words = ("replay", candidate, "-o", folder)
    other = driftline(*words, "--", sys.executable, program, "--layers", "1")
    assert other.code == 2
    assert "'layers.1.norm1'" in other.err
    other = driftline(*words, "--", sys.executable, program, "--hidden", "32")
    assert other.code == 2
    assert "'embed.weight' has shape (96, 32)" in other.err
    assert "(96, 64)" in other.err
    assert not folder.exists()
    part = driftline(*words, "--partial", "--", sys.executable, program, "--layers", "1")
    assert part.code == 0
    assert "skipped" in part.err


def test_runs_without_what_replay_needs_say_how_to_dump(
    program: Path, driftline: Callable, tmp_path: Path
) -> None:
    for options, word in (
        (("--keep", "summary"), "only the summary"),
        (("-stp", "1"), "no inputs"),
        (("-time", "1"), "after the calls"),
    ):
        folder = tmp_path / word.replace(" ", "_")
        dump = driftline("dump", "-o", folder, *options, "--", sys.executable, program)
        assert dump.code == 0, dump.err
        said = driftline("replay", folder, "-o", tmp_path / "r", "--", sys.executable, program)
        assert said.code == 2
        assert word in said.err
        assert "hint: driftline dump" in said.err
        assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_programs_that_are_not_the_reference_are_one_sentence(
    dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--dtype", "bfloat16")
    for code, word in (
        ("print(1)", "imported torch"),
        ("import torch", "no module was called"),
        ("import torch; torch.nn.ReLU()(torch.ones(2))", "called none of the candidate's modules"),
        ("import torch; raise SystemExit(3)", "status 3"),
    ):
        said = driftline(
            "replay", candidate, "-o", tmp_path / "r", "--", sys.executable, "-c", code
        )
        assert said.code == 2, said.err
        assert "nothing was replayed" in said.err
        assert word in said.err
        assert "Traceback" not in said.err


@pytest.mark.slow
def test_an_earlier_replay_is_replaced_only_when_asked(
    program: Path, dumped: Callable, driftline: Callable, tmp_path: Path
) -> None:
    candidate = dumped("--dtype", "bfloat16")
    replayed(driftline, program, candidate, tmp_path / "rep")
    words = ("replay", candidate, "-o", tmp_path / "rep")
    again = driftline(*words, "--", sys.executable, program)
    assert again.code == 2
    assert "--force" in again.err
    assert driftline(*words, "--force", "--", sys.executable, program).code == 0
    (tmp_path / "rep" / "mine.txt").write_text("kept")
    assert driftline(*words, "--force", "--", sys.executable, program).code == 2
    assert (tmp_path / "rep" / "mine.txt").read_text() == "kept"
