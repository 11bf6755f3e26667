"""One process against pipelines without an optimizer, experts on ranks, and dealt-out optimizers.

Right ones pass with every tensor compared; each has one fault on its last rank, which is named.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rank_processes import PROGRAM, run_ranks

import driftline
from driftline.cli.main import main


@pytest.mark.parametrize(
    ("reference", "name", "ports"),
    [
        ("plain_4", "gpipe", {"output", "grad_input", "param_grad"}),
        ("plain_4", "alternating", {"output", "grad_input", "param_grad"}),
        ("plain_4", "two_stages_each", {"output", "grad_input", "param_grad"}),
        ("experts_2", "experts", {"output", "grad_input", "param_grad", "optimizer_grad"}),
        ("two_steps", "zero", {"output", "grad_input", "param_grad", "optimizer_grad"}),
    ],
)
def test_a_right_one_passes_and_all_of_it_is_compared(
    alone: Path, in_two: Path, reference: str, name: str, ports: set[str]
) -> None:
    table = driftline.compare(alone / reference, in_two / name)
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert {row.key.port for row in table.rows} >= ports
    # How the work is dealt out is no difference of the programs.
    assert not [difference for difference in table.differences or () if difference.counts]


@pytest.mark.parametrize("name", ["gpipe", "alternating", "two_stages_each"])
def test_a_batch_in_micro_batches_is_one_step_without_an_optimizer(in_two: Path, name: str) -> None:
    run = driftline.open_run(in_two / name)
    keys = [record.key for record in run.records if record.key.port == "output"]
    assert {key.step for key in keys} == {0, 1}
    assert {key.visit for key in keys} == {0, 1, 2, 3}


def test_every_micro_batch_and_the_sum_of_their_gradients_are_compared(
    alone: Path, in_two: Path
) -> None:
    table = driftline.compare(alone / "plain_4", in_two / "alternating")
    note = next(note for note in table.notes if "ranks of" in note)
    assert "joined along axis 0 over micro-batches" in note
    assert "averaged over micro-batches" in note
    # The stages are no models that lack something.
    assert not [difference for difference in table.differences or () if difference.counts]


@pytest.mark.parametrize(
    ("reference", "name", "site"),
    [
        ("plain_4", "alternating_wrong", "layers.3.mlp.act"),
        ("experts_2", "experts_wrong", "layers.1.moe.experts.1.act"),
    ],
)
def test_a_wrong_activation_on_the_last_rank_is_named_with_its_cause(
    alone: Path,
    in_two: Path,
    capsys: pytest.CaptureFixture[str],
    reference: str,
    name: str,
    site: str,
) -> None:
    table = driftline.compare(alone / reference, in_two / name)
    assert f"'{site}' (SiLU, in the candidate GELU" in str(table.finding)
    assert "on rank 1" in str(table.finding)
    assert main(["diagnose", str(alone / reference), str(in_two / name)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"the drift starts at {site}, cause: activation" in said
    assert "it computes gelu where the reference computes silu" in said


def test_an_update_that_never_arrives_is_named_with_its_rank(alone: Path, in_two: Path) -> None:
    table = driftline.compare(alone / "two_steps", in_two / "zero_wrong")
    assert table.verdict == "fail"
    assert str(table.finding).startswith(
        "gradients agree in step 0 on all ranks of the candidate, and the update does not reach "
        "rank 1, in 1 parameter: layers.1.mlp.up_proj.weight"
    )
    row = next(row for row in table.rows if row.status == "fail" and row.key.port == "output")
    assert (row.key.step, row.key.site) == (1, "layers.1.mlp.up_proj")
    assert driftline.diagnose(alone / "two_steps", in_two / "zero_wrong").cause == "stale"


def test_one_rank_of_a_mesh_with_another_activation_is_named(alone: Path, together: Path) -> None:
    table = driftline.compare(alone / "one", together / "mesh_wrong")
    assert table.verdict == "fail"
    assert table.first is not None and table.first.key.site == "layers.1.mlp.act"
    assert "rank 3" in str(table.finding)
    said = driftline.diagnose(alone / "one", together / "mesh_wrong")
    assert "class (rank 3) is GELU in the candidate, SiLU in the reference" in str(said)


@pytest.mark.slow
def test_eight_ranks(warm_parallel: str, tmp_path: Path) -> None:
    alone = [
        warm_parallel,
        str(PROGRAM),
        str(tmp_path),
        "plain_16",
        "experts_8",
        "two_steps",
        "one",
    ]
    subprocess.run(alone, check=True, timeout=280)
    right = {
        "plain_16": ("gpipe", "alternating", "two_stages_each"),
        "experts_8": ("experts",),
        "two_steps": ("zero",),
        "one": ("mesh",),
    }
    wrong = {
        "alternating_wrong": ("plain_16", "layers.15.mlp.act"),
        "experts_wrong": ("experts_8", "layers.1.moe.experts.7.act"),
        "zero_wrong": ("two_steps", "layers.1.mlp.up_proj"),
        "mesh_wrong": ("one", "layers.1.mlp.act"),
    }
    names = [*(name for several in right.values() for name in several), *wrong]
    run_ranks(warm_parallel, tmp_path, 8, names)
    for reference, several in right.items():
        for name in several:
            table = driftline.compare(tmp_path / reference, tmp_path / name)
            assert (table.verdict, table.coverage.share) == ("pass", 1.0), (name, table.finding)
    for name, (reference, site) in wrong.items():
        table = driftline.compare(tmp_path / reference, tmp_path / name)
        assert table.first is not None and table.first.key.site == site, (name, table.finding)
        assert "rank 7" in str(table.finding), (name, table.finding)
