"""Expectations on disk: what is written is read again, and damage is a sentence."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.errors import BadInput, DriftlineError
from driftline.testing.expectations.expectations import Expectations, Subject, find, write
from driftline.testing.expectations.signature import call, see

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_numbers_come_back_to_the_last_bit(numbers: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), "x", numbers, {"seed": 1})
        assert "\n" not in path.read_text()
        kept = find(Path(folder), ["older", "x"])
        assert kept is not None
        assert kept.numbers().tolist() == numbers
        assert kept.fingerprint == {"seed": 1}


@given(content=st.binary(max_size=60), beside=st.none() | st.binary(max_size=60))
@settings(max_examples=150, deadline=None)
def test_whatever_a_file_holds_is_read_or_refused_in_words(
    content: bytes, beside: bytes | None
) -> None:
    model = torch.nn.Linear(3, 2)
    subject = Subject("it", lambda: model(torch.ones(1, 3)), model)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x").write_bytes(content)
        if beside is not None:
            (Path(folder) / "x.json").write_bytes(beside)
        for check in (Expectations(Path(folder)).output, Expectations(Path(folder)).weight_keys):
            try:
                result = check(subject, ["x"])
            except DriftlineError as trouble:
                assert str(trouble)
            else:
                assert result.message or result.state == "same"


def test_a_missing_expectation_is_known_before_the_model_is_called(tmp_path: Path) -> None:
    def never() -> None:
        pytest.fail("the model was called")

    assert Expectations(tmp_path).output(Subject("it", never), ["x"]).state == "missing"


def test_nothing_half_written_is_left_where_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(DriftlineError, match="cannot be written"):
        write(tmp_path, "x", [1.0], {})
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".driftline-")]


def test_the_signature_is_the_documented_one() -> None:
    logits = torch.tensor([[[1.0, 4.0, 2.0], [0.0, 9.0, 5.0]]])
    assert see(logits).signature.tolist() == [0.0, 6.0]
    start, end = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 3.0]])
    assert see((start, end)).signature.tolist() == [0.0, 1.0, 4.0, 2.0]
    half = torch.tensor([[[1.0, 2049.0]]], dtype=torch.float16)
    assert see(half).signature.tolist() == [0.0]


def test_tensors_that_cannot_be_joined_each_have_a_signature() -> None:
    seen = see({"logits": torch.ones(1, 4, 3), "pooled": torch.arange(2.0).unsqueeze(0)})
    assert seen.signature.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert seen.shapes == ((1, 4, 3), (1, 2))


def test_caches_losses_and_integers_are_no_output() -> None:
    output = {"loss": torch.ones(()), "logits": torch.ones(1, 2, 3), "ids": torch.arange(3)}
    assert see(output | {"past_key_values": torch.ones(9)}).shapes == ((1, 2, 3),)


def test_padding_is_not_judged() -> None:
    judged = np.array([False, True, True, True])
    base = torch.arange(24.0).reshape(1, 4, 6) ** 1.5
    other = base.clone()
    other[:, 0] = torch.nan
    seen = see(other, judged=judged)
    assert seen.not_finite == 0
    assert np.isfinite(seen.signature).all()
    assert see(other).not_finite == 6
    other[:, 0] = -1e9
    assert see(other, judged=judged).sketch == see(base, judged=judged).sketch


def test_a_nan_is_never_kept(tmp_path: Path) -> None:
    subject = Subject("it", lambda: torch.tensor([1.0, torch.nan]))
    with pytest.raises(BadInput, match="1 values that are NaN"):
        Expectations(tmp_path, "all").output(subject, ["x"])
    assert not list(tmp_path.iterdir())


def test_how_a_model_is_called_with_what_was_given_for_it() -> None:
    seen: list[tuple[object, ...]] = []

    def model(*args: object, **kwargs: object) -> None:
        seen.append((args, kwargs))

    one, other = torch.ones(2), torch.zeros(3)
    for inputs in (one, (one, other), [one], {"x": one, "y": other}):
        call(model, inputs)
    assert seen == [
        ((one,), {}),
        ((one, other), {}),
        ((one,), {}),
        ((), {"x": one, "y": other}),
    ]
    seen.clear()
    call(model, None)  # one sequence of the first token ids
    ((ids,), _) = seen[0]
    assert isinstance(ids, torch.Tensor)
    assert ids.tolist() == [list(range(16))]
