"""msprobe beside ours: some of the trials dumped and compared by it, in an environment of its own.

Each step of its dump is one trial. A row is flagged where its `Result` is `error`; the first such
row, in the order it writes them, is what it names. Rows that it flags for nothing but a difference
of dtype count like all others, because a reader cannot tell them apart; how many they are is said.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers
from driftline.testing.faults.rates import job_of

OUTPUT = peers.ROOT / "bench-output" / "faults"
PROGRAM = peers.PROGRAMS / "trials_with_msprobe.py"
_NAME = re.compile(r"Module\.(?:(.+)\.)?(\w+)\.forward\.\d+\.")
_DTYPE = "dtype of NPU and Bench are inconsistent"


def beside(results: Sequence[dict[str, Any]], most: int) -> None:
    """Add msprobe's outcome to some of the results, evenly over formats and kinds."""
    chosen = chosen_of(results, most)
    if not chosen:
        print("msprobe: no trial is fit for it", flush=True)
        return
    try:
        peers.install()
        tables = list(_compared([result["job"] for result in chosen]))
    except (OSError, subprocess.SubprocessError, SystemExit) as problem:
        said = str(problem).splitlines() or ["it failed"]
        print(f"msprobe was left out: its environment could not be made or used: {said[0]}")
        return
    for result, table in zip(chosen, tables, strict=True):
        result["msprobe"] = outcome(table, result["site"])
    rows = [row for table in tables for row in table if row["Result"] == "error"]
    only = sum(_DTYPE in row["Err_message"] for row in rows)
    print(
        f"msprobe: {len(chosen)} trials, {len(rows)} rows are errors, {only} of them for "
        "a difference of dtype",
        flush=True,
    )


def chosen_of(results: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Short trials that changed something, half in float32 (where msprobe is at its best), half in
    other formats; every fourth without a fault."""
    fit = [
        r
        for r in sorted(results, key=lambda r: tuple(map(str, r["job"])))
        if r.get("changed") and "broken" not in r and job_of(r).length <= 64
        if job_of(r).format in ("fp32", "bf16", "fp16") and not job_of(r).group
    ]
    groups = [
        [r for r in fit if (job_of(r).format == "fp32") == wide and bool(job_of(r).kind) == faulty]
        for wide in (True, False)
        for faulty in (True, False)
    ]
    shares = [most * 3 // 8, most // 8, most * 3 // 8, most // 8]
    chosen: list[dict[str, Any]] = []
    for group, share in zip(groups, shares, strict=True):
        share = min(share, len(group))
        chosen += [group[at * len(group) // share] for at in range(share)]
    return chosen


def _compared(jobs: Sequence[Any]) -> Iterator[list[dict[str, str]]]:
    """msprobe's table of each trial."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    listed = OUTPUT / "jobs.jsonl"
    listed.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    theirs = str(peers.VENV / "bin" / "python")
    for side in ("reference", "candidate"):
        _called([theirs, str(PROGRAM), "--jobs", str(listed), "--side", side, "--output", side])
    for at in range(len(jobs)):  # it takes several steps at once from jobs of several ranks only
        step, table = f"step{at}", f"table{at}"
        compare = [str(peers.VENV / "bin" / "msprobe"), "compare"]
        _called([*compare, "-tp", f"candidate/{step}", "-gp", f"reference/{step}", "-o", table])
        files = sorted((OUTPUT / table).glob("*.csv"))
        if len(files) != 1:
            raise OSError(f"msprobe wrote {len(files)} tables of trial {at}")
        with files[0].open(newline="") as text:
            yield list(csv.DictReader(text))


def _called(command: Sequence[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(peers.ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=OUTPUT, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise OSError(f"{Path(command[0]).name} failed: {''.join(last)}")


def outcome(rows: Sequence[dict[str, str]], site: str) -> dict[str, Any]:
    """What a table of msprobe says of a trial."""
    flagged = [site_of(row["NPU Name"]) for row in rows if row["Result"] == "error"]
    first = flagged[0] if flagged else ""
    around = [f for f in flagged if f and site and (f == site or site.startswith(f"{f}."))]
    return {
        "detected": bool(flagged),
        "exact": first == site,
        "named": False,
        "flagged": len(flagged),
        "rows": len(rows),
        "first_site": first,
        "cause": "",
        "wrong": len(flagged) - len(around),
    }


def site_of(name: str) -> str:
    """The site of a row of msprobe's; empty for the model itself."""
    match = _NAME.match(name)
    return (match.group(1) or "") if match else name


if __name__ == "__main__":
    sys.exit("run python -m benchmarks.faults --peers")
