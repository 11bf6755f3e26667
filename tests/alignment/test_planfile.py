"""A plan is saved, edited and given back; what it says wins, what it cannot say is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import driftline
from driftline.alignment.plan_file import read_plan, write_plan
from driftline.cli.main import main
from driftline.errors import BadFile, DriftlineError
from driftline.runs.run import Run
from driftline.testing.runs import run_of


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def two() -> tuple[Run, Run]:
    x = np.arange(6, dtype=np.float32)
    return run_of({"a": x, "b": x + 1, "only": x}), run_of({"a": x, "b": x + 1, "c": x})


def test_a_saved_plan_reads_back_as_it_was(two: tuple[Run, Run], tmp_path: Path) -> None:
    plan = driftline.align(*two)
    write_plan(plan, tmp_path / "plan.toml", "ref", "cand")
    again = read_plan(tmp_path / "plan.toml", *two)
    assert [str(pair) for pair in again.pairs] == [str(pair) for pair in plan.pairs]
    assert again.missing == plan.missing
    assert again.extra == plan.extra


def test_an_edited_plan_wins(two: tuple[Run, Run], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    write_plan(driftline.align(*two), file)
    text = file.read_text().replace('candidate = "rank0/step0/b/output/0"', _key("c"))
    file.write_text(text)
    plan = driftline.align(*two, plan=file)
    assert [p.candidate.key.site for p in plan.pairs] == ["a", "c"]
    table = driftline.compare(*two, plan=file)
    assert table.verdict == "fail"
    assert table.first is not None and table.first.key.site == "b"
    left = {
        row.candidate_site or row.key.site: row.reason for row in table.rows if not row.compared
    }
    assert left["b"] == "the plan has no pair for it"


def _key(site: str) -> str:
    return f'candidate = "rank0/step0/{site}/output/0"'


@pytest.mark.parametrize(
    ("change", "line", "says", "hint"),
    [
        (
            ('"rank0/step0/b/output/0"', '"rank0/step0/bb/output/0"'),
            13,
            "the reference has no",
            "/b/",
        ),
        (('by = "name"', 'by = "nam"'), 9, "'nam' is no rule", "name"),
        (("confidence = 1.0", "confidense = 1.0"), 10, "no field 'confidense'", "'confidence'"),
        (("confidence = 1.0", 'confidence = "x"'), 10, "confidence is a number", ""),
        (("[[pair]]", "[[pairs]]"), 1, "'pairs' means nothing", "'pair'"),
        (('by = "name"', "by ="), None, "line 9", ""),
        (("plan = 1", "plan = 7"), None, "does not begin with 'plan = 1'", "--save-plan"),
    ],
)
def test_a_plan_that_means_nothing_is_refused_with_its_line(
    two: tuple[Run, Run], tmp_path: Path, change: Any, line: int | None, says: str, hint: str
) -> None:
    file = tmp_path / "plan.toml"
    write_plan(driftline.align(*two), file)
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(BadFile) as trouble:
        read_plan(file, *two)
    assert says in str(trouble.value)
    assert hint in trouble.value.hint
    if line is not None:
        assert f"line {line}:" in str(trouble.value), file.read_text()


def test_recipes_are_saved_and_carried_out_again(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    ours, theirs = run_of({"whole": x}), run_of({"left": x[:, :3], "right": x[:, 3:]})
    file = tmp_path / "plan.toml"
    file.write_text(
        'plan = 1\n[[pair]]\nreference = "rank0/step0/whole/output/0"\n'
        'candidate = "rank0/step0/left/output/0"\n'
        'candidate_recipe = { sources = ["rank0/step0/left/output/0", '
        '"rank0/step0/right/output/0"], steps = ["concat(axis 1)"], shape = [2, 6] }\n'
    )
    plan = driftline.align(ours, theirs, plan=file)
    assert not plan.extra
    assert driftline.compare(ours, theirs, plan=plan).verdict == "pass"
    write_plan(plan, tmp_path / "again.toml")
    assert read_plan(tmp_path / "again.toml", ours, theirs).pairs == plan.pairs
    file.write_text(file.read_text().replace("concat(axis 1)", "konkat"))
    with pytest.raises(BadFile, match="line 5: 'konkat' is no step"):
        driftline.align(ours, theirs, plan=file)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_makes_reading_crash(text: str) -> None:
    import tempfile

    x = np.zeros(2, np.float32)
    runs = run_of({"a": x}), run_of({"a": x})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.toml"
        file.write_text("plan = 1\n" + text, encoding="utf-8", errors="replace")
        with pytest.raises(DriftlineError):
            read_plan(file, *runs)


@settings(deadline=None)
@given(st.text())
def test_any_name_survives_writing(name: str) -> None:
    import tomllib

    from driftline.alignment.plan_file import _text

    name = name.encode("utf-8", "replace").decode()
    assert tomllib.loads(f"x = {_text(name)}")["x"] == name


def test_the_command_line_saves_and_takes_back_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "r.npz", x=np.ones(3, np.float32), y=np.ones(3, np.float32))
    np.savez(tmp_path / "c.npz", x=np.ones(3, np.float32), z=np.full(3, 2, np.float32))

    def drift(*words: str) -> Said:
        capsys.readouterr()
        code = main(["compare", "r.npz", "c.npz", *words])
        return Said(code, *capsys.readouterr())

    said = drift("--dry-run", "--save-plan", "plan.toml")
    assert said.code == 0
    assert "1 pairs, 1 only in the reference" in said.out
    assert "the plan is in plan.toml" in said.err
    assert drift("--save-plan", "plan.toml").code == 2  # nothing is overwritten
    assert drift("--plan", "plan.toml").code == 0
    said = drift("--map", "y=z", "--map", "x=x")
    assert said.code == 1
    assert "2 pairs (2 by the map)" in said.err
    said = drift("--map", "q=z")
    assert said.code == 2
    assert "no site of the reference matches 'q'" in said.err


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ('steps = ["split(axis 9, 0:3)"], shape = [3]', "split(axis 9, 0:3) does not fit 6"),
        ('steps = ["trim(axis 0, 0:7)"], shape = [7]', "does not fit 6"),
        ('steps = ["select(axis 0, 0,6)"], shape = [2]', "does not fit 6"),
        ('steps = ["transpose(1,0)"], shape = [6]', "does not fit 6"),
        ('steps = ["reshape(2,4)"], shape = [2, 4]', "does not fit 6"),
        ('steps = ["split(axis 0, 0:3)"], shape = [4]', "the steps give 3, the recipe says 4"),
        ('steps = ["dequantise(axis 0)"], shape = [6]', "dequantise takes values"),
        ('steps = ["trim(axis 0, 0:3)", "sum"], shape = [3]', "must be the first step"),
    ],
)
def test_a_recipe_that_cannot_be_carried_out_is_refused_when_the_plan_is_read(
    two: tuple[Run, Run], tmp_path: Path, recipe: str, says: str
) -> None:
    file = tmp_path / "plan.toml"
    key = "rank0/step0/a/output/0"
    file.write_text(
        f'plan = 1\n[[pair]]\nreference = "{key}"\ncandidate = "{key}"\n'
        f'candidate_recipe = {{ sources = ["{key}"], {recipe} }}\n'
    )
    with pytest.raises(BadFile, match="line 5: ") as trouble:
        read_plan(file, *two)
    assert says in str(trouble.value)


@pytest.mark.parametrize("confidence", ["7.5", "-1", "nan", "true", '"high"'])
def test_a_confidence_that_is_none_is_refused(
    two: tuple[Run, Run], tmp_path: Path, confidence: str
) -> None:
    file = tmp_path / "plan.toml"
    key = "rank0/step0/a/output/0"
    pair = f'[[pair]]\nreference = "{key}"\ncandidate = "{key}"\nconfidence = {confidence}\n'
    file.write_text(f"plan = 1\n{pair}")
    with pytest.raises(BadFile, match="line 5: confidence is a number from 0 to 1"):
        read_plan(file, *two)
