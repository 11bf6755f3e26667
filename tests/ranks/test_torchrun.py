"""The two commands and a real torchrun: one process against two and four, and a rank that dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import driftline
from driftline.cli.main import main
from driftline.runs.reader import open_run

PROGRAM = Path(__file__).with_name("train_llama.py")
LEVELS = ("--level", "modules,gradients,params", "--step", "*")

pytestmark = pytest.mark.slow


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same program on one, two and four processes."""
    folder = tmp_path_factory.mktemp("dumps")
    commands = {"one": [sys.executable], "two": torchrun(2), "four": torchrun(4)}
    for name, command in commands.items():
        words = ["dump", "-o", str(folder / name), *LEVELS, "--", *command, str(PROGRAM)]
        assert main(words) == 0, name
    return folder


@pytest.mark.parametrize("many", ["two", "four"])
def test_a_llama_of_one_process_agrees_with_its_ranks(dumps: Path, many: str) -> None:
    table = driftline.compare(dumps / "one", dumps / many)
    assert table.verdict == "pass", table.finding
    assert table.coverage.share >= 0.95
    assert {row.key.step for row in table.rows} == {0, 1}
    assert main(["compare", str(dumps / "one"), str(dumps / many)]) == 0


def test_two_ranks_agree_with_four(dumps: Path) -> None:
    table = driftline.compare(dumps / "two", dumps / "four")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share >= 0.95


def test_a_rank_that_is_killed_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    words = ["dump", "-o", str(run), *LEVELS, "--", *torchrun(2), str(PROGRAM), "killed"]
    assert main(words) != 0
    said = capfd.readouterr().err
    assert "note: rank1: was not closed" in said
    assert {(r.key.rank, r.key.step) for r in open_run(run).records} >= {(0, 0), (1, 0)}


def test_two_jobs_in_one_folder_are_refused_in_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
        "dist.destroy_process_group()\n"
    )
    both = " && ".join([" ".join([*torchrun(2), str(program)])] * 2)
    assert main(["dump", "-o", str(tmp_path / "run"), "--", "bash", "-c", both]) == 2
    assert "holds ranks of 2 jobs: rank0, rank1 and rank0.p1, rank1.p1" in capfd.readouterr().err
    assert main(["show", str(tmp_path / "run")]) == 2
    assert "holds ranks of 2 jobs" in capfd.readouterr().err
