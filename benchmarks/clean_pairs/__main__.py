"""Clean pairs and planted faults, judged by `compare` and `diagnose`: the rates of both.

    python -m benchmarks.clean_pairs --install          once: torchvision, timm and diffusers
    python -m benchmarks.clean_pairs -j 2               all clean pairs
    python -m benchmarks.clean_pairs --slice 1/8        an eighth of them
    python -m benchmarks.clean_pairs --filter 'llama bf16' --list
    python -m benchmarks.clean_pairs --half held        those that no rule was repaired on
    python -m benchmarks.clean_pairs --faults           the planted faults instead
    python -m benchmarks.clean_pairs --read FILE...     the tables of results written before

Results are written as they come, with a fingerprint of the source; what was judged by the same
source is not judged again. Exit 1: a clean pair is accused, or a gross fault is not found.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clean_pairs import environment
from benchmarks.clean_pairs.faults import Planted, planted_faults, trial
from benchmarks.clean_pairs.models import ARCHITECTURES, buildable
from benchmarks.clean_pairs.pairs import Pair, clean_pairs
from benchmarks.clean_pairs.report import markdown, report, summary

ROOT = environment.ROOT
OUTPUT = ROOT / "bench-output" / "clean_pairs"
HALVES = ("seen", "held")
"""Whoever repairs a rule looks at the first half only; the second says how good the repair is."""


def main() -> int:
    asked = arguments()
    if asked.install:
        environment.install()
    if asked.read:
        results = [json.loads(x) for path in asked.read for x in path.read_text().splitlines()]
        if asked.markdown:
            print(markdown(results))
            return 0
        return 0 if _finish(results, None) else 1
    absent = [name for name in ARCHITECTURES if name not in buildable()]
    if absent:
        print(f"left out ({', '.join(absent)}): run it once with --install")
    jobs: list[Pair | Planted] = [*(planted_faults() if asked.faults else clean_pairs())]
    jobs = [job for job in jobs if re.search(asked.filter, job.name)]
    if asked.half is not None:
        jobs = [job for job in jobs if half_of(job.name) == asked.half]
    number, parts = asked.slice
    jobs = jobs[number - 1 :: parts]
    if asked.list:
        print(*(job.name for job in jobs), sep="\n")
        print(f"{len(jobs)} trials")
        return 0
    path: Path = asked.output or OUTPUT / ("faults.jsonl" if asked.faults else "clean.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    results = _run(jobs, asked, path)
    return 0 if _finish(results, path.with_suffix(".json")) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clean_pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--install", action="store_true", help="make .models-venv first")
    add("--faults", action="store_true", help="planted faults instead of clean pairs")
    add("--no-replay", action="store_true", help="with --faults: two runs alone")
    add("--filter", default="", metavar="REGEX", help="only trials whose name matches")
    add("--slice", type=_slice, default=(1, 1), metavar="N/M", help="the N-th of M parts")
    add("--half", choices=HALVES, help="those that rules may be repaired on, or the other half")
    add("--list", action="store_true", help="name the trials and stop")
    add("-j", "--workers", type=int, default=1, help="processes")
    add("--fresh", action="store_true", help="judge again what this source has judged before")
    add("--output", type=Path, metavar="FILE", help="results as JSON lines; rates beside it")
    add("--read", type=Path, nargs="+", metavar="FILE", help="report on results written before")
    add("--markdown", action="store_true", help="with --read: the rates as tables of a page")
    return parser.parse_args()


def half_of(name: str) -> str:
    """To which half of the set a trial belongs, by a hash of its name."""
    return HALVES[int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2]


def _slice(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError("N/M with N from 1 to M, such as 2/8")
    return int(number), int(parts)


def _run(
    jobs: Sequence[Pair | Planted], asked: argparse.Namespace, path: Path
) -> list[dict[str, Any]]:
    """All trials that this source has not judged yet; the results of all that were asked for."""
    source = fingerprint()
    results: dict[str, dict[str, Any]] = {}
    wanted = {job.name for job in jobs}
    if path.exists() and not asked.fresh:
        for line in path.read_text().splitlines():
            known = json.loads(line)
            if known["source"] == source and known["name"] in wanted and "broken" not in known:
                results[known["name"]] = known
    rest = [job for job in jobs if job.name not in results]
    print(f"{len(jobs)} trials, {len(rest)} to do, {asked.workers} workers, source {source}")
    begin = time.monotonic()
    tried = functools.partial(trial, replay=not asked.no_replay)
    context = multiprocessing.get_context("spawn")
    with path.open("a") as file, context.Pool(asked.workers) as pool:
        for count, result in enumerate(pool.imap_unordered(tried, rest), 1):
            result["source"] = source
            results[result["name"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
            spent = time.monotonic() - begin
            left = spent / count * (len(rest) - count)
            print(
                f"  {count}/{len(rest)} {spent:.0f} s, {left:.0f} s left: {_line(result)}",
                flush=True,
            )
    return list(results.values())


def _line(result: dict[str, Any]) -> str:
    verdicts = "/".join(
        result[m]["verdict"] for m in ("compare", "diagnose", "replay") if m in result
    )
    verdicts = verdicts or result.get("skipped") or result.get("broken", "")[:80]
    return f"{verdicts:12} {result['name']}"


def _finish(results: Sequence[dict[str, Any]], path: Path | None) -> bool:
    good = report(results)
    if path is not None:
        path.write_text(json.dumps(summary(results), indent=1) + "\n")
    return good


def fingerprint() -> str:
    """Of the source that judges and of this benchmark: results of another are no results."""
    digest = hashlib.sha256()
    for folder in (Path(environment.__file__).parent, _package()):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _package() -> Path:
    import driftline

    return Path(driftline.__file__).parent


if __name__ == "__main__":
    raise SystemExit(main())
