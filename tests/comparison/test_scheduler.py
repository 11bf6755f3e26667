"""The engine: pairs become rows, whatever was kept, and what cannot be measured says why."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from driftline.alignment.rules.names import pair_by_name
from driftline.comparison.measure import scheduler
from driftline.comparison.measure.scheduler import measure
from driftline.comparison.metrics.catalogue import requested
from driftline.comparison.pipeline import compare
from driftline.errors import BadRun, Unreachable
from driftline.formats.registry import open_run
from driftline.numerics import kernel
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of

RNG = np.random.default_rng(7)


def only(table):
    (row,) = table.rows
    return row


def noise(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def measured(reference, candidate, **options):
    plan = pair_by_name(reference.records, candidate.records)
    return measure(plan, reference, candidate, **options)


def test_a_row_holds_the_numbers_numpy_computes():
    ours, theirs = noise(5, 7), noise(5, 7)
    row = only(measured(run_of({"a": ours}), run_of({"a": theirs})))
    error = theirs.astype(float) - ours
    assert row.status == "unjudged"
    assert row.basis == "values"
    assert row.metrics["max_abs_error"] == pytest.approx(np.abs(error).max())
    assert row.metrics["mean_abs_error"] == pytest.approx(np.abs(error).mean())
    assert row.metrics["rmse"] == pytest.approx(np.sqrt((error**2).mean()))
    assert row.metrics["max_abs_error_at"] == np.abs(error).argmax()
    assert row.metrics["reference_std"] == pytest.approx(ours.astype(float).std())
    assert row.metrics["candidate_l2"] == pytest.approx(np.linalg.norm(theirs.astype(float)))
    assert row.metrics["candidate_min"] == theirs.min()
    assert "one_sided_at" not in row.metrics


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_blocks_and_threads_do_not_change_a_row(monkeypatch, threads):
    tensors = {f"t{n}": noise(n * 37 + 1) for n in range(40)}
    other = {name: array + 0.01 * noise(array.size) for name, array in tensors.items()}
    other["t39"][100] = np.nan
    other["t39"][200] += 1000
    one = measured(run_of(tensors), run_of(other), threads=1)
    monkeypatch.setattr(scheduler, "BLOCK", 64)
    many = measured(run_of(tensors), run_of(other), threads=threads)
    assert [row.key for row in many.rows] == [row.key for row in one.rows]
    for a, b in zip(one.rows, many.rows, strict=True):
        assert a.metrics.keys() == b.metrics.keys()
        for name, value in a.metrics.items():
            assert b.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
    assert many.rows[39].metrics["one_sided_at"] == 100
    assert many.rows[39].metrics["max_abs_error_at"] == 200


def test_equal_digests_are_read_once_and_give_the_row_of_two_reads():
    array = noise(100)
    array[3] = np.inf
    ours, theirs = run_of({"a": array}), run_of({"a": array.copy()})
    short = only(measured(ours, theirs))
    blind = run_of({"a": array})
    blind._records = [record._replace(digest="other:1") for record in blind.records]
    blind._blobs = {("other:1", 400): array.view(np.uint8)}
    long = only(measured(blind, theirs))
    assert short.metrics == long.metrics
    assert short.metrics["different"] == 0
    assert short.metrics["reference_inf"] == 1


def test_the_share_outside_uses_the_coarser_dtype_s_tolerance_unless_one_is_given():
    x = np.ones(1000, np.float32)
    y = x.copy()
    y[:10] = 1.01
    assert only(compare(run_of({"a": x}), run_of({"a": y}))).metrics["outside_share"] == 0.01
    coarse = run_of({"a": y.astype(ml_dtypes.bfloat16)})
    assert only(compare(run_of({"a": x}), coarse)).metrics["outside_share"] == 0.0
    strict = compare(run_of({"a": x}), coarse, rtol=1e-3)
    assert only(strict).metrics["outside_share"] == 0.01


def test_shapes_that_differ_are_a_row_with_a_reason():
    row = only(compare(run_of({"a": noise(2, 3)}), run_of({"a": noise(3, 2)})))
    assert row.status == "incomparable"
    assert row.reason == "the shapes differ: 2x3 against 3x2"


def test_lost_values_are_a_row_with_a_reason():
    sink = MemorySink(max_bytes=10)
    record_into(sink, "a", noise(100))
    record_into(sink, "b", noise(1))
    table = compare(run_of({"a": noise(100), "b": noise(1)}), sink.run())
    assert table.rows[0].status == "incomparable"
    assert "size limit" in table.rows[0].reason
    assert table.rows[1].compared


def test_a_complex_tensor_against_a_real_one_is_incomparable():
    row = only(compare(run_of({"a": noise(4)}), run_of({"a": noise(4).astype(np.complex64)})))
    assert row.status == "incomparable"
    assert "complex" in row.reason


def test_complex_tensors_compare_by_their_parts():
    ours = (noise(4) + 1j * noise(4)).astype(np.complex64)
    theirs = ours.copy()
    theirs[2] *= -1j
    row = only(compare(run_of({"a": ours}), run_of({"a": theirs})))
    assert row.status == "fail"
    expected = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
    assert row.metrics["relative_l2"] == pytest.approx(expected)
    assert "(2)" in row.reason


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors_have_answers(shape):
    array = np.ones(shape, np.float32)
    row = only(compare(run_of({"a": array}), run_of({"a": array})))
    assert row.status == "pass"
    assert row.metrics["relative_l2"] == 0.0
    assert row.metrics["cosine"] == 1.0


def test_integers_beyond_2_53_compare_exactly():
    ours = np.array([2**53, 2**62 + 1, -(2**63)], np.int64)
    theirs = ours.copy()
    assert only(compare(run_of({"a": ours}), run_of({"a": theirs}))).status == "pass"
    theirs[1] -= 1
    row = only(compare(run_of({"a": ours}), run_of({"a": theirs})))
    assert row.status == "fail"
    assert row.metrics["different"] == 1
    assert row.reason == "1 of 3 elements differ, first at (1)"


def test_integers_against_floats_compare_as_numbers_and_say_so():
    ours, theirs = np.arange(5, dtype=np.int64), np.arange(5, dtype=np.float32)
    row = only(compare(run_of({"a": ours}), run_of({"a": theirs})))
    assert row.status == "pass"
    assert "int64 against float32" in row.reason


def test_a_value_out_of_float64_s_squares_is_measured_the_long_way():
    ours = np.array([3e-200, 4e-200])
    row = only(measured(run_of({"a": ours}), run_of({"a": np.array([3e-200, 0.0])})))
    assert row.metrics["relative_l2"] == pytest.approx(0.8)
    assert row.metrics["cosine"] == pytest.approx(0.6)
    assert not [name for name in row.metrics if name.startswith("_")]


def test_kl_and_user_metrics_are_measured_on_request(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "def flat(r, c):\n    return float(r.ndim)\n"
        "def shaped(r, c):\n    return float(np.isnan(c).sum() + 10 * r.ndim)\n"
        "shaped.whole = True\n"
        "def writes(r, c):\n    r[:] = 0\n    return 0.0\n"
    )
    ours, theirs = noise(2, 3), noise(2, 3)
    theirs[0, 0] = np.nan
    names = ["kl", f"{path}:flat", f"{path}:shaped", f"{path}:writes"]
    row = only(measured(run_of({"a": ours}), run_of({"a": theirs}), metrics=requested(names)))
    r, c = ours.reshape(-1)[1:].astype(float), theirs.reshape(-1)[1:].astype(float)
    p, q = np.exp(r) / np.exp(r).sum(), np.exp(c) / np.exp(c).sum()
    assert row.metrics["kl"] == pytest.approx((p * np.log(p / q)).sum())
    assert row.metrics["flat"] == 1.0
    assert row.metrics["shaped"] == 21.0


@pytest.mark.parametrize("how", ["1 / 0", "exit(0)"])
def test_a_metric_that_fails_is_nan_and_does_not_hide_what_the_others_found(tmp_path, how):
    path = tmp_path / "mine.py"
    path.write_text(f"def breaks(r, c):\n    return 1.0 if r.size == 1 else {how}\n")
    ours, theirs = run_of({"a": noise(6)}), run_of({"a": noise(6)})
    (row,) = compare(ours, theirs, metrics=[f"{path}:breaks"])
    assert row.status == "fail"
    assert math.isnan(row.metrics["breaks"])
    assert "relative_l2" in row.reason
    assert "'breaks' failed: " in row.reason
    (same,) = compare(ours, ours, metrics=[f"{path}:breaks"])
    assert same.status == "pass"
    (held,) = compare(ours, ours, metrics=[f"{path}:breaks"], limits={"breaks": 1e9})
    assert held.status == "fail"


# -- what was kept --------------------------------------------------------------------------


def activations():
    """Tokens x heads x width, each head at its own scale, as attention outputs are."""
    return (noise(16, 8, 32) + noise(1, 8, 32)).reshape(16, 256)


def head_swap(x):
    heads = x.reshape(16, 8, 32).copy()
    heads[:, [2, 5]] = heads[:, [5, 2]]
    return heads.reshape(16, 256)


FAULTS = {
    "head swap": head_swap,
    "token shift": lambda x: np.roll(x, 1, axis=0),
    "sign": lambda x: -x,
    "half scale": lambda x: x * np.float32(0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("other_side", ["summary", "full"])
def test_a_permutation_is_seen_in_summaries(fault, other_side):
    for _ in range(20):
        clean = activations()
        broken = FAULTS[fault](clean)
        true = np.linalg.norm(broken - clean) / np.linalg.norm(clean)
        ours = run_of({"a": clean}, keep="summary")
        theirs = run_of({"a": broken.astype(ml_dtypes.bfloat16)}, keep=other_side)
        row = only(compare(ours, theirs))
        assert row.basis == "summary"
        assert row.status == "fail"
        assert "relative_l2" in row.estimated
        assert "estimated relative_l2" in row.reason
        assert row.metrics["relative_l2"] == pytest.approx(true, rel=0.5)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounding_alone_passes_in_summaries(dtype):
    for _ in range(20):
        clean = activations()
        ours = run_of({"a": clean}, keep="summary")
        row = only(compare(ours, run_of({"a": clean.astype(dtype)}, keep="summary")))
        assert row.status == "pass"
        true = np.linalg.norm(clean.astype(dtype).astype(float) - clean) / np.linalg.norm(clean)
        assert row.metrics["relative_l2"] == pytest.approx(true, rel=0.5)


def test_a_nan_in_one_summary_fails():
    clean = activations()
    broken = clean.copy()
    broken[3, 4] = np.nan
    ours, theirs = run_of({"a": clean}, keep="summary"), run_of({"a": broken}, keep="summary")
    row = only(compare(ours, theirs))
    assert row.status == "fail"
    assert "NaN or Inf on one side only" in row.reason


def test_equal_digests_pass_and_different_ones_fail_without_a_number():
    x, y = noise(4), noise(4)
    ours = run_of({"a": x, "b": y}, keep="digest")
    theirs = run_of({"a": x, "b": y + 1}, keep="full")
    equal, unequal = compare(ours, theirs).rows
    assert (equal.status, equal.basis, equal.metrics["relative_l2"]) == ("pass", "digest", 0.0)
    assert unequal.status == "fail"
    assert "how much is not known" in unequal.reason


def test_digests_of_different_dtypes_say_nothing():
    x = noise(4)
    ours = run_of({"a": x}, keep="digest")
    theirs = run_of({"a": x.astype(np.float16)}, keep="digest")
    table = compare(ours, theirs)
    assert only(table).status == "incomparable"
    assert "float32 and float16" in only(table).reason
    assert table.verdict == "incomparable"


def test_descriptions_compare_shapes_only_and_say_so():
    ours = run_of({"a": noise(4)}, keep="describe")
    row = only(compare(ours, run_of({"a": noise(4)})))
    assert row.status == "incomparable"
    assert "shapes agree, dtypes too" in row.reason
    row = only(compare(ours, run_of({"a": noise(5)})))
    assert "the shapes differ" in row.reason


@pytest.mark.parametrize(("ours", "theirs", "step"), [(3, 1, 3), (2, 3, 6), (4, 4, 4)])
def test_a_sample_is_set_against_the_same_elements(ours, theirs, step):
    x, y = noise(100), noise(100)
    a = run_of({"a": x}, keep="sample" if ours > 1 else "full", stride=ours)
    b = run_of({"a": y}, keep="sample" if theirs > 1 else "full", stride=theirs)
    row = only(measured(a, b))
    assert row.basis == "sample"
    error = y[::step].astype(float) - x[::step]
    assert row.metrics["max_abs_error"] == pytest.approx(np.abs(error).max())
    assert row.metrics["reference_max"] == x[::step].max()


def test_integers_kept_as_summaries_are_decided_by_their_digests():
    ids = np.arange(100)
    ours = run_of({"a": ids}, keep="summary")
    other = ids.copy()
    other[[3, 4]] = other[[4, 3]]
    assert only(compare(ours, run_of({"a": ids.copy()}, keep="summary"))).status == "pass"
    assert only(compare(ours, run_of({"a": other}, keep="summary"))).status == "fail"


def test_progress_counts_every_pair_once():
    tensors = {f"t{n}": noise(10) for n in range(20)}
    seen = []
    measured(run_of(tensors), run_of(tensors), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(n + 1, 20) for n in range(20)]


def test_a_bug_in_a_worker_is_raised_and_not_lost():
    def breaks(done, of):
        raise RuntimeError("planted")

    tensors = {f"t{n}": noise(10) for n in range(20)}
    with pytest.raises(RuntimeError, match="planted"):
        measured(run_of(tensors), run_of(tensors), progress=breaks, threads=3)


def test_tensors_that_are_nan_throughout_on_both_sides_show_nothing():
    nans = np.full(4, np.nan, np.float32)
    row = only(compare(run_of({"a": nans}), run_of({"a": nans.copy()})))
    assert (row.status, row.limit_from) == ("fail", "always")
    assert "neither side has a finite number" in row.reason
    assert row.metrics["reference_nan"] == 4
    assert math.isnan(row.metrics["reference_mean"])


def test_bytes_that_two_sites_share_are_read_once_and_have_a_row_each(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    for name, shift in (("ref", 0.0), ("cand", 0.5)):
        writer = RunWriter(tmp_path / name)
        shared = (values + np.float32(shift)).view(np.uint8)
        for site, port in (("a", "output"), ("b", "input"), ("c", "input")):
            key = TensorKey.of(site, port)  # type: ignore[arg-type]
            writer.put(Record(key, 0, "float32", (64,), class_name=site.upper()), shared)
        writer.close()
    ref, cand = open_run(tmp_path / "ref"), open_run(tmp_path / "cand")
    read: list[Record] = []

    def counting(run: Run) -> None:
        # Read in place where the C kernel is there, as an array elsewhere.
        name = "memory" if kernel.takes_addresses() else "raw"
        plain = getattr(run, name)
        setattr(run, name, lambda record: (read.append(record), plain(record))[1])

    counting(ref)
    table = compare(ref, cand)
    assert len(read) == 1
    assert [(r.key.site, r.key.port, r.class_name, r.status) for r in table.rows] == [
        ("a", "output", "A", "fail"),
        ("b", "input", "B", "fail"),
        ("c", "input", "C", "fail"),
    ]
    assert len({r.metrics["max_abs_error"] for r in table.rows}) == 1


def test_a_square_weight_that_agrees_the_other_way_round_is_said_to_and_stays_what_it_is():
    square = noise(6, 6)
    turned = np.ascontiguousarray(square.T)

    def row(name, theirs):
        return only(measured(run_of({name: square}), run_of({name: theirs})))

    found = row("m/param/weight", turned)
    assert "ambiguous: transposed it would agree better (relative_l2 0)" in found.reason
    assert found.metrics["relative_l2"] > 0.1
    assert row("m/param/weight", noise(6, 6)).reason == ""  # neither way
    assert row("m/param/weight", square * np.float32(1.5)).reason == ""  # as it is, if at all
    assert row("m", turned).reason == ""  # an activation lies as its model says
    # A tenth of the error is what must go.
    half = turned + np.float32(0.2) * noise(6, 6)
    off = row("m/param/weight", half).metrics["relative_l2"]
    left = np.linalg.norm(half.T.astype(float) - square) / np.linalg.norm(square.astype(float))
    assert left > off / 10
    assert row("m/param/weight", half).reason == ""


class Far(Run):
    """A run whose values are not here, and do not come."""

    def __init__(self, run: Run, words: str = "") -> None:
        self.name, self._run, self._words = "far", run, words

    @property
    def records(self):
        return self._run.records

    @property
    def manifest(self):
        return self._run.manifest

    def raw(self, record):
        raise (Unreachable if self._words else BadRun)(self._words or "the file is cut")

    def memory(self, record):
        return self.raw(record)


@pytest.mark.parametrize("size", [8, 1 << 20])
@pytest.mark.parametrize("side", [0, 1])
def test_a_store_that_cannot_be_reached_ends_the_comparison_and_is_no_row(size, side):
    """It says nothing about this pair, nor about the next one; a bad file does."""
    run = run_of({"a": np.ones(size, np.float32), "b": np.zeros(size, np.float32)})
    sides = [run, run]
    sides[side] = Far(run, "s3://b cannot be reached")
    plan = pair_by_name(run.records, run.records)
    with pytest.raises(Unreachable, match="s3://b cannot be reached"):
        measure(plan, *sides)
    sides[side] = Far(run)
    found = measure(plan, *sides).rows
    assert [(row.status, row.reason) for row in found] == [("incomparable", "the file is cut")] * 2
