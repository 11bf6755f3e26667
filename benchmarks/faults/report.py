"""What the trials gave, in tables: per kind, per method, against the goals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.faults.jobs import HELD_OUT
from driftline.testing.faults import rates
from driftline.testing.faults.rates import Result, job_of

OURS = ("replay", "noise", "two runs")
RULES = ("fixed tolerance", "three-way", "msprobe")
WORDS = {"detected": "found", "exact": "site", "named": "cause"}


def report(results: Sequence[Result]) -> bool:
    """Print what was found; whether every goal was reached."""
    sets = rates.sort_out(results)
    for result in sets.broken[:10]:
        print(f"  broken: {tuple(result['job'])}: {result['broken']}")
    good = _clean(sets.clean)
    good &= _groups(sets.groups)
    if sets.above or sets.below or sets.unchanged:
        good &= _faults(sets)
    return good and not sets.broken


def _faults(sets: rates.Sorted) -> bool:
    print(
        f"\n{len(sets.unchanged)} plants changed no bit and are left out: "
        f"{_counted(sets.unchanged)}"
    )
    print("output error of fault-free pairs, 99.9th percentile by format:")
    print("  " + ", ".join(f"{name} {floor:.2g}" for name, floor in sorted(sets.floors.items())))
    print(
        f"{len(sets.below)} faults do not exceed it and are excluded from the goals for loud "
        f"faults: {_counted(sets.below)}"
    )
    short = _kinds(sets)
    _others(sets.above)
    _excluded(sets.below)
    _hidden(sets.above)
    _methods(sets.above)
    good = _goals(sets)
    print("\nkinds that fall short of a goal:" if short else "\nno kind falls short of a goal")
    for line in short:
        print(f"  {line}")
    return good


def _counted(results: Sequence[Result]) -> str:
    counts = rates.counts_by_kind(results)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"


def _clean(clean: Sequence[Result]) -> bool:
    print(f"\nfault-free pairs: {len(clean)}")
    print(f"  {'format':11} {'method':16} {'pairs':>5} {'alarms':>7} {'rows':>8} {'flagged':>8}")
    good = True
    for name in sorted({job_of(r).format for r in clean}):
        good &= _alarms(name, [r for r in clean if job_of(r).format == name])
    if clean:
        print("  bar: no alarm in 200 pairs, no more than 1.0 flagged in 10 000 rows")
    return good


def _alarms(title: str, clean: Sequence[Result]) -> bool:
    good = True
    for method in (*OURS, *RULES):
        said = rates.alarms(clean, method)
        if not said.pairs:
            continue
        kept = method not in OURS or said.allowed
        good &= kept
        print(
            f"  {title:11} {method:16} {said.pairs:5} {said.runs:7} {said.rows:8} {said.flagged:8}"
            f"   {said.per_10_000:7.1f} in 10 000{'' if kept else '   above the bar'}"
        )
        if method in OURS:
            loud = [r for r in clean if method in r and r[method]["detected"]]
            for result in loud[:3]:
                job, seen = job_of(result), result[method]
                how = job.implementation or "as it is"
                print(
                    f"      {job.architecture} {job.format} seed {job.seed} {how}: "
                    f"{seen['first_site']} {seen['cause']}"
                )
    return good


def _groups(groups: dict[str, list[Result]]) -> bool:
    if not groups:
        return True
    print("\nfault-free pairs by number of tokens and by implementation")
    good = True
    for title, some in groups.items():
        print(f" {title}: {len(some)} pairs")
        good &= _alarms("", some)
    return good


def _kinds(sets: rates.Sorted) -> list[str]:
    """The table of our methods; sentences about kinds that fall short."""
    short: list[str] = []
    below = rates.counts_by_kind(sets.below)
    print(f"\nfaults above the noise of fault-free pairs: {len(sets.above)}")
    head = " found   site  cause rows false"
    print(f"{'':36}| by replay{'':22}| by noise runs{'':18}| two runs")
    print(f"{'kind':28} n   excl |{head} |{head} | found   site  short of")
    for kind, some in rates.by_kind(sets.above).items():
        missed = rates.shortfalls(some)
        mark = " *" if kind in HELD_OUT["kinds"] else ""
        cells = " | ".join(_cells(some, method) for method in ("replay", "noise"))
        words = ", ".join(f"{method} {WORDS[what]}" for method, what, _ in missed)
        print(
            f"{kind + mark:28} {len(some):3} {below[kind]:4} | {cells} | "
            f"{_shown(rates.rate(some, 'two runs', 'detected'))} "
            f"{_shown(rates.rate(some, 'two runs', 'exact'))}  {words}"
        )
        if missed:
            said = ", ".join(f"{m} {WORDS[w]} {_shown(v).strip()}" for m, w, v in missed)
            short.append(f"{kind} ({len(some)} trials): {said}")
    print("  * held out: no rule was tuned on it; rows: flagged on average; false: of these,")
    print("    neither the module at fault nor around it; excl: excluded, see above")
    return short


def _cells(some: Sequence[Result], method: str) -> str:
    shares = " ".join(_shown(rates.rate(some, method, w)) for w in WORDS)
    rows, wrong = (rates.mean(some, method, what) for what in ("flagged", "wrong"))
    return f"{shares} {rows:4.1f} {wrong:5.1f}"


def _others(above: Sequence[Result]) -> None:
    print("\nthe same faults by other rules")
    head = " found   site   rows  false"
    print(f"{'kind':28} " + " ".join(f"| {rule:26}" for rule in RULES))
    print(f"{'':28} " + " ".join(f"|{head} " for _ in RULES))
    for kind, some in rates.by_kind(above).items():
        cells: list[str] = []
        for rule in RULES:
            judged = [r for r in some if rule in r]
            if not judged:
                cells.append(f"{'-':>26}")
                continue
            cells.append(
                f"{_shown(rates.rate(judged, rule, 'detected'))} "
                f"{_shown(rates.rate(judged, rule, 'exact'))} "
                f"{rates.mean(judged, rule, 'flagged'):6.1f} "
                f"{rates.mean(judged, rule, 'wrong'):5.1f}"
            )
        print(f"{kind:28} | " + " | ".join(cells))


def _excluded(below: Sequence[Result]) -> None:
    if not below:
        return
    print(f"\nexcluded faults (no goal but for those meant to be below noise): {len(below)}")
    print(f"{'kind':28} n   by replay: found   site  cause")
    for kind, some in rates.by_kind(below).items():
        shares = " ".join(_shown(rates.rate(some, "replay", w)) for w in WORDS)
        print(f"{kind:28} {len(some):3}            {shares}")


def _hidden(above: Sequence[Result]) -> None:
    """Faults inside blocks that were compiled as a whole: which block, and what is said of it."""
    hidden = [r for r in above if rates.is_hidden(r)]
    if not hidden:
        return
    print(f"\nfaults inside a compiled block, of which no tensor is seen: {len(hidden)}")
    print("  (they count for found and site, where the site is the block; not for cause)")
    for method in OURS:
        judged = [{**r, "seen": True} for r in hidden if method in r]
        shares = " ".join(_shown(rates.rate(judged, method, w)) for w in WORDS)
        unknown = sum(r[method]["cause"] == "unknown" for r in judged)
        wrong = sum(
            r[method]["detected"] and not r[method]["named"] and r[method]["cause"] != "unknown"
            for r in judged
        )
        print(f"  {method:16} {shares}  (cause unknown {unknown}, another cause named {wrong})")


def _methods(above: Sequence[Result]) -> None:
    held = [
        r
        for r in above
        if job_of(r).kind in HELD_OUT["kinds"]
        or job_of(r).architecture in HELD_OUT["architectures"]
    ]
    print("\nmethod                    trials   found   site  cause   rows  false")
    groups = [("all", above), ("held out", held)]
    groups += [
        (name, [r for r in above if job_of(r).format == name])
        for name in sorted({job_of(r).format for r in above})
    ]
    groups += [
        (name, [r for r in above if job_of(r).architecture == name])
        for name in sorted({job_of(r).architecture for r in above})
    ]
    for title, group in groups:
        for method in (*OURS, *RULES) if title in ("all", "held out") else OURS[:2]:
            some = [r for r in group if method in r]
            if some:
                shares = " ".join(_shown(rates.rate(some, method, w)) for w in WORDS)
                print(
                    f"{title:8} {method:16} {len(some):6}  {shares} "
                    f"{rates.mean(some, method, 'flagged'):6.1f} "
                    f"{rates.mean(some, method, 'wrong'):6.1f}"
                )
    seen = [r for r in above if "msprobe" in r]
    if seen:
        print(f"\nthe {len(seen)} of them that msprobe was run on")
        for method in (*OURS, *RULES):
            shares = " ".join(_shown(rates.rate(seen, method, w)) for w in WORDS)
            print(f"  {method:16} {shares} {rates.mean(seen, method, 'flagged'):6.1f} rows")


def _goals(sets: rates.Sorted) -> bool:
    enough, faint = rates.sub_noise([*sets.above, *sets.below])
    lines = [
        (f"{method}, {WORDS[what]}", rates.rate(sets.above, method, what), goal)
        for (method, what), goal in rates.GOALS.items()
    ]
    name = "replay, found below noise"
    lines.append((name, rates.rate(enough, "replay", "detected"), rates.SUB_NOISE_GOAL))
    print()
    good = True
    for title, value, goal in lines:
        reached = math.isnan(value) or value >= goal
        verdict = "reached" if reached else f"missed by {100 * (goal - value):.1f} points"
        verdict = "not tried" if math.isnan(value) else verdict
        print(f"  {title:26} {_shown(value)}  goal {_shown(goal)}  {verdict}")
        good &= reached
    if faint:
        print(
            f"  {len(faint)} of {len(enough) + len(faint)} sub-noise faults change their own "
            f"module by less than {rates.MEANT} units of roundoff and are excluded: "
            f"{_counted(faint)}; "
            f"{_shown(rates.rate(faint, 'replay', 'detected')).strip()} of them are found"
        )
    return good


def _shown(value: float) -> str:
    return "     -" if math.isnan(value) else f"{100 * value:5.1f}%"
