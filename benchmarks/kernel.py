"""How fast the C kernel is, as ratios to reading the same memory in the same run.

`python -m benchmarks.kernel` prints them. Times are this thread's own (CPU time). A large pair is
taken in windows, one after the other, so that each is out of the caches when its turn comes again
(256 MB of 16-bit pairs: half of that stayed in the third cache of a large Xeon, in part);
what counts is the least time of each window, of several rounds: a neighbour that takes the core in
the middle of a long read or measurement would count against the longer of the two.

The goals were set on pairs of 2^25 elements, measured and read at once; so are they here. The rows
"by 4 M" have windows an eighth as long, each of them a call with a start of its own: 4 % less of
the read for float16 on Zen 4.

Arrays begin at a multiple of 64 bytes, as tensors do in torch's memory and in the shards of a run;
numpy's own begin 16 bytes behind one, where every other load of 32 bytes meets two cache lines:
that costs the read little, and float16 a fifth of its rate.

The data: normal numbers, and a candidate with errors of a thousandth that do not depend on them, as
other orders of summation leave them; about a tenth of them is outside the tolerance. The kernel has
a shorter way where the greatest relative error is far beyond the usual one, which is so here; the
rows "errors of 1 %" have errors in proportion to the values, where it is not.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES

COUNT = 1 << 26
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


WINDOW, SHORT = 1 << 25, 1 << 22
AHEAD = ((0, 0), (512, 0), (1024, 0), (2048, 0), (2048, 4096))
"""Bytes that the read fetches ahead, and into the second cache; the best of them counts."""
ROUNDS, PATIENCE = 8, 40
"""As many rounds as are taken at least; and at most, as long as some action's time still falls."""
Pair = Callable[[np.ndarray, np.ndarray], object]


def _windows(
    actions: dict[str, tuple[Pair, np.ndarray, np.ndarray]], window: int
) -> dict[str, float]:
    """Seconds each action takes for all of its arrays: the least of each window.

    All take their turns in every round, so that a bad moment of the machine is everybody's. A
    neighbour on the other thread of the core takes a fifth of what computes and hardly anything of
    a read, for seconds: rounds go on until the last four have brought no action more than 1 %.
    """
    best: dict[str, list[float]] = {}
    history: list[dict[str, float]] = []
    while len(history) < PATIENCE:
        for name, (action, a, b) in actions.items():
            starts = range(0, a.size, window)
            least = best.setdefault(name, [float("inf")] * len(starts))
            for number, start in enumerate(starts):
                x, y = a[start : start + window], b[start : start + window]
                begin = time.thread_time()
                action(x, y)
                least[number] = min(least[number], time.thread_time() - begin)
        history.append({name: sum(least) for name, least in best.items()})
        if len(history) < ROUNDS:
            continue
        if all(history[-5][name] <= 1.01 * took for name, took in history[-1].items()):
            break
    return history[-1]


def _best(action: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        action()
        best = min(best, time.thread_time() - start)
    return best


def _aligned(values: np.ndarray) -> np.ndarray:
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + values.nbytes].view(values.dtype)
    copy[:] = values
    return copy


def _bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _reader() -> Callable[[str, tuple[int, int]], Pair] | None:
    library, _ = kernel.chosen(None)
    if library is None:
        return None
    read = library.driftline_read_two
    read.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    ]
    read.restype = ctypes.c_uint64

    def reading(path: str, ahead: tuple[int, int]) -> Pair:
        number = kernel.PATHS.index(path)
        return lambda x, y: read(x.ctypes.data, y.ctypes.data, x.nbytes, *ahead, number)

    return reading


def _row(what: str, value: float, goal: float | None, better: str, unit: str, note: str) -> Row:
    return {
        "what": what,
        "value": value,
        "goal": goal,
        "better": better,
        "unit": unit,
        "note": note,
    }


def _pair(name: str, path: str, **tolerance: float) -> Pair:
    dtype = DTYPES[name]
    return lambda x, y: kernel.pair_moments(
        x, dtype, y, dtype, count=x.size, path=path, **tolerance
    )


def _scaled(r: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    c = r * (1 + np.float32(1e-2) * rng.standard_normal(r.size, dtype=np.float32))
    return _in_formats(c)


def _in_formats(values: np.ndarray) -> dict[str, np.ndarray]:
    others = {"bfloat16": _bfloat16(values), "float16": values.astype(np.float16)}
    return {name: _aligned(array) for name, array in {"float32": values, **others}.items()}


def run(count: int = COUNT) -> list[Row]:
    """Every figure of the kernel that has a goal, and the rates behind them."""
    reader = _reader()
    if reader is None:
        return [_row("kernel", 0.0, 1.0, "higher", "", "the C kernel was not built")]
    rng = np.random.default_rng(0)
    r = rng.standard_normal(count, dtype=np.float32)
    c = r + np.float32(1e-3) * rng.standard_normal(count, dtype=np.float32)
    references, candidates = _in_formats(r), _in_formats(c)
    data = {name: (array, candidates[name]) for name, array in references.items()}
    r, c = data["float32"]
    places = np.arange(0, count, 4096) + rng.integers(0, 4096, len(range(0, count, 4096)))
    rows: list[Row] = []
    scaled = _scaled(r, rng)
    for (name, path), goal in GOALS.items():
        if path not in kernel.available():
            continue
        a, b = data[name]
        odd = _aligned(a)
        odd[places] = 0x7FC0 if name == "bfloat16" else np.nan
        within, exactly = _pair(name, path, **TOLERANCE), _pair(name, path)
        # Prefetching helps some processors and hinders others.
        reads = {f"read {ahead}": (reader(path, ahead), a, b) for ahead in AHEAD}
        seconds = _windows(
            {
                **reads,
                "clean": (within, a, b),
                "plain": (exactly, a, b),
                "dirty": (within, odd, b),
                "scaled": (within, a, scaled[name]),
            },
            WINDOW,
        )
        reading = min(seconds[read] for read in reads)
        shorts = _windows({**reads, "clean": (within, a, b)}, SHORT)
        clean, plain, other = (seconds[kind] for kind in ("clean", "plain", "scaled"))
        rate = 2 * a.nbytes / 1e9
        note = f"{rate / clean:.1f} of {rate / reading:.1f} GB/s"
        title = f"pair {name} {path}"
        rows += [
            _row(f"{title} / two-stream read", reading / clean, goal, "higher", "", note),
            _row(
                f"{title} by 4 M / two-stream read",
                *(min(shorts[read] for read in reads) / shorts["clean"], None, "higher", ""),
                f"{rate / shorts['clean']:.1f} GB/s",
            ),
            _row(
                f"{title} without a tolerance / two-stream read",
                *(reading / plain, goal, "higher", ""),
                f"{rate / plain:.1f} GB/s",
            ),
            _row(
                f"{title}, errors of 1 % / two-stream read",
                *(reading / other, None, "higher", ""),
                f"{rate / other:.1f} GB/s",
            ),
            _row(
                f"{title}, 1 NaN in 4096 / clean", seconds["dirty"] / clean, 2.5, "lower", "x", ""
            ),
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
