"""`python -m benchmarks.engines`: the table of engines in docs/engines.md, measured.

    python -m benchmarks.engines                        all engines and models
    python -m benchmarks.engines --filter 'QDQ.*resnet' some of them
    python -m benchmarks.engines --write                and write the rows into docs/engines.md

A row that could not be measured says why. Exit 1: a clean pair does not pass, or a fault is not
named where it is.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.engines.cases import Case, Measured

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
FAMILIES = ("onnx_quantised", "served_models", "compiled", "ranks", "paddle_twins", "devices")
"""Modules of this folder, each with its `CASES`."""
BEGIN, END = "<!-- engines: begin -->", "<!-- engines: end -->"
HEAD = (
    "| engine | model | pairs | calls covered | clean pair | fault | named at | cost |",
    "|---|---|---|---|---|---|---|---|",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--filter", default="", metavar="REGEX", help="only rows that match")
    parser.add_argument("--write", action="store_true", help="write them into docs/engines.md")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--traceback", action="store_true", help="say why a row was not measured")
    asked = parser.parse_args()
    cases: list[Case] = []
    for name in FAMILIES:
        try:
            cases += importlib.import_module(f"benchmarks.engines.{name}").CASES
        except ModuleNotFoundError as error:
            print(f"no rows of {name}: {error}", file=sys.stderr)
    cases = [case for case in cases if re.search(asked.filter, f"{case.engine} {case.model}")]
    if asked.list:
        print(*(f"{case.engine}: {case.model}" for case in cases), sep="\n")
        return 0
    print(*HEAD, sep="\n")
    lines: dict[str, str] = {}
    sound = True
    for case in cases:
        try:
            with tempfile.TemporaryDirectory(prefix="driftline-engines-") as folder:
                result = case.measure(Path(folder))
        except Exception as error:
            if asked.traceback:
                traceback.print_exc()
            lines[_label(case)] = f"{_label(case)} not measured: {type(error).__name__} |"
            sound = False
        else:
            lines[_label(case)] = _line(case, result)
            sound = sound and result.verdict == "pass" and result.right
        print(lines[_label(case)], flush=True)
    if asked.write:
        write(lines)
    return 0 if sound else 1


def _label(case: Case) -> str:
    return f"| {case.engine} | {case.model} |"


def _line(case: Case, result: Measured) -> str:
    share = "" if result.coverage is None else f"{result.coverage:.0%}"
    named = result.named if result.right else f"**{result.named}**"
    pairs = f"{result.pairs} + {result.inside}" if result.inside else str(result.pairs)
    return (
        f"{_label(case)} {pairs} of {result.tensors} | {share} | {result.verdict.upper()} | "
        f"{result.fault} | {named} | {result.cost:.1f}x |"
    )


def write(lines: dict[str, str]) -> None:
    """Put rows into the page; rows of cases that were not run stay."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    kept = [row for row in old.splitlines() if row.startswith("| ") and row not in HEAD]
    label = re.compile(r"^\| [^|]* \| [^|]* \|")
    rows = {match[0]: row for row in kept if (match := label.match(row))} | lines
    body = "\n".join((*HEAD, *rows.values()))
    PAGE.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
