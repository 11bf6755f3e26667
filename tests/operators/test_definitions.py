"""Definitions without a recorded case, against torch or by hand; and what does not fit is said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

import driftline
from driftline.errors import BadInput
from driftline.operators import golden, known_operators
from driftline.operators.definitions.call import Tensor, Unfit, scale_of
from driftline.operators.definitions.registry import results

RNG = np.random.default_rng(0)


def draw(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def close(mine: Any, theirs: Any, rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(mine, float), np.asarray(theirs, float), rtol, 1e-6)


def wide(value: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(value)).double()


ACTIVATIONS = {
    1: torch.relu,
    2: lambda x: functional.gelu(x, approximate="tanh"),
    4: functional.silu,
    5: torch.log,
    8: torch.sigmoid,
    9: lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_activations_are_torchs(kind: int) -> None:
    x = np.abs(draw(5, 6)) if kind == 5 else draw(5, 6) * 4
    (found,) = golden("ActivationOperation", {"activationType": kind}, [x])
    close(found, ACTIVATIONS[kind](wide(x)))


def test_swiglu_halves_the_named_dimension() -> None:
    x = draw(4, 3)
    (found,) = golden("Activation", {"activationType": 6, "dim": 0}, [x])
    a, b = wide(x).chunk(2, 0)
    close(found, functional.silu(a) * b)


@pytest.mark.parametrize("flags", [(False, True), (False, False), (True, False)])
def test_linear_turns_what_it_is_told_to(flags: tuple[bool, bool]) -> None:
    x, w, bias = draw(3, 5), draw(5, 4), draw(4)
    given_x, given_w = (x.T if flags[0] else x), (w.T if flags[1] else w)
    param = {"transposeA": flags[0], "transposeB": flags[1], "hasBias": True}
    (found,) = golden("LinearOperation", param, [given_x, given_w, bias])
    close(found, wide(x) @ wide(w) + wide(bias))


@pytest.mark.parametrize("turned", [True, False])
def test_a_batched_product_turns_its_second_factor_as_told(turned: bool) -> None:
    x, w = draw(3, 2, 5), draw(2, 5, 4)
    param = {"matmulType": 1, "transposeB": turned}
    (found,) = golden("LinearOperation", param, [x, w.swapaxes(1, 2) if turned else w])
    close(found, torch.einsum("mbk,bkn->mbn", wide(x), wide(w)))
    if turned:
        (found,) = golden("LinearOperation", {"matmulType": 1}, [x, w.swapaxes(1, 2)])
        close(found, torch.einsum("mbk,bkn->mbn", wide(x), wide(w)))


def test_one_hot_is_ones_among_zeros_where_no_values_are_given() -> None:
    (found,) = golden("OnehotOperation", {"depth": 4, "axis": 1}, [np.array([2, 0])])
    assert found.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    values = [np.array([7]), np.array([-1])]
    (found,) = golden("OnehotOperation", {"depth": 2, "axis": 1}, [np.array([1]), *values])
    assert found.tolist() == [[-1, 7]]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_added_slices_have_the_size_of_what_was_added_up(axis: int) -> None:
    target, places = draw(3, 4, 5), np.array([1, 0, 1])
    shape = [3, 4, 5]
    shape[axis] = 3
    added = draw(*shape)
    inputs = [Tensor(each, each.dtype.name) for each in (target, places, added)]
    (found,) = results("IndexAddOperation", {"indexType": 1, "axis": axis}, inputs)
    ours = wide(target).index_add(axis, torch.from_numpy(places), wide(added))
    close(found.values, ours)
    assert found.terms == 3
    size = (wide(target) ** 2).index_add(axis, torch.from_numpy(places), wide(added) ** 2)
    close(scale_of(found), size.sqrt())


def test_where_takes_the_first_values_where_the_condition_holds() -> None:
    condition, x, y = np.array([True, False, True]), draw(3), draw(3)
    (found,) = golden("WhereOperation", {}, [condition, x, y])
    assert found.tolist() == [x[0], y[1], x[2]]


def test_an_int8_linear_layer_unpacks_its_scale() -> None:
    x = RNG.integers(-128, 128, (3, 64)).astype(np.int8)
    w = RNG.integers(-128, 128, (8, 64)).astype(np.int8)
    bias = RNG.integers(-1000, 1000, 8).astype(np.int32)
    scale = RNG.uniform(1e-4, 1e-3, 8).astype(np.float32)
    packed = scale.view(np.uint32).astype(np.int64)
    expected = (x.astype(int) @ w.astype(int).T + bias) * scale.astype(float)
    for given_scale in (packed, scale):
        (found,) = golden("LinearOperation", {"outDataType": 1}, [x, w, bias, given_scale])
        assert found.dtype == np.float16
        close(found, expected, 1e-3)
    (found,) = golden("LinearOperation", {"outDataType": 27}, [x, w, bias, packed])
    assert found.dtype.name == "bfloat16"
    # Rows that were quantised each by its own step are scaled back by it, after the channels.
    steps = np.array([1.0, 0.5, 3.0], np.float32)
    param = {"outDataType": 1, "quantMode": 2}
    (found,) = golden("LinearOperation", param, [x, w, bias, scale, steps])
    close(found, expected * steps[:, None], 1e-3)


def test_a_compressed_weight_is_said_to_be_one() -> None:
    with pytest.raises(BadInput, match="the weight is compressed"):
        x = np.ones((2, 64), np.int8)
        golden("LinearSparseOperation", {}, [x, np.ones(100, np.int8)])


def test_products_of_blocks_are_laid_out_by_their_strides() -> None:
    a, b = draw(24), draw(24)
    param = {"batch": 1, "headNum": 2, "m": [2], "n": [2], "k": [3]}
    param |= {"lda": [6], "ldb": [6], "ldc": [4], "strideA": [3], "strideB": [3], "strideC": [2]}
    param |= {"transposeA": False, "transposeB": True}
    (found,) = golden("StridedBatchMatmulOperation", param, [a[:12], b[:12]])
    left, right = a[:12].reshape(2, 2, 3), b[:12].reshape(2, 2, 3)  # (row, head, k)
    expected = np.einsum("mhk,nhk->mhn", left.astype(float), right.astype(float))
    close(found, expected.reshape(-1))


def attention(q: Any, k: Any, v: Any, mask: Any = None, scale: float = 0.5) -> Any:
    """(tokens, heads, size) by torch, keys shared among heads."""
    q, k, v = (wide(each).transpose(0, 1) for each in (q, k, v))
    shared = q.shape[0] // k.shape[0]
    k, v = (each.repeat_interleave(shared, 0) for each in (k, v))
    given_mask = None if mask is None else wide(mask)
    found = functional.scaled_dot_product_attention(q, k, v, given_mask, scale=scale)
    return found.transpose(0, 1).numpy()


def test_packed_attention_keeps_sequences_apart_and_hides_what_comes_later() -> None:
    q, k, v = draw(7, 4, 8), draw(7, 2, 8), draw(7, 2, 8)
    param = {"calcType": 3, "headNum": 4, "kvHeadNum": 2, "qkScale": 0.5}
    lengths = np.array([3, 4], np.int32)
    (found,) = golden("SelfAttentionOperation", param, [q, k, v, lengths])
    close(found[:3], attention(q[:3], k[:3], v[:3]))
    close(found[3:], attention(q[3:], k[3:], v[3:]))
    (causal,) = golden("SelfAttentionOperation", {**param, "maskType": 9}, [q, k, v, lengths])
    later = np.triu(np.full((4, 4), -np.inf), 1)
    close(causal[3:], attention(q[3:], k[3:], v[3:], later))


@pytest.mark.parametrize("shape", [(7, 4, 8), (7, 32), (1, 7, 32), (1, 7, 4, 8)])
def test_packed_attention_gives_tokens_in_the_shape_of_its_queries(shape: tuple[int, ...]) -> None:
    q, k, v = draw(7, 4, 8), draw(7, 2, 8), draw(7, 2, 8)
    param = {"calcType": 3, "headNum": 4, "kvHeadNum": 2, "qkScale": 0.5}
    given_all = [q.reshape(shape), k, v, np.array([3, 4], np.int32)]
    (found,) = golden("SelfAttentionOperation", param, given_all)
    assert found.shape == shape
    close(found.reshape(7, 4, 8)[:3], attention(q[:3], k[:3], v[:3]))


def test_a_mask_of_ones_hides_and_a_small_one_stands_for_the_triangle() -> None:
    q, k, v = draw(4, 2, 8), draw(4, 2, 8), draw(4, 2, 8)
    lengths = np.array([4], np.int32)
    param = {"calcType": 3, "headNum": 2, "qkScale": 0.5, "maskType": 1}
    later = attention(q, k, v, np.triu(np.full((4, 4), -np.inf), 1))
    for mask in (np.triu(np.ones((4, 4)), 1), np.triu(np.full((2, 2), -1e4), 1)):
        given_all = [q, k, v, mask.astype(np.float32), lengths]
        (found,) = golden("SelfAttentionOperation", param, given_all)
        close(found, later)


@pytest.mark.parametrize("kind", [4, 5, 6])
def test_packed_alibi_masks_are_those_of_their_slopes(kind: int) -> None:
    q, k, v = draw(6, 2, 8), draw(6, 2, 8), draw(6, 2, 8)
    slopes = np.array([0.5, 0.25])
    places = np.arange(6)
    away = (places[None] - places[:, None]).astype(float)
    if kind == 5:
        away = np.sqrt(np.abs(away)) * np.sign(away)
    elif kind == 6:
        away = np.broadcast_to(places.astype(float), (6, 6))
    hidden = np.triu(np.full((6, 6), -np.inf), 1)
    whole = away * slopes[:, None, None] + hidden
    corner = (-away + np.triu(np.full((6, 6), 6e4), 1))[:4, :4]
    param = {"calcType": 3, "headNum": 2, "qkScale": 0.5, "maskType": kind}
    given_all = [q, k, v, corner.astype(np.float32), np.array([6], np.int32)]
    (found,) = golden("SelfAttentionOperation", param, [*given_all, -slopes.astype(np.float32)])
    close(found, attention(q, k, v, whole))


def test_attention_over_a_cache_puts_the_new_tokens_in_first() -> None:
    heads, size, longest = 2, 4, 6
    cache_k, cache_v = draw(3, 2, longest, 8), draw(3, 2, longest, 8)
    q, k, v = draw(2, 8), draw(2, 8), draw(2, 8)
    ends, lengths, layer = (np.array(each, np.int32) for each in ([3, 5], [1, 1], [1]))
    param = {"calcType": 2, "headNum": heads, "qkScale": 0.5}
    given_all = [q, k, v, cache_k, cache_v, ends, lengths, layer]
    (found,) = golden("SelfAttentionOperation", param, given_all)
    for batch, end in enumerate(ends):
        keys, values = cache_k[1, batch, :end].copy(), cache_v[1, batch, :end].copy()
        keys[-1], values[-1] = k[batch], v[batch]
        expected = attention(
            q[batch].reshape(1, heads, size),
            keys.reshape(-1, heads, size),
            values.reshape(-1, heads, size),
        )
        close(found[batch], expected.reshape(-1))


def test_paged_attention_follows_the_block_table() -> None:
    q, keys, values = draw(2, 4, 8), draw(5, 4, 2, 8), draw(5, 4, 2, 8)
    table = np.array([[3, 1], [4, -1]], np.int32)
    lengths = np.array([6, 3], np.int32)
    param = {"headNum": 4, "kvHeadNum": 2, "qkScale": 0.5}
    (found,) = golden("PagedAttentionOperation", param, [q, keys, values, table, lengths])
    first = np.concatenate([keys[3], keys[1]])[:6], np.concatenate([values[3], values[1]])[:6]
    close(found[:1], attention(q[:1], *first))
    close(found[1:], attention(q[1:], keys[4, :3], values[4, :3]))


def test_the_gradient_of_a_packed_softmax_is_autograds() -> None:
    lengths, heads = [2, 3], 2
    rows, grads, expected = [], [], []
    for length in lengths:
        x = wide(draw(heads * length, length)).requires_grad_()
        y, grad = torch.softmax(x, -1), wide(draw(heads * length, length))
        y.backward(grad)
        rows.append(y.detach().reshape(-1))
        grads.append(grad.reshape(-1))
        expected.append(x.grad.reshape(-1))
    given_both = [torch.cat(rows).numpy(), torch.cat(grads).numpy()]
    param = {"headNum": heads, "qSeqLen": lengths}
    (found,) = golden("FastSoftMaxGradOperation", param, given_both)
    close(found, torch.cat(expected))


@pytest.mark.parametrize(("kind", "name"), [(1, "amax"), (2, "amin"), (3, "sum")])
def test_reductions_over_several_axes_make_them_disappear(kind: int, name: str) -> None:
    x = draw(2, 3, 4)
    (found,) = golden("ReduceOperation", {"reduceType": kind, "axis": [0, 2]}, [x])
    close(found, getattr(wide(x), name)((0, 2)))


def test_a_norm_with_a_residual_also_gives_the_sum() -> None:
    x, residual, gamma = draw(3, 8), draw(3, 8), draw(8)
    param = {"layerType": 2, "preNormParam": {"epsilon": 1e-5}}
    inputs = [x, residual, gamma]
    normed, total = golden("RmsNormOperation", param, inputs)
    # The addition and the norm each round once.
    tensors = [Tensor(tensor, "float32") for tensor in inputs]
    assert [made.terms for made in results("RmsNorm", param, tensors)] == [2, 2]
    close(normed, functional.rms_norm(wide(x + residual), (8,), wide(gamma), 1e-5))
    close(total, x + residual)


def test_a_norm_without_gamma_is_the_plain_norm() -> None:
    x = draw(3, 8)
    (found,) = golden("RmsNormOperation", {"layerType": 1}, [x])
    close(found, functional.rms_norm(wide(x), (8,), None, 1e-5))


@pytest.mark.parametrize(("kind", "group"), [(2, "preNormParam"), (3, "postNormParam")])
def test_the_residual_of_a_layer_norm_is_scaled_before_it_is_added(kind: int, group: str) -> None:
    x, residual, gamma, beta = draw(3, 8), draw(3, 8), draw(8), draw(8)
    param = {"layerType": kind, group: {"epsilon": 1e-5, "zoomScaleValue": 2.5}}
    normed, *total = golden("LayerNormOperation", param, [x, residual, gamma, beta])
    added = wide(x) + 2.5 * wide(residual)
    close(normed, functional.layer_norm(added, (8,), wide(gamma), wide(beta), 1e-5))
    assert len(total) == (kind == 2)
    for each in total:
        close(each, added)


def by_rows(values: Any) -> tuple[Any, Any]:
    """Whole steps between -127 and 127, and the size of a step of each row."""
    scale = np.abs(values).max(-1, keepdims=True) / 127
    return np.rint(values / scale), scale[..., 0]


def test_a_dynamically_quantised_norm_adds_its_beta_first() -> None:
    x, gamma, beta = draw(3, 8), draw(8), 3 * draw(8)
    param = {"layerType": 1, "normParam": {"epsilon": 1e-5, "dynamicQuantType": 1}}
    normed = functional.rms_norm(wide(x), (8,), wide(gamma), 1e-5).numpy()
    for inputs, expected in (([x, gamma], normed), ([x, gamma, beta], normed + beta)):
        steps, scale = golden("RmsNormOperation", param, inputs)
        wanted, sizes = by_rows(expected)
        np.testing.assert_array_equal(steps, wanted)
        close(scale, sizes)
    param["normParam"]["beginNormAxis"] = 1
    steps, scale = golden("LayerNormOperation", param, [x, gamma, beta])
    layer = functional.layer_norm(wide(x), (8,), wide(gamma), wide(beta), 1e-5).numpy()
    wanted, sizes = by_rows(layer)
    np.testing.assert_array_equal(steps, wanted)
    close(scale, sizes)


def test_rstd_is_the_second_output_where_it_is_asked_for() -> None:
    x, gamma = draw(3, 8), draw(8)
    param = {"layerType": 1, "normParam": {"rstd": True, "epsilon": 1e-5}}
    _, rstd = golden("RmsNormOperation", param, [x, gamma])
    close(rstd, 1 / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-5))
    assert rstd.dtype == np.float32


def test_what_was_only_selected_must_be_the_same_to_the_last_bit() -> None:
    tensor = Tensor(draw(3, 8), "float32")
    (relu,) = results("Activation", {"activationType": 1}, [tensor])
    (swish,) = results("Activation", {"activationType": 4}, [tensor])
    assert relu.exact and not swish.exact


def test_rows_are_quantised_by_their_own_scale() -> None:
    x = np.array([[1.0, -2.0, 4.0], [0.0, 0.0, 0.0]], np.float16)
    steps, scale = golden("ElewiseOperation", {"elewiseType": 19}, [x])
    assert steps.tolist() == [[32, -64, 127], [0, 0, 0]]
    close(scale, [4 / 127, 0])


def test_unpadding_joins_the_sequences_and_says_where_tokens_were() -> None:
    ids = np.array([[5, 6, 0, 0], [7, 8, 9, 0]])
    offsets, lengths = np.array([[2], [3]], np.int32), np.array([[2], [3]], np.int32)
    count = np.array([[5]])
    flat, before, padding = golden("UnpadOperation", {}, [ids, offsets, count, lengths])
    assert flat.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert before.tolist() == [[0], [2]]
    assert padding.tolist() == [[0, 0, 2, 2, 2, 0, 0, 0]]


def test_gathering_slicing_and_splitting_take_what_numpy_takes() -> None:
    x = draw(4, 6)
    (found,) = golden("GatherOperation", {"axis": 1}, [x, np.array([[0, 5], [2, 2]])])
    assert found.tolist() == x[:, [[0, 5], [2, 2]]].tolist()
    (found,) = golden("SliceOperation", {"offsets": [1, -4], "size": [2, -1]}, [x])
    assert found.tolist() == x[1:3, 2:].tolist()
    parts = golden("SplitOperation", {"splitDim": -1, "splitNum": 3}, [x])
    assert [part.tolist() for part in parts] == [p.tolist() for p in np.split(x, 3, -1)]


def test_only_the_size_of_a_result_is_bounded_not_that_of_what_it_is_taken_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("driftline.operators.definitions.call.LARGEST", 100)
    x = draw(50, 4)
    (found,) = golden("GatherOperation", {"axis": 0}, [x, np.arange(25)])
    assert found.tolist() == x[:25].tolist()
    with pytest.raises(BadInput, match="the result would have 104 elements"):
        golden("GatherOperation", {"axis": 0}, [x, np.arange(26)])


def test_one_value_of_a_single_class_is_hot() -> None:
    (found,) = golden("OnehotOperation", {"depth": 1, "axis": 1}, [np.array([0, 1, 0])])
    assert found.tolist() == [[1], [0], [1]]


def test_parallel_layers_take_the_inputs_of_every_rank() -> None:
    xs, ws = [draw(4, 3) for _ in range(2)], [draw(5, 3) for _ in range(2)]
    given_all = [xs[0], ws[0], xs[1], ws[1]]
    total = sum(wide(x) @ wide(w).T for x, w in zip(xs, ws, strict=True))
    param = {"rankSize": 2, "rank": 1, "type": 0}
    close(golden("LinearParallelOperation", param, given_all)[0], total)
    scattered = golden("LinearParallelOperation", {**param, "type": 1}, given_all)[0]
    close(scattered, total[2:])
    gathered = golden("LinearParallelOperation", {**param, "type": 2}, given_all)[0]
    close(gathered, torch.cat([wide(x) for x in xs]) @ wide(ws[1]).T)
    alone = golden("LinearParallelOperation", {**param, "type": 3}, given_all)[0]
    close(alone, wide(xs[1]) @ wide(ws[1]).T)
    with pytest.raises(BadInput, match="type 4 of a parallel layer is not defined here"):
        golden("LinearParallelOperation", {**param, "type": 4}, given_all)
    assert golden("AllGatherOperation", {"rankSize": 2}, xs)[0].shape == (2, 4, 3)
    assert golden("BroadcastOperation", {"rankSize": 2, "rankRoot": 1}, xs)[0].tolist() == (
        xs[1].tolist()
    )


def test_torch_tensors_are_taken_and_bfloat16_is_given_back() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    (found,) = driftline.operators.golden("Softmax", {"axes": [-1]}, [x])
    assert found.dtype.name == "bfloat16"
    close(found, torch.softmax(x.double(), -1), 4e-3)


def test_an_unknown_operator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadInput, match="no golden implementation") as found:
        golden("SoftMaxOperation", {}, [])
    assert "Softmax" in found.value.hint


@pytest.mark.parametrize(
    ("kind", "param", "shapes", "said"),
    [
        ("Linear", {"hasBias": False}, [(2, 3), (4, 5)], "3 columns, but 5 rows"),
        ("Softmax", {}, [(2, 3)], "parameter axes is missing"),
        ("Softmax", {"axes": [5]}, [(2, 3)], "axes 5 does not exist"),
        ("Softmax", {"axes": "last"}, [(2, 3)], "no list of whole numbers"),
        ("RmsNorm", {"layerType": 2}, [(2, 3)], "input 1 .residual. is missing; 1 input is there"),
        ("Softmax", {"axes": [0]}, [], "no input is there"),
        ("RmsNorm", {"layerType": 1, "normParam": 7}, [(2, 3), (3,)], "no group of parameters"),
        ("RmsNorm", {"layerType": 1}, [(2, 3), (4,)], "gamma has 4 elements, rows have 3"),
        ("Fill", {"withMask": False, "outDim": [10**9, 10**9]}, [], "would have"),
        ("Fill", {"withMask": False, "outDim": [2, -1]}, [], "-1.* is no shape"),
        ("Elewise", {"elewiseType": 99}, [(2,)], "elewiseType 99 is not known"),
        ("Elewise", {"elewiseType": 8}, [(2, 3), (4, 5)], "do not fit together"),
        ("Elewise", {"elewiseType": 8}, [(10**5, 1), (1, 10**5)], "10000000000 elements"),
        ("Linear", {"hasBias": False}, [(10**5, 1), (10**5, 1)], "10000000000 elements"),
        ("Where", {}, [(10**5, 1), (1, 10**5), (1,)], "10000000000 elements"),
        ("Onehot", {"depth": 0}, [(3,)], "depth 0 is no size"),
        ("Onehot", {"depth": 2**31}, [(3,)], "depth 2147483648 is no size"),
    ],
)
def test_what_does_not_fit_is_said_in_words(
    kind: str, param: dict[str, Any], shapes: list[tuple[int, ...]], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        golden(kind, param, [np.ones(shape, np.float16) for shape in shapes])


NAMES = [
    "activationType",
    "elewiseType",
    "layerType",
    "normParam",
    "preNormParam",
    "postNormParam",
    "epsilon",
    "quantType",
    "beginNormAxis",
    "axes",
    "axis",
    "perm",
    "multiples",
    "size",
    "stride",
    "offset",
    "outDim",
    "value",
    "withMask",
    "depth",
    "num",
    "starts",
    "ends",
    "strides",
    "transdataType",
    "outCrops",
    "topkExpertNum",
    "cumSumNum",
    "numSamples",
    "randSeed",
    "rotaryCoeff",
    "headNum",
    "kvHeadNum",
    "calcType",
    "maskType",
    "kvcacheCfg",
    "seqLen",
    "qSeqLen",
    "rankSize",
    "rank",
    "type",
    "allReduceType",
    "topk",
    "topkToppSamplingType",
    "randSeeds",
    "m",
    "n",
    "k",
    "lda",
    "ldb",
    "ldc",
    "strideA",
    "strideB",
    "strideC",
    "batch",
    "splitDim",
    "splitNum",
    "splitSizes",
    "concatDim",
    "indexType",
    "reduceType",
    "offsets",
    "hasBias",
    "transposeA",
]
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([10**12, -(10**12), 0.5, float("nan"), float("inf")])
)
VALUES = st.one_of(
    NUMBERS,
    st.lists(NUMBERS, max_size=4),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=3),
)
ARRAYS = st.tuples(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(["float32", "float16", "int8", "int32", "int64", "bool", "uint64"]),
    st.integers(-3, 300),
)


@settings(max_examples=400, deadline=None)
@example("Linear", {}, [([0], "int32", 0), ([0], "float32", 0)])
@given(
    st.sampled_from(known_operators()),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8),
    st.lists(ARRAYS, max_size=8),
)
def test_whatever_a_stranger_wrote_is_computed_or_refused_in_words(
    kind: str, param: dict[str, Any], arrays: list[Any]
) -> None:
    tensors: list[Tensor] = []
    for shape, dtype, fill in arrays:
        values = (np.arange(int(np.prod(shape))) % 7 - 3 + fill).reshape(shape)
        tensors.append(Tensor(values.astype(np.float64 if "float" in dtype else dtype), dtype))
    json.dumps(param)
    try:
        found = results(kind, param, tensors)
    except Unfit as why:
        assert str(why)
    else:
        assert all(each.values.shape is not None for each in found)


def test_a_cast_takes_the_type_of_its_parameter() -> None:
    x = np.array([1.7, -1.7, 300.0], np.float32)
    assert golden("Elewise", {"elewiseType": 1, "outTensorType": 1}, [x])[0].dtype == np.float16
    (cut,) = golden("Elewise", {"elewiseType": 1, "outTensorType": 3}, [x])
    assert (cut.dtype, cut.tolist()) == (np.int32, [1, -1, 300])
    with pytest.raises(BadInput, match="outTensorType -1"):
        golden("Elewise", {"elewiseType": 1}, [x])


def test_a_quantised_layer_norm_is_scaled_and_clamped() -> None:
    x, gamma, beta = draw(3, 8), draw(8), draw(8)
    param = {"layerType": 1, "normParam": {"beginNormAxis": 1, "quantType": 2}}
    given_all = [x, gamma, beta, np.array([0.02], np.float32), np.array([3], np.int8)]
    (found,) = golden("LayerNormOperation", param, given_all)
    normed = functional.layer_norm(wide(x), (8,), wide(gamma), wide(beta), 1e-5)
    steps = np.rint(normed.numpy() / np.float64(np.float32(0.02)) + 3)
    np.testing.assert_array_equal(found, np.clip(steps, -128, 127))


def test_asymmetric_rows_use_all_steps_between_their_ends() -> None:
    x = np.array([[0.0, 1.0, 2.55]], np.float32)
    param = {"elewiseType": 19, "quantParam": {"asymmetric": True}}
    steps, scale, offset = golden("ElewiseOperation", param, [x])
    close(scale, [0.01])
    close(offset, [-127.5], 1e-4)
    assert steps[0, 0] in (-128, -127) and steps[0, 2] == 127


def test_the_gradient_of_rope_is_the_one_its_library_defines() -> None:
    grads = [draw(3, 8), draw(3, 8)]
    cos, sin = draw(4, 4), draw(4, 4)
    found = golden("RopeGradOperation", {"qSeqLen": [1, 2]}, [*grads, cos, sin])
    rows = [0, 0, 1]
    turned = np.concatenate([sin[:, 2:], -sin[:, :2]], 1)
    factor = np.tile((cos + turned)[rows], (1, 2))
    for mine, grad in zip(found, grads, strict=True):
        close(mine, grad * factor, 1e-4)


def test_a_cache_takes_new_tokens_behind_the_old_ones() -> None:
    cache, new = np.zeros((2, 2, 4, 3), np.float16), draw(3, 3, dtype=np.float16)
    numbers = [np.array(each, np.int32) for each in ([1], [4, 2], [1, 2])]
    (found,) = golden("KvCacheOperation", {}, [new, numbers[0], cache, *numbers[1:]])
    assert found[1, 0, 3].tolist() == new[0].tolist()
    assert found[1, 1, :2].tolist() == new[1:].tolist()
    assert np.count_nonzero(found.any(-1)) == 3


@pytest.mark.parametrize("name", known_operators())
def test_every_definition_can_be_written_into_a_script_of_its_own(name: str) -> None:
    import ast

    from driftline.operators.definitions.registry import definition_of
    from driftline.operators.repro import source_of

    definition = definition_of(name)
    assert definition is not None
    text = source_of(definition.__module__)
    assert "driftline" not in text.replace("driftline opcheck", "")
    defined: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.append(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                defined += [each.id for each in names if isinstance(each, ast.Name)]
    twice = {each for each in defined if defined.count(each) > 1}
    assert not twice, "files of one script must not overwrite each other's names"
    assert definition.__name__ in defined
    assert not {"main", "decoded", "compared", "OPERATOR", "PARAM"} & set(defined)


def test_the_last_tokens_keep_their_type() -> None:
    tokens = draw(5, 4, dtype=np.float16)
    lengths = np.array([[3], [2]], np.int32)
    (found,) = golden("PadOperation", {}, [tokens, np.zeros((1, 5)), lengths, np.zeros((2, 4))])
    assert found.dtype == np.float16
    assert found.tolist() == tokens[[2, 4]].tolist()


PROBS = np.array([[0.1, 0.4, 0.05, 0.3, 0.15], [0.5, 0.05, 0.05, 0.3, 0.1]], np.float32)
TOP_K, TOP_P = np.array([[2], [4]], np.int32), np.array([[0.9], [0.85]], np.float32)


def test_each_row_is_drawn_with_its_own_seed() -> None:
    param = {"topkToppSamplingType": 1, "randSeeds": [1, 7]}
    chosen, weights = golden("TopkToppSamplingOperation", param, [PROBS, TOP_K, TOP_P])
    # Row 0: 0.4, 0.7, 0.85 stay below 0.9; 0.840 of 0.85 is 0.714, beyond 0.7: the third largest.
    # Row 1: 0.5, 0.8 stay below 0.85; 0.487 of 0.8 is 0.39, below 0.5: the largest.
    assert chosen.tolist() == [[4], [0]]
    close(weights, [[0.15], [0.5]])


def test_a_draw_by_given_numbers_also_gives_the_logarithms() -> None:
    param = {"topkToppSamplingType": 3, "logProbsSize": 3}
    drawn = np.array([[0.1], [0.99]], np.float32)
    chosen, _, logs = golden("TopkToppSampling", param, [PROBS, TOP_K, TOP_P, drawn])
    assert chosen.tolist() == [[1], [3]]
    close(logs[0], np.log(np.array([0.4, 0.3, 0.15]) / 0.85), 1e-4)
    close(logs[1], [np.log(0.5 / 0.8), np.log(0.3 / 0.8), -9999.0], 1e-4)


def test_the_largest_quotient_by_exponential_numbers_is_drawn() -> None:
    divisors = np.array([[1.0, 0.5, 1, 1, 1], [2.0, 0.1, 1, 1, 1]], np.float32)
    for kind, outputs in ((2, 2), (4, 3)):
        param = {"topkToppSamplingType": kind, "logProbsSize": 2}
        found = golden("TopkToppSampling", param, [PROBS, TOP_K, TOP_P, divisors])
        assert len(found) == outputs
        # Divisors belong to ranks: 0.4/1, 0.3/0.5, 0.15/1; and 0.5/2, 0.3/0.1.
        assert found[0].tolist() == [[3], [3]]


def test_a_parallel_layer_of_a_rank_that_is_not_there_or_without_a_weight_is_refused() -> None:
    xs = [draw(4, 3) for _ in range(2)]
    for rank in (2, -1):
        with pytest.raises(BadInput, match=f"rank {rank} of 2 does not exist"):
            golden("LinearParallelOperation", {"rankSize": 2, "rank": rank, "type": 3}, [*xs, *xs])
    with pytest.raises(BadInput, match="needs a weight"):
        golden("LinearParallelOperation", {"rankSize": 2, "rank": 1, "type": 3}, xs)
