"""One process against four: what lies in parts is made whole, and what is wrong has a rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import driftline
from driftline.cli.main import main
from driftline.comparison.table.table import Table
from driftline.errors import BadRun
from driftline.runs.reader import open_run


def compared(alone: Path, together: Path, name: str, reference: str = "one") -> Table:
    return driftline.compare(alone / reference, together / name)


def first_words(table: Table) -> str:
    assert table.verdict == "fail"
    assert table.first is not None
    return f"{table.finding} | {table.first.key.site}"


def test_every_rank_has_a_folder_and_says_where_it_stands(together: Path) -> None:
    run = open_run(together / "fsdp_tp")
    facts = {each["rank"]: each for each in run.processes()}
    assert sorted(facts) == [0, 1, 2, 3]
    mesh = next(m for m in facts[3]["meshes"] if m["names"] == ["dp", "tp"])
    assert mesh["shape"] == [2, 2]
    assert mesh["coordinate"] == [1, 1]
    assert facts[1]["backend"] == "gloo"
    assert not run.losses


def test_a_tensor_says_how_it_lies(together: Path) -> None:
    run = open_run(together / "fsdp_tp")
    weight = run.get(site="layers.0.self_attn.q_proj", port="param", slot="weight", rank=2)
    assert weight.shape == (8, 32)
    assert weight.record.placement == (
        "[_S(0, 2), S(0)] of (32, 32) over mesh (2, 2) named (dp, tp) at (1, 0)"
    )
    output = run.get(site="layers.0.self_attn.q_proj", port="output", slot="0", rank=2)
    assert output.record.placement.startswith("local [S(2)] of (4, 12, 32)")


def test_tensor_parallel_agrees_and_all_of_it_is_compared(alone: Path, together: Path) -> None:
    table = compared(alone, together, "tp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert not [row for row in table.rows if row.status == "extra"]
    ports = {row.key.port for row in table.rows}
    assert ports >= {"input", "output", "grad_input", "grad_output", "param_grad", "optimizer_grad"}
    said = next(note for note in table.notes if "4 ranks of" in note)
    assert "joined along axis 0 over tp (as the tensors say)" in said
    assert "joined along axis 2 over tp (by shape)" in said


def test_a_sequence_in_parts_is_joined_and_its_gradients_are_added(
    alone: Path, together: Path
) -> None:
    table = compared(alone, together, "sp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    norm = next(
        row
        for row in table.rows
        if (row.key.site, row.key.port) == ("layers.0.post_norm", "optimizer_grad")
    )
    assert norm.candidate_recipe == "sum of 4 ranks"


def test_a_missing_all_reduce_is_named_with_its_ranks(alone: Path, together: Path) -> None:
    table = compared(alone, together, "no_reduce")
    words = first_words(table)
    assert words.endswith("layers.1.self_attn.o_proj")
    assert "an all-reduce is missing" in words
    assert "rank 0 holds something else than ranks 1, 2 and 3" in words
    at_fault = [
        row
        for row in table.rows
        if (row.key.site, row.key.port) == ("layers.1.self_attn.o_proj", "output")
    ]
    assert [row.candidate_rank or 0 for row in at_fault] == [0, 1, 2, 3]
    assert {row.status for row in at_fault} == {"fail"}


def test_a_weight_cut_along_the_wrong_axis_is_named(alone: Path, together: Path) -> None:
    words = first_words(compared(alone, together, "wrong_cut"))
    assert words.endswith("layers.1.self_attn.q_proj")
    assert (
        "ranks 0, 1, 2 and 3 hold a slice of axis 1, not of axis 0: cut along the wrong dimension"
        in words
    )


def test_a_replica_that_differs_is_a_finding_though_it_keeps_every_limit(
    alone: Path, together: Path
) -> None:
    table = compared(alone, together, "odd_gradient")
    words = first_words(table)
    assert "'layers.1.post_norm' (Norm) on rank 2" in words
    assert "rank 2 holds something else than ranks 0, 1 and 3" in words
    failing = [row for row in table.rows if row.status == "fail"]
    assert len(failing) == 1
    assert failing[0].candidate_rank == 2
    assert failing[0].decided_by == "replica_gap"
    assert failing[0].metrics["relative_l2"] < 1e-4


def test_what_is_written_by_hand_is_understood_too(alone: Path, together: Path) -> None:
    table = compared(alone, together, "hand", reference="hand")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    terms = {row.key.port for row in table.rows if row.candidate_recipe == "sum of 4 ranks"}
    assert terms == {"output", "grad_input", "param_grad"}  # added up later, by somebody


def test_a_norm_whose_gradient_nobody_added_up_is_named(alone: Path, together: Path) -> None:
    table = compared(alone, together, "hand_forgotten", reference="hand")
    words = first_words(table)
    assert "'1.norm' (Norm)" in words
    assert "an all-reduce is missing" in words
    failing = {str(row.key).partition("/")[2] for row in table.rows if row.status == "fail"}
    # The gradient, and the weight that was updated with it.
    assert failing == {"step0/1.norm/optimizer_grad/weight", "step0/1.norm/param/weight@after"}


def test_rows_that_were_dealt_out_are_put_in_order(alone: Path, together: Path) -> None:
    table = compared(alone, together, "ddp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert any("in another order" in note for note in table.notes)
    assert any("the mean of them is the other run's" in note for note in table.notes)


def test_gradients_that_were_never_averaged_are_named(alone: Path, together: Path) -> None:
    table = compared(alone, together, "not_averaged")
    failing = [row for row in table.rows if row.status == "fail"]
    gradients = [row for row in failing if row.key.port == "optimizer_grad"]
    assert {row.candidate_rank or 0 for row in gradients} == {0, 1, 2, 3}
    assert all("it was never averaged" in row.reason for row in gradients)
    # What else fails was updated with them.
    others = [row.key for row in failing if row not in gradients]
    assert {(key.port, key.moment) for key in others} == {("param", "after")}
    assert table.first in gradients


def test_fully_sharded_parameters_are_joined(alone: Path, together: Path) -> None:
    table = compared(alone, together, "fsdp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert {row.key.port for row in table.rows} >= {"param", "param_grad", "optimizer_grad"}


def test_a_mesh_of_two_axes_is_undone_in_the_right_order(alone: Path, together: Path) -> None:
    table = compared(alone, together, "fsdp_tp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert any("(dp 2 x tp 2)" in note for note in table.notes)


def test_stages_are_mapped_to_layers(alone: Path, together: Path) -> None:
    table = compared(alone, together, "pipeline", reference="four_layers")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert any("layers n of stage 3 is layers n + 3" in note for note in table.notes)
    last = next(row for row in table.rows if row.key.site == "layers.3.mlp")
    assert (last.candidate_site, last.candidate_rank) == ("layers.0.mlp", 3)


@pytest.mark.parametrize("schedule", ["interleaved", "turned_back"])
def test_several_stages_of_a_rank_are_mapped_to_layers_in_any_schedule(
    alone: Path, together: Path, schedule: str
) -> None:
    table = compared(alone, together, schedule, reference="eight_layers")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert any("a pipeline of 8 stages" in note for note in table.notes)


def test_two_schedules_of_a_pipeline_agree(together: Path) -> None:
    """Other stages on every rank, another number of micro-batches, walked back in another order."""
    table = driftline.compare(together / "interleaved", together / "turned_back")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0


def test_heads_that_ranks_share_are_joined_once(alone: Path, together: Path) -> None:
    table = compared(alone, together, "shared_heads", reference="shared_heads")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0


def test_a_shared_head_whose_gradient_nobody_added_up_is_named(alone: Path, together: Path) -> None:
    words = first_words(compared(alone, together, "shared_heads_forgotten", "shared_heads"))
    assert words.endswith("layers.0.self_attn.k_proj")
    assert "ranks 0 and 2 together hold something else than ranks 1 and 3" in words
    assert "an all-reduce is missing" in words


def test_axes_that_were_flattened_into_one_are_undone(alone: Path, together: Path) -> None:
    table = compared(alone, together, "flattened")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0


def test_flat_pieces_of_weights_are_joined_and_have_names(alone: Path, together: Path) -> None:
    table = compared(alone, together, "flat_pieces")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert {row.key.port for row in table.rows} >= {"param", "param_grad", "optimizer_grad"}


def test_the_ranks_may_be_the_reference(alone: Path, together: Path) -> None:
    table = driftline.compare(together / "fsdp_tp", alone / "one")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0


def test_two_meshes_of_as_many_ranks_are_compared_as_wholes(together: Path) -> None:
    table = driftline.compare(together / "tp", together / "fsdp_tp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share > 0.95


def test_no_rank_waits_for_another_because_it_is_captured(together: Path) -> None:
    """Had capture waited for the all-reduce, rank 0 would never have told the others to begin."""
    run = open_run(together / "late")
    for rank in range(4):
        output = run.get(site="(root)", port="output", slot="0", rank=rank)
        assert output.numpy().tolist() == [10.0, 10.0, 10.0]  # and not what was added afterwards


@pytest.mark.parametrize("gone", [0, 2, 3])
def test_a_rank_whose_folder_is_missing_is_named(
    alone: Path, together: Path, tmp_path: Path, gone: int
) -> None:
    shutil.copytree(together / "tp", tmp_path / "tp")
    shutil.rmtree(tmp_path / "tp" / f"rank{gone}")
    run = open_run(tmp_path / "tp")
    said = f"rank {gone}: left nothing: the job had 4 ranks, 3 of them are here"
    assert [str(loss) for loss in run.losses] == [said]
    table = driftline.compare(alone / "one", run)
    assert table.verdict == "incomplete"
    assert "could not be read" in table.finding
    assert f"the values are lost with rank {gone}" in table.finding
    weight = next(row for row in table.rows if row.key.site == "layers.0.mlp.up_proj")
    assert weight.status == "incomparable"
    part = f"part {gone + 1} of 4 is missing; the values are lost with rank {gone}"
    assert weight.reason == part
    assert any(f"rank {gone}: left nothing" in loss for loss in table.candidate.losses)
    rest = driftline.compare(together / "tp", run)  # rank by rank: the others stand where they did
    assert rest.verdict == "incomplete" and not rest.failing
    assert rest.finding.startswith(f"nothing of rank{gone} of the reference was compared")
    assert {row.reason for row in rest.rows if row.status == "missing"} == {
        f"the candidate has no rank {gone}"
    }


def test_a_rank_that_ends_early_is_named(together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "tp", tmp_path / "tp")
    for rank in (0, 2, 3):
        index = tmp_path / "tp" / f"rank{rank}" / "index.jsonl"
        last = json.loads(index.read_text().splitlines()[-1])
        last |= {"step": 1, "order": last["order"] + 1}
        index.write_text(index.read_text() + json.dumps(last) + "\n")
    losses = [str(loss) for loss in open_run(tmp_path / "tp").losses]
    assert losses == ["rank 1: ends with step 0, the longest rank with step 1"]


def test_parts_of_two_runs_in_one_folder_are_refused(together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "tp", tmp_path / "tp")
    shutil.rmtree(tmp_path / "tp" / "rank3")
    shutil.copytree(together / "sp" / "rank3", tmp_path / "tp" / "rank3")
    with pytest.raises(BadRun, match="holds parts of two runs: rank3 was written for another one"):
        open_run(tmp_path / "tp")


def test_ranks_of_two_jobs_in_one_folder_are_refused(together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "tp", tmp_path / "tp")
    for rank in (0, 1):
        folder = tmp_path / "tp" / f"rank{rank}.p1"
        shutil.copytree(together / "tp" / f"rank{rank}", folder)
        facts = json.loads((folder / "process.json").read_text())
        (folder / "process.json").write_text(json.dumps({**facts, "job": "another"}))
    with pytest.raises(BadRun, match=r"holds ranks of 2 jobs: rank0, rank1, rank2, rank3 and "):
        open_run(tmp_path / "tp")


def test_clocks_that_disagree_change_nothing(alone: Path, together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "tp", tmp_path / "tp")
    facts = tmp_path / "tp" / "rank1" / "process.json"
    about = json.loads(facts.read_text())
    facts.write_text(json.dumps({**about, "started": "1970-01-01", "ended": "1971-01-01"}))
    assert driftline.compare(alone / "one", tmp_path / "tp").verdict == "pass"


def test_shards_and_saved_plans_find_the_same(alone: Path, together: Path, tmp_path: Path) -> None:
    whole = compared(alone, together, "odd_gradient")
    parts = [
        driftline.compare_shard(alone / "one", together / "odd_gradient", f"{n}/3")
        for n in (1, 2, 3)
    ]
    assert driftline.merge(parts).rows == whole.rows
    words = ["compare", str(alone / "one"), str(together / "odd_gradient")]
    assert main([*words, "--dry-run", "--save-plan", str(tmp_path / "plan.toml")]) == 0
    planned = driftline.compare(
        alone / "one", together / "odd_gradient", plan=tmp_path / "plan.toml"
    )
    assert [row.status for row in planned.rows] == [row.status for row in whole.rows]


def test_a_diagnosis_names_the_missing_reduction(
    alone: Path, together: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(alone / "one"), str(together / "no_reduce")]) == 1
    said = capsys.readouterr().out
    assert "the drift starts at layers.1.self_attn.o_proj, cause: missing-reduction" in said
