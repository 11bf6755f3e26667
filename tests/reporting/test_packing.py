"""The container of a page: what goes in comes out, and nothing in it can end an HTML element."""

from __future__ import annotations

import math
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from driftline.errors import BadFile
from driftline.reporting.html.document import numbers, words
from driftline.reporting.html.page import decode_container, encode_container, pack, unpack

_ARRAYS = st.sampled_from(["<f8", "<f4", "<i4", "<u4", "<u2", "u1"]).flatmap(
    lambda kind: arrays(np.dtype(kind), st.integers(0, 20))
)
_LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text() | _ARRAYS
)
_KEYS = st.text(min_size=1).filter(lambda key: key != "$")
_DOCUMENTS = st.dictionaries(
    _KEYS,
    st.recursive(
        _LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)


def same(put: Any, got: Any) -> bool:
    if isinstance(put, np.ndarray):
        return np.array_equal(put.reshape(-1), got, equal_nan=put.dtype.kind == "f")
    if isinstance(put, float) and not math.isfinite(put):
        return got == ("nan" if math.isnan(put) else "inf" if put > 0 else "-inf")
    if isinstance(put, dict):
        return put.keys() == got.keys() and all(same(value, got[key]) for key, value in put.items())
    if isinstance(put, list):
        return len(put) == len(got) and all(map(same, put, got))
    return put == got


@settings(max_examples=60, deadline=None)
@given(_DOCUMENTS)
def test_a_document_comes_back_as_it_was(document: dict[str, Any]) -> None:
    content = pack(document)
    assert same(document, unpack(content))
    letters = encode_container(content)
    assert set(letters) <= set(string.ascii_letters + string.digits + "+/=")
    assert decode_container(letters) == content


def test_a_name_that_is_no_text_is_no_reason_to_fail() -> None:
    document = {"name": "half of a pair: \ud800"}
    assert unpack(pack(document)) == document


@pytest.mark.parametrize("content", [b"", b"DLP1", b"DLP1\x04\0\0\0nope", b"GIF89a" * 4])
def test_what_is_no_container_is_refused_in_a_sentence(content: bytes) -> None:
    with pytest.raises(BadFile, match="no data of a page"):
        unpack(content)


def test_absent_is_not_nan_and_nan_is_not_absent() -> None:
    column = numbers([None, math.nan, 1.5])
    assert column["absent"].tolist() == [1, 0, 0]
    assert np.isnan(column["numbers"][1]) and column["numbers"][2] == 1.5


def test_figures_keep_what_a_reader_can_see_of_them() -> None:
    assert numbers([1e-300, 1.0])["numbers"].dtype == np.float64
    assert numbers([0.25, math.inf])["numbers"].dtype == np.float32
    counts = numbers([0, 2**40])["numbers"]
    assert counts.tolist() == [0.0, float(2**40)]
    assert words(["a", "b", "a"])["codes"].tolist() == [0, 1, 0]
