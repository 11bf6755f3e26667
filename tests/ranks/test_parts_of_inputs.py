"""A copy on one rank is judged by what all ranks were given, each a part of it."""

from __future__ import annotations

from driftline.comparison.table.row import Row
from driftline.comparison.verdict.settled_rows import judge_sites
from driftline.runs.records import TensorKey

PARTS = "concat(axis 1) of 2 ranks"


def row_of(
    site: str, port: str, order: int, error: float, *, rank: int = 0, recipe: str = ""
) -> Row:
    metrics = {"relative_l2": error, "reference_l2": 8.0 + order, "candidate_l2": 8.0 + order}
    return Row(
        TensorKey.of(site, port, "0", rank=rank),  # type: ignore[arg-type]
        "unjudged",
        order=order,
        class_name="Linear",
        reference_recipe=recipe,
        reference_dtype="float32",
        candidate_dtype="float32",
        reference_shape=(8, 64),
        candidate_shape=(8, 64),
        basis="values",
        metrics=metrics,
    )


def culprits(brought: float, made: float) -> list[str]:
    """Sites that add error in a model of two ranks whose `down` joins what the ranks computed."""
    rows = [row_of("up", "input", 0, 1e-7, rank=rank) for rank in (0, 1)]
    # One row for what lies in parts on both ranks, that of the first; copies have one each.
    rows += [row_of("up", "output", 1, brought, recipe=PARTS)]
    rows += [row_of("down", "input", 2, brought, recipe=PARTS)]
    rows += [row_of("down", "output", 3, made, rank=rank) for rank in (0, 1)]
    judgement = judge_sites(rows)
    assert judgement is not None
    return [place.site for place in judgement.culprits]


def test_an_error_that_arrived_in_parts_is_no_fault_of_the_copies_made_of_it() -> None:
    assert "down" not in culprits(brought=1e-3, made=1e-3)


def test_an_error_that_copies_add_to_equal_parts_is_theirs() -> None:
    assert culprits(brought=1e-7, made=1e-3) == ["down"]
