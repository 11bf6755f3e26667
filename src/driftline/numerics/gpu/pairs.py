"""Compare two tensors on their device, without copying them to the host.

Kernels read the float types of 16 and 32 bits, and two of 8. Integers of 8 and 16 bits are widened
first, into a type that has all their numbers. Whatever else is compared on the host.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import torch

from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments
from driftline.numerics.gpu import launcher
from driftline.numerics.gpu.launcher import Kernel

FLOATS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16)
"""Types that no kernel for pairs reads; float32 has all their numbers."""
_MOST_PROGRAMS = 1056
_MOST_SHARES = 128
"""Number of programs that look up one position."""
_ROW = 40
_MAX_ABS_E, _MAX_ULP = 26, 28
"""Places in a row."""


class _Kernels(NamedTuple):
    rows: Kernel
    join: Kernel


@functools.cache
def _kernels(ours: torch.dtype, theirs: torch.dtype) -> _Kernels:
    from driftline.numerics.gpu.kernels import pair

    constants: dict[str, Any] = {}
    for side, dtype in (("R", ours), ("C", theirs)):
        described = DTYPES[str(dtype).removeprefix("torch.")]
        lowest = described.lowest if described.has_sentinel else -math.inf
        constants |= {side: described.triton, f"{side}_LOWEST": lowest}
    level = {"LEVEL": launcher.level()}
    return _Kernels(
        Kernel(
            pair.pair_rows,
            {**constants, **level},
            warps=pair.WARPS,
            registers=128,
        ),
        Kernel(pair.joined_pair, constants, warps=pair.JOIN_WARPS),
    )


def can_pair(reference: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether two tensors of as many elements can be compared where they are."""
    readable = reference.dtype in FLOATS and candidate.dtype in FLOATS
    if reference.dtype != candidate.dtype:
        # The reference is rounded to the candidate's type, which kernels do for larger types.
        readable = readable and min(reference.itemsize, candidate.itemsize) > 1
    elif candidate.dtype in EXACT:
        readable = True
    return (
        readable
        and reference.device == candidate.device
        and reference.numel() > 0
        and not launcher.why_not()
        and reference.is_cuda != launcher.interpreted()
    )


def pair_on_device(
    reference: torch.Tensor, candidate: torch.Tensor, *, rtol: float, atol: float
) -> torch.Tensor:
    """Measure a pair; the figures stay on the device, in the row that is returned."""
    if candidate.dtype in EXACT:
        row = pair_on_device(reference.float(), candidate.float(), rtol=rtol, atol=atol)
        row[_MAX_ULP] = row[_MAX_ABS_E]
        return row
    ours, theirs = _in_order(reference), _in_order(candidate)
    index = -1 if ours.is_cpu else ours.get_device()
    count = ours.numel()
    parts = -(-count // 65536)
    each = -(-parts // _MOST_PROGRAMS)
    programs = -(-parts // each)
    rows = torch.empty((programs + 1, _ROW), dtype=torch.float64, device=ours.device)
    kernels = _kernels(ours.dtype, theirs.dtype)
    where = ours.data_ptr(), theirs.data_ptr(), count, each, rows.data_ptr()
    kernels.rows(programs, index, *where, _bits(rtol), _bits(atol))
    shares = min(_MOST_SHARES, -(-min(count, each * 65536) // 4096))
    kernels.join(1 + 5 * shares, index, *where, programs, shares)
    return rows[0]


def moments_of(row: torch.Tensor, count: int) -> PairMoments:
    """Copy a row to the host and return its moments."""
    row = row.cpu()
    f: list[float] = row.tolist()
    places: list[int] = row.view(torch.int64)[35:].tolist()

    def spot(number: int) -> int:
        return places[number] if places[number] < count else -1

    finite, r_n, c_n = int(f[0]), int(f[11]), int(f[12])
    nan = math.nan

    def extreme(value: float, some: int) -> float:
        return value if some else nan

    return PairMoments(
        count=count,
        finite=finite,
        sum_rr=f[3],
        sum_cc=max(0.0, f[4]),
        sum_rc=f[5],
        sum_ee=f[6],
        sum_abs_e=f[7],
        max_abs_e=max(0.0, f[26]),
        max_abs_e_at=spot(0),
        sum_rel_e=f[8],
        max_rel_e=max(0.0, f[27]),
        max_ulp=max(0.0, f[28]),
        outside=int(f[9]),
        different=int(f[10]),
        first_different_at=spot(1),
        r_finite=r_n,
        c_finite=c_n,
        r_min=extreme(f[31], r_n),
        r_max=extreme(f[29], r_n),
        c_min=extreme(f[32], c_n),
        c_max=extreme(f[30], c_n),
        r_mean=f[13] / r_n if r_n else nan,
        c_mean=f[14] / c_n if c_n else nan,
        r_l2=math.sqrt(max(0.0, f[15])),
        c_l2=math.sqrt(max(0.0, f[16])),
        r_std=math.sqrt(f[17] / r_n) if r_n else nan,
        c_std=math.sqrt(f[18] / c_n) if c_n else nan,
        r_nan=int(f[19]),
        c_nan=int(f[20]),
        r_pos_inf=int(f[21]),
        c_pos_inf=int(f[22]),
        r_neg_inf=int(f[23]),
        c_neg_inf=int(f[24]),
        one_sided=int(f[25]),
        one_sided_at=spot(2),
        r_nonfinite_at=spot(3),
        c_nonfinite_at=spot(4),
    )


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.data_ptr() & 15:
        return tensor
    tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.clone() if tensor.data_ptr() & 15 else tensor


@functools.cache
def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]
