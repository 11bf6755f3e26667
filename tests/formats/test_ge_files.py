"""One GE dump file: every element type and layout, and a reason of its own for every fault."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from driftline.errors import BadFile
from driftline.formats.ascend.ge import operator_file
from driftline.formats.registry import open_run
from support.ge import (
    FRACTAL_NZ,
    NC1HWC0,
    NCHW,
    ND,
    GeValue,
    ge_bytes,
    ge_tiles,
    ge_value,
)

DATA = Path(__file__).parents[1] / "data" / "ascend" / "ge_dump"


def written(tmp_path: Path, *values: np.ndarray | GeValue, **more) -> Path:
    path = tmp_path / "Op.op.1.2.1706596911887829"
    path.write_bytes(ge_bytes("op", values, [], **more))
    return path


def only(path: Path):
    run = open_run(path)
    assert len(run) == 1
    return next(iter(run.tensors()))


@pytest.mark.parametrize(
    "path", sorted((DATA / "20240130064151").rglob("*.*.*")), ids=lambda p: p.name
)
def test_the_golden_files_hold_the_expected_arrays(path: Path) -> None:
    run = open_run(path)
    seen = 0
    for handle in run.tensors():
        expected = DATA / "expect" / f"{handle.key.site}.{handle.key.port}.{handle.key.slot}.npy"
        if expected.exists():
            array = np.load(expected)
            assert handle.shape == array.shape
            assert np.array_equal(handle.float64(), array.astype(np.float64))
            seen += 1
    assert seen


@pytest.mark.parametrize(
    "dtype",
    [
        *("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16"),
        *("uint32", "uint64", "bool", "complex64", "complex128"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn),
    ],
)
def test_every_element_type_comes_back_bit_for_bit(dtype, tmp_path: Path) -> None:
    array = np.arange(-6, 6).astype(dtype).reshape(3, 4)
    handle = only(written(tmp_path, array))
    assert handle.dtype == array.dtype.name
    assert handle.raw().tobytes() == array.tobytes()
    assert handle.shape == (3, 4)


@pytest.mark.parametrize(
    ("code", "data", "shape", "dtype", "expected"),
    [
        (0, b"\xff\x02", (2,), "int8", [-1, 2]),
        (18, b"\xff\x02", (2,), "int8", [-1, 2]),
        (22, b"\xff\xff", (1,), "uint16", [65535]),
        (23, struct.pack("<q", -5), (1,), "int64", [-5]),
        (28, b"\x1f\x07", (3,), "int4", [-1, 1, 7]),
        (29, b"\x05\x01", (9,), "bool", [1, 0, 1, 0, 0, 0, 0, 0, 1]),
        (32, struct.pack("<ee", 1.5, -2), (1,), "complex32", [1.5 - 2j]),
        (33, b"\x08\x01", (2,), "float16", [1.0, 2.0**-22]),
        (36, b"\x7f\x80", (2,), "float8_e8m0fnu", [1.0, 2.0]),
        (37, b"\x0c\x3f", (2,), "float8_e5m2", [1.0, -28.0]),
        (38, b"\x08\x3f", (2,), "float8_e4m3fn", [1.0, -7.5]),
        (39, b"\x72", (2,), "float4_e2m1fn_x2", [1.0, 6.0]),
    ],
)
def test_numbers_of_types_are_the_graph_engines_own(
    code, data, shape, dtype, expected, tmp_path: Path
) -> None:
    handle = only(written(tmp_path, GeValue(data, code, shape)))
    assert handle.dtype == dtype
    assert handle.float64().tolist() == expected


def test_padding_behind_the_elements_is_left_out(tmp_path: Path) -> None:
    array = np.arange(5, dtype=np.float32)
    assert np.array_equal(only(written(tmp_path, ge_value(array, padding=44))).numpy(), array)


def test_shapes_that_are_missing_empty_or_of_nothing(tmp_path: Path) -> None:
    data = np.arange(3, dtype=np.float32).tobytes()
    assert only(written(tmp_path, GeValue(data, 1, None))).shape == (3,)
    assert only(written(tmp_path, GeValue(data[:4], 1, ()))).shape == ()
    nothing = only(written(tmp_path, GeValue(b"", 1, (0, 4))))
    assert nothing.shape == (0, 4)
    assert nothing.numpy().size == 0


@given(
    matrix=hnp.arrays(
        np.int16,
        st.lists(st.integers(1, 3), max_size=2).flatmap(
            lambda lead: st.tuples(*map(st.just, lead), st.integers(1, 35), st.integers(1, 35))
        ),
    )
)
def test_tiles_become_the_matrix_they_were(matrix, tmp_path_factory) -> None:
    handle = only(written(tmp_path_factory.mktemp("nz"), ge_tiles(matrix)))
    assert handle.shape == matrix.shape
    assert np.array_equal(handle.numpy(), matrix)


def test_tiles_of_bytes_are_wider(tmp_path: Path) -> None:
    matrix = np.arange(20 * 40, dtype=np.int8).reshape(20, 40)
    assert np.array_equal(only(written(tmp_path, ge_tiles(matrix))).numpy(), matrix)


def test_channels_in_blocks_become_nchw_or_nhwc_as_the_original_was(tmp_path: Path) -> None:
    image = np.arange(2 * 20 * 3 * 5, dtype=np.float16).reshape(2, 20, 3, 5)
    padded = np.zeros((2, 32, 3, 5), np.float16)
    padded[:, :20] = image
    stored = np.ascontiguousarray(padded.reshape(2, 2, 16, 3, 5).transpose(0, 1, 3, 4, 2))
    value = GeValue(stored.tobytes(), 2, stored.shape, NC1HWC0, image.shape)
    assert np.array_equal(only(written(tmp_path, value)).numpy(), image)
    nhwc = np.ascontiguousarray(image.transpose(0, 2, 3, 1))
    handle = only(written(tmp_path, value._replace(original=nhwc.shape)))
    assert np.array_equal(handle.numpy(), nhwc)


def test_weights_in_fractal_z_become_nchw(tmp_path: Path) -> None:
    weight = np.arange(20 * 18 * 2 * 3, dtype=np.float32).reshape(20, 18, 2, 3)
    padded = np.zeros((32, 32, 2, 3), np.float32)
    padded[:20, :18] = weight
    tiles = padded.reshape(2, 16, 2, 16, 2, 3).transpose(2, 4, 5, 0, 1, 3)
    stored = np.ascontiguousarray(tiles).reshape(2 * 2 * 3, 2, 16, 16)
    value = GeValue(stored.tobytes(), 1, stored.shape, 4, weight.shape)
    assert np.array_equal(only(written(tmp_path, value)).numpy(), weight)


def test_plain_layouts_are_reshaped_or_their_axes_swapped(tmp_path: Path) -> None:
    image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)  # NHWC
    value = GeValue(image.tobytes(), 1, image.shape, 1, (1, 4, 2, 3))
    expected = image.transpose(0, 3, 1, 2)
    assert np.array_equal(only(written(tmp_path, value)).numpy(), expected)
    flat = GeValue(image.tobytes(), 1, (24,), ND, (4, 6))
    assert np.array_equal(only(written(tmp_path, flat)).numpy(), image.reshape(4, 6))
    same = GeValue(image.tobytes(), 1, image.shape, NCHW, image.shape)
    assert np.array_equal(only(written(tmp_path, same)).numpy(), image)


def test_packed_elements_are_reshaped_but_not_moved(tmp_path: Path) -> None:
    flat = GeValue(b"\x21\x43\x65", 28, (6,), ND, (2, 3))
    assert only(written(tmp_path, flat)).numpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    tiles = GeValue(bytes(128), 28, (1, 1, 16, 16), FRACTAL_NZ, (10, 12))
    run = open_run(written(tmp_path, tiles))
    assert next(iter(run.tensors())).shape == (1, 1, 16, 16)
    assert "left as it is stored" in next(iter(run.events()))["message"]


def test_a_layout_nobody_can_undo_stays_as_stored_and_says_so(tmp_path: Path) -> None:
    stored = np.arange(64, dtype=np.float32).reshape(2, 2, 4, 4)
    value = GeValue(stored.tobytes(), 1, stored.shape, 33, (3, 5))
    run = open_run(written(tmp_path, value))
    assert next(iter(run.tensors())).shape == stored.shape
    (event,) = run.events()
    assert "left as it is stored" in event["message"]


def test_old_files_hold_the_data_inside_the_message(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = written(tmp_path, array, version="1.0", bare=True)
    handle = only(path)
    assert handle.key.site == "op"
    assert np.array_equal(handle.numpy(), array)


def test_buffers_behind_the_tensors_are_no_tensors(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    assert np.array_equal(only(written(tmp_path, array, buffers=[b"x" * 32])).numpy(), array)


WHOLE = ge_bytes("op", [np.arange(6, dtype=np.float32)], [np.arange(4, dtype=np.int32)])
LENGTH = struct.unpack_from("<Q", WHOLE)[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "fewer than any header"),
        (WHOLE[:5], "fewer than any header"),
        (struct.pack("<Q", 1 << 60) + WHOLE[8:], f"claims {1 << 60} bytes"),
        (WHOLE[: 8 + LENGTH - 3], "its header claims"),
        (WHOLE + b"xyz", "3 bytes follow the data"),
        (bytes(64), "its header is empty"),
        (WHOLE[:8] + b"\xff" * LENGTH + WHOLE[8 + LENGTH :], "longer than 64 bits"),
        (struct.pack("<Q", 2) + b"\x03\x01", "field number 0|number 0"),
        (struct.pack("<Q", 2) + b"\x0b\x01", "wire type 3"),
        (struct.pack("<Q", 3) + b"\x0a\x7fx", "is 127 bytes long and 1 are left"),
        (struct.pack("<Q", 2) + b"\x18\x01", "field 3 has wire type 0"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_with_its_reason(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=reason):
        operator_file.open(path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (GeValue(b"abcd", 13, (1,)), "type string, which are no numbers"),
        (GeValue(b"abcd", 99, (1,)), "number 99, which is not known"),
        (GeValue(b"abcd", 1, (2, 3)), "2x3 of float needs 24 bytes and it has 4"),
        (GeValue(b"abcd", 1, (-1, 3)), "not known when it was dumped"),
        (GeValue(b"abcd", 1, (0, 1 << 60)), "claims"),
        (GeValue(b"", 1, (2, 3)), "no values of it were dumped"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_lost_with_its_reason(
    value: GeValue, reason: str, tmp_path: Path
) -> None:
    run = open_run(written(tmp_path, value, np.ones(3, np.float32)))
    (loss,) = run.losses
    assert reason in loss.reason
    assert np.array_equal(run.get("op", "input", "1").numpy(), np.ones(3))


def test_a_file_cut_short_keeps_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(WHOLE[:-1])
    run = operator_file.open(path)
    assert run.get("op", "input").numpy().tolist() == [0, 1, 2, 3, 4, 5]
    (loss,) = run.losses
    assert loss.key is not None
    assert loss.key.port == "output"
    assert "cut short" in loss.reason


def test_tiles_that_do_not_fit_their_original_stay_as_stored(tmp_path: Path) -> None:
    stored = np.zeros((2, 1, 16, 16), np.float16)
    value = GeValue(stored.tobytes(), 2, stored.shape, FRACTAL_NZ, (17, 20))
    run = open_run(written(tmp_path, value))
    assert next(iter(run.tensors())).shape == stored.shape
    assert len(list(run.events())) == 1


@pytest.mark.parametrize(
    "content", [b"", b"hello\n" * 40, bytes(4096), b'\x10\0\0\0\0\0\0\0{"a":1}         ']
)
def test_other_files_are_not_taken_for_ge_dumps(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert not operator_file.sniff(path)
