"""Which rows of a layer's output count: padding never, tokens of earlier calls not again."""

from __future__ import annotations

import numpy as np
import pytest

from driftline.decoding.files.names import file_layer, layer_csv
from driftline.decoding.layerwise.row_metrics import Span, token_rows

REAL = np.array([[False, False, True, True], [True, True, True, True]])
PREFILL = Span(REAL)
LATER = Span(np.concatenate([REAL, np.ones((2, 1), bool)], axis=1), cached=4, new=4)


def test_padding_does_not_count_in_any_usual_shape() -> None:
    assert np.array_equal(token_rows((2, 4, 8), "0", PREFILL), REAL)
    assert np.array_equal(token_rows((8, 16), "0", PREFILL), REAL.reshape(-1))
    heads_first = token_rows((2, 3, 4, 8), "0", PREFILL)
    assert heads_first is not None
    assert all(np.array_equal(heads_first[:, head], REAL) for head in range(3))
    tokens_first = token_rows((2, 4, 3, 8), "0", PREFILL)
    assert tokens_first is not None
    assert all(np.array_equal(tokens_first[:, :, head], REAL) for head in range(3))


def test_what_all_prompts_share_counts_where_any_prompt_has_a_token() -> None:
    assert np.array_equal(
        token_rows((1, 4, 8), "0", Span(REAL[:1].repeat(2, axis=0))),
        REAL[:1],
    )
    assert token_rows((1, 4, 8), "0", PREFILL) is not None
    assert token_rows((1, 4, 8), "0", PREFILL).all()  # type: ignore[union-attr]


def test_where_heads_and_tokens_are_as_many_no_pad_slips_through() -> None:
    counts = token_rows((2, 4, 4, 8), "0", PREFILL)
    assert counts is not None
    assert not counts[0, :2].any()
    assert not counts[0, :, :2].any()
    assert counts[0, 2:, 2:].all()


def test_a_cache_with_as_many_heads_as_tokens_is_known_by_its_slot() -> None:
    counts = token_rows((2, 4, 4, 8), "past_key_values.0.1", PREFILL)
    assert counts is not None
    assert all(np.array_equal(counts[:, head], REAL) for head in range(4))


def test_without_padding_every_row_counts() -> None:
    assert token_rows((2, 4, 8), "0", Span(np.ones((2, 4), bool))) is None


def test_a_later_call_counts_its_own_token_of_the_cache_only() -> None:
    assert token_rows((2, 1, 8), "0", LATER) is None
    for slot in ("past_key_values.0.0", "1.0.0", "1.0"):
        counts = token_rows((2, 3, 5, 8), slot, LATER)
        assert counts is not None
        assert counts.sum() == 2 * 3
        assert counts[:, :, 4].all()


def test_a_cache_with_a_window_holds_the_last_tokens() -> None:
    slot = "past_key_values.0.0"
    counts = token_rows((2, 1, 3, 8), slot, PREFILL)
    assert counts is not None
    assert counts[:, 0].tolist() == REAL[:, 1:].tolist()
    later = token_rows((2, 1, 3, 8), slot, LATER)
    assert later is not None
    assert later[:, 0].tolist() == [[False, False, True]] * 2
    # A state without tokens counts whole.
    assert token_rows((2, 1, 3, 8), "past_key_values.0.recurrent_states", LATER) is None


def test_a_model_without_cache_counts_its_new_token_only() -> None:
    whole = Span(LATER.real, cached=0, new=4)
    counts = token_rows((2, 5, 8), "0", whole)
    assert counts is not None
    assert counts.tolist() == [[False] * 4 + [True]] * 2


def test_outputs_without_a_token_axis_count_whole() -> None:
    assert token_rows((7, 16), "0", PREFILL) is None
    assert token_rows((3, 3, 8), "0", PREFILL) is None
    assert token_rows((), "0", PREFILL) is None


@pytest.mark.parametrize(
    ("site", "layer"),
    [
        ("(root)", "model"),
        ("head", "model.head"),
        ("base_model", "model.base_model"),
        ("base_model.layers.7.ln", "model.base_model.layers7.ln"),
        ("base_model.layers.8.attn.dense", "model.base_model.layers8.attn.dense"),
        ("base_model.layers.25.ff_sub_layer.w1", "model.base_model.layers25.ff_sub_layer.w1"),
        ("base_model.layers.3.experts.0.1", "model.base_model.layers3.experts01"),
    ],
)
def test_layers_of_fms_models_have_the_documented_names(site: str, layer: str) -> None:
    assert file_layer(site, "fms") == layer


def test_the_documented_file_name() -> None:
    start = "ibm-granite--granite-3.2-8b-instruct_max-new-tokens-128_batch-size-1_seq-length-64"
    name = layer_csv(
        f"{start}_dtype-float16", file_layer("base_model.layers.7.ln", "fms"), "abs_diff"
    )
    assert name == f"{start}_dtype-float16--model.base_model.layers7.ln.abs_diff.csv"
