"""Row figures against the raw layer outputs of the documented tool, and against planted faults."""

from __future__ import annotations

import math
import tarfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tiny_decoders import DATA

from driftline.alignment.plan import Pair
from driftline.decoding.layerwise.row_metrics import RowMetrics, measure_rows
from driftline.decoding.layerwise.walk import TABLE_METRICS
from driftline.runs.records import Record, TensorKey

LAYERS = DATA / "layers"
LEAKED = float(np.float16(1e-6))
ERAS = ("docera_model-forward", "head_model-forward")


def figures(ours: Any, theirs: Any, counts: Any = None, **words: Any) -> RowMetrics:
    sides = [np.ascontiguousarray(side) for side in (ours, theirs)]
    records = [
        Record(TensorKey.of("layer", "output"), 0, str(side.dtype), side.shape) for side in sides
    ]
    flat = [side.reshape(-1).view(np.uint8) for side in sides]
    return measure_rows(Pair(*records), *flat, counts, TABLE_METRICS, **words)


def stacks() -> dict[str, dict[str, Any]]:
    return torch.load(LAYERS / ERAS[1] / "layer_stacks.pt", weights_only=True)


def golden(era: str, layer: str, metric: str) -> np.ndarray[Any, Any]:
    """The numbers of one file of the documented tool, whose heading has one line or three."""
    ending = f"--{layer.replace('[', '').replace(']', '')}.{metric}.csv"
    with tarfile.open(LAYERS / era / "csv.tar.gz") as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith(ending))
        file = tar.extractfile(member)
        assert file is not None
        lines = file.read().decode().split("\n")[1:]
    return np.array([float(line) for line in lines if line and "shape" not in line])


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in leaves(item)]


@pytest.mark.parametrize("era", ERAS)
def test_differences_of_elements_are_those_of_the_documented_tool(era: str) -> None:
    raw = stacks()
    compared = 0
    for layer, ours in raw["cpu"].items():
        if not isinstance(ours, torch.Tensor):
            continue
        found = figures(ours.numpy(), raw["dev"][layer].numpy(), elements=True)
        wanted = golden(era, layer, "abs_diff")
        # The later era wrote 1e-6 over zeros of its inputs, some of which it compared again.
        wanted[(wanted == LEAKED) & (ours.flatten() == 0).numpy()] = 0.0
        np.testing.assert_allclose(found.elements, wanted, rtol=1e-6, atol=1e-12)
        compared += 1
    assert compared == 25


def test_rows_agree_with_the_raw_outputs_where_the_documented_tool_does_not() -> None:
    raw = stacks()
    for layer, value in raw["cpu"].items():
        for ours, theirs in zip(leaves(value), leaves(raw["dev"][layer]), strict=True):
            found = figures(ours.numpy(), theirs.numpy())
            a, b = ours.double(), theirs.double()
            np.testing.assert_allclose(
                found.abs_diff, (a - b).abs().mean(-1).flatten(), rtol=1e-5, atol=1e-12
            )
            # The first two tokens are pads whose embedding is zero: equal, so as near as can be.
            both_zero = ((a == 0).all(-1) & (b == 0).all(-1)).flatten().numpy()
            wanted = torch.cosine_similarity(a, b, dim=-1, eps=1e-30).flatten().numpy()
            np.testing.assert_allclose(
                found.cos_sim, np.where(both_zero, 1.0, wanted), rtol=0, atol=1e-9
            )
            assert (found.cos_sim <= 1.0).all()


def test_what_the_two_eras_of_the_documented_tool_made_of_the_same_outputs() -> None:
    """Documented in docs/seed-differences.md; held here so that it stays true."""
    raw = stacks()
    signs = golden(ERAS[0], "model.base_model.layers[1].ln", "cos_sim")
    assert set(signs[~np.isnan(signs)]) <= {1.0, -1.0, 0.0}  # a sign per element, no cosine
    assert golden(ERAS[0], "model.base_model.layers[0].attn.in_proj", "abs_diff").max() == 0.0
    assert golden(ERAS[1], "model.head", "cos_sim").max() > 1.0
    last = raw["cpu"]["model.base_model.layers[0].attn.in_proj"][-1]
    only_last = golden(ERAS[1], "model.base_model.layers[0].attn.in_proj", "abs_diff")
    assert len(only_last) == last.numel()
    every = sum(
        len(figures(a.numpy(), b.numpy()).abs_diff)
        for a, b in zip(
            leaves(raw["cpu"]["model.base_model.layers[0].attn.in_proj"]),
            leaves(raw["dev"]["model.base_model.layers[0].attn.in_proj"]),
            strict=True,
        )
    )
    assert every == 3 * 8  # query, key and value of every token


def test_nan_on_one_side_makes_its_row_nan_and_no_other() -> None:
    ours = np.ones((3, 4), np.float32)
    theirs = ours.copy()
    theirs[1, 2] = np.nan
    found = figures(ours, theirs, elements=True)
    assert np.isnan(found.abs_diff).tolist() == [False, True, False]
    assert np.isnan(found.cos_sim).tolist() == [False, True, False]
    assert found.elements is not None
    assert np.isnan(found.elements).sum() == 1
    assert found.row.metrics["one_sided"] == 1


def test_what_is_infinite_alike_on_both_sides_is_left_out() -> None:
    ours = np.array([[-np.inf, 1.0, 2.0], [-np.inf] * 3], np.float32)
    theirs = np.array([[-65504.0, 1.0, 2.5], [-65504.0] * 3], np.float16)  # a mask's lowest value
    found = figures(ours, theirs, elements=True)
    assert found.abs_diff[0] == 0.25
    assert math.isnan(found.abs_diff[1])  # nothing is left to compare; nothing is made up
    assert found.elements is not None
    assert found.elements.tolist() == [0.0, 0.5]


def test_zeros_against_numbers_are_no_agreement() -> None:
    found = figures(np.zeros((2, 4), np.float32), np.array([[0, 0, 0, 0], [1, 0, 0, 0]], "f4"))
    assert found.cos_sim.tolist() == [1.0, 0.0]
    assert found.abs_diff.tolist() == [0.0, 0.25]


def test_rows_that_do_not_count_are_in_no_figure() -> None:
    ours = np.ones((2, 3, 4), np.float32)
    theirs = ours.copy()
    theirs[0, 0] = np.nan
    theirs[1, 0] = 7
    counts = np.array([[False, True, True], [False, True, True]])
    found = figures(ours, theirs, counts, elements=True)
    assert found.abs_diff.tolist() == [0.0] * 4
    assert found.cos_sim.tolist() == [1.0] * 4
    assert found.row.metrics["max_abs_error"] == 0.0
    assert found.elements is not None
    assert len(found.elements) == 16


def test_outputs_of_different_shapes_are_said_to_be_so() -> None:
    found = figures(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))
    assert found.row.status == "incomparable"
    assert "2x3 against 3x2" in found.row.reason
    assert not len(found.abs_diff)


@pytest.mark.parametrize("width", [64, 256, 257, 3000])
def test_large_outputs_are_measured_as_small_ones_are(width: int) -> None:
    """Narrow rows go together and wide ones by themselves, by several threads where it is worth."""
    dice = np.random.default_rng(width)
    ours = dice.standard_normal((1200, width)).astype(np.float32)
    theirs = ours.astype(np.float16)
    ours[7] = theirs[7] = 0
    theirs[11] = 0
    theirs[13, 5] = np.inf
    ours[17, 3] = theirs[17, 3] = np.nan
    counts = dice.random(1200) > 0.2
    counts[[7, 11, 13, 17]] = True
    found = figures(ours, theirs, counts)
    apart = [figures(ours[n : n + 1], theirs[n : n + 1]) for n in np.flatnonzero(counts)]
    for name in ("abs_diff", "cos_sim"):
        rows = np.concatenate([getattr(one, name) for one in apart])
        np.testing.assert_allclose(getattr(found, name), rows, rtol=1e-6, atol=1e-12)
    assert np.isnan(found.abs_diff).sum() == 1
    # NaN on both sides agrees in nothing: the output has no figure that could pass.
    assert math.isnan(found.row.metrics["mean_abs_error"])
    assert found.row.reason == "elements that are NaN on both sides: 1"
    ours[17, 3] = theirs[17, 3] = 0.5
    found = figures(ours, theirs, counts)
    whole = np.abs(ours[counts].astype(float) - theirs[counts])
    assert found.row.metrics["mean_abs_error"] == pytest.approx(
        whole[np.isfinite(whole)].mean(), rel=1e-6
    )


_FLOATS = st.floats(-1e4, 1e4, width=16)


@settings(max_examples=60, deadline=None)
@given(
    ours=arrays.arrays(np.float32, (3, 5), elements=_FLOATS),
    theirs=arrays.arrays(np.float16, (3, 5), elements=_FLOATS),
)
def test_every_row_is_its_plain_definition(ours: Any, theirs: Any) -> None:
    found = figures(ours, theirs)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    b[b == -65504.0] = -np.inf
    np.testing.assert_allclose(found.abs_diff, np.abs(a - b).mean(-1), rtol=1e-5, atol=1e-9)
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        wanted = np.where(lengths > 0, (a * b).sum(-1) / lengths, 0.0)
    wanted[(a == 0).all(-1) & (b == 0).all(-1)] = 1.0
    np.testing.assert_allclose(found.cos_sim, wanted, atol=1e-6)
    assert (np.abs(found.cos_sim) <= 1.0).all()
