"""`driftline convert`, and `show` of dumps that other programs wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Say = Callable[..., Any]

DATA = Path(__file__).parents[1] / "data"
DUMPS = {
    "msprobe": DATA / "msprobe" / "L0_tensor",
    "ait torch dump": DATA / "ascend" / "mini_torch",
    "decoder output": next((DATA / "aiu" / "generate_metrics").glob("*cuda*.1.out")),
}


@pytest.mark.parametrize("name", DUMPS)
def test_show_says_what_is_in_a_dump(driftline: Say, name: str) -> None:
    said = driftline("show", DUMPS[name])
    assert said.code == 0
    assert any(line.split(maxsplit=1) == ["format", name] for line in said.out.splitlines())
    listed = json.loads(driftline("show", DUMPS[name], "--format", "json").out)
    assert listed["tensors"] > 8
    assert listed["ranks"] == [0]
    assert listed["modules"]


def test_show_lists_what_cannot_be_read(driftline: Say, tmp_path: Path) -> None:
    shutil.copytree(DUMPS["msprobe"], tmp_path / "dump")
    data = tmp_path / "dump" / "step0" / "proc0" / "dump_tensor_data"
    (data / "Module.head.Linear.forward.0.output.0.pt").unlink()
    said = driftline("show", tmp_path / "dump")
    assert said.code == 0
    assert "missing: " in said.out
    assert "Module.head.Linear.forward.0.output.0.pt is not there" in said.out
    compared = driftline("compare", DUMPS["msprobe"], tmp_path / "dump")
    assert compared.code in (1, 2)
    assert "is not there" in compared.out


@pytest.mark.parametrize("to", ["run", "npy", "pt", "safetensors", "ait"])
def test_a_run_goes_out_and_comes_back_equal(
    driftline: Say, reference: Path, tmp_path: Path, to: str
) -> None:
    said = driftline("convert", reference, "-o", tmp_path / "out", "--to", to)
    assert said.code == 0
    assert said.out.endswith(f"as {to}\n")
    assert not said.err
    assert driftline("convert", tmp_path / "out", "-o", tmp_path / "back").code == 0
    compared = driftline("compare", reference, tmp_path / "back", "--min-coverage", "1")
    assert compared.code == 0, compared.out


def test_a_faulty_candidate_stays_faulty_in_every_format(
    driftline: Say, reference: Path, faulty: Path, tmp_path: Path
) -> None:
    for to in ("npy", "pt", "safetensors", "ait"):
        driftline("convert", faulty, "-o", tmp_path / to, "--to", to)
        assert driftline("compare", reference, tmp_path / to).code == 1


@pytest.mark.parametrize("to", ["run", "npy", "pt", "safetensors"])
def test_what_is_left_out_is_named_with_the_reason_and_is_exit_code_1(
    driftline: Say, tmp_path: Path, to: str
) -> None:
    np.save(tmp_path / "fine.npy", np.ones(3))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    said = driftline("convert", tmp_path, "-o", tmp_path / "out", "--to", to)
    assert said.code == 1
    assert ("1 tensor has no values in it" if to == "run" else "1 tensor left out") in said.err
    assert "rank0/step0/broken/output/0  " in said.err
    assert driftline("show", tmp_path / "out").code == 0


@pytest.mark.parametrize("to", ["run", "npy", "pt", "safetensors", "ait"])
def test_an_interrupted_convert_leaves_nothing_and_what_was_there_stays(
    reference: Path, tmp_path: Path, to: Any
) -> None:
    from driftline.formats.convert.convert import convert

    def stop(done: int, whole: int) -> None:
        if done > whole // 2:
            raise KeyboardInterrupt

    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(reference, work / "out", to=to, progress=stop)
    assert not list(work.iterdir())
    convert(reference, work / "out", to=to)
    before = sorted(path.relative_to(work) for path in work.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        convert(reference, work / "out", to=to, force=True, progress=stop)
    assert sorted(path.relative_to(work) for path in work.rglob("*")) == before
    convert(reference, work / "out", to=to, force=True)


def test_what_a_killed_convert_left_is_taken_away_by_the_next(
    driftline: Say, reference: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    left = work / ".out.unfinished-4194305"  # beyond the largest process id
    left.mkdir(parents=True)
    (left / "half.npy").write_bytes(b"x")
    assert driftline("convert", reference, "-o", work / "out", "--to", "npy").code == 0
    assert [path.name for path in work.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs PATH"),
        (("there",), "needs -o DIR"),
        (("nowhere", "-o", "out"), "there is no 'nowhere'"),
        (("there", "-o", "out", "--to", "onnx"), "--to takes run, npy, pt, safetensors or ait"),
        (("there", "-o", "there"), "into itself"),
        (("there", "-o", "there/a.npy", "--to", "npy"), "is a file"),
        (("text.txt", "-o", "out"), "is no tensor file"),
        (("empty", "-o", "out"), "is an empty folder"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    driftline: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "there" / "a.npy", np.ones(3))
    (tmp_path / "text.txt").write_text("hello")
    said = driftline("convert", *words)
    assert said.code == 2
    assert says in said.err
    assert not said.out


def test_a_part_of_a_dump_points_to_its_folder(driftline: Say) -> None:
    rank = DUMPS["msprobe"] / "step0" / "proc0"
    said = driftline("show", rank / "dump.json")
    assert said.code == 2
    assert f"give the dump's folder: {rank}" in said.err


def test_a_folder_of_dumps_says_so(driftline: Say) -> None:
    said = driftline("show", DATA / "msprobe")
    assert "L0_tensor is a dump by itself (msprobe)" in said.out
