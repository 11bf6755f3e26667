"""Summaries, digests, merging, the numpy path and the generic build, against their definitions."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics_tensors import (
    SPECIALS,
    assert_same_moments,
    assert_same_summary,
    encode,
    misaligned,
    noisy_pair,
)

from driftline.errors import BadInput
from driftline.numerics import definitions, kernel
from driftline.numerics.dtypes import DTYPES, DType
from driftline.numerics.fields import merge_moments

PATHS = [path for path in kernel.available() if path != "numpy"]
C_SOURCES = Path(kernel.__file__).with_name("csrc")
needs_kernel = pytest.mark.skipif(not PATHS, reason="the C kernel was not built on this machine")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("path", [*PATHS, "numpy"])
def test_a_summary_is_as_defined_in_every_type(dtype: DType, path: str) -> None:
    rng = np.random.default_rng(1)
    reals = 2 if dtype.kind == "complex" else 1
    for count in (0, 1, 63, 64, 65, 130, 1024, 4097):
        values = rng.standard_normal(count * reals) * 3
        values[rng.random(values.size) < 0.1] = 0.0
        raw = encode(values, dtype)
        want = definitions.summarize(raw, dtype, count=count)
        assert_same_summary(kernel.summarize(raw, dtype, count=count, path=path), want)


@needs_kernel
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("every", [1, 2, 50, 4096])
def test_a_summary_leaves_out_what_is_not_finite(path: str, name: str, every: int) -> None:
    rng = np.random.default_rng(2)
    dtype = DTYPES[name]
    values = 5 + rng.standard_normal(9000)
    odd = np.array([math.nan, math.inf, -math.inf, dtype.lowest, 0.0])
    where = rng.random(values.size) < 1 / every
    values[where] = rng.choice(odd, where.sum())
    raw = encode(values, dtype)
    want = definitions.summarize(raw, dtype, count=values.size)
    assert_same_summary(kernel.summarize(raw, dtype, count=values.size, path=path), want)


@needs_kernel
@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.sampled_from(SPECIALS), st.floats(width=32)), min_size=1, max_size=80
    ),
    tile=st.integers(1, 30),
    offset=st.integers(0, 63),
    name=st.sampled_from(list(DTYPES)),
)
def test_a_summary_of_any_values_is_as_defined(
    values: list[float], tile: int, offset: int, name: str
) -> None:
    dtype = DTYPES[name]
    flat = np.array(values * tile * 2)
    raw = misaligned(encode(flat, dtype), offset)
    count = flat.size // (2 if dtype.kind == "complex" else 1)
    want = definitions.summarize(raw, dtype, count=count)
    for path in PATHS:
        assert_same_summary(kernel.summarize(raw, dtype, count=count, path=path), want)


@needs_kernel
@pytest.mark.parametrize("path", PATHS)
def test_the_digest_is_the_one_of_the_xxhash_package(path: str) -> None:
    data = np.random.default_rng(3).integers(0, 256, 70_000, np.uint8)
    for size in (*range(515), 1023, 1024, 1025, 1087, 1088, 1089, 2048, 4097, 69_999):
        part = data[size % 7 :][:size]
        want = "xxh3-128:" + xxhash.xxh3_128_hexdigest(part.tobytes())
        assert kernel.digest(part, path=path) == want, size


@pytest.mark.parametrize("built", [True, False])
def test_memory_given_by_address_is_read_like_the_array_over_it(
    built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not built:
        monkeypatch.setattr(kernel, "_default_number", lambda: -1)
    f32 = DTYPES["float32"]
    data = np.random.default_rng(4).standard_normal(1001).astype(np.float32)
    for count in (0, 1, 63, 1001):
        part = data[:count]
        address = data.ctypes.data
        window = kernel.bytes_at(address, part.nbytes)
        assert window.tobytes() == part.tobytes()
        assert kernel.digest_at(address, part.nbytes) == kernel.digest(part)
        summary = kernel.summarize_at(address, part.nbytes, f32, count=count)
        assert repr(summary) == repr(kernel.summarize(part, f32, count=count))
    with pytest.raises(BadInput, match="do not fit"):
        kernel.summarize_at(data.ctypes.data, 7, f32, count=2)


def test_without_the_kernel_the_digest_says_which_kind_it_is() -> None:
    assert kernel.digest(np.arange(5), path="numpy").startswith("blake2b-128:")
    assert len(kernel.digest(np.arange(5), path="numpy").split(":")[1]) == 32


@pytest.mark.parametrize(
    "names", [("float32", "bfloat16"), ("int4", "int4"), ("complex64", "complex32")]
)
def test_the_numpy_path_gives_the_whole_from_its_blocks(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "NUMPY_BLOCK", 256)
    r, c = DTYPES[names[0]], DTYPES[names[1]]
    reference, candidate = noisy_pair(np.random.default_rng(4), 2001, r, c)
    got = kernel.pair_moments(
        reference, r, candidate, c, count=2001, atol=1e-2, rtol=1e-2, path="numpy"
    )
    want = definitions.pair_moments(reference, r, candidate, c, count=2001, atol=1e-2, rtol=1e-2)
    assert_same_moments(got, want)
    assert_same_summary(
        kernel.summarize(reference, r, count=2001, path="numpy"),
        definitions.summarize(reference, r, count=2001),
    )


@pytest.mark.parametrize("odd", [False, True])
def test_merged_blocks_are_the_whole(odd: bool) -> None:
    fp32 = DTYPES["float32"]
    rng = np.random.default_rng(5)
    r = (50 + rng.standard_normal(10_000)).astype(np.float32)
    c = (r + 1e-3 * rng.standard_normal(r.size)).astype(np.float32)
    if odd:
        r[7000] = math.nan
        c[:3000] = math.inf
    cuts = [0, 0, 1, 2500, 2501, 9000, 10_000]
    parts = [
        definitions.pair_moments(r[a:b], fp32, c[a:b], fp32, count=b - a, atol=1e-3)
        for a, b in itertools.pairwise(cuts)
    ]
    want = definitions.pair_moments(r, fp32, c, fp32, count=r.size, atol=1e-3)
    got = merge_moments(parts)
    assert_same_moments(got, want)
    assert got.max_abs_e_at == want.max_abs_e_at


@needs_kernel
def test_the_kernel_built_without_vector_instructions_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    built = tmp_path / "_kernel.so"
    generate = [sys.executable, "-I", C_SOURCES / "generate_tables.py", tmp_path / "tables.h"]
    subprocess.run(generate, check=True)
    flags = ("-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    sources = (C_SOURCES / "api.c", C_SOURCES / "isa.c")
    defined = ("-DDRIFTLINE_GENERIC_ONLY=1", "-DISA=generic")
    subprocess.run(
        [compiler, *flags, *defined, "-I", tmp_path, "-o", built, *sources, "-lm", "-pthread"],
        check=True,
    )
    library = kernel.load(built)
    assert library is not None
    assert library.driftline_best_path() == 0
    monkeypatch.setattr(kernel, "_library", lambda: library)
    data = np.arange(5000, dtype=np.uint8)
    want = xxhash.xxh3_128_hexdigest(data.tobytes())
    for path in PATHS:  # asked for more than it has, it takes what it has
        assert kernel.digest(data, path=path) == "xxh3-128:" + want
    rng = np.random.default_rng(6)
    for r in DTYPES.values():
        c = DTYPES["float32"] if r.kind == "float" else r
        reference, candidate = noisy_pair(rng, 1500, r, c)
        kwargs = {"count": 1500, "atol": 1e-3, "rtol": 1e-2}
        got = kernel.pair_moments(reference, r, candidate, c, path="generic", **kwargs)
        wanted = definitions.pair_moments(reference, r, candidate, c, **kwargs)
        assert_same_moments(got, wanted)
        assert_same_summary(
            kernel.summarize(reference, r, count=1500, path="generic"),
            definitions.summarize(reference, r, count=1500),
        )


def test_a_path_this_machine_lacks_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="unknown"):
        kernel.digest(np.zeros(4), path="avx1024")


def test_too_few_bytes_are_refused_before_the_kernel_reads_them() -> None:
    fp32 = DTYPES["float32"]
    with pytest.raises(BadInput, match="do not fit"):
        kernel.summarize(np.zeros(3, np.float32), fp32, count=4)
    with pytest.raises(BadInput, match="contiguous"):
        kernel.summarize(np.zeros(8, np.float32)[::2], fp32, count=4)


@pytest.mark.parametrize("choice", ["numpy", "generic", "nonsense"])
def test_the_environment_chooses_the_path(choice: str) -> None:
    if choice not in (*kernel.available(), "nonsense"):
        pytest.skip("the C kernel was not built on this machine")
    code = "from driftline.numerics import kernel; print(kernel.active())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"DRIFTLINE_KERNEL": choice, "PYTHONPATH": str(Path(kernel.__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    if choice == "nonsense":
        assert done.returncode != 0 and "nonsense" in done.stderr
    else:
        assert done.stdout.strip() == choice


def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "_kernel.so"
    assert kernel.load(broken) is None
    broken.write_bytes(b"not a library")
    assert kernel.load(broken) is None


def test_without_a_library_everything_is_measured_by_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "_library", lambda: None)
    fp32 = DTYPES["float32"]
    values = np.arange(100, dtype=np.float32)
    got = kernel.pair_moments(values, fp32, values + 1, fp32, count=100)
    assert (got.different, got.max_abs_e) == (100, 1.0)
    assert kernel.summarize(values, fp32, count=100).max == 99.0
    assert kernel.digest(values).startswith("blake2b-128:")
