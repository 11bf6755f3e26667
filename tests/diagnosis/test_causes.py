"""Every kind of bug, planted into arrays: the rule names it, and nothing else does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from driftline.comparison.evidence.error_stats import rounded
from driftline.comparison.evidence.leaf_functions import ACTIVATIONS as FUNCTIONS
from driftline.diagnosis.causes.case import Case
from driftline.diagnosis.causes.registry import CAUSES, best_clue, clues

UNIT = 2.0**-24
BF16 = 2.0**-8


def tensor(seed: int = 0, shape: tuple[int, ...] = (4, 24, 64)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) * (
        1.0 + np.random.default_rng(seed + 1).random(shape[-1])
    )


def case(r: np.ndarray, c: np.ndarray, *, coarse: bool = False, **more: Any) -> Case:
    """A candidate in float32, or rounded to bfloat16."""
    name, unit = ("bfloat16", BF16) if coarse else ("float32", UNIT)
    noise = 0.6 * unit if coarse else 8 * unit
    return Case(r, rounded(c, name), noise, unit, name, **more)


def heads(x: np.ndarray) -> np.ndarray:
    b, t, w = x.shape
    return x.reshape(b, t, 4, w // 4)[:, :, [2, 0, 3, 1]].reshape(b, t, w)


def tile(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, 8:16, 16:32] = 0.0
    return x


def expert(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, ::3] = 0.0
    return x


def copied(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, 8:16] = x[:, 0:8]
    return x


def dropped(x: np.ndarray) -> np.ndarray:
    keep = np.random.default_rng(9).random(x.shape) >= 0.1
    return np.where(keep, x / 0.9, 0.0)


def merged(x: np.ndarray) -> np.ndarray:
    b, t, w = x.shape
    return x.reshape(b, t, 8, w // 8).transpose(0, 2, 1, 3).reshape(b, t, w)


def late(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, 17:] += 0.3 * tensor(5, x[:, 17:].shape)
    return x


def all_but_last(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, :-1] += 0.3 * tensor(5, x[:, :-1].shape)
    return x


def shuffled(x: np.ndarray) -> np.ndarray:
    return x[..., np.random.default_rng(3).permutation(x.shape[-1])]


def interleaved(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)


PLANTED: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "scale": ("scale", lambda x: 1.03 * x),
    "halved": ("scale", lambda x: 0.5 * x),
    "offset": ("offset", lambda x: x + tensor(7, (x.shape[-1],))),
    "constant": ("offset", lambda x: x + 0.25),
    "heads": ("permutation", heads),
    "channels": ("permutation", shuffled),
    "interleaved": ("permutation", interleaved),
    "sequences": ("permutation", lambda x: x[[1, 0, 3, 2]]),
    "merge": ("transpose", merged),
    "shift": ("shift", lambda x: np.roll(x, 1, axis=1)),
    "shift back": ("shift", lambda x: np.roll(x, -1, axis=1)),
    "tile": ("zeroed", tile),
    "expert": ("zeroed", expert),
    "channel": ("zeroed", lambda x: np.where(np.arange(x.shape[-1]) == 5, 0.0, x)),
    "copied": ("stale", copied),
    "clipped": ("saturation", lambda x: np.clip(x, -1.5, 1.5)),
    "fp8": ("low-precision", lambda x: rounded(x, "float8_e4m3fn")),
    "fp8 (e5m2)": ("low-precision", lambda x: rounded(x, "float8_e5m2")),
    "dropout": ("dropout", dropped),
}


@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_bug_is_named(kind: str, coarse: bool) -> None:
    cause, plant = PLANTED[kind]
    r = tensor()
    found, all_of_them = best_clue(case(r, plant(r), coarse=coarse))
    assert found is not None, all_of_them
    assert found.cause == cause, all_of_them
    assert found.cause in CAUSES
    assert found.sentence


def emptied(*region: Any) -> Callable[[np.ndarray], np.ndarray]:
    def plant(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[region] = 0.0
        return x

    return plant


ALL = slice(None)
SENTENCES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str, str]] = {
    "channels": (
        emptied(ALL, ALL, slice(4, 8)),
        "channels 4 to 7 are zero and should not be",
        "channels 4 to 7",
    ),
    "first channels": (
        emptied(ALL, ALL, slice(0, 2)),
        "channels 0 to 1 are zero and should not be",
        "channels 0 to 1",
    ),
    "last channels": (
        emptied(ALL, ALL, slice(60, 64)),
        "channels 60 to 63 are zero and should not be",
        "channels 60 to 63",
    ),
    "channels apart": (
        emptied(ALL, ALL, [3, 4, 9]),
        "3 channels are zero and should not be",
        "3 channels",
    ),
    "one token": (emptied(1, 5), "one token is zero and should not be", "one token"),
    "tokens": (emptied(2, slice(3, 8)), "5 tokens are zero and should not be", "5 tokens"),
    "tile": (
        emptied(0, slice(8, 16), slice(16, 32)),
        "a tile of 8 tokens x 16 channels is zero and should not be",
        "a tile of 8 tokens x 16 channels",
    ),
    "all": (emptied(...), "everything is zero and should not be", "everything"),
    "token before": (
        lambda x: np.roll(x, 1, axis=1),
        "every token has what belongs to the token before it",
        "+1",
    ),
    "token after": (
        lambda x: np.roll(x, -1, axis=1),
        "every token has what belongs to the token after it",
        "-1",
    ),
    "two tokens before": (
        lambda x: np.roll(x, 2, axis=1),
        "every token has what belongs to 2 tokens before it",
        "+2",
    ),
    "two tokens after": (
        lambda x: np.roll(x, -2, axis=1),
        "every token has what belongs to 2 tokens after it",
        "-2",
    ),
    "copied": (copied, "32 of 96 tokens hold what belongs to other tokens", "rows"),
}


@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SENTENCES)
def test_what_is_said_of_a_planted_bug_is_what_was_planted(kind: str, coarse: bool) -> None:
    plant, sentence, detail = SENTENCES[kind]
    r = tensor()
    found, all_of_them = best_clue(case(r, plant(r), coarse=coarse))
    assert found is not None, all_of_them
    assert (found.sentence, found.detail) == (sentence, detail)
    assert 0.95 < found.score <= 1.0


def clipped_count() -> int:
    return int(np.count_nonzero(np.abs(tensor()) > 1.5))


NUMBERS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "the output is 1.03 times what it should be, everywhere alike": ("scale", lambda x: 1.03 * x),
    "the output is 0.5 times what it should be, everywhere alike": ("scale", lambda x: 0.5 * x),
    "the constant 0.25 is added everywhere": ("offset", lambda x: x + 0.25),
    "the constant -0.5 is added everywhere": ("offset", lambda x: x - 0.5),
    "one constant per channel is added to every token": (
        "offset",
        lambda x: x + tensor(7, (x.shape[-1],)),
    ),
    "blocks of 16 channels (heads) stand in another order": ("permutation", heads),
    "63 of 64 channels stand in another order": ("permutation", shuffled),  # one stays in place
    "channels are interleaved where they should be split in halves, or the reverse": (
        "permutation",
        interleaved,
    ),
    "sequences of the batch stand in another order": ("permutation", lambda x: x[[1, 0, 3, 2]]),
    "8 heads were joined without putting tokens first again": ("transpose", merged),
    f"{clipped_count()} values stop at -1.5 and 1.5": (
        "saturation",
        lambda x: np.clip(x, -1.5, 1.5),
    ),
    "every value lies on the grid of fp8 (e4m3)": (
        "low-precision",
        lambda x: rounded(x, "float8_e4m3fn"),
    ),
    "every value lies on the grid of fp8 (e5m2)": (
        "low-precision",
        lambda x: rounded(x, "float8_e5m2"),
    ),
}


@pytest.mark.parametrize("sentence", NUMBERS)
def test_the_numbers_in_a_sentence_are_those_that_were_planted(sentence: str) -> None:
    cause, plant = NUMBERS[sentence]
    r = tensor()
    found, all_of_them = best_clue(case(r, plant(r)))
    assert found is not None, all_of_them
    assert (found.cause, found.sentence) == (cause, sentence)


def test_the_sentence_of_a_dropout_counts_its_zeros_and_names_its_probability() -> None:
    r = tensor()
    c = dropped(r)
    found, _ = best_clue(case(r, c))
    assert found is not None
    zeros = float((c == 0).mean())
    assert found.sentence == (
        f"{zeros:.1%} of the elements are zero, the others 1.111 times as large: dropout of 0.1"
    )


@pytest.mark.parametrize(
    ("calls", "part", "words"),
    [
        (1, slice(32, None), "part of it is still what stood there at the call before"),
        (2, slice(32, None), "part of it is still what stood there at 2 calls before"),
        (1, slice(None), "all of it is still what stood there at the call before"),
    ],
)
def test_a_stale_output_is_told_with_how_much_of_it_and_since_when(
    calls: int, part: slice, words: str
) -> None:
    r = tensor()
    before = tuple(tensor(seed) for seed in range(1, 4))
    c = r.copy()
    c[..., part] = before[calls - 1][..., part]
    found, _ = best_clue(case(r, c, before=before))
    assert found is not None
    assert found.sentence == words


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        ("mask", "tokens from position 17 on are off and none before: "),
        ("nan", "one element is NaN while all inputs are finite"),
        ("nondeterminism", "the same program run again differs here by 0.015 of the output"),
        ("missing-reduction", "the sum over 4 ranks is right, each rank holds only its part of it"),
    ],
)
def test_what_other_tensors_show_of_a_bug_is_told_with_its_numbers(
    cause: str, sentence: str
) -> None:
    r = tensor()
    hole = np.where(np.arange(r.size).reshape(r.shape) == 77, np.nan, r)
    parts = [tensor(seed) for seed in range(4)]
    cases = {
        "mask": case(r, late(r), site="layers.1.self_attn", class_name="Attention"),
        "nan": case(r, hole, inputs={"x": r}),
        "nondeterminism": case(r, r + 1e-2 * tensor(2), repeats=(r + 1e-2 * tensor(3),)),
        "missing-reduction": case(sum(parts), parts[0], ranks=tuple(parts[1:])),
    }
    found, all_of_them = best_clue(cases[cause])
    assert found is not None, all_of_them
    assert found.cause == cause
    assert found.sentence.startswith(sentence)


@pytest.mark.parametrize("plant", [late, all_but_last])
def test_an_attention_that_is_off_at_some_positions_has_a_wrong_mask(
    plant: Callable[[np.ndarray], np.ndarray],
) -> None:
    r = tensor()
    found, _ = best_clue(case(r, plant(r), site="layers.1.self_attn", class_name="Attention"))
    assert found is not None
    assert found.cause == "mask"


def test_the_same_error_in_a_linear_layer_is_no_mask() -> None:
    r = tensor()
    found, _ = best_clue(case(r, late(r), site="mlp.up_proj", class_name="Linear"))
    assert found is None


def test_error_on_padding_alone_is_a_mask() -> None:
    r = tensor()
    pads = np.zeros(r.shape[:2], dtype=bool)
    pads[1, :7] = pads[3, :11] = True
    c = np.where(pads[..., None], r + tensor(4), r)
    found, _ = best_clue(case(r, c, pads=pads))
    assert found is not None
    assert (found.cause, found.detail) == ("mask", "pads")


def test_error_on_the_tokens_that_can_see_padding_is_a_mask() -> None:
    """Pads on the left that nobody masks: what comes behind them sees them."""
    r = tensor()
    pads = np.zeros(r.shape[:2], dtype=bool)
    pads[1, :7] = pads[3, :11] = True
    seeing = (np.cumsum(pads, axis=1) > 0) & ~pads
    found, all_of_them = best_clue(
        case(r, r + np.where(seeing[..., None], tensor(4), 0), pads=pads)
    )
    assert found is not None, all_of_them
    assert (found.cause, found.detail) == ("mask", "pads")
    assert found.sentence == "the error sits on the tokens that can see padding"
    some = seeing & (np.arange(r.shape[1]) % 2 == 0)
    found, _ = best_clue(case(r, r + np.where(some[..., None], tensor(4), 0), pads=pads))
    assert found is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (slice(0, 22), "every token but the last 2 tokens is off"),
        (slice(0, 23), "every token but the last token is off"),
        (slice(2, 24), "tokens from position 2 on are off and none before"),
        (slice(1, 24), ""),  # the first token sees itself alone, whatever is wrong
        (slice(8, 16), ""),
        (slice(0, 24, 2), ""),
    ],
)
def test_which_positions_of_an_attention_are_off_tells_a_mask(wrong: slice, words: str) -> None:
    r = tensor()
    c = r.copy()
    c[:, wrong] += 0.3 * tensor(5)[:, wrong]
    found, _ = best_clue(case(r, c, site="layers.1.self_attn", class_name="Attention"))
    if words:
        assert found is not None
        assert found.sentence.startswith(words)
    else:
        assert found is None or found.cause != "mask"


@pytest.mark.parametrize("right", ["silu", "gelu", "gelu (tanh)", "relu"])
@pytest.mark.parametrize("wrong", ["silu", "gelu", "gelu (tanh)", "relu", "no activation"])
def test_another_activation_is_named_with_both_functions(right: str, wrong: str) -> None:
    if right == wrong:
        return
    x = tensor()
    found, _ = best_clue(case(FUNCTIONS[right](x), FUNCTIONS[wrong](x), inputs={"input": x}))
    assert found is not None
    assert found.cause == "activation"
    assert f"computes {wrong} where the reference computes {right}" in found.sentence


def test_a_transposed_weight_is_found_from_input_and_output_alone() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 32, 48)), rng.standard_normal((48, 48))
    found, _ = best_clue(case(x @ w, x @ w.T, inputs={"input": x}))
    assert found is not None
    assert found.cause == "transpose"
    assert "weight" in found.sentence


def test_a_missing_bias_is_told_from_a_doubled_one() -> None:
    r, bias = tensor(), tensor(7, (64,))
    for times, word in ((-1.0, "missing"), (1.0, "doubled"), (-2.0, "negated")):
        found, _ = best_clue(case(r, r + times * bias, params={"bias": bias}))
        assert found is not None
        assert (found.cause, found.detail) == ("offset", word)


def norm(x: np.ndarray, eps: float, w: np.ndarray, b: np.ndarray | float = 0.0) -> np.ndarray:
    if isinstance(b, np.ndarray):
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w + b


@pytest.mark.parametrize("bias", [False, True], ids=["rms", "layer"])
def test_a_wrong_epsilon_is_told_from_a_scale(bias: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 24, 64)) * np.exp(rng.standard_normal((4, 24, 1)))
    w, b = 1 + 0.2 * rng.standard_normal(64), rng.standard_normal(64) if bias else 0.0
    r, c = norm(x, 1e-6, w, b), norm(x, 1e-2, w, b)
    found, _ = best_clue(case(r, c, inputs={"x": x}, site="ln_1", class_name="LayerNorm"))
    assert found is not None
    assert (found.cause, found.detail) == ("scale", "epsilon")


def test_a_scaled_weight_beside_an_unscaled_bias_is_a_scale() -> None:
    r, bias = tensor(), 5.0 * tensor(7, (64,))
    found, _ = best_clue(case(r + bias, 1.01 * r + bias))
    assert found is not None
    assert found.cause == "scale"


def test_a_norm_in_bfloat16_under_a_float32_name_is_low_precision() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 24, 64)), 1 + 0.2 * rng.standard_normal(64)
    r = norm(x, 1e-6, w)
    c = rounded(norm(rounded(x, "bfloat16"), 1e-6, w) * 1.0, "bfloat16")
    found, _ = best_clue(case(r, c, inputs={"x": x}, site="norm", class_name="RMSNorm"))
    assert found is not None
    assert found.cause == "norm-precision"


def test_a_product_of_rounded_inputs_is_low_precision_although_its_output_is_not_on_a_grid() -> (
    None
):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 32, 96)), rng.standard_normal((96, 64))
    for name in ("bfloat16", "float16", "tf32", "float8_e4m3fn"):
        c = rounded(x, name) @ rounded(w, name)
        found, _ = best_clue(case(x @ w, c, inputs={"input": x}, class_name="Linear"))
        assert found is not None, name
        assert found.cause == "low-precision"


def test_sums_kept_in_bfloat16_are_low_precision() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 32, 96)), rng.standard_normal((96, 64))
    total = np.zeros((4, 32, 64))
    for at in range(0, 96, 8):
        piece = rounded(x[..., at : at + 8] @ w[at : at + 8], "bfloat16")
        total = rounded(total + piece, "bfloat16")
    for bias in (0.0, rng.standard_normal(64)):  # with a bias its results lie on no grid
        found, all_of_them = best_clue(
            case(x @ w + bias, total + bias, inputs={"input": x}, class_name="Linear")
        )
        assert found is not None, all_of_them
        assert found.cause == "low-precision"


def test_eight_bit_integers_behind_floats_lie_on_equal_steps() -> None:
    r = tensor()
    step = np.abs(r).max() / 127
    found, _ = best_clue(case(r, np.rint(r / step) * step))
    assert found is not None
    assert found.cause == "low-precision"


def test_nan_is_born_where_all_inputs_are_finite_and_overflow_where_values_are_too_large() -> None:
    r = tensor()
    c = r.copy()
    c[0, 3, 5] = np.nan
    found, _ = best_clue(case(r, c, inputs={"x": r}))
    assert found is not None
    assert found.cause == "nan"
    big = r * 1e5
    over = np.where(np.abs(big) > 65504, np.copysign(np.inf, big), big)
    found, _ = best_clue(Case(big, over, 1e-3, 2.0**-11, "float16", inputs={"x": r}))
    assert found is not None
    assert (found.cause, found.detail) == ("saturation", "overflow")


def test_nan_that_came_in_was_not_born_here() -> None:
    r = tensor()
    c = np.where(np.arange(64) == 3, np.nan, r)
    assert not any(clue.cause == "nan" for clue in clues(case(r, c, inputs={"x": c})))


def test_parts_of_a_sum_over_ranks_are_a_missing_reduction() -> None:
    parts = [tensor(seed) for seed in range(4)]
    total = sum(parts)
    found, _ = best_clue(case(total, parts[0], ranks=tuple(parts[1:])))
    assert found is not None
    assert found.cause == "missing-reduction"
    same = case(total / 4, total, ranks=(total, total, total))
    found, _ = best_clue(same)
    assert found is not None
    assert found.cause == "missing-reduction"


def test_ranks_that_hold_the_same_mean_are_not_said_to_hold_parts() -> None:
    total = tensor()
    found, _ = best_clue(case(total, total / 2, ranks=(total / 2,)))
    assert found is not None
    assert found.cause == "scale"
    assert found.sentence == "it is 2 times too small: the mean over ranks for their sum"


def test_repeats_that_differ_are_non_determinism() -> None:
    r = tensor()
    again = r + 1e-2 * tensor(3)
    found, _ = best_clue(case(r, r + 1e-2 * tensor(2), repeats=(again,)))
    assert found is not None
    assert found.cause == "nondeterminism"
    found, _ = best_clue(case(r, 1.03 * r, repeats=(rounded(1.03 * r, "float32"),)))
    assert found is not None
    assert found.cause == "scale"


def test_another_modules_output_is_named_with_that_module() -> None:
    r, other = tensor(0), tensor(1)
    found, _ = best_clue(case(r, other, others={"layers.0.v_proj": other}))
    assert found is not None
    assert found.cause == "permutation"
    assert "layers.0.v_proj" in found.sentence


def test_what_stood_there_at_the_call_before_is_stale() -> None:
    r, earlier = tensor(0), tensor(1)
    c = r.copy()
    c[:, :, 32:] = earlier[:, :, 32:]
    found, _ = best_clue(case(r, c, before=(earlier,)))
    assert found is not None
    assert found.cause == "stale"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [1e-5, 1e-3, 5e-3, 0.1, 0.5, 1.4])
def test_an_error_of_no_known_kind_gets_no_name_but_that_of_rounding(
    seed: int, size: float
) -> None:
    """Structured in a way no rule knows: a product of low rank, per token and channel."""
    rng = np.random.default_rng(seed)
    r = tensor(seed)
    e = rng.standard_normal((96, 3)) @ rng.standard_normal((3, 64))
    e *= size * np.linalg.norm(r) / np.linalg.norm(e)
    found, all_of_them = best_clue(
        case(r, r + e.reshape(r.shape), inputs={"x": tensor(seed + 50)}, class_name="Linear")
    )
    assert found is None, all_of_them


@pytest.mark.parametrize("seed", range(6))
def test_another_random_tensor_gets_no_name(seed: int) -> None:
    r = tensor(seed)
    others = {"a": tensor(seed + 20), "b": tensor(seed + 21)}
    wrong = case(r, tensor(seed + 7), inputs={"x": tensor(seed + 9)}, others=others)
    assert best_clue(wrong)[0] is None
    in_attention = replace(wrong, site="self_attn", class_name="Attention")
    assert best_clue(in_attention)[0] is None


def test_a_linear_layer_that_was_given_other_heads_is_understood_from_its_output() -> None:
    from driftline.diagnosis.causes.linear_solve import implied_input
    from driftline.diagnosis.causes.registry import rules_for_inputs

    rng = np.random.default_rng(0)
    x, w = tensor(), rng.standard_normal((64, 64))
    seen = implied_input(case(x @ w, heads(x) @ w, inputs={"input": x}))
    assert seen is not None
    found, _ = best_clue(seen, rules_for_inputs())
    assert found is not None
    assert found.cause == "permutation"


def test_one_dimensional_and_tiny_tensors_raise_nothing() -> None:
    for shape in ((1,), (3,), (1, 1), (2, 2), (1, 1, 1), (2, 1, 8), (1, 4, 2, 8)):
        r = tensor(0, shape)
        for c in (r, r * 2, r + 1, np.zeros(shape), np.full(shape, np.nan), -r):
            best_clue(case(r, c, inputs={"x": r}))


def _attention(seed: int = 0, *, rope: bool = True, causal: bool = True) -> Any:
    from driftline.diagnosis.causes.attention_model import Attention, Turn

    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, 24, 4, 16)) * 2
    k, v = rng.standard_normal((2, 24, 2, 16)), rng.standard_normal((2, 24, 2, 16))
    angle = np.outer(np.arange(24), 10.0 ** -np.linspace(0, 2, 8))
    angle = np.concatenate([angle, angle], axis=1)
    seen = np.tri(24, dtype=bool) if causal else np.ones((24, 24), dtype=bool)
    turn = Turn(np.cos(angle), np.sin(angle)) if rope else None
    return Attention(q, k, v, 0.25, seen[None], turn)


def _attention_case(right: Any, wrong: np.ndarray, **more: Any) -> Case:
    """The names say nothing: what is what must follow from shapes and numbers."""
    parts = {
        "m.a": right.q.reshape(2, 24, -1),
        "m.b": right.k.reshape(2, 24, -1),
        "m.c": right.v.reshape(2, 24, -1),
    }
    if right.turn is not None:
        parts |= {"u": right.turn.cos[None], "w": right.turn.sin[None]}
    return case(right.output(), wrong, parts=parts, site="m", class_name="Block", **more)


_TRI = np.tri(24, dtype=bool)


@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        ({"scale": 0.25 * 1.07}, "scale", "scaled by 1.07"),
        ({"scale": 1.0}, "scale", "scaled by 3.99|scaled by 4"),
        ({"cap": 3.0}, "soft-cap", r"soft cap of (3|2.99|3.00)\d* in place of none"),
        ({"seen": np.ones((1, 24, 24), dtype=bool)}, "mask", "without its causal mask"),
        (
            {"seen": np.tri(24, k=1, dtype=bool)[None]},
            "mask",
            "off by one: tokens see the next one",
        ),
        ({"seen": (_TRI & ~np.tri(24, k=-7, dtype=bool))[None]}, "mask", "window of 7 tokens"),
        ({"turn.pairs": "neighbours"}, "permutation", "pairs neighbours in place of halves"),
        ({"tiled": True}, "permutation", "key heads shared in turns rather than in blocks"),
        ({"turn.late": 1}, "shift", "keys are rotated to the position before"),
        ({"turn": None}, "positions", "without rotation"),
        ({"turn.sides": "q"}, "positions", "keys are not rotated"),
        ({"slopes": np.array([0.5, 0.25, 0.125, 0.0625])}, "positions", "fall by 0.5"),
    ],
)
def test_a_mistake_inside_an_attention_is_recomputed_and_named(
    change: dict[str, Any], cause: str, words: str, coarse: bool
) -> None:
    right = _attention()
    ((name, value),) = change.items()
    if name.startswith("turn."):
        change = {"turn": right.turn._replace(**{name.removeprefix("turn."): value})}
    found, all_of_them = best_clue(
        _attention_case(right, replace(right, **change).output(), coarse=coarse)
    )
    assert found is not None, all_of_them
    assert found.cause == cause, all_of_them
    assert found.detail == "attention"
    assert re.search(words, found.sentence), found.sentence


@pytest.mark.parametrize("change", [{"scale": 0.4}, {"cap": 4.0}, {"scale": 0.3, "cap": 6.0}])
def test_an_attention_with_constants_of_its_own_is_read_as_it_is(change: dict[str, Any]) -> None:
    right = replace(_attention(), **change)
    found, all_of_them = best_clue(_attention_case(right, replace(right, tiled=True).output()))
    assert found is not None, all_of_them
    assert found.cause == "permutation", all_of_them


def test_dropout_of_an_attentions_weights_is_dropout() -> None:
    right = _attention()
    weights = right.weights()
    kept = np.random.default_rng(5).random(weights.shape) > 0.2
    values = np.repeat(right.v, 2, axis=2).transpose(0, 2, 1, 3)
    made = np.matmul(weights * kept / 0.8, values).transpose(0, 2, 1, 3).reshape(2, 24, -1)
    found, all_of_them = best_clue(_attention_case(right, made))
    assert found is not None, all_of_them
    assert found.cause == "dropout", all_of_them


@pytest.mark.parametrize(("one", "other"), [("q", "k"), ("k", "v")])
def test_exchanged_queries_keys_and_values_are_a_permutation(one: str, other: str) -> None:
    made = _attention(rope=one == "q")
    right = replace(made, q=made.q[:, :, :2])  # as many heads of each
    wrong = replace(right, **{one: getattr(right, other), other: getattr(right, one)})
    found, all_of_them = best_clue(_attention_case(right, wrong.output()))
    assert found is not None, all_of_them
    assert found.cause == "permutation", all_of_them
    assert "exchanged" in found.sentence


def test_a_cache_that_is_one_token_late_is_a_shift() -> None:
    right = _attention()
    behind = np.tri(24, k=-1, dtype=bool)
    behind[0, 0] = True
    late = replace(right, seen=behind[None])
    found, all_of_them = best_clue(_attention_case(right, late.output()))
    assert found is not None, all_of_them
    assert found.cause == "shift", all_of_them


def test_an_attention_without_causal_mask_or_rotation_is_recomputed_too() -> None:
    right = _attention(rope=False, causal=False)
    masked = replace(right, seen=np.tri(24, dtype=bool)[None]).output()
    found, _ = best_clue(_attention_case(right, masked))
    assert found is not None
    assert found.cause == "mask"


def test_an_attention_that_is_wrong_in_another_way_gets_no_name() -> None:
    right = _attention()
    other = right.output() + 0.1 * np.tanh(_attention(3).output())
    assert best_clue(_attention_case(right, other))[0] is None


def _linear(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((4, 40, 64)), rng.standard_normal((64, 48)) / 8.0


@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16"])
def test_one_ranks_part_of_a_product_is_a_missing_reduction_even_in_a_single_run(
    coarse: bool,
) -> None:
    x, w = _linear()
    part = x[..., :32] @ w[:32]
    found, all_of_them = best_clue(case(x @ w, part, coarse=coarse, inputs={"input": x}))
    assert found is not None, all_of_them
    assert found.cause == "missing-reduction"


@pytest.mark.parametrize("which", ["weight", "input"])
def test_a_rounded_factor_of_a_product_is_recomputed(which: str) -> None:
    x, w = _linear()
    x = x + 2.0  # constants in the input make constants in the error: no white noise
    a, b = (x, rounded(w, "float8_e4m3fn")) if which == "weight" else (rounded(x, "bfloat16"), w)
    found, all_of_them = best_clue(case(x @ w, a @ b, inputs={"input": x}, class_name="Linear"))
    assert found is not None, all_of_them
    assert found.cause == "low-precision"
    assert which in found.sentence


def test_factors_per_channel_are_a_scale() -> None:
    r = tensor()
    factors = 1.0 + np.random.default_rng(4).random(64)
    found, _ = best_clue(case(r, r * factors, class_name="RMSNorm", site="norm"))
    assert found is not None
    assert (found.cause, found.detail) == ("scale", "channels")


def test_some_channels_of_some_tokens_that_hold_other_tokens_values_are_stale() -> None:
    r = tensor()
    c = r.copy()
    c[:, 8:16, :16] = c[:, :8, :16]
    found, all_of_them = best_clue(case(r, c))
    assert found is not None, all_of_them
    assert found.cause == "stale"


def test_tokens_of_one_expert_that_lack_a_summand_lost_that_expert() -> None:
    rng = np.random.default_rng(0)
    routes = np.stack([rng.permutation(6)[:2] for _ in range(160)])
    gives = rng.standard_normal((6, 160, 64))
    r = np.stack([gives[a, t] + gives[b, t] for t, (a, b) in enumerate(routes)])
    lacks = np.stack(
        [sum(gives[e, t] for e in pair if e != 3) + np.zeros(64) for t, pair in enumerate(routes)]
    )
    found, all_of_them = best_clue(case(r, lacks, codes={"top_k_index": routes}))
    assert found is not None, all_of_them
    assert (found.cause, found.detail) == ("zeroed", "expert")
    other = np.where((routes == 3).any(axis=1)[:, None], r + 0.5 * np.tanh(r), r)
    found, _ = best_clue(case(r, other, codes={"top_k_index": routes}))
    assert found is None
