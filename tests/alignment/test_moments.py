"""Inputs of one run taken before the call, of the other after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import driftline
from driftline.runs.records import TensorKey
from driftline.testing.runs import run_of
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

PROMPT = np.array([3, 1, 4, 1, 5])
MODEL = toy_decoder(layers=2)


def test_a_dump_of_mode_1_pairs_its_inputs_with_those_of_mode_3(tmp_path: Path) -> None:
    atb_twin(tmp_path / "late", MODEL, PROMPT, time=1)
    atb_twin(tmp_path / "usual", MODEL, PROMPT)
    for names in (("late", "usual"), ("usual", "late")):
        runs = tmp_path / names[0], tmp_path / names[1]
        plan = driftline.align(*runs)
        assert not plan.missing and not plan.extra
        inputs = [pair for pair in plan.pairs if pair.reference.key.port == "input"]
        assert {(pair.by, pair.confidence) for pair in inputs} == {("moment", 0.8)}
        assert any("@after" in line and "by moment, 0.80" in line for line in plan.lines())
        assert any("inputs were taken" in note for note in plan.notes)
        assert driftline.compare(*runs).verdict == "pass"


def test_a_torch_dump_pairs_with_the_inputs_of_a_dump_of_mode_1(tmp_path: Path) -> None:
    torch_twin(tmp_path / "torch", MODEL, PROMPT)
    atb_twin(tmp_path / "late", MODEL, PROMPT, time=1)
    atb_twin(tmp_path / "usual", MODEL, PROMPT)
    late, usual = (
        [
            (p.reference.key, p.candidate.key._replace(moment="after"))
            for p in driftline.align(tmp_path / "torch", tmp_path / name).pairs
        ]
        for name in ("late", "usual")
    )
    assert late == usual


def test_where_the_same_moment_is_there_it_is_taken_and_outputs_never_change_theirs(
    tmp_path: Path,
) -> None:
    for time in (0, 1, 2):
        atb_twin(tmp_path / str(time), MODEL, PROMPT, time=time)
    both = driftline.align(tmp_path / "2", tmp_path / "1")
    assert {pair.by for pair in both.pairs} == {"name"}
    apart = driftline.align(tmp_path / "1", tmp_path / "0")
    assert {pair.reference.key.port for pair in apart.pairs} == {"input"}


def test_an_input_written_into_is_no_failure_and_an_error_is_still_named(tmp_path: Path) -> None:
    def run(moment: str, first: float, out: float):
        keys = (
            TensorKey("op", "input", "0", moment=moment),  # type: ignore[arg-type]
            TensorKey.of("op", "output"),
        )
        return run_of(dict(zip(keys, (np.full(4, first), np.full(4, out)), strict=True)))

    table = driftline.compare(run("before", 1.0, 2.0), run("after", 2.0, 2.0))
    assert table.verdict == "pass"
    row = next(row for row in table.rows if row.key.port == "input")
    assert row.status == "incomparable"
    assert "written into it" in row.reason
    atb_twin(tmp_path / "late", MODEL, PROMPT, time=1, error=Error(layer=1))
    atb_twin(tmp_path / "usual", MODEL, PROMPT)
    found = driftline.compare(tmp_path / "usual", tmp_path / "late")
    assert found.first is not None
    assert found.first.key.site == "2_Decoder_layer.1_LinearOperation"
    assert found.first.key.port == "output"
