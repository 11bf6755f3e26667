"""Recipes carried out: on every dtype the result is what numpy gives, and bad recipes say why."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step, joined, recipe_from_json, start, step_from_text
from driftline.comparison.measure import scheduler
from driftline.comparison.measure.recipes import apply_recipe
from driftline.comparison.measure.scheduler import measure
from driftline.comparison.table.row import Row
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES, to_float64, unpack_nibbles
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.testing.runs import run_of

MOVABLE = [name for name, dtype in DTYPES.items() if dtype.kind != "bits"]


def stored(tensors: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> Run:
    """A run of raw words: (dtype, array of words in their shape), 4-bit codes one per byte."""
    sink = MemorySink()
    for site, (name, words) in tensors.items():
        flat = np.ascontiguousarray(words).reshape(-1)
        if DTYPES[name].bits == 4:
            even = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
            flat = even[0::2] | (even[1::2] << 4)
        record = Record(TensorKey.of(site, "output"), 0, name, tuple(words.shape))
        sink.put(record, flat.view(np.uint8))
    return sink.run()


def words_of(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    dtype = DTYPES[name]
    rng = np.random.default_rng(seed)
    if dtype.bits == 4:
        return rng.integers(0, 16, shape, dtype=np.uint8)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = np.dtype(dtype.storage).itemsize
    raw = rng.integers(0, 256, (*shape, size), dtype=np.uint8)
    return raw.view(dtype.storage).reshape(shape)


def result(run: Run, recipe: Recipe) -> np.ndarray[Any, Any]:
    cooked = apply_recipe(run, recipe)
    if cooked.dtype.bits == 4:
        return unpack_nibbles(cooked.values, math.prod(cooked.shape)).reshape(cooked.shape)
    return cooked.values.reshape(cooked.shape)


def same(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    return (
        ours.shape == theirs.shape
        and np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(MOVABLE))
def test_moved_elements_are_bit_for_bit_what_numpy_moves(data: st.DataObject, name: str) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    words = words_of(name, shape, data.draw(st.integers(0, 99)))
    run = stored({"x": (name, words)})
    goal, steps = words, list[Step]()
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["transpose", "reshape", "trim", "split", "select"]))
        axis = data.draw(st.integers(0, goal.ndim - 1))
        if kind == "transpose":
            order = tuple(data.draw(st.permutations(range(goal.ndim))))
            steps.append(Step("transpose", numbers=order))
            goal = goal.transpose(order)
        elif kind == "reshape":
            steps.append(Step("reshape", numbers=(goal.size,)))
            goal = goal.reshape(-1)
        elif kind == "select":
            numbers = tuple(
                data.draw(st.lists(st.integers(0, goal.shape[axis] - 1), min_size=1, max_size=6))
            )
            steps.append(Step("select", axis, numbers=numbers))
            goal = np.take(goal, numbers, axis=axis)
        else:
            begin = data.draw(st.integers(0, goal.shape[axis] - 1))
            end = data.draw(st.integers(begin + 1, goal.shape[axis]))
            steps.append(Step(kind, axis, begin, end))  # type: ignore[arg-type]
            goal = goal[(slice(None),) * axis + (slice(begin, end),)]
    assert same(result(run, start(run.records[0]).then(*steps, shape=goal.shape)), goal)


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("axis", [0, 1])
def test_joined_elements_are_bit_for_bit_what_numpy_joins(name: str, axis: int) -> None:
    parts = [words_of(name, (3, 5), seed) for seed in range(3)]
    run = stored({f"p{at}": (name, words) for at, words in enumerate(parts)})
    goal = np.concatenate(parts, axis=axis)
    assert same(result(run, joined(run.records, "concat", axis, goal.shape)), goal)


NUMBERS = [name for name in MOVABLE if DTYPES[name].kind in ("float", "int", "uint")]


@pytest.mark.parametrize("name", NUMBERS)
def test_partial_sums_are_added_in_float64_and_rounded_once(name: str) -> None:
    dtype = DTYPES[name]
    parts = [words_of(name, (4, 6), seed) for seed in range(3)]
    run = stored({f"p{at}": (name, words) for at, words in enumerate(parts)})
    cooked = apply_recipe(run, joined(run.records, "sum", 0, (4, 6)))
    decoded = [to_float64(run.raw(record), dtype, 24) for record in run.records]
    with np.errstate(all="ignore"):
        if dtype.is_floating:
            wide = np.float64 if dtype.bits == 64 else np.float32
            goal = np.asarray(sum(decoded)).astype(wide)
        elif dtype.bits == 4:
            goal = np.asarray(sum(decoded)).astype(np.int64)
        else:
            goal = np.asarray(sum(words.astype(np.int64) for words in parts)).reshape(-1)
    assert np.array_equal(cooked.values, goal, equal_nan=dtype.is_floating)


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4", "int32", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("scale_shape", "axis"), [((), 0), ((1,), 0), ((6,), 0), ((8,), 1), ((6, 1), 0), ((3, 4), 0)]
)
def test_dequantised_values_are_the_float32_product(
    name: str, scale_shape: tuple[int, ...], axis: int
) -> None:
    rng = np.random.default_rng(0)
    words = words_of(name, (6, 8), 1)
    if name == "int32":
        words = rng.integers(-(2**23), 2**23, (6, 8)).astype(np.int32)
    scale = rng.uniform(1e-3, 1e-1, scale_shape).astype(np.float32)
    zero = rng.integers(-3, 4, scale_shape).astype(np.int32)
    run = stored({"w": (name, words), "s": ("float32", scale), "z": ("int32", zero)})
    recipe = Recipe(run.records, (Step("dequantise", axis),), (6, 8))  # type: ignore[arg-type]
    values = to_float64(run.raw(run.records[0]), DTYPES[name], 48).reshape(6, 8)

    def wide(small: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if small.ndim == 1 and small.size > 1:
            small = small.reshape(-1, 1) if axis == 0 else small.reshape(1, -1)
        if small.shape == (3, 4):
            small = np.repeat(np.repeat(small, 2, 0), 2, 1)
        return small

    goal = (values - wide(zero)).astype(np.float32) * wide(scale)
    assert goal.dtype == np.float32
    assert np.array_equal(apply_recipe(run, recipe).values.reshape(6, 8), goal, equal_nan=True)


def test_scales_of_groups_are_laid_over_blocks_of_rows_rightly(monkeypatch: Any) -> None:
    import driftline.alignment.recipe_steps as steps

    monkeypatch.setattr(steps, "_ROWS", 24)  # three rows at a time, groups of two
    rng = np.random.default_rng(0)
    words = rng.integers(-128, 128, (10, 8)).astype(np.int8)
    scale = rng.uniform(0.1, 1, (5, 2)).astype(np.float32)
    run = run_of({"w": words, "s": scale})
    recipe = Recipe(tuple(run.records), (Step("dequantise"),), (10, 8))
    goal = words.astype(np.float32) * np.repeat(np.repeat(scale, 2, 0), 4, 1)
    assert np.array_equal(apply_recipe(run, recipe).values.reshape(10, 8), goal)


def test_parts_of_different_types_are_joined_as_float32_and_mask_words_stay_masks() -> None:
    half = np.array([[1.5, -65504.0]], np.float16)
    brain = np.array([[2.0, 3.0]], ml_dtypes.bfloat16)
    run = run_of({"a": half, "b": brain})
    cooked = apply_recipe(run, joined(run.records, "concat", 0, (2, 2)))
    assert cooked.dtype.name == "float32"
    assert cooked.values.tolist() == [1.5, float(np.finfo(np.float32).min), 2.0, 3.0]


def test_recipes_inside_recipes_are_made_first() -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((6, 4)).astype(np.float32)
    run = run_of({"a": whole[:2], "b": whole[2:4], "c": whole[4:].T.copy()})
    a, b, c = run.records
    inner = joined([a, b], "concat", 0, (4, 4))
    turned = start(c).then(Step("transpose", numbers=(1, 0)), shape=(2, 4))
    assert same(result(run, joined([inner, turned], "concat", 0, (6, 4))), whole)


@pytest.mark.parametrize(
    ("steps", "shape", "said"),
    [
        ([Step("split", 2, 0, 1)], (1,), "no axis 2"),
        ([Step("split", 0, 1, 9)], (8, 3), "does not fit 4x3"),
        ([Step("transpose", numbers=(0, 0))], (4, 3), "does not fit"),
        ([Step("reshape", numbers=(5, 3))], (5, 3), "does not fit"),
        ([Step("reshape", numbers=(-1, 3))], (4, 3), "does not fit"),
        ([Step("select", 0, numbers=(0, 4))], (2, 3), "does not fit"),
        ([Step("trim", 0, 0, 2)], (4, 3), "the plan says"),
        ([Step("trim", 0, 0, 4), Step("sum")], (4, 3), "must be the first step"),
        ([Step("dequantise")], (4, 3), "values, a scale"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(
    steps: list[Step], shape: tuple[int, ...], said: str
) -> None:
    run = run_of({"a": np.zeros((4, 3), np.float32)})
    with pytest.raises(BadInput, match=said):
        apply_recipe(run, Recipe((run.records[0],), tuple(steps), shape))


def test_sources_without_all_values_are_refused() -> None:
    run = run_of({"a": np.zeros((4, 3), np.float32)}, keep="summary")
    turn = start(run.records[0]).then(Step("transpose", numbers=(1, 0)), shape=(3, 4))
    with pytest.raises(BadInput, match="kept as summary"):
        apply_recipe(run, turn)


def paired(reference: Run, candidate: Run, recipe: Recipe) -> Row:
    pair = Pair(reference.records[0], candidate.records[0], candidate_recipe=recipe)
    return measure(Plan((pair,)), reference, candidate).rows[0]


def test_a_row_says_what_was_done_and_has_the_shape_that_was_compared() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    ours, theirs = run_of({"a": x}), run_of({"b": x.T.copy()})
    turn = start(theirs.records[0]).then(Step("transpose", numbers=(1, 0)), shape=(4, 3))
    row = paired(ours, theirs, turn)
    assert row.metrics["relative_l2"] == 0.0
    assert row.candidate_recipe == "transpose(1,0) of 3x4"
    assert row.candidate_shape == (4, 3)
    assert (row.candidate_site, row.candidate_name) == ("b", "b")


def test_a_reshape_alone_needs_no_values() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    ours = run_of({"a": x}, keep="summary")
    theirs = run_of({"a": x.reshape(6, 4)}, keep="summary")
    flat = start(theirs.records[0]).then(Step("reshape", numbers=(2, 3, 4)), shape=(2, 3, 4))
    row = paired(ours, theirs, flat)
    assert row.basis == "digest"  # of the bytes, which another shape does not change
    assert row.metrics["relative_l2"] == 0.0


def test_large_recipes_are_measured_in_blocks_that_add_up(monkeypatch: Any) -> None:

    x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    y = x.copy()
    y[40, 7] += 1.0
    ours, theirs = run_of({"a": x}), run_of({"a": y.T.copy()})
    turn = start(theirs.records[0]).then(Step("transpose", numbers=(1, 0)), shape=(64, 48))
    at_once = paired(ours, theirs, turn)
    monkeypatch.setattr(scheduler, "BLOCK", 256)
    in_blocks = paired(ours, theirs, turn)
    assert (
        in_blocks.metrics["max_abs_error_at"] == at_once.metrics["max_abs_error_at"] == 40 * 48 + 7
    )
    assert in_blocks.metrics["relative_l2"] == pytest.approx(at_once.metrics["relative_l2"])


def test_a_recipe_survives_its_text() -> None:
    run = run_of({"q": np.zeros((4, 3)), "k": np.zeros((4, 3))})
    by_key = {str(record.key): record for record in run.records}
    recipe = Recipe(
        (joined(run.records, "concat", 0, (8, 3)),),
        (
            Step("select", 0, numbers=(0, 1, 2, 6)),
            Step("trim", 1, 0, 2),
            Step("transpose", numbers=(1, 0)),
            Step("reshape", numbers=(8,)),
        ),
        (8,),
    )
    assert recipe_from_json(recipe.as_json(), by_key.__getitem__) == recipe


@pytest.mark.parametrize(
    "text", ["", "turn(1)", "split(axis 0)", "select(axis 0, a)", "select(axis 0, 0:99999999999)"]
)
def test_a_text_that_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        step_from_text(text)


@pytest.mark.parametrize(
    "shown", [None, {}, {"sources": []}, {"sources": ["a"], "steps": [], "shape": [-1]}]
)
def test_data_that_is_no_recipe_is_refused(shown: Any) -> None:
    run = run_of({"a": np.zeros(3)})
    with pytest.raises(BadInput):
        recipe_from_json(shown, lambda _: run.records[0])


def test_codes_with_one_scale_and_zero_point_need_no_tensor_of_them() -> None:
    codes = np.array([[-128, 0, 127], [3, 4, 5]], np.int8)
    run = run_of({"codes": codes})
    step = step_from_text("dequantise(axis 0, times 0.25, minus 3)")
    assert step_from_text(step.text()) == step
    made = result(run, Recipe(tuple(run.records), (step,), (2, 3)))
    np.testing.assert_array_equal(made, (codes.astype(np.float32) - 3) * np.float32(0.25))
    for text in ("dequantise(axis 0, times)", "dequantise(axis 0, times inf)"):
        with pytest.raises(BadInput, match="numbers cannot be read"):
            step_from_text(text)


@pytest.mark.parametrize("kind", [np.uint64, np.int64])
def test_the_float_in_the_low_half_of_a_word_is_read(kind: Any) -> None:
    scales = np.array([0.5, 1e-3, 3.0], np.float32)
    words = scales.view(np.uint32).astype(np.uint64)
    words[1] |= np.uint64(1 << 46)  # operators keep flags in the other half
    run = run_of({"codes": np.ones((3, 2), np.int8), "scale": words.astype(kind)})
    inner = Recipe((run.records[1],), (step_from_text("lowfloat"),), (3,))
    made = result(run, Recipe((run.records[0], inner), (Step("dequantise", 0),), (3, 2)))
    np.testing.assert_array_equal(made[:, 0], scales)
    with pytest.raises(BadInput, match="64 bits"):
        apply_recipe(run, Recipe((run.records[0],), (Step("lowfloat"),), (3, 2)))
