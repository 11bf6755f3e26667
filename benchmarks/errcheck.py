"""Cost of the error watch: a 134M-parameter Llama on one CPU thread, with and without the watch.

It is measured as in `capture`: variants run in a shuffled order in each round, and the median of
the rounds' ratios counts. A program begins a watch only once. Therefore each round begins one, uses
the first forward to name the modules, and times the second. The cost of the first forward is a
separate figure.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.capture import Variant, _in_turns, _one_thread, _ratio, timed_passes

ROUNDS = 15


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Measure all figures of this suite, as described in the module's docstring."""

    from benchmarks.programs.infer_llama import build, prompt
    from driftline.captures.torch.errcheck.api import watch_errors

    model = build("float32")
    tokens = prompt()
    first: dict[str, list[float]] = {}
    seen: dict[str, int] = {}

    forward, both_ways = timed_passes(model, tokens)

    def watched(name: str, call: Any, **options: Any) -> Variant:
        def timed() -> float:
            with watch_errors(folder / "found", **options) as watch:
                first.setdefault(name, []).append(call())
                calls = watch.reporter.calls
                took = call()
                seen[name] = watch.reporter.calls - calls
            assert not watch.findings
            return took

        return Variant(name, timed)

    with tempfile.TemporaryDirectory(prefix="driftline-bench-") as place, _one_thread():
        folder = Path(place)
        plain = Variant("plain", forward)
        operators = watched("operators", forward)
        everything = watched("all", forward, types="all")
        modules = watched("modules", forward, level="module")
        _in_turns([plain, operators, everything, modules], rounds)
        backward = Variant("backward", both_ways)
        training = watched("training", both_ways)
        _in_turns([backward, training], max(5, rounds // 3))

    def figure(
        what: str,
        variant: Variant,
        base: Variant,
        goal: float | None,
        times: tuple[float, ...] = (),
    ) -> dict[str, Any]:
        value, note = _ratio(list(times or variant.times)[-len(base.times) :], base.times)
        return {
            "what": what,
            "value": value,
            "goal": goal,
            "better": "lower",
            "unit": "x plain",
            "note": f"{note}; {seen[variant.name]} calls",
        }

    return [
        {
            "what": "plain forward of the 134M Llama",
            "value": statistics.median(plain.times),
            "goal": None,
            "better": "lower",
            "unit": "s",
            "note": f"spread {min(plain.times):.3f}..{max(plain.times):.3f}",
        },
        figure("forward, every operator watched for overflow", operators, plain, 2.5),
        figure("the same, its first forward", operators, plain, None, tuple(first["operators"])),
        figure("forward, every operator, all types", everything, plain, 2.5),
        figure("forward, modules watched for overflow", modules, plain, 1.25),
        figure("the same, its first forward", modules, plain, None, tuple(first["modules"])),
        figure("forward + backward, every operator watched", training, backward, 2.5),
    ]


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(run())  # type: ignore[arg-type]
