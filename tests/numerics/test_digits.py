"""Numbers as text by the kernel: to the letter what Python writes."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftline.numerics import digits, kernel
from driftline.numerics.digits import number_lines

needs_kernel = pytest.mark.skipif(
    not kernel.takes_addresses(), reason="the C kernel was not built here"
)
CELLS = st.one_of(st.none(), st.floats(), st.integers())


@given(st.lists(CELLS, max_size=12), st.integers(1, 5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_number_is_written_as_python_writes_it(
    cells: list[float | int | None], columns: int
) -> None:
    cells = cells[: len(cells) // columns * columns]
    words = ["" if cell is None else str(cell) for cell in cells]
    lines = [",".join(words[at : at + columns]) + "\n" for at in range(0, len(words), columns)]
    assert number_lines(cells, columns) == lines


@needs_kernel
def test_the_kernel_writes_numbers_of_usual_size_itself() -> None:
    rng = random.Random(0)
    values = [
        struct.unpack(
            "d", struct.pack("Q", (rng.randrange(900, 1200) << 52) | rng.getrandbits(52))
        )[0]
        for _ in range(20_000)
    ]
    values += [sign * 10.0**power for power in range(-30, 40) for sign in (1, -1)]
    values += [2.0**power for power in range(-120, 180)]
    values += [math.nextafter(10.0**power, math.inf) for power in range(-30, 40)]
    values += [round(rng.gauss(0, 1), places) for places in range(14) for _ in range(200)]
    values += [0.0, -0.0, math.inf, -math.inf, math.nan, 1e16, 9999999999999998.0, 1e-4, 9.9e-5]
    assert digits._by_kernel(values, 1) == [f"{value!r}\n" for value in values]


@needs_kernel
@pytest.mark.parametrize("cell", [5e-324, 1e300, 2**53, -(10**30), 10**400, True, "text"])
def test_what_the_kernel_has_no_words_for_is_left_to_python(cell: object) -> None:
    cells: list[object] = [0.5, cell]
    assert digits._by_kernel(cells, 1) is None  # type: ignore[arg-type]
    assert number_lines(cells, 1) == ["0.5\n", f"{cell}\n"]  # type: ignore[arg-type]


def test_without_the_kernel_python_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_library", lambda: None)
    assert number_lines([0.1, None, 3, math.nan], 2) == ["0.1,\n", "3,nan\n"]
