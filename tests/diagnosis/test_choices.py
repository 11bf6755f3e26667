"""Routers that choose other experts at a near tie raise no alarm; wrong experts do."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import array_run

from driftline.alignment.align import AlignOptions, align_runs
from driftline.comparison.evidence.routing_changes import flips, rows_reached
from driftline.diagnosis.api import diagnose
from driftline.runs.records import TensorKey
from driftline.testing.faults import FAULTS, Setting
from driftline.testing.faults.trials import METHODS, planted


def test_a_clean_pair_with_a_flipped_choice_is_no_fault_and_it_is_said() -> None:
    setting = Setting("mixtral", "fp16", 1078)
    pair = planted(setting)
    found = diagnose(pair.reference, pair.candidate, noise=pair.noise)
    assert found.verdict == "pass", str(found)
    (note,) = found.evidence["notes"]
    assert "other experts at a near tie" in note
    assert "model.layers.0.mlp.gate" in note
    said = found.site("model.layers.0.mlp.experts")
    assert said.status == "clean"
    assert "near tie" in said.reason


@pytest.mark.parametrize("fault", ["experts swapped", "expert zeroed"])
def test_wrong_experts_are_still_found_where_choices_flip(fault: str) -> None:
    kind = FAULTS[fault]
    setting = Setting("mixtral", "fp16", 1078, kind, kind.amounts[0])
    pair = planted(setting)
    assert METHODS["noise"](setting, pair).detected
    found = METHODS["replay"](setting, pair)
    assert found.detected
    assert found.exact, found


def _router(scores: np.ndarray, chosen: np.ndarray) -> object:
    at = TensorKey("mlp.gate", "output", "0", 0)
    tokens = np.ones((2, len(scores) // 2, 3), dtype=np.float32)
    return array_run(
        {
            TensorKey("norm", "output", "0", 0): tokens,
            at: scores.astype(np.float32),
            at._replace(slot="1"): chosen,
        }
    )


def test_a_choice_that_its_scores_do_not_excuse_is_no_flip() -> None:
    scores = np.array([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.9999, 0.0]])
    ours, theirs = np.array([[0, 1], [0, 1]]), np.array([[0, 2], [2, 0]])
    reference = _router(scores, ours)
    moved = scores + np.array([0.0, 0.0, 0.001, 0.0])
    candidate = _router(moved, theirs)
    plan = align_runs(reference, candidate, AlignOptions())
    (flip,) = flips(reference, candidate, plan)
    assert flip.rows.tolist() == [False, True]


def test_only_scores_of_more_experts_than_were_chosen_excuse_a_choice() -> None:
    # The router gives the scores of the chosen experts as well: among these, none was rejected.
    at = TensorKey("mlp.gate", "output", "0", 0)
    scores = np.array([[3.0, 2.0, 1.9999, 0.0]], dtype=np.float32)

    def router(moved: float, chosen: list[int]) -> object:
        wide = scores + np.array([0.0, 0.0, moved, 0.0], dtype=np.float32)
        return array_run(
            {
                at: wide,
                at._replace(slot="1"): np.array([chosen]),
                at._replace(slot="2"): wide[:, chosen],
            }
        )

    reference, candidate = router(0.0, [0, 1]), router(0.001, [0, 2])
    (flip,) = flips(reference, candidate, align_runs(reference, candidate, AlignOptions()))
    assert flip.rows.tolist() == [True]


def test_what_a_choice_reaches_are_its_token_and_later_ones_of_its_sequence() -> None:
    scores = np.tile([3.0, 2.0, 1.9999, 0.0], (8, 1))
    ours = np.tile([0, 1], (8, 1))
    theirs = ours.copy()
    theirs[5] = [0, 2]
    reference = _router(scores, ours)
    candidate = _router(scores + np.array([0.0, 0.0, 0.001, 0.0]), theirs)
    found = flips(reference, candidate, align_runs(reference, candidate, AlignOptions()))
    record = next(iter(reference.records))._replace(order=100)
    block = rows_reached(found, "mlp", record, (2, 4, 16))
    assert block is not None
    assert np.flatnonzero(block).tolist() == [5]
    after = rows_reached(found, "next", record, (2, 4, 16))
    assert after is not None
    assert np.flatnonzero(after).tolist() == [5, 6, 7]
    assert rows_reached(found, "next", record._replace(order=-1), (2, 4, 16)) is None
