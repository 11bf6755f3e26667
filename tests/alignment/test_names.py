"""Two runs become pairs: by equal names, by the alias of a slot, and never by accident."""

import pytest

from driftline.alignment.rules.names import nothing_in_common, pair_by_name, select
from driftline.errors import BadInput
from driftline.runs.records import Record, TensorKey


def records(*names, alias=None, step=0):
    made = []
    for order, name in enumerate(names):
        site, port, slot = name.split("/")
        key = TensorKey.of(site, port, slot, step=step)
        made.append(Record(key, order, "float32", (2,), alias=(alias or {}).get(name, "")))
    return made


def test_equal_names_pair_in_the_reference_s_execution_order():
    ours = records("a/input/x", "a/output/0", "b/output/0")
    theirs = records("b/output/0", "a/output/0", "a/input/x")
    plan = pair_by_name(ours, theirs)
    assert [str(pair) for pair in plan.pairs] == [str(record.key) for record in ours]
    assert not plan.missing
    assert not plan.extra


def test_every_part_of_the_key_keeps_tensors_apart():
    key = TensorKey.of("a", "output", "0")
    changed = [
        TensorKey.of("a", "output", "0", step=1),
        TensorKey.of("a", "output", "0", visit=1),
        TensorKey.of("a", "output", "0", rank=1),
        TensorKey("a", "output", "0", process=1),
        TensorKey("a", "output", "0", phase="recompute"),
        TensorKey("a", "output", "0", moment="before"),
        TensorKey.of("a", "input", "0"),
        TensorKey.of("a", "param", "0"),
    ]
    ours = [Record(key, 0, "float32", (2,))]
    for other in changed:
        theirs = [Record(key, 0, "float32", (2,)), Record(other, 1, "float32", (2,))]
        plan = pair_by_name(ours, theirs)
        assert [record.key for record in plan.extra] == [other]


def test_an_argument_passed_by_position_meets_the_same_argument_passed_by_name():
    ours = records("a/input/0", "a/input/mask")
    theirs = records("a/input/hidden", "a/input/mask", alias={"a/input/hidden": "0"})
    for first, second in ((ours, theirs), (theirs, ours)):
        plan = pair_by_name(first, second)
        assert len(plan.pairs) == 2
        assert plan.pairs[0].by == "alias"
        assert not plan.missing
        assert not plan.extra


def test_two_names_of_the_same_position_meet_by_their_common_alias():
    ours = records("a/output/logits", alias={"a/output/logits": "0"})
    theirs = records("a/output/prediction", alias={"a/output/prediction": "0"})
    assert pair_by_name(ours, theirs).pairs[0].by == "alias"


def test_an_alias_never_takes_a_partner_that_a_name_has():
    ours = records("a/input/0", "a/input/hidden")
    theirs = records("a/input/hidden", alias={"a/input/hidden": "0"})
    plan = pair_by_name(ours, theirs)
    assert [str(pair) for pair in plan.pairs] == ["rank0/step0/a/input/hidden"]
    assert [record.key.slot for record in plan.missing] == ["0"]


def test_what_only_one_side_has_is_missing_or_extra():
    plan = pair_by_name(records("a/output/0", "b/output/0"), records("a/output/0", "c/output/0"))
    assert [record.key.site for record in plan.missing] == ["b"]
    assert [record.key.site for record in plan.extra] == ["c"]
    assert str(plan) == "1 pairs, 1 only in the reference, 1 only in the candidate"


def test_the_plan_prints_every_pair_with_both_shapes_where_they_differ():
    ours = records("a/output/0")
    theirs = [Record(ours[0].key, 0, "bfloat16", (2, 3))]
    text = "\n".join(pair_by_name(ours, theirs).lines())
    assert "float32 | bfloat16 2 | 2x3" in text


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "wrapped."])
def test_names_that_differ_by_a_prefix_are_an_error_that_names_the_prefix(prefix):
    ours = records("layers.0/output/0", "layers.1/output/0")
    theirs = records(f"{prefix}layers.0/output/0", f"{prefix}layers.1/output/0")
    error = nothing_in_common(ours, theirs)
    assert "2 names against 2, 0 in common" in str(error)
    assert f"2 names differ by the prefix '{prefix}' in the candidate" in error.hint


def test_the_same_sites_at_other_steps_are_an_error_that_names_the_steps():
    error = nothing_in_common(records("a/output/0"), records("a/output/0", step=3))
    assert "the reference has step 0 and the candidate step 3" in error.hint


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest_site():
    with pytest.raises(BadInput, match="no site matches") as caught:
        select(records("layers.0/output/0"), ["layers.O"], [])
    assert "layers.0" in caught.value.hint


def test_globs_and_ports_choose_together():
    chosen = select(records("a.0/output/0", "a.1/input/x", "b/output/0"), ["a.*"], ["output"])
    assert [record.key.site for record in chosen] == ["a.0"]


def test_a_name_that_comes_twice_loses_no_tensor():
    ours, theirs = records("a/output/0", "a/output/0"), records("a/output/0", "a/output/0")
    plan = pair_by_name(ours, theirs)
    assert (len(plan.pairs), len(plan.missing), len(plan.extra)) == (1, 1, 1)
