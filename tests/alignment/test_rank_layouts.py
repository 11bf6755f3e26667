"""Ranks that share parts, meshes that were flattened, stages with several models, single ranks."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.alignment.placements.mesh import mesh_of
from driftline.cli.main import main
from driftline.comparison.evidence.second_look import SecondLook
from driftline.runs.reader import open_run
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of

RANDOM = np.random.default_rng(0)


def ranks(
    folder: Path,
    many: int,
    held: Callable[[int], Mapping[str, Any]],
    placed: Callable[[int], Mapping[str, str]] = lambda rank: {},
    facts: Callable[[int], Mapping[str, Any]] = lambda rank: {},
) -> Run:
    """A run of many ranks: what each holds, how that lies, and what its process says."""
    for rank in range(many):
        writer = RunWriter(folder, rank=rank, world_size=many)
        for name, values in held(rank).items():
            record_into(writer, name, values)
        writer.describe(**facts(rank))
        writer.close()
        index = folder / f"rank{rank}" / "index.jsonl"
        lines = [json.loads(line) for line in index.read_text().splitlines()]
        for line in lines:
            name = f"{line['site']}/{line['port']}/{line['slot']}"
            if text := placed(rank).get(name):
                line["placement"] = text
        index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_run(folder)


def values(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


# --- heads that ranks share

HEADS = values(2, 4, 6)  # two parts of a weight, each on two of four ranks


def shared(folder: Path, who: Callable[[int], int], spoiled: int | None = None) -> Run:
    def held(rank: int) -> dict[str, Any]:
        part = HEADS[who(rank)]
        return {"k/param/weight": part * 2 if rank == spoiled else part, "norm/output": HEADS[0]}

    return ranks(folder, 4, held)


@pytest.mark.parametrize("who", [lambda rank: rank // 2, lambda rank: rank % 2])
def test_parts_that_ranks_share_are_joined_once_and_compared_as_copies(
    tmp_path: Path, who: Callable[[int], int]
) -> None:
    whole = run_of({"k/param/weight": HEADS.reshape(8, 6), "norm/output": HEADS[0]})
    table = driftline.compare(whole, shared(tmp_path / "run", who))
    assert table.verdict == "pass", table.finding
    joined = [row for row in table.rows if row.key.site == "k"]
    assert [row.candidate_recipe for row in joined] == ["concat(axis 0) of 2 ranks"] * 2


def test_a_shared_part_that_one_rank_holds_differently_is_named(tmp_path: Path) -> None:
    whole = run_of({"k/param/weight": HEADS.reshape(8, 6), "norm/output": HEADS[0]})
    table = driftline.compare(whole, shared(tmp_path / "run", lambda rank: rank // 2, spoiled=3))
    assert table.verdict == "fail"
    assert "ranks 1 and 3 together hold something else than ranks 0 and 2" in table.finding


@pytest.mark.parametrize("spoiled", range(4))
def test_a_second_look_is_at_the_copy_that_is_off(tmp_path: Path, spoiled: int) -> None:
    whole = run_of({"a/output": HEADS[0]})
    copies = ranks(
        tmp_path / "run", 4, lambda rank: {"a/output": HEADS[0] * (1.5 if rank == spoiled else 1)}
    )
    plan = driftline.align(whole, copies)
    look = SecondLook(whole, copies, plan)
    errors = {
        row.candidate_rank or 0: look.at(row).half  # type: ignore[union-attr]
        for row in driftline.compare(whole, copies, plan=plan).rows
    }
    assert errors == {rank: pytest.approx(0.5 * (rank == spoiled)) for rank in range(4)}


def test_two_and_four_ranks_that_cut_their_weights_themselves_agree(tmp_path: Path) -> None:
    """Neither says how anything lies: (16, 6) twice and (8, 6) four times are (32, 6)."""
    weight, wide, down = values(32, 6), values(3, 32), values(6, 32)
    heads = values(8, 6)

    def cut(many: int) -> Callable[[int], dict[str, Any]]:
        return lambda rank: {
            "q/param/weight": np.split(weight, many)[rank],
            "q/input": weight[:3],
            "q/output": np.split(wide, many, axis=1)[rank],
            "k/param/weight": np.split(heads, 2)[rank * 2 // many],
            "down/param/weight": np.split(down, many, axis=1)[rank],
        }

    two, four = (ranks(tmp_path / str(many), many, cut(many)) for many in (2, 4))
    for ours, theirs in ((two, four), (four, two)):
        table = driftline.compare(ours, theirs)
        assert table.verdict == "pass", table.finding
        assert table.coverage.share == 1.0
        shapes = {(row.key.site, row.key.port): row.reference_shape for row in table.rows}
        assert shapes["q", "param"] == (32, 6)
        assert shapes["q", "output"] == (3, 32)
        assert shapes["k", "param"] == (8, 6)
        assert shapes["down", "param"] == (6, 32)


# --- flattened meshes


def test_an_axis_that_was_flattened_from_two_is_undone_in_their_order(tmp_path: Path) -> None:
    """FSDP over dp and cp as one, after tensor parallelism, on a mesh of dp, cp and tp."""
    whole, row = values(19, 3), values(8)
    places = list(itertools.product(range(2), range(2), range(2)))

    def chunk(array: Any, many: int, which: int) -> Any:
        each = -(-len(array) // many)
        return array[each * which : each * (which + 1)]

    def held(rank: int) -> dict[str, Any]:
        dp, cp, tp = places[rank]
        return {
            "w/param/weight": chunk(chunk(whole, 2, tp), 4, dp * 2 + cp),
            "w/output": np.split(row, 2)[cp],
        }

    def placed(rank: int) -> dict[str, str]:
        dp, cp, tp = places[rank]
        both = f"over mesh (4, 2) named (dp_cp, tp) at ({dp * 2 + cp}, {tp})"
        return {
            "w/param/weight": f"[_S(0, 2), S(0)] of (19, 3) {both}",
            "w/output/0": f"[S(0)] of (8,) over mesh (2,) named (cp) at ({cp},)",
        }

    mesh = {"names": ["dp", "cp", "tp"], "shape": [2, 2, 2], "ranks": list(range(8))}
    many = ranks(tmp_path / "run", 8, held, placed, lambda rank: {"meshes": [mesh]})
    assert str(mesh_of(many)) == "dp 2 x cp 2 x tp 2"
    table = driftline.compare(run_of({"w/param/weight": whole, "w/output": row}), many)
    assert table.verdict == "pass", table.finding
    assert any("joined along axis 0 over dp" in note for note in table.notes)


def test_a_mesh_that_only_the_tensors_know_is_found_by_where_they_stand(tmp_path: Path) -> None:
    whole = values(8, 6)

    def placed(rank: int) -> dict[str, str]:
        at = f"at ({rank // 2}, {rank % 2})"
        return {"w/param/weight": f"[S(0), S(1)] of (8, 6) over mesh (2, 2) named (a, b) {at}"}

    def held(rank: int) -> dict[str, Any]:
        return {"w/param/weight": whole[4 * (rank // 2) :][:4, 3 * (rank % 2) :][:, :3]}

    many = ranks(tmp_path / "run", 4, held, placed)
    table = driftline.compare(run_of({"w/param/weight": whole}), many)
    assert table.verdict == "pass", table.finding


# --- several stages on a rank

LAYERS = values(8, 4)


def pipeline(folder: Path, stages: Callable[[int], list[int]], *, said: bool, kept: bool) -> Run:
    """Two ranks with several models each, which count their layers from 0 unless they keep them."""

    def site(which: int) -> str:
        return "" if which == 0 else f"Part_{which}."

    def held(rank: int) -> dict[str, Any]:
        return {
            f"{site(n)}layers.{stage if kept else 0}.mlp/output": LAYERS[stage]
            for n, stage in enumerate(stages(rank))
        }

    def facts(rank: int) -> dict[str, Any]:
        if not said:
            return {}
        return {
            "stages": [
                {"stage": stage, "of": 8, "site": site(n).rstrip(".") or "(root)"}
                for n, stage in enumerate(stages(rank))
            ]
        }

    return ranks(folder, 2, held, facts=facts)


ONE = {f"layers.{n}.mlp/output": LAYERS[n] for n in range(8)}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("said", [False, True])
def test_several_stages_of_a_rank_are_mapped_to_layers(
    tmp_path: Path, said: bool, kept: bool
) -> None:
    many = pipeline(tmp_path / "run", lambda rank: [rank, rank + 2, rank + 4, rank + 6],
                    said=said, kept=kept)  # fmt: skip
    table = driftline.compare(run_of(ONE), many)
    assert table.verdict == "pass", table.finding
    assert table.coverage.share == 1.0
    assert any("rank 1 has stages 1, 3, 5, 7" in note for note in table.notes)


def test_a_schedule_that_turns_back_is_mapped_by_what_the_ranks_say(tmp_path: Path) -> None:
    there = pipeline(
        tmp_path / "v",
        lambda rank: [0, 3, 4, 7] if rank == 0 else [1, 2, 5, 6],
        said=True,
        kept=False,
    )
    table = driftline.compare(run_of(ONE), there)
    assert table.verdict == "pass", table.finding
    looped = pipeline(tmp_path / "looped", lambda rank: [rank, rank + 2, rank + 4, rank + 6],
                      said=True, kept=False)  # fmt: skip
    both = driftline.compare(looped, there)
    assert both.verdict == "pass", both.finding
    assert both.coverage.share == 1.0


# --- one rank of many


def test_a_rank_is_compared_with_its_own_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight, norm, terms = values(8, 4), values(4), values(2, 3)

    def held(rank: int) -> dict[str, Any]:
        part = np.split(weight, 2)[rank]
        return {
            "up/param/weight": part * 2 if rank else part,
            "norm/output": norm,
            "down/output": terms if rank else terms * 0,
        }

    def placed(rank: int) -> dict[str, str]:
        return {"down/output/0": f"[P(sum)] of (2, 3) over mesh (2,) named (tp) at ({rank},)"}

    ranks(tmp_path / "two", 2, held, placed)
    writer = RunWriter(tmp_path / "whole")
    for name, array in (("up/param/weight", weight), ("norm/output", norm), ("down/output", terms)):
        record_into(writer, name, array)
    writer.close()
    words = ["compare", str(tmp_path / "whole"), str(tmp_path / "two"), "--rank"]
    assert main([*words, "0"]) == 0
    said = capsys.readouterr()
    told = " ".join((said.out + said.err).split())
    assert "only what rank 0 of" in told
    assert "left out: 1 that only all ranks together make" in told
    assert main([*words, "1"]) == 1
    assert "'up'" in capsys.readouterr().out
    assert main([*words, "5"]) == 2
    assert "has no rank 5" in capsys.readouterr().err
    assert main([*words, "1", "--python"]) == 0
    assert "of_ranks(" in capsys.readouterr().out


# --- tokens from both ends


@pytest.mark.parametrize("alike", [False, True])
def test_tokens_from_both_ends_of_a_text_are_put_in_order(tmp_path: Path, alike: bool) -> None:
    """Context parallelism, balanced: rank r has stretch r from the front and from the back."""
    ids = np.zeros((1, 8), np.int64) if alike else np.arange(8, dtype=np.int64)[None] + 3
    ids[0, -1] = 7
    hidden = values(1, 8, 4)
    mine = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}

    def held(rank: int) -> dict[str, Any]:
        at = mine[rank]
        return {"(root)/input/ids": ids[:, at], "layers.0/output": hidden[:, at]}

    table = driftline.compare(
        run_of({"(root)/input/ids": ids, "layers.0/output": hidden}),
        ranks(tmp_path / "run", 2, held),
    )
    assert table.verdict == "pass", table.finding
    assert any("tokens together are the other run's in another order" in n for n in table.notes)


def test_an_argument_that_one_side_knows_by_place_only_is_joined_all_the_same(
    tmp_path: Path,
) -> None:
    """Wrappers of a tensor parallel library call `forward(*args)`."""
    whole = values(2, 8)
    reference = run_of({"o_proj/input/input": whole}, aliases={"o_proj/input/input": "0"})
    parts = np.split(whole, 4, axis=1)
    many = ranks(tmp_path / "run", 4, lambda rank: {"o_proj/input/0": parts[rank]})
    table = driftline.compare(reference, many)
    assert table.verdict == "pass", table.finding
    assert [row.candidate_recipe for row in table.rows] == ["concat(axis 1) of 4 ranks"]


def test_one_rank_that_is_left_of_a_sharded_job_is_no_pass_and_the_lost_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight, norm = values(8, 4), values(4)

    def held(rank: int) -> dict[str, Any]:
        return {"up/param/weight": np.split(weight, 2)[rank], "norm/output": norm}

    def placed(rank: int) -> dict[str, str]:
        return {"up/param/weight": f"[S(0)] of (8, 4) over mesh (2,) named (tp) at ({rank},)"}

    ranks(tmp_path / "two", 2, held, placed)
    shutil.rmtree(tmp_path / "two" / "rank1")
    writer = RunWriter(tmp_path / "whole")
    for name, array in (("up/param/weight", weight), ("norm/output", norm)):
        record_into(writer, name, array)
    writer.close()
    for first, second in (("whole", "two"), ("two", "whole")):
        assert main(["compare", str(tmp_path / first), str(tmp_path / second)]) == 2
        told = " ".join(capsys.readouterr().out.split())
        assert told.startswith("INCOMPLETE") and "the values are lost with rank 1" in told
