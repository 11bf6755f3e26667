"""The yardstick: planted faults and fault-free pairs, and what each way of judging says of them.

    python -m benchmarks.faults                    a sample that takes some minutes on two cores
    python -m benchmarks.faults --seeds 2 --clean 200 --clean-sets 8 --peers --workers 16     all
    python -m benchmarks.faults --formats compiled        every kind, in one costly format
    python -m benchmarks.faults --formats fp32 --candidate-on cuda     candidates of another device

Trials whose fault changes no bit are left out and counted. Faults whose output error does not
exceed the 99.9th percentile of fault-free pairs of their format are excluded from the goals for
loud faults, and counted by kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.faults.jobs import FORMATS, REPORTED, clean_jobs, fault_jobs, run, set_jobs
from benchmarks.faults.report import report


def main() -> int:
    asked = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked.add_argument("--seeds", type=int, default=1, help="trials of every kind and severity")
    asked.add_argument("--clean", type=int, default=24, help="fault-free pairs of each format")
    asked.add_argument(
        "--clean-sets",
        type=int,
        default=0,
        metavar="PAIRS",
        help="fault-free pairs from 256 to 16 000 tokens and by implementation, so many of each",
    )
    asked.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    asked.add_argument("--every", type=int, default=1, help="only each n-th trial")
    asked.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    asked.add_argument("--tuning", action="store_true", help="the seeds and kinds for tuning")
    asked.add_argument(
        "--peers",
        type=int,
        nargs="?",
        const=16,
        default=0,
        metavar="TRIALS",
        help="so many of the trials by msprobe too, in .bench-venv",
    )
    where = {"--reference-on": "reference, replay and noise runs", "--candidate-on": "candidates"}
    for name, who in where.items():
        asked.add_argument(name, default="cpu", metavar="DEVICE", help=f"device of {who}")
    asked.add_argument("--write", type=Path, help="all results as JSON lines")
    asked.add_argument("--read", type=Path, nargs="+", help="report on results written before")
    given = asked.parse_args()
    if given.read:
        results = [json.loads(x) for path in given.read for x in path.read_text().splitlines()]
        return 0 if report(results) else 1
    first = 0 if given.tuning else REPORTED
    seeds = range(first, first + given.seeds)
    jobs = [
        *fault_jobs(seeds, given.formats, given.tuning),
        *clean_jobs(first, given.clean, given.formats, given.tuning),
    ][:: given.every]
    jobs += list(set_jobs(first, given.clean_sets))[:: given.every]
    print(f"{len(jobs)} trials, {given.workers} workers", flush=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(given.write.open("w")) if given.write else None

        def keep(result: dict[str, Any]) -> None:
            if file is not None:
                file.write(json.dumps(result) + "\n")
                file.flush()

        results = run(jobs, given.workers, keep, given.reference_on, given.candidate_on)
    if given.peers:
        from benchmarks.faults.msprobe import beside

        beside(results, given.peers)
        if given.write:  # again: now with what msprobe said
            given.write.write_text("".join(json.dumps(r) + "\n" for r in results))
    return 0 if report(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
