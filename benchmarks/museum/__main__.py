"""`make bench-museum`: bugs that happened in public, and what each way of judging says of them.

    python -m benchmarks.museum                       all cases
    python -m benchmarks.museum --only quick_gelu     some of them
    python -m benchmarks.museum --half fresh          those that no rule has seen
    python -m benchmarks.museum --clean               also the right program against itself
    python -m benchmarks.museum --peers               also msprobe, in .bench-venv
    python -m benchmarks.museum --list                the cases and their truth, as JSON lines

Each case is dumped right and wrong, then judged by `compare`, by `diagnose`, and by `diagnose` with
a replay of the right program. Detected: the verdict is FAIL, or a difference of the two models
names the bug. Exact: the first site is where the bug lies. Explained: the cause, or a difference of
the two models, is the right one. Wrong: a cause was stated and it is another.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.faults.msprobe import site_of as msprobe_site
from benchmarks.museum.networks import CASES, FILES, FRESH, Case

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("compare", "diagnose", "replay")
HALVES = ("tune", "report", "fresh")
SILENT = ("", "unknown", "noise")
ROOTS = ("", "(root)", "(program)")
PATIENCE = 600


def half_of(case: Case) -> str:
    """Rules may be tuned on `tune`; figures of the others are those to be believed."""
    if case.file in FRESH:
        return "fresh"
    return "tune" if zlib.crc32(case.name.encode()) % 2 else "report"


def run_words(words: list[str]) -> tuple[int, str]:
    """A command and what it printed; a case that hangs is a case that failed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout if done.stdout.strip() else done.stderr


def driftline(*words: str) -> tuple[int, str]:
    return run_words([sys.executable, "-m", "driftline", *words])


def program_of(case: Case, variant: str, dtype: str) -> list[str]:
    start = [sys.executable, "-m"]
    if case.ranks > 1:
        start += ["torch.distributed.run", f"--nproc-per-node={case.ranks}", "-m"]
    return [*start, case.program.__module__, case.name, "--variant", variant, "--dtype", dtype]


def document_of(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {"trouble": text[-300:]}
    return document if isinstance(document, dict) else {}


def is_place(site: str, case: Case) -> bool:
    """Whether a bug lies at a site."""
    return site in case.sites or (site in ROOTS and any(name in ROOTS for name in case.sites))


def judged(case: Case, code: int, document: dict[str, Any]) -> dict[str, Any]:
    """What one way of judging said, beside what is true."""
    site, cause = document.get("first_site") or "", document.get("cause") or ""
    listed = document.get("differences") or []
    # With the path of what differs, as `site.name`: a word may name both.
    paths = [f"{each.get('site', '')}.{each.get('name', '')}" for each in listed]
    named = any(word in json.dumps([listed, paths]) for word in case.differences)
    exact = is_place(site, case)
    cause_right = cause in case.causes
    return {
        "code": code,
        "verdict": document.get("verdict"),
        "site": site,
        "cause": cause,
        "finding": document.get("finding"),
        "trouble": document.get("trouble", ""),
        "detected": code == 1 or named,
        "exact": code == 1 and exact,
        "named": named,
        "explained": named or (code == 1 and cause_right),
        "wrong": code == 1 and cause not in SILENT and not cause_right and not named,
    }


def try_case(case: Case, folder: Path, ways: Collection[str], clean: bool) -> dict[str, Any]:
    """Dump, compare, diagnose, replay, diagnose again."""
    reference, candidate = case.formats
    runs = {"good": reference, "bad": candidate}
    if clean:
        runs["control"] = candidate
    result: dict[str, Any] = {"case": case.name, "half": half_of(case)}
    for name, dtype in runs.items():
        program = program_of(case, "bad" if name == "bad" else "good", dtype)
        code, said = driftline(
            "dump", "--force", "-o", str(folder / name), *case.dump, "--", *program
        )
        if code:
            result["trouble"] = said[-400:]
            return result
    good, bad = str(folder / "good"), str(folder / "bad")
    for way in ("compare", "diagnose"):
        if way in ways:
            code, said = driftline(way, good, bad, "--format", "json")
            result[way] = judged(case, code, document_of(said))
    if "replay" in ways:
        replay = str(folder / "replay")
        program = program_of(case, "good", reference)
        code, said = driftline("replay", bad, "--force", "-o", replay, "--", *program)
        if code == 0:
            code, said = driftline("diagnose", good, bad, "--replay", replay, "--format", "json")
            result["replay"] = judged(case, code, document_of(said))
        else:
            result["replay refused"] = said[-300:]
    if clean:
        control = str(folder / "control")
        for way in ("compare", "diagnose"):
            code, _ = driftline(way, good, control, "--format", "json")
            result[f"alarm {way}"] = code == 1
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Counts of every way of judging, by half."""
    lines = [
        f"{'':<10} {'half':<7} {'cases':>5} {'detected':>9} {'exact':>6} {'explained':>10} "
        f"{'difference':>11} {'wrong':>6}"
    ]
    for way in WAYS:
        for half in HALVES:
            rows = [result[way] for result in results if result["half"] == half and way in result]
            if not rows:
                continue
            counts = [sum(row[what] for row in rows) for what in ("detected", "exact")]
            counts += [sum(row[what] for row in rows) for what in ("explained", "named", "wrong")]
            lines.append(
                f"{way:<10} {half:<7} {len(rows):>5} {counts[0]:>9} {counts[1]:>6} "
                f"{counts[2]:>10} {counts[3]:>11} {counts[4]:>6}"
            )
    alarms = [
        key
        for result in results
        for key, value in result.items()
        if key.startswith("alarm") and value
    ]
    tried = sum("alarm compare" in result for result in results)
    if tried:
        lines.append(f"right programs called wrong: {len(alarms)} of {2 * tried}")
    return "\n".join(lines)


# msprobe: a row is flagged where its result is `error`; the first such row is what it names.


def by_msprobe(cases: list[Case], folder: Path) -> str:
    """How many bugs msprobe flags, at which place, and how many right programs it flags."""
    peers.install()
    alone = [case for case in cases if case.ranks == 1]
    names = [case.name for case in alone]
    python, command = (str(peers.VENV / "bin" / name) for name in ("python", "msprobe"))
    script = str(peers.PROGRAMS / "museum_with_msprobe.py")
    for variant in ("good", "bad", "control"):
        output = str(folder / variant)
        code, text = run_words([python, script, "--variant", variant, "--output", output, *names])
        if code:
            return f"msprobe could not be run: {text.strip()[-200:]}"
    counts = dict.fromkeys(("detected", "exact", "alarms"), 0)
    for number, case in enumerate(alone):
        for variant in ("bad", "control"):
            table = folder / f"{variant}{number}"
            sides = [str(folder / side / f"step{number}") for side in (variant, "good")]
            run_words([command, "compare", "-tp", sides[0], "-gp", sides[1], "-o", str(table)])
            flagged = [row for path in table.glob("*.csv") for row in _flagged(path)]
            if variant == "control":
                counts["alarms"] += bool(flagged)
                continue
            counts["detected"] += bool(flagged)
            counts["exact"] += bool(flagged) and is_place(msprobe_site(flagged[0]), case)
    return (
        f"msprobe: {len(alone)} cases of one process, {counts['detected']} detected, "
        f"{counts['exact']} exact, {counts['alarms']} right programs called wrong"
    )


def _flagged(path: Path) -> list[str]:
    with path.open(newline="") as text:
        return [row["NPU Name"] for row in csv.DictReader(text) if row["Result"] == "error"]


def entry_of(case: Case) -> dict[str, Any]:
    """A case as another tool's adapter needs it: how it is run, and what is true."""
    reference, candidate = case.formats
    return {
        "name": case.name,
        "half": half_of(case),
        "url": case.url,
        "title": case.title,
        "sites": case.sites,
        "causes": case.causes,
        "differences": case.differences,
        "right": program_of(case, "good", reference),
        "wrong": program_of(case, "bad", candidate),
        "control": program_of(case, "good", candidate),
        "ranks": case.ranks,
    }


def line_of(result: dict[str, Any]) -> str:
    if "trouble" in result:
        return f"{result['case']:<36} could not be run: {result['trouble'].strip()[-120:]}"
    words = [f"{result['case']:<36}"]
    for way in WAYS:
        row = result.get(way)
        if f"{way} refused" in result:
            words.append(f"{way}: refused")
        elif row is None:
            continue
        else:
            place = "exact" if row["exact"] else row["site"] or "-"
            words.append(f"{way}: {row['verdict']} {place} {row['cause']}".rstrip())
    return "  |  ".join(words)


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m benchmarks.museum", description=__doc__)
    asked.add_argument("--only", nargs="*", default=(), help="names of cases")
    asked.add_argument("--half", choices=HALVES, help="only these cases")
    asked.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS, help="ways of judging")
    asked.add_argument("--clean", action="store_true", help="also right against right")
    asked.add_argument("--peers", action="store_true", help="also msprobe, in .bench-venv")
    asked.add_argument("--list", action="store_true", help="print the cases and their truth alone")
    asked.add_argument("--workers", type=int, default=2)
    asked.add_argument("--json", type=Path, help="write all that was said to this file")
    asked.add_argument("--keep", type=Path, help="keep the runs in this folder")
    chosen = asked.parse_args()
    for name in FILES:
        importlib.import_module(f"benchmarks.museum.cases.{name}")
    unknown = set(chosen.only) - set(CASES)
    if unknown:
        sys.exit(f"benchmarks: no case {sorted(unknown)}; there are {', '.join(sorted(CASES))}")
    cases = [
        case
        for name, case in sorted(CASES.items())
        if (not chosen.only or name in chosen.only)
        and (chosen.half is None or half_of(case) == chosen.half)
    ]
    if chosen.list:
        print("\n".join(json.dumps(entry_of(case)) for case in cases))
        return
    results: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="museum-") as folder,
        ThreadPoolExecutor(chosen.workers) as pool,
    ):
        work = chosen.keep or Path(folder)
        finished: Iterable[dict[str, Any]] = pool.map(
            lambda case: try_case(case, work / case.name, chosen.ways, chosen.clean),
            cases,
        )
        for result in finished:
            results.append(result)
            print(line_of(result), flush=True)
    print()
    print(table(results))
    if chosen.peers:
        with tempfile.TemporaryDirectory(prefix="museum-") as folder:
            print(by_msprobe(cases, Path(folder)))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
