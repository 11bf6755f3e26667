"""How fast the C kernel is, as ratios to reading the same memory in the same run.

`python -m benchmarks.kernel` prints them. Times are this thread's own (CPU time), best of several,
so that a neighbour on the core does not count; what a neighbour takes of the memory's bandwidth,
floor and kernel share.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES

COUNT = 1 << 25
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
GOALS = {
    ("float32", "avx512"): 0.85,
    ("float32", "avx2"): 0.65,
    ("bfloat16", "avx512"): 0.5,
    ("bfloat16", "avx2"): 0.4,
    ("float16", "avx512"): 0.5,
    ("float16", "avx2"): 0.4,
}
Row = dict[str, Any]


def _best(action: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        action()
        best = min(best, time.thread_time() - start)
    return best


def _bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _reader() -> Callable[[np.ndarray, np.ndarray, str], float] | None:
    library = kernel.load(kernel.Path(kernel.__file__).with_name("_kernel.so"))
    if library is None:
        return None
    read = library.driftline_read_two
    read.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    ]
    read.restype = ctypes.c_uint64

    def floor(a: np.ndarray, b: np.ndarray, path: str) -> float:
        """Seconds of the fastest read: prefetching helps some processors and hinders others."""
        number = kernel.PATHS.index(path)
        return min(
            _best(lambda ahead=ahead: read(a.ctypes.data, b.ctypes.data, a.nbytes, ahead, number))
            for ahead in (0, 512, 1024)
        )

    return floor


def _row(what: str, value: float, goal: float | None, better: str, unit: str, note: str) -> Row:
    return {
        "what": what,
        "value": value,
        "goal": goal,
        "better": better,
        "unit": unit,
        "note": note,
    }


def run(count: int = COUNT) -> list[Row]:
    """Every figure of the kernel that has a goal, and the rates behind them."""
    floor = _reader()
    if floor is None:
        return [_row("kernel", 0.0, 1.0, "higher", "", "the C kernel was not built")]
    rng = np.random.default_rng(0)
    r = rng.standard_normal(count, dtype=np.float32)
    c = r + np.float32(1e-3) * rng.standard_normal(count, dtype=np.float32)
    data = {
        "float32": (r, c),
        "bfloat16": (_bfloat16(r), _bfloat16(c)),
        "float16": (r.astype(np.float16), c.astype(np.float16)),
    }
    places = np.arange(0, count, 4096) + rng.integers(0, 4096, len(range(0, count, 4096)))
    rows: list[Row] = []
    for (name, path), goal in GOALS.items():
        if path not in kernel.available():
            continue
        a, b = data[name]
        dtype = DTYPES[name]
        odd = a.copy()
        odd[places] = 0x7FC0 if name == "bfloat16" else np.nan

        def pair(x: np.ndarray, dtype=dtype, b=b, path=path) -> object:
            return kernel.pair_moments(x, dtype, b, dtype, count=count, path=path, **TOLERANCE)

        reading = floor(a, b, path)
        clean = _best(lambda a=a, pair=pair: pair(a))
        dirty = _best(lambda odd=odd, pair=pair: pair(odd), 3)
        plain = _best(
            lambda a=a, b=b, dtype=dtype, path=path: kernel.pair_moments(
                a, dtype, b, dtype, count=count, path=path
            )
        )
        reading = min(reading, floor(a, b, path))
        rate = 2 * a.nbytes / 1e9
        note = f"{rate / clean:.1f} of {rate / reading:.1f} GB/s"
        title = f"pair {name} {path}"
        rows += [
            _row(f"{title} / two-stream read", reading / clean, goal, "higher", "", note),
            _row(
                f"{title} without a tolerance / two-stream read",
                *(reading / plain, goal, "higher", ""),
                f"{rate / plain:.1f} GB/s",
            ),
            _row(f"{title}, 1 NaN in 4096 / clean", dirty / clean, 2.5, "lower", "x", ""),
        ]
    for path in (p for p in kernel.available() if p != "numpy"):
        # What `driftline compare` meets most: a float32 reference against a 16-bit candidate.
        for name in ("float32", "bfloat16", "float16"):
            b = data[name][1]
            seconds = _best(
                lambda b=b, name=name, path=path: kernel.pair_moments(
                    *(r, DTYPES["float32"], b, DTYPES[name]), count=count, path=path, **TOLERANCE
                ),
                3,
            )
            title = f"pair float32 with {name} {path}"
            goal = 2.0 if path == "generic" else None
            rate = (r.nbytes + b.nbytes) / seconds / 1e9
            rows.append(
                _row(title, rate, goal, "higher", "GB/s", f"{seconds / count * 1e9:.2f} ns")
            )
        part = r[: count // 2]
        seconds = _best(
            lambda path=path, part=part: kernel.summarize(
                part, DTYPES["float32"], count=part.size, path=path
            ),
            3,
        )
        goal = {"avx512": 10.0, "avx2": 6.0, "generic": 2.0}[path]
        note = "with the sketch"
        rows.append(
            _row(
                f"summary float32 {path}", part.nbytes / seconds / 1e9, goal, "higher", "GB/s", note
            )
        )
        seconds = _best(lambda path=path, part=part: kernel.digest(part, path=path), 3)
        rows.append(_row(f"digest {path}", part.nbytes / seconds / 1e9, None, "higher", "GB/s", ""))
    return rows + _small_calls(r, c)


def _small_calls(r: np.ndarray, c: np.ndarray) -> list[Row]:
    fp32 = DTYPES["float32"]
    a, b, few = r[:1024].copy(), c[:1024].copy(), r[:64].copy()

    def each(action: Callable[[], object]) -> float:
        return _best(lambda: [action() for _ in range(500)], 20) / 500 * 1e6

    return [
        _row(
            "pair of 4 KB",
            each(lambda: kernel.pair_moments(a, fp32, b, fp32, count=1024)),
            *(8.0, "lower", "us", "call from Python"),
        ),
        _row(
            "summary of 256 bytes",
            each(lambda: kernel.summarize(few, fp32, count=64)),
            *(4.0, "lower", "us", "call from Python"),
        ),
        _row(
            "digest of 256 bytes",
            each(lambda: kernel.digest(few)),
            *(4.0, "lower", "us", "call from Python"),
        ),
    ]


def main() -> None:
    for row in run():
        goal = "" if row["goal"] is None else f"goal {row['goal']:g}"
        print(f"{row['what']:58} {row['value']:8.2f} {row['unit']:5} {goal:10} {row['note']}")


if __name__ == "__main__":
    main()
