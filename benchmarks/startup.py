"""Start-up time of commands, which each call of a command takes."""

from __future__ import annotations

import subprocess
import sys
import time

ROUNDS = 7


def _seconds(*words: str) -> float:
    """Shortest wall time of a new process, because other load only makes it longer."""
    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def run() -> list[dict[str, object]]:
    bare = _seconds("-c", "pass")
    figures: list[dict[str, object]] = []
    for what, words, goal in (
        ("import driftline", ("-c", "import driftline"), None),
        ("driftline --help", ("-m", "driftline", "--help"), 0.3),
        ("driftline dump --help", ("-m", "driftline", "dump", "--help"), 0.3),
        ("driftline compare --help", ("-m", "driftline", "compare", "--help"), 0.3),
    ):
        figures.append(
            {
                "what": what,
                "value": _seconds(*words),
                "goal": goal,
                "better": "lower",
                "unit": "s",
                "note": f"an empty Python takes {bare:.3f} s",
            }
        )
    return figures
