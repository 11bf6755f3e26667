"""Every printed figure agrees with its float64 definition on every path (docs/metrics.md).

The cases at the top are those in which an earlier kernel, with float32 sums, was wrong.
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from numerics_tensors import assert_same_moments, encode, misaligned

from driftline.comparison.metrics import from_moments
from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.metrics.from_moments import needs_definition
from driftline.numerics import definitions, kernel
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.numerics.fields import PairMoments, merge_moments
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter

PATHS = list(kernel.available())
FLOATS = ("float32", "bfloat16", "float16")
DEFINED = [metric for metric in STANDARD if metric.definition is not None]


def measured(
    reference: np.ndarray, candidate: np.ndarray, r: str, c: str, path: str
) -> PairMoments:
    return kernel.pair_moments(
        *(reference, DTYPES[r], candidate, DTYPES[c]),
        count=reference.nbytes * 8 // DTYPES[r].bits,
        atol=1e-3,
        rtol=1e-3,
        path=path,
    )


def assert_figures_are_defined(reference: np.ndarray, candidate: np.ndarray, r: str, c: str):
    """Whatever `compare` would print of a pair, from its moments or the long way."""
    count = reference.nbytes * 8 // DTYPES[r].bits
    sides = [
        definitions.real_values(raw, DTYPES[name], count)
        for raw, name in ((reference, r), (candidate, c))
    ]
    for path in PATHS:
        moments = measured(reference, candidate, r, c, path)
        if needs_definition(moments):
            continue
        for metric in DEFINED:
            want, got = metric.define()(*sides), metric.derive(moments)
            absolute = 1e-12 if metric.name in ("cosine", "projection") else 0.0
            assert math.isclose(got, want, rel_tol=1e-9, abs_tol=absolute), (path, metric.name)


def lognormal(rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    return np.exp(3 * rng.standard_normal(count)) * scale


@pytest.mark.parametrize("scale", [1e-20, 1e-19, 1e-18, 3e-18, 1.0, 1e15])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_products_below_float32_count_in_the_cosine(name: str, scale: float) -> None:
    """It was off by 2.5e-6 (log-normal, 1e-20) to 2e-2 (unrelated, 1e-19) in bfloat16."""
    rng, dtype = np.random.default_rng(0), DTYPES[name]
    for count in (1000, 6144, 30_000):
        for draw in (lognormal, lambda rng, n, scale: rng.standard_normal(n) * scale):
            r, c = (encode(draw(rng, count, scale), dtype) for _ in range(2))
            assert_figures_are_defined(r, c, name, name)


@pytest.mark.parametrize("r", FLOATS)
@pytest.mark.parametrize("c", FLOATS)
def test_relative_errors_are_those_of_numpy(r: str, c: str) -> None:
    """The greatest of them differed by 1e-8 in 7 to 10 % of pairs."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = rng.standard_normal(700)
        reference = encode(values, DTYPES[r])
        candidate = encode(values * (1 + 1e-2 * rng.standard_normal(700)), DTYPES[c])
        want = definitions.pair_moments(
            reference, DTYPES[r], candidate, DTYPES[c], count=700
        ).max_rel_e
        for path in PATHS:
            assert measured(reference, candidate, r, c, path).max_rel_e == want


@pytest.mark.parametrize("path", PATHS)
def test_a_mean_that_nearly_cancels_keeps_its_digits(path: str) -> None:
    """A mean of 1e-9 was off by a quarter."""
    rng = np.random.default_rng(1)
    half = rng.standard_normal(1 << 18).astype(np.float32)
    values = rng.permutation(np.concatenate([half, -half, [np.float32(2**-11)]])).astype(np.float32)
    mean = 2.0**-11 / values.size
    assert mean < 1e-9
    moments = measured(values, values, "float32", "float32", path)
    summary = kernel.summarize(values, DTYPES["float32"], count=values.size, path=path)
    for got in (moments.r_mean, moments.c_mean, summary.mean):
        assert math.isclose(got, mean, rel_tol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-150, 1e150, 1e200, 1e308])
@pytest.mark.parametrize("name", ["float64", "complex128"])
def test_huge_and_tiny_float64_values_have_a_spread(path: str, scale: float, name: str) -> None:
    """The std of values of 1e-200 was 0, that of values of 1e200 infinite."""
    rng, dtype = np.random.default_rng(2), DTYPES[name]
    values = rng.uniform(0.25, 1.0, 3000) * scale
    values[::3] *= -1
    count = values.size // dtype.reals
    unit = np.longdouble(scale)
    plain = (values.astype(np.longdouble) / unit).astype(np.float64)
    moments = kernel.pair_moments(values, dtype, values, dtype, count=count, path=path)
    summary = kernel.summarize(values, dtype, count=count, path=path)
    for mean, std, l2 in (
        (moments.r_mean, moments.r_std, moments.r_l2),
        (moments.c_mean, moments.c_std, moments.c_l2),
        (summary.mean, summary.std, summary.l2),
    ):
        # A norm may be larger than any float64; subnormal numbers have a fixed step.
        norm = float(np.longdouble(np.linalg.norm(plain)) * unit)
        for got, want in ((mean, plain.mean()), (std, plain.std())):
            assert math.isclose(got, float(want * unit), rel_tol=1e-9, abs_tol=5e-324)
        assert got != 0 and math.isclose(l2, norm, rel_tol=1e-9, abs_tol=5e-324)


@pytest.mark.parametrize("path", PATHS)
def test_huge_values_with_gaps_and_another_side_of_usual_size(path: str) -> None:
    rng, f64 = np.random.default_rng(3), DTYPES["float64"]
    r = rng.standard_normal(2001) * 1e200
    c = rng.standard_normal(2001)
    r[::7], c[::5], c[3] = -math.inf, math.nan, f64.lowest
    want = definitions.pair_moments(r, f64, c, f64, count=2001, atol=1e-3, rtol=1e-3)
    assert math.isfinite(want.r_std) and math.isfinite(want.r_l2)
    assert_same_moments(measured(r, c, "float64", "float64", path), want)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "numpy"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_windows_of_any_size_at_any_address_join_to_the_whole(path: str, name: str) -> None:
    """As threads, jobs and shards take them."""
    rng, dtype = np.random.default_rng(4), DTYPES[name]
    values = rng.standard_normal(20_000) + 3
    other = values + 1e-3 * rng.standard_normal(values.size)
    values[rng.random(values.size) < 0.1] = -math.inf
    r, c = encode(values, dtype), encode(other, dtype)
    want = definitions.pair_moments(r, dtype, c, dtype, count=20_000, atol=1e-3, rtol=1e-3)
    size = dtype.bits // 8
    for window in (333, 512, 4096, 19_999):
        parts = [
            measured(
                misaligned(r[i * size : (i + window) * size], window % 64),
                misaligned(c[i * size : (i + window) * size], 3),
                *(name, name, path),
            )
            for i in range(0, 20_000, window)
        ]
        assert_same_moments(merge_moments(parts), want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("r", "c"), [("float32", "bfloat16"), ("float16", "float32")])
def test_smooth_and_masked_tensors_are_exact(path: str, r: str, c: str) -> None:
    rng = np.random.default_rng(5)
    ramp = np.linspace(1000.0, 1001.0, 30_000)
    masked = rng.standard_normal(30_000)
    masked[rng.random(masked.size) < 0.5] = -math.inf
    for values in (ramp, masked):
        a = encode(values, DTYPES[r])
        b = encode(values * (1 + 1e-3 * rng.standard_normal(values.size)), DTYPES[c])
        want = definitions.pair_moments(
            a, DTYPES[r], b, DTYPES[c], count=values.size, atol=1e-3, rtol=1e-3
        )
        assert_same_moments(measured(a, b, r, c, path), want)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_a_tolerance_that_nothing_can_meet_leaves_every_pair_outside(
    path: str, tolerance: float
) -> None:
    values = np.array([0.0, 1.0, math.nan, 2.0, -math.inf], np.float32)
    got = kernel.pair_moments(
        *(values, DTYPES["float32"], values, DTYPES["float32"]),
        count=5,
        atol=tolerance,
        path=path,
    )
    assert (got.outside, got.different, got.finite) == (3, 0, 3)


@pytest.mark.parametrize("path", PATHS)
def test_a_sum_of_thousands_of_equal_blocks_keeps_its_digits(path: str) -> None:
    """They all round the same way: a mean of 5e7 equal elements was off by 2e-12."""
    count, f64 = 1 << 22, DTYPES["float64"]
    for value in (0.1, 1.7, 2.9):
        r, c = np.full(count, value), np.full(count, -3 * value)
        moments = kernel.pair_moments(r, f64, c, f64, count=count, path=path)
        summary = kernel.summarize(r, f64, count=count, path=path)
        for got, want in (
            (moments.r_mean, value),
            (summary.mean, value),
            (summary.l2, value * 2048),
            (from_moments.mean_abs_error(moments), 3 * value + value),
            (from_moments.mean_rel_error(moments), 4.0),
            (from_moments.projection(moments), -4.0),
            (from_moments.cosine(moments), -1.0),
        ):
            assert math.isclose(got, want, rel_tol=3e-14)


@pytest.mark.parametrize("path", PATHS)
def test_a_projection_of_a_much_larger_candidate_keeps_its_bound(path: str) -> None:
    """What is left of `<c, r>` after it cancelled is known to the digits of `|c| |r|`."""
    rng, f32 = np.random.default_rng(9), DTYPES["float32"]
    for loud in (1.0, 1e4, 1e8):
        r = (1 + rng.random(20_000)).astype(np.float32)
        c = (loud * rng.choice([-1.0, 1.0], r.size) * rng.random(r.size)).astype(np.float32)
        moments = kernel.pair_moments(r, f32, c, f32, count=r.size, path=path)
        a, b = r.astype(np.longdouble), c.astype(np.longdouble)
        want = float(((b - a) * a).sum() / (a * a).sum())
        assert abs(from_moments.projection(moments) - want) <= 1e-12 * max(1.0, loud)


BEYOND = {
    # Norms beyond float64, of nearly equal tensors: the distance was printed as 0, which passes.
    "near": (np.full(9, 1.5e308), np.full(9, 1.5e308 * (1 - 2.0**-40))),
    # The difference itself is beyond float64.
    "opposite": (np.full(4, 1.5e308), np.full(4, -1.5e308)),
    # The sum of errors is, their mean is not.
    "far": (np.full(100, 1e-300), np.full(100, 1e307)),
    "relative": (np.array([1.0, 1e-300, 1e-300]), np.array([1.0, 1.5e8, 1.5e8])),
    "tiny": (np.full(7, 1e-310), np.full(7, 3e-310)),
}


def test_what_is_a_float64_is_printed_whatever_its_sums_exceed(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path / side) for side in ("reference", "candidate")]
    for order, (site, sides) in enumerate(BEYOND.items()):
        for writer, values in zip(writers, sides, strict=True):
            record = Record(TensorKey.of(site, "output"), order, "float64", values.shape)
            writer.put(record, values.view(np.uint8))
    for writer in writers:
        writer.close()
    words = ["compare", "reference", "candidate", "--format", "csv", "--all", "--metric", "sqnr"]
    done = subprocess.run(
        [sys.executable, "-m", "driftline", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 1, done.stderr
    rows = {row["site"]: row for row in csv.DictReader(io.StringIO(done.stdout))}
    for site, sides in BEYOND.items():
        r, c = (side.astype(np.longdouble) for side in sides)  # whose range is much wider
        ratio, relative = np.linalg.norm(c - r) / np.linalg.norm(r), np.abs(c - r) / np.abs(r)
        wanted = {
            "relative_l2": ratio,
            "sqnr": -20 * np.log10(ratio),
            "mean_abs_error": np.abs(c - r).mean(),
            "rmse": np.sqrt(((c - r) ** 2).mean()),
            "max_rel_error": relative.max(),
            "mean_rel_error": relative.mean(),
            "projection": ((c - r) * r).sum() / (r * r).sum(),
            "cosine": (r * c).sum() / np.linalg.norm(r) / np.linalg.norm(c),
        }
        for name, want in wanted.items():
            got, absolute = float(rows[site][name]), 1e-12 if name == "cosine" else 0.0
            close = math.isclose(got, float(want), rel_tol=1e-9, abs_tol=absolute)
            assert close, (site, name, got, want)


PRINTED = ("max_abs_error", "max_rel_error", "mean_abs_error", "relative_l2", "rmse")


def test_every_path_and_number_of_threads_prints_the_figures_of_numpy_and_one_verdict(
    tmp_path: Path,
) -> None:
    """Through the command line: kinds, sizes and masks that take every way through the kernel."""
    rng = np.random.default_rng(6)
    defined: dict[str, list[float]] = {}
    writers = [RunWriter(tmp_path / side) for side in ("reference", "candidate")]
    for name in ("float64", "float32", "bfloat16", "float16"):
        for number, count in enumerate((1, 7, 513, 100_003)):
            values = rng.standard_normal(count) * 10.0 ** (number - 2) + number
            sides = [values, values * (1 + 1e-3 * rng.standard_normal(count))]
            if count > 7:
                sides = [np.where(rng.random(count) < 0.1, -math.inf, side) for side in sides]
                sides[1] = np.where(np.isinf(sides[0]), -math.inf, sides[1])
                sides[0] = np.where(np.isinf(sides[1]), -math.inf, sides[0])
            site, dtype = f"{name}.{count}", DTYPES[name]
            raws = [encode(side, dtype) for side in sides]
            for writer, raw in zip(writers, raws, strict=True):
                record = Record(TensorKey.of(site, "output"), len(defined), name, (count,))
                writer.put(record, raw.view(np.uint8))
            plain = [definitions.real_values(raw, dtype, count) for raw in raws]
            finite = np.isfinite(plain[0]) & np.isfinite(plain[1])
            defined[site] = [
                metric.define()(*(side[finite] for side in plain))
                for metric in DEFINED
                if metric.name in PRINTED
            ]
    for writer in writers:
        writer.close()
    names = [metric.name for metric in DEFINED if metric.name in PRINTED]
    judged: set[str] = set()
    for path, threads in [*((path, "1") for path in PATHS), (PATHS[0], "3")]:
        words = ["compare", "reference", "candidate", "--format", "csv", "--all"]
        done = subprocess.run(
            [sys.executable, "-m", "driftline", *words, "--threads", threads],
            cwd=tmp_path,
            env={**os.environ, "DRIFTLINE_KERNEL": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        rows = {row["site"]: row for row in csv.DictReader(io.StringIO(done.stdout))}
        assert rows.keys() == defined.keys(), done.stderr
        judged.add(repr((done.returncode, [(site, row["status"]) for site, row in rows.items()])))
        for site, row in rows.items():
            for name, want in zip(names, defined[site], strict=True):
                assert math.isclose(float(row[name]), want, rel_tol=1e-9), (path, site, name)
    assert len(judged) == 1


@pytest.mark.parametrize(("name", "word"), [("float32", "<u4"), ("bfloat16", "<u2")])
def test_a_signalling_nan_is_a_nan_without_a_word_from_numpy(name: str, word: str) -> None:
    bits = np.array([0x7F800001 >> (32 - DTYPES[name].bits) | 1], word).view(DTYPES[name].storage)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(to_float64(bits, DTYPES[name])).all()
        assert definitions.pair_moments(bits, DTYPES[name], bits, DTYPES[name], count=1).r_nan == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler with sanitizers")
def test_the_sanitizers_find_nothing_in_random_bytes(tmp_path: Path) -> None:
    sources = Path(kernel.__file__).with_name("csrc")
    subprocess.run(
        [sys.executable, "-I", sources / "generate_tables.py", tmp_path / "tables.h"], check=True
    )
    flags = ["-O1", "-g", "-ffp-contract=off", "-fsanitize=address,undefined"]
    flags += ["-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
    flags += ["-I", str(tmp_path), "-I", str(sources)]
    sets = {
        "generic": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-mpopcnt"],
        "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    }
    if "avx2" not in PATHS:
        sets, flags = {"generic": []}, [*flags, "-DDRIFTLINE_GENERIC_ONLY=1"]
    objects: list[Path] = []
    for name, options in sets.items():
        objects.append(tmp_path / f"{name}.o")
        subprocess.run(
            ["gcc", *flags, *options, f"-DISA={name}", "-c", sources / "isa.c", "-o", objects[-1]],
            check=True,
        )
    driver = Path(__file__).with_name("sanitized_kernel.c")
    program = tmp_path / "program"
    subprocess.run(["gcc", *flags, driver, *objects, "-o", program, "-lm", "-lpthread"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-4000:]
