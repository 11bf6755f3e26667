"""`make bench`: measure all speed figures and compare them with their goals.

    python -m benchmarks                 all suites
    python -m benchmarks kernel files    some suites
    python -m benchmarks --peers         also msprobe and polygraphy, in a .bench-venv

The figures are not tests, because machines differ and cores are shared. If a goal is missed, the
distance from it is printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TypedDict

SUITES = (
    "startup",
    "kernel",
    "files",
    "compare",
    "capture",
    "model_facts",
    "errcheck",
    "npy_tree",
    "foreign",
    "alignment",
    "decoding",
    "diagnosis",
    "replay",
    "report_page",
    "scale",
    "gpu",
)


class Figure(TypedDict):
    """One measured figure; `better` says whether `higher` or `lower` values reach the goal."""

    what: str
    value: float
    goal: float | None
    better: str
    unit: str
    note: str


def verdict(figure: Figure) -> str:
    goal, value = figure["goal"], figure["value"]
    if goal is None:
        return ""
    met = value >= goal if figure["better"] == "higher" else value <= goal
    return "reached" if met else f"missed by {abs(value - goal) / goal:.0%}"


def show(figures: list[Figure]) -> None:
    width = max((len(f["what"]) for f in figures), default=10)
    for figure in figures:
        sign = ">=" if figure["better"] == "higher" else "<="
        goal = "" if figure["goal"] is None else f"{sign} {figure['goal']:g}"
        print(
            f"  {figure['what']:<{width}}  {figure['value']:>9.3g} {figure['unit']:<8}"
            f" {goal:<10} {verdict(figure):<14} {figure['note']}",
            flush=True,
        )


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n")[0]
    )
    options.add_argument("suites", nargs="*", help="which of: " + " ".join(SUITES))
    options.add_argument("--peers", action="store_true", help="also run msprobe and polygraphy")
    options.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = options.parse_args()
    unknown = set(chosen.suites) - {*SUITES, "peers"}
    if unknown:
        sys.exit(f"benchmarks: no suite {sorted(unknown)}; there are {', '.join(SUITES)}")
    names = list(chosen.suites or SUITES) + (["peers"] if chosen.peers else [])
    everything: list[Figure] = []
    for name in names:
        print(f"\n{name}", flush=True)
        figures: list[Figure] = importlib.import_module(f"benchmarks.{name}").run()
        show(figures)
        everything += figures
    if chosen.json:
        chosen.json.write_text(json.dumps(everything, indent=1))
    missed = [f for f in everything if verdict(f).startswith("missed")]
    print(f"\n{len(everything)} figures, {len(missed)} below their goal")
    for figure in missed:
        print(
            f"  {figure['what']}: {figure['value']:.3g}, goal {figure['goal']:g}, {verdict(figure)}"
        )


if __name__ == "__main__":
    main()
