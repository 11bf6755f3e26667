"""Single ATB tensor files: every type, every kind of absence, every way to be broken."""

from __future__ import annotations

import math
import random
import resource
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import driftline
from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.formats.ascend.atb import file
from driftline.formats.ascend.tiled_layouts import nz_to_nd
from driftline.formats.ascend.types import ACL_TYPES, hifloat8_values
from support.atb import NZ, AtbDump, Operation, Value, bin_bytes, write_bin
from support.atb_files import nd_to_nz

GOLDEN = Path(__file__).parents[1] / "data" / "ascend" / "atb_bin"
SAMPLES = sorted(path for path in GOLDEN.glob("*.bin") if path.with_suffix(".npy").exists())


def only(path: Path):
    (handle,) = driftline.open_run(path).tensors()
    return handle


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_golden_files_hold_what_their_npy_holds(path: Path) -> None:
    handle, wanted = only(path), np.load(path.with_suffix(".npy"))
    assert handle.shape == wanted.shape
    got = handle.numpy()
    if handle.dtype == "bfloat16":
        got = got.astype(np.float32)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bad_empty_file", "is empty"),
        ("bad_no_end", "no $End line"),
        ("bad_truncated", "cut short: 24 bytes of data are promised, and 19 are there"),
        ("bad_unknown_dtype", "unknown element type 99"),
        ("bad_written_twice", "written twice"),
    ],
)
def test_every_bad_golden_file_is_refused_with_its_own_reason(name: str, said: str) -> None:
    with pytest.raises(BadFile) as refused:
        driftline.open_run(GOLDEN / f"{name}.bin")
    assert said in str(refused.value)


def test_a_description_has_a_shape_and_no_values() -> None:
    handle = only(GOLDEN / "f16_desc_only_2x3.bin")
    assert (handle.record.kept, handle.shape, handle.dtype) == ("describe", (2, 3), "float16")
    with pytest.raises(BadInput, match="only its describe was kept"):
        handle.raw()


def test_statistics_are_a_summary_that_says_what_it_does_not_know() -> None:
    handle = only(GOLDEN / "f16_stats_only_2x3.bin")
    known = handle.summary
    assert handle.record.kept == "summary" and known is not None
    assert (known.count, known.max, known.min, known.l2) == (6, 1024.0, -2.25, 1024.007973)
    assert math.isnan(known.std) and math.isnan(known.nan) and not known.sketch


def test_statistics_that_differ_fail_and_equal_ones_pass(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    for name, values in (("a", x), ("b", x), ("c", x * 1.5)):
        write_bin(tmp_path / f"{name}.bin", values, keep="statistics")
    same = driftline.compare(tmp_path / "a.bin", tmp_path / "b.bin")
    assert same.verdict == "pass"
    assert "at least" in same.rows[0].reason
    other = driftline.compare(tmp_path / "a.bin", tmp_path / "c.bin")
    assert other.verdict == "fail"
    assert other.rows[0].metrics["relative_l2"] == pytest.approx(0.5, rel=1e-4)


def test_statistics_against_values_never_claim_too_much(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e-7
    write_bin(tmp_path / "values.bin", x)
    write_bin(tmp_path / "statistics.bin", x, keep="statistics")
    table = driftline.compare(tmp_path / "values.bin", tmp_path / "statistics.bin")
    assert table.verdict == "pass"  # six decimals say nothing of 1e-7; that is no difference


ODD_TYPES = {
    29: (np.array([0x21, 0xF8], np.uint8), (3,), [1, 2, -8]),
    30: (np.array([0b101], np.uint8), (3,), [1, 0, 1]),
    33: (np.array([1.5, -2], np.float16).view(np.uint8), (1,), [1.5 - 2j]),
    34: (np.array([0x08, 0x88, 0x80, 0x6F, 0x01], np.uint8), (5,), [1, -1, np.nan, np.inf, 2**-22]),
    35: (np.array([0x3C], np.uint8), (1,), [1]),
    36: (np.array([0x38], np.uint8), (1,), [1]),
    37: (np.array([127, 128], np.uint8), (2,), [1, 2]),
    38: (np.array([0x0C, 0x3F], np.uint8), (2,), [1, -28]),
    39: (np.array([0x08, 0x1F, 0x21], np.uint8), (3,), [1, 7.5, -0.125]),
    40: (np.array([0x72], np.uint8), (2,), [1, 6]),
    41: (np.array([0xF4], np.uint8), (2,), [1, -1.75]),
}


@pytest.mark.parametrize("code", ODD_TYPES)
def test_types_that_no_other_reader_knows_are_decoded(tmp_path: Path, code: int) -> None:
    payload, shape, wanted = ODD_TYPES[code]
    write_bin(tmp_path / "x.bin", payload, code=code, dims=shape)
    np.testing.assert_array_equal(only(tmp_path / "x.bin").float64(), np.array(wanted))


def test_every_known_code_is_read_or_said_to_be_no_number(tmp_path: Path) -> None:
    for code, kind in ACL_TYPES.items():
        path = write_bin(
            tmp_path / f"{code}.bin", np.zeros(kind.byte_count(8), np.uint8), code=code, dims=(8,)
        )
        handle = only(path)
        if kind.dtype:
            assert handle.float64().shape == (8,), kind.name
        else:
            assert kind.name in handle.lost
            with pytest.raises(BadInput):
                handle.raw()


def test_hifloat8_agrees_with_its_definition() -> None:
    values = hifloat8_values()
    finite = values[np.isfinite(values)]
    assert np.nanmax(finite) == 2**15 and np.abs(finite[finite != 0]).min() == 2**-22
    assert np.isnan(values).sum() == 1 and np.isinf(values).sum() == 2
    assert len(set(finite.tolist())) == len(finite)  # no value has two codes
    assert (values.astype(np.float16).astype(float) == values)[np.isfinite(values)].all()


@pytest.mark.parametrize(("dtype", "width"), [(np.float16, 16), (np.int8, 32)])
def test_tiles_come_back_in_order_with_their_padding(tmp_path: Path, dtype, width: int) -> None:
    matrix = np.arange(2 * 20 * 40).reshape(2, 20, 40).astype(dtype)
    tiles = nd_to_nz(matrix, width)
    assert tiles.shape == (2, -(-40 // width), 32, width)
    for layout in (NZ, 50, 51):
        path = write_bin(tmp_path / f"{layout}.bin", tiles, layout=layout)
        handle = only(path)
        assert handle.shape == (2, 32, -(-40 // width) * width)
        np.testing.assert_array_equal(handle.numpy()[:, :20, :40], matrix)
        assert not handle.numpy()[:, 20:].any()
    np.testing.assert_array_equal(nz_to_nd(tiles, tiles.shape, (20, 40)), matrix)


def test_packed_tiles_are_put_in_order_too(tmp_path: Path) -> None:
    codes = (np.arange(16 * 128) % 16).astype(np.uint8).reshape(16, 128)
    tiles = nd_to_nz(codes, 64).reshape(-1)
    packed = tiles[0::2] | (tiles[1::2] << 4)
    path = write_bin(tmp_path / "x.bin", packed, code=29, dims=(1, 2, 16, 64), layout=NZ)
    handle = only(path)
    signed = np.where(codes > 7, codes.astype(int) - 16, codes)
    np.testing.assert_array_equal(handle.numpy(), signed)


def test_other_private_formats_say_that_they_are_in_storage_order(tmp_path: Path) -> None:
    run = driftline.open_run(write_bin(tmp_path / "x.bin", np.zeros((1, 2, 3, 4, 16)), layout=3))
    assert "NC1HWC0 is given in the order of its storage" in str(list(run.events()))


def test_large_values_are_a_view_of_the_file(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "x.bin", np.arange(1 << 20, dtype=np.float32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    raw = only(path).raw()
    assert raw[-1] == (1 << 20) - 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3000  # kB: nothing copied
    base = raw
    while isinstance(base, np.ndarray):
        base = base.base
    assert "mmap" in repr(base) or isinstance(base, memoryview)


def test_a_file_that_shrank_after_it_was_opened_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "x.bin", np.arange(1 << 16, dtype=np.float32))
    handle = only(path)
    with path.open("r+b") as stream:
        stream.truncate(4000)
    with pytest.raises(BadFile, match="has changed"):
        handle.raw()


def test_a_file_that_points_to_another_is_resolved_in_its_own_execution(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path, "G4")
    x = np.arange(4, dtype=np.float32)
    dump.execute([Operation("Add", [Value("x", x)], [Value("y", x + 1)])])
    alias = dump.execution(0) / "1_Mul" / "before" / "intensor0.bin"
    write_bin(alias, x + 1, points_to="0_outtensor0.bin")
    np.testing.assert_array_equal(only(alias).numpy(), x + 1)
    alone = write_bin(tmp_path / "alone" / "a.bin", x, points_to="../../0_outtensor0.bin")
    assert "open the dump's folder" in only(alone).lost


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b"$Version=1.0", b"$Version=2.0", "only 1.0 is known"),
        (b"dims=2,3\n", b"dims=2,3\ndims=2,3\n", "says dims twice"),
        (b"format=2\n", b"", "does not say its format"),
        (b"format=2\n", b"format=2\nhello\n", "no name=value"),
        (b"format=2\n", b"format=2\na=b=c\n", "no name=value"),
        (b"format=2\n", b"format=2\n$New=1\n", "is not known"),
        (b"dtype=0\n", b"dtype=zero\n", "no number for its dtype"),
        (b"Count=1", b"Count=2", "claims 2 objects"),
        (b"Count=1", b"Count=0", "no object, but data"),
        (b"dims=2,3", b"dims=2,x", "sizes that are no numbers"),
        (b"dims=2,3", b"dims=2,4", "32 bytes by type and sizes, 24 by its length"),
        (b"dims=2,3", b"dims=" + b"9" * 18 + b"," + b"9" * 18, "contradicts itself"),
        (b"data=0,24", b"data=8,16", "contradicts itself"),
        (b"data=0,24", b"data=here", "where its data are"),
        (b"$Version", b"$version", "does not begin as an ATB tensor file"),
    ],
)
def test_a_header_that_cannot_be_believed_says_why(
    tmp_path: Path, before: bytes, after: bytes, said: str
) -> None:
    whole = bin_bytes(np.zeros((2, 3), np.float32))
    assert before in whole
    path = tmp_path / "intensor0.bin"
    path.write_bytes(whole.replace(before, after, 1))
    with pytest.raises(BadFile) as refused:
        driftline.open_run(path)
    assert said in str(refused.value)


def test_unknown_attributes_of_newer_writers_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bin_bytes(np.ones(3)).replace(b"dims=", b"stream=7\ndims="))
    assert only(path).shape == (3,)


def test_a_payload_may_hold_the_end_of_a_header(tmp_path: Path) -> None:
    payload = np.frombuffer(b"$End=1\n$Version=1.0\n$End=1\n\0", np.uint8)
    np.testing.assert_array_equal(only(write_bin(tmp_path / "x.bin", payload)).numpy(), payload)


@settings(max_examples=60, deadline=None)
@given(
    npst.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.uint32, np.complex64])
        | st.just(np.dtype(ml_dtypes.bfloat16)),
        npst.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6),
        elements=st.integers(0, 100),
    )
)
def test_whatever_is_written_comes_back(tmp_path_factory, array) -> None:
    path = write_bin(tmp_path_factory.mktemp("any") / "x.bin", array)
    handle = only(path)
    assert handle.shape == array.shape and handle.dtype == array.dtype.name
    assert handle.numpy().tobytes() == array.tobytes()


WORDS = (b"$End=1\n", b"=", b"\n", b"dims=", b"99999999999999999", b"-1", b"dtype=", b",", b"\0")


def mutated(dice: random.Random, seeds: list[bytes]) -> bytes:
    """One of the seeds, cut, glued, overwritten or with words of the format thrown in."""
    whole = bytearray(dice.choice(seeds))
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(whole) + 1)
        match dice.randrange(6):
            case 0 if at < len(whole):
                whole[at] = dice.randrange(256)
            case 1:
                del whole[at : at + dice.randint(1, 20)]
            case 2:
                whole[at:at] = dice.choice(WORDS)
            case 3:
                whole[at:at] = dice.choice(seeds)
            case 4:
                del whole[at:]
            case _:
                end = at + dice.randint(1, 4)
                whole[at:end] = str(dice.choice((0, 1, 2**31, 2**63, 10**17))).encode()
    return bytes(whole)


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_files_never_end_in_anything_but_a_sentence(tmp_path: Path, count: int) -> None:
    dice = random.Random(count)
    seeds = [path.read_bytes() for path in sorted(GOLDEN.glob("*.bin")) if path.stat().st_size]
    seeds.append(bin_bytes(nd_to_nz(np.ones((20, 20), np.float16)), layout=NZ))
    seeds.append(bin_bytes(np.ones(3, np.float32), points_to="../../../etc/passwd"))
    path = tmp_path / "intensor0.bin"
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        path.write_bytes(mutated(dice, seeds))
        try:
            (handle,) = file.open(path).tensors()
            if handle.has_values:
                assert handle.raw().nbytes <= 64 * path.stat().st_size
        except DriftlineError as why:
            assert str(why) and "\n" not in str(why)
            refused += 1
    assert refused > count // 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
