"""`make bench-third-party`: other people's programs, each clean and with one fault.

    python -m benchmarks.third_party --install        once: the packages, in .third-party-venv
    python -m benchmarks.third_party -j 2             all programs
    python -m benchmarks.third_party --only timm_vit
    python -m benchmarks.third_party --read FILE      the table of results written before

Every program is dumped three times by the command line: the reference, the candidate, the candidate
with a fault. Both candidates are diagnosed from two runs alone and with a replay of the reference.
Alarm: a clean candidate is called wrong. Refused: a command could not judge (its exit code is 2).
Exact: the first site is the module the fault was planted in. Exit 1: an alarm, or a refusal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.clean_pairs.environment import install
from benchmarks.museum.__main__ import ROOTS, document_of, driftline
from benchmarks.third_party.catalogue import PACKAGES, Program, load

WAYS = ("two runs", "replay")
KINDS = ("clean", "faulty")


def try_program(program: Program, folder: Path) -> dict[str, Any]:
    """Dump three times; diagnose and replay both candidates."""
    result: dict[str, Any] = {"name": program.name, "package": program.package}
    result |= {"fault": program.fault, "sites": program.sites, "format": program.format}
    command = [sys.executable, "-m", "benchmarks.third_party.catalogue", program.name]
    cast = ["--format", program.format]
    runs = {"reference": [], "clean": cast, "faulty": [*cast, "--faulty"]}
    for name, words in runs.items():
        code, text = driftline(
            *("dump", "--force", "-o", str(folder / name), *program.dump, "--", *command, *words)
        )
        if code:
            return result | {"trouble": f"{name}: {text.strip()[-300:]}"}
    reference = str(folder / "reference")
    for kind in KINDS:
        candidate, replayed = str(folder / kind), str(folder / f"{kind}-replay")
        result[kind] = {"two runs": judged(program, reference, candidate)}
        code, text = driftline("replay", candidate, "--force", "-o", replayed, "--", *command)
        if code:
            result[kind]["replay"] = {"code": 2, "reason": f"replay: {text.strip()[-300:]}"}
        else:
            result[kind]["replay"] = judged(program, reference, candidate, "--replay", replayed)
    return result


def judged(program: Program, *words: str) -> dict[str, Any]:
    """What `diagnose` says, and whether it names the place of the fault."""
    code, text = driftline("diagnose", *words, "--format", "json")
    document = document_of(text)
    site = document.get("first_site") or ""
    at_root = site in ROOTS and any(name in ROOTS for name in program.sites)
    return {
        "code": code,
        "verdict": document.get("verdict"),
        "site": site,
        "cause": document.get("cause"),
        "reason": str(document.get("finding") or document.get("trouble") or "")[:500],
        "exact": code == 1 and (site in program.sites or at_root),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Counts of both ways of judging."""
    tried = [result for result in results if "clean" in result]
    lines = [
        f"{len(tried)} programs of {len({result['package'] for result in tried})} packages",
        f"{'':<10} {'clean: alarms':>14} {'refused':>8} {'faults: detected':>17} {'exact':>6} "
        f"{'refused':>8}",
    ]
    for way in WAYS:
        clean, faulty = ([result[kind][way] for result in tried] for kind in KINDS)
        exact = sum(row.get("exact", False) for row in faulty)
        lines.append(
            f"{way:<10} {codes(clean, 1):>14} {codes(clean, 2):>8} {codes(faulty, 1):>17} "
            f"{exact:>6} {codes(faulty, 2):>8}   {exact / max(1, len(faulty)):.0%} exact"
        )
    broken = [result["name"] for result in results if "trouble" in result]
    if broken:
        lines.append(f"could not be run: {', '.join(broken)}")
    return "\n".join(lines)


def codes(rows: list[dict[str, Any]], code: int) -> int:
    """How many ended with a code; every code but 0 and 1 is a refusal."""
    return sum((row["code"] if row["code"] in (0, 1) else 2) == code for row in rows)


def line_of(result: dict[str, Any]) -> str:
    words = [f"{result['name']:<24}"]
    if "trouble" in result:
        return f"{words[0]} could not be run: {result['trouble'][-160:]}"
    for kind in KINDS:
        for way in WAYS:
            row = result[kind][way]
            text = {0: "pass", 1: "FAIL"}.get(row["code"], "refused")
            if row["code"] == 1:
                place = "exact" if row["exact"] else f"at {row['site'] or '(model)'}"
                text = f"{text} {place} {row['cause'] or ''}".rstrip()
            words.append(f"{kind}, {way}: {text}")
    return "  |  ".join(words)


def main() -> int:
    asked = argparse.ArgumentParser(
        prog="python -m benchmarks.third_party",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked.add_argument("--install", action="store_true", help="make .third-party-venv first")
    asked.add_argument("--only", nargs="*", default=(), help="names of programs")
    asked.add_argument("-j", "--workers", type=int, default=1)
    asked.add_argument("--json", type=Path, help="write all that was said, a line per program")
    asked.add_argument("--keep", type=Path, help="keep the runs in this folder")
    asked.add_argument("--read", type=Path, help="only print the table of such a file")
    chosen = asked.parse_args()
    if chosen.read:
        results = [json.loads(line) for line in chosen.read.read_text().splitlines()]
        print(table(results))
        return 0
    if chosen.install:
        install(PACKAGES)
    if not PACKAGES.is_ready:
        sys.exit("benchmarks: the packages are not installed; run it once with --install")
    programs = load()
    unknown = set(chosen.only) - set(programs)
    if unknown:
        sys.exit(f"benchmarks: no program {sorted(unknown)}; there are {', '.join(programs)}")
    wanted = [entry for name, entry in programs.items() if not chosen.only or name in chosen.only]
    results = []
    with tempfile.TemporaryDirectory(prefix="third-party-") as temporary:
        work = chosen.keep or Path(temporary)

        def attempt(entry: Program) -> dict[str, Any]:
            result = try_program(entry, work / entry.name)
            if chosen.keep is None:
                shutil.rmtree(work / entry.name, ignore_errors=True)
            return result

        with ThreadPoolExecutor(chosen.workers) as pool:
            for result in pool.map(attempt, wanted):
                results.append(result)
                print(line_of(result), flush=True)
                if chosen.json:
                    chosen.json.write_text("".join(json.dumps(row) + "\n" for row in results))
    print()
    print(table(results))
    rows = [
        row
        for x in results
        if "clean" in x
        for row in (*x["clean"].values(), *x["faulty"].values())
    ]
    alarms = any(x["clean"][way]["code"] == 1 for x in results if "clean" in x for way in WAYS)
    return int(alarms or codes(rows, 2) > 0 or any("trouble" in x for x in results))


if __name__ == "__main__":
    raise SystemExit(main())
