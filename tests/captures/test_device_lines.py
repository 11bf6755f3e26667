"""Index lines of summaries that come from a device: what C writes is what Python writes."""

from __future__ import annotations

import importlib.util
import json
import locale
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.captures.recorder import Snapshot
from driftline.captures.torch.device import summaries
from driftline.captures.torch.device.delivery import Delivery
from driftline.captures.torch.device.summaries import Constant, Group, SummaryTransfer
from driftline.numerics.gpu import launcher
from driftline.runs.index_lines import check_line, decoder, record_of
from driftline.runs.records import TensorKey

needs_library = pytest.mark.skipif(
    launcher.library() is None, reason="the library for devices was not built"
)
NUMBERS = st.floats(width=64, allow_nan=False, allow_infinity=False)
ROWS = st.tuples(
    st.tuples(st.integers(0, 2**40), *[st.floats(-1e100, 1e100)] * 2),
    st.tuples(NUMBERS, NUMBERS),
    st.tuples(*[st.integers(0, 2**40)] * 4),
    st.tuples(*[st.integers(0, 2**64 - 1)] * 2),
    NUMBERS,
)


def row(drawn: Any) -> list[float]:
    (finite, mean, spread), ends, counts, digest, sketch = drawn
    figures = [float(finite), mean, abs(spread), min(ends), max(ends), *map(float, counts)]
    words = struct.unpack("<dd", struct.pack("<QQ", *digest))
    return [*figures, *words, *([0.0] * 5), *([sketch] * 64)]


class Here:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def constant(kept: Any = "summary", site: str = "layers.0", **key: Any) -> Constant:
    shot = Snapshot("bfloat16", (3, 5), 0, -1, "cuda:0", 0, 15, "", None)
    place = TensorKey(site, "output", "0", 7, 2, **key)
    return Constant(place, shot, "", "Linear", kept, 2)


def group(rows: list[list[float]], some: Constant, first: int = 0) -> Group:
    transfer = SummaryTransfer()
    transfer.depart(torch.tensor([[0.0] * 80] * first + rows, dtype=torch.float64), Here())
    made = Group(transfer)
    for at in range(len(rows)):
        made.add(some, 3 + at, at, first + at)
    return made


@needs_library
@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=2), st.sampled_from(["summary", "digest"]))
def test_lines_made_in_c_say_what_those_of_python_say(drawn: list[Any], kept: Any) -> None:
    made = group([row(one) for one in drawn], constant(kept), first=1)
    fast = made.lines(41).splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summaries.launcher, "lines", lambda *_: None)
        slow = made.lines(41).splitlines()
    # As values: of two shortest texts of a number each may take another one.
    assert [json.loads(line) for line in fast] == [json.loads(line) for line in slow]


def test_lines_are_read_back_as_the_records_they_stand_for() -> None:
    sites = ('quote " and \\', 'layers.0,"step":0,"visit":0', "café")
    for site in sites:
        made = group([[4.0, 1.5, 2.0, -1.0, 3.0, *([0.0] * 75)]] * 2, constant(site=site))
        for line, record in zip(made.lines(5).splitlines(), made.records(), strict=True):
            read = decoder()(line)
            check_line(read)
            assert record_of(read, 0, 0) == record._replace(order=read.order)
        assert [r.key.step for r in made.records()] == [3, 4]
        assert made.dtypes == {"bfloat16"} and len(made) == 2


@needs_library
@pytest.mark.parametrize(
    "value",
    [
        0.0,
        -0.0,
        1.0,
        0.1,
        1e15,
        123456789012345678.0,
        1e16,
        1e22,
        5e-324,
        4.2653749046806e-310,
        1e-5,
        1e-4,
        1 / 3,
    ],
)
def test_a_number_has_the_digits_that_python_gives_it(value: float) -> None:
    made = group([[1.0, value, 0.0, -value, value, *([0.0] * 75)]], constant())
    said = made.lines(0).decode()
    assert f'"mean":{value!r},' in said
    assert f'"min":{-value!r},"max":{value!r}' in said


@needs_library
def test_the_program_s_language_does_not_change_numbers() -> None:
    before = locale.setlocale(locale.LC_NUMERIC)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", ""):
        try:
            locale.setlocale(locale.LC_NUMERIC, name)
        except locale.Error:
            continue
        try:
            made = group([[1.0, 0.5, 0.0, 0.25, 0.75, *([0.0] * 75)]], constant())
            assert json.loads(made.lines(0))["summary"]["mean"] == 0.5
        finally:
            locale.setlocale(locale.LC_NUMERIC, before)


def test_a_tensor_of_nothing_finite_has_no_extremes() -> None:
    made = group([[0.0, 0.0, 0.0, math.inf, -math.inf, 0.0, 15.0, *([0.0] * 73)]], constant())
    said = json.loads(made.lines(0))["summary"]
    assert said["min"] == said["max"] == said["mean"] == said["std"] == "nan"
    assert (said["nan"], said["l2"]) == (15, 0.0)


def test_a_tensor_noted_after_its_group_was_handed_over_is_handed_over_too() -> None:
    # Another thread of the program had the transfer sent and handed over what it brought so far.
    some, handed = constant(), list[list[TensorKey]]()
    transfer = group([[4.0, 1.5, 2.0, -1.0, 3.0, *([0.0] * 75)]], some).transfer

    def take(made: Group) -> None:
        handed.append([record.key for record in made.records()])

    delivery = Delivery(
        lambda *_: None, take, lambda _, act, *given: act(*given), lambda: False, lambda: None
    )
    for step in (3, 4):
        delivery.note(transfer, some, step, 0, 0)
    delivery.sent()
    delivery.note(transfer, some, 5, 0, 0)
    delivery.finish()
    assert [[key.step for key in group] for group in handed] == [[3, 4], [5]]
    assert not len(delivery)


# One compiled kernel serves tensors of all sizes.

ADDRESSES = {"address", "reference", "candidate"}


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or launcher.interpreted(),
    reason="needs Triton, and not its interpreter",
)
def test_no_kernel_is_compiled_for_the_numbers_of_its_first_launch() -> None:
    """Compiled for a multiple of 16, one read behind its memory where another number came."""
    from driftline.numerics.gpu.kernels import pair, summary, summary_16bit

    for kernel in (
        *(summary.summary_rows, summary.joined_rows, summary.sketch_tables),
        *(summary_16bit.summary_of_halves, pair.pair_rows, pair.joined_pair),
    ):
        numbers = {
            parameter.name
            for parameter in kernel.params
            if not parameter.is_constexpr and not parameter.do_not_specialize
        }
        assert {name for name in numbers if not name.endswith("_at")} <= ADDRESSES, kernel
