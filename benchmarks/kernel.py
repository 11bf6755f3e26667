"""Speed of the C kernel: elements per second of one core, for kinds of data that models produce.

`python -m benchmarks.kernel` prints the rates. Times are CPU times of this thread. The minimum of
several rounds counts, in which all kinds of data take turns, because another process that takes the
core during a measurement would increase the time.

Arrays begin at a multiple of 64 bytes, like tensors in torch's memory and in the shards of a run.

The kinds of data: "normal" has normal numbers against a candidate with errors of a thousandth, as
other orders of summation cause them; "rounded" has the reference rounded to the candidate's format;
"masked" has -inf in half of the places of both sides; "smooth" is a ramp, whose blocks are far from
zero relative to their spread. Masked and smooth tensors have a goal: half the rate of normal ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES

COUNT = 1 << 24
ROUNDS = 9
TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
PAIRS = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
)
"""The most frequent pairs of formats in `driftline compare`."""
GOAL = 0.5
Row = dict[str, Any]


def _best(action: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.thread_time()
        action()
        best = min(best, time.thread_time() - start)
    return best


def _least(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each action: the minimum of several rounds, in which all take turns."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(ROUNDS):
        for name, action in actions.items():
            best[name] = min(best[name], _best(action, 1))
    return best


def _encoded(values: np.ndarray, name: str) -> np.ndarray:
    """The values in a format, at an address that is a multiple of 64 bytes."""
    if name == "bfloat16":
        bits = values.view(np.uint32)
        stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        stored = np.where(np.isnan(values), np.uint16(0x7FC0), stored)
    else:
        stored = values.astype(name)
    room = np.empty(stored.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    aligned = room[start : start + stored.nbytes].view(stored.dtype)
    aligned[:] = stored
    return aligned


def _data(count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    noise = np.float32(1e-3) * rng.standard_normal(count, dtype=np.float32)
    normal = rng.standard_normal(count, dtype=np.float32)
    smooth = np.linspace(0, 4, count, dtype=np.float32)
    mask = rng.random(count, dtype=np.float32) < 0.5
    holes = normal.copy()
    holes[::4096] = np.nan
    masked, other = (np.where(mask, np.float32(-np.inf), x) for x in (normal, normal + noise))
    return {
        "normal": (normal, normal + noise),
        "rounded": (normal, normal),
        "masked": (masked, other),
        "smooth": (smooth, smooth + noise),
        "1 NaN in 4096": (holes, normal + noise),
    }


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
    """The rates of each code path, and those of masked and smooth tensors against normal ones."""
    paths = [path for path in kernel.available() if path != kernel.NUMPY]
    if not paths:
        return [_row("kernel", 0.0, 1.0, "higher", "", "the C kernel was not built")]
    data = _data(count)
    whole = data["normal"][0]
    rows: list[Row] = []
    for path in paths:
        for names in PAIRS:
            rows += _pair_rows(path, names, data)
        for name in ("float32", "bfloat16"):
            rows += _summary_rows(path, name, data)
        seconds = _best(lambda path=path: kernel.digest(whole, path=path), 3)
        rate = whole.nbytes / seconds / 1e9
        rows.append(_row(f"digest {path}", rate, None, "higher", "GB/s", ""))
    r, c = data["normal"]
    return rows + _small_calls(r, c)


def _pair_rows(
    path: str, names: tuple[str, str], data: dict[str, tuple[np.ndarray, np.ndarray]]
) -> list[Row]:
    r_dtype, c_dtype = (DTYPES[name] for name in names)
    actions: dict[str, Callable[[], object]] = {}
    for kind, (r, c) in data.items():
        a, b = _encoded(r, names[0]), _encoded(c, names[1])
        actions[kind] = lambda a=a, b=b: kernel.pair_moments(
            *(a, r_dtype, b, c_dtype), count=a.size, path=path, **TOLERANCE
        )
    size = (r_dtype.bits + c_dtype.bits) / 8
    return _rates(f"pair {names[0]}/{names[1]} {path}", _least(actions), data, size)


def _summary_rows(
    path: str, name: str, data: dict[str, tuple[np.ndarray, np.ndarray]]
) -> list[Row]:
    actions: dict[str, Callable[[], object]] = {}
    for kind in ("normal", "masked", "smooth"):
        x = _encoded(data[kind][0], name)
        actions[kind] = lambda x=x: kernel.summarize(x, DTYPES[name], count=x.size, path=path)
    return _rates(f"summary {name} {path}", _least(actions), data, DTYPES[name].bits / 8)


def _rates(
    title: str,
    seconds: dict[str, float],
    data: dict[str, tuple[np.ndarray, np.ndarray]],
    size: float,
) -> list[Row]:
    count = data["normal"][0].size
    rows: list[Row] = []
    for kind, took in seconds.items():
        note = f"{count * size / took / 1e9:.1f} GB/s"
        rows.append(_row(f"{title}, {kind}", count / took / 1e6, None, "higher", "M/s", note))
    for kind in ("masked", "smooth"):
        share = seconds["normal"] / seconds[kind]
        rows.append(_row(f"{title}, {kind} / normal", share, GOAL, "higher", "", ""))
    return rows


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
