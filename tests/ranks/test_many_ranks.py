"""One process against four: what lies in parts is made whole, and what is wrong has a rank."""

from __future__ import annotations

from pathlib import Path

import driftline
from driftline.comparison.table import Table
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
    failing = {(row.key.site, row.key.port) for row in table.rows if row.status == "fail"}
    assert failing == {("1.norm", "optimizer_grad")}


def test_rows_that_were_dealt_out_are_put_in_order(alone: Path, together: Path) -> None:
    table = compared(alone, together, "ddp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert any("in another order" in note for note in table.notes)
    assert any("the mean of them is the other run's" in note for note in table.notes)


def test_gradients_that_were_never_averaged_are_named(alone: Path, together: Path) -> None:
    table = compared(alone, together, "not_averaged")
    failing = [row for row in table.rows if row.status == "fail"]
    assert {row.key.port for row in failing} == {"optimizer_grad"}
    assert {row.candidate_rank or 0 for row in failing} == {0, 1, 2, 3}
    assert all("it was never averaged" in row.reason for row in failing)


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


def test_the_ranks_may_be_the_reference(alone: Path, together: Path) -> None:
    table = driftline.compare(together / "fsdp_tp", alone / "one")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0


def test_two_meshes_of_as_many_ranks_are_compared_as_wholes(together: Path) -> None:
    table = driftline.compare(together / "tp", together / "fsdp_tp")
    assert table.verdict == "pass", table.finding
    assert table.coverage.share > 0.95
