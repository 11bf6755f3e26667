"""What the trials gave: false alarms of clean pairs, and how many faults were found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.clean_pairs.faults import GROSS

Result: TypeAlias = Mapping[str, Any]
METHODS = ("compare", "diagnose")


def report(results: Sequence[Result]) -> bool:
    """Print all tables; whether no clean pair is accused and gross faults are found."""
    good = True
    clean = [r for r in results if r["set"] == "clean"]
    faults = [r for r in results if r["set"] == "faults"]
    broken = [r for r in results if "broken" in r]
    for result in broken[:10]:
        print(f"  broken: {result['name']}: {result['broken'][:160]}")
    if broken:
        good = False
        print(f"  {len(broken)} trials broke")
    if clean:
        good &= _clean(clean)
    if faults:
        good &= _faults(faults)
    return good


def _is_false(result: Result, method: str) -> bool:
    return result[method]["verdict"] == "fail"


def _is_vain(result: Result, method: str) -> bool:
    return (
        result[method]["verdict"] in ("incomplete", "incomparable") and not result["reason_is_true"]
    )


def _is_clean(result: Result) -> bool:
    """Whether the candidate's format can hold the model; by its outputs, whatever was said of it.

    Infinities on one side, an output that is zero throughout and should not be, or one that one
    rounding puts further off than its format allows, are rightly a FAIL.
    """
    return not (result["one_sided"] or result["vanished"] or result["unfit"])


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The rates, for the JSON file."""
    judged = [r for r in results if r["set"] == "clean" and "broken" not in r and _is_clean(r)]
    rates: dict[str, Any] = {"clean_pairs": len(judged)}
    for method in METHODS:
        rates[method] = {
            "false_fail": sum(_is_false(r, method) for r in judged),
            "incomplete": sum(r[method]["verdict"] == "incomplete" for r in judged),
            "incomplete_without_reason": sum(_is_vain(r, method) for r in judged),
        }
    rates["verdicts_differ"] = sum(
        r["compare"]["verdict"] != r["diagnose"]["verdict"] for r in judged
    )
    planted = _loud(results)
    rates["gross_faults"] = len(planted)
    for method in (*METHODS, "replay"):
        some = [r for r in planted if method in r]
        rates[f"gross_found_by_{method}"] = sum(r[method]["verdict"] == "fail" for r in some)
    return rates


def _clean(clean: Sequence[Result]) -> bool:
    judged = [r for r in clean if "compare" in r and "broken" not in r]
    unfit = [r for r in judged if not _is_clean(r)]
    judged = [r for r in judged if _is_clean(r)]
    architectures = {r["pair"]["architecture"] for r in judged}
    print(f"\nclean pairs: {len(judged)} of {len(architectures)} architectures")
    equal = sum(r["equal_to_the_bit"] for r in judged)
    print(f"  {equal} of them equal to the bit; {len(unfit)} more do not fit their format")
    head = " FAIL  INCOMPLETE  without reason"
    print(f"  {'':24} {'pairs':>5} | compare:{head} | diagnose:{head}")
    by_kind = _grouped(judged, lambda r: r["kind"])
    by_family = _grouped(judged, lambda r: r["family"])
    by_depth = _grouped(judged, lambda r: f"{r['pair']['layers']} layers")
    by_weights = _grouped(judged, lambda r: r["pair"]["weights"])
    for groups in (by_kind, by_family, by_depth, by_weights, {"all": judged}):
        for title, some in groups.items():
            cells = " | ".join(f"{' ' * len(method)} {_cells(some, method)}" for method in METHODS)
            print(f"  {title:24} {len(some):5} | {cells}")
        print()
    bad = 0
    for method in METHODS:
        false = [r for r in judged if _is_false(r, method)]
        vain = [r for r in judged if _is_vain(r, method)]
        bad += len(false) + len(vain)
        rate = 100 * len(false) / max(1, len(judged))
        print(
            f"  {method}: false FAIL {len(false)} of {len(judged)} ({rate:.1f} %), "
            f"INCOMPLETE without a true reason {len(vain)}"
        )
        for result in [*false, *vain][:12]:
            seen = result[method]
            print(f"    {seen['verdict']}: {result['name']}")
            print(f"      {seen['first_site'] or '-'}: {seen['reason'][:180]}")
    differing = [r for r in judged if r["compare"]["verdict"] != r["diagnose"]["verdict"]]
    print(f"  compare and diagnose differ in their verdict: {len(differing)}")
    return not bad and not differing


def markdown(results: Sequence[Result]) -> str:
    """The rates as a table of docs/verdicts.md."""
    judged = [r for r in results if r["set"] == "clean" and "broken" not in r and _is_clean(r)]
    lines = ["| clean pairs | pairs | FAIL | INCOMPLETE | of these without a true reason |"]
    lines.append("|---|---|---|---|---|")
    for title, some in {**_grouped(judged, lambda r: r["kind"]), "all": judged}.items():
        false, incomplete, vain = (
            sum(test(r) for r in some)
            for test in (
                lambda r: _is_false(r, "compare"),
                lambda r: r["compare"]["verdict"] == "incomplete",
                lambda r: _is_vain(r, "compare"),
            )
        )
        lines.append(f"| {title} | {len(some)} | {false} | {incomplete} | {vain} |")
    faults = [r for r in results if r["set"] == "faults" and "compare" in r]
    if faults:
        lines += [
            "",
            "| planted faults | | compare | diagnose | with replay |",
            "|---|---|---|---|---|",
        ]
        everywhere = [r for r in faults if r["place"] == "everywhere"]
        for title, some in (("gross, in one place", _loud(faults)), ("in every layer", everywhere)):
            cells = " | ".join(_shares(some, method) for method in (*METHODS, "replay"))
            lines.append(f"| {title}: FAIL, at its site | {len(some)} | {cells} |")
    return "\n".join(lines)


def _shares(some: Sequence[Result], method: str) -> str:
    judged = [r[method] for r in some if method in r]
    if not judged:
        return "-"
    failed = [seen for seen in judged if seen["verdict"] == "fail"]
    exact = [seen for seen in failed if seen["exact"]]
    return f"{100 * len(failed) / len(judged):.1f} %, {100 * len(exact) / len(judged):.1f} %"


def _cells(some: Sequence[Result], method: str) -> str:
    false = sum(_is_false(r, method) for r in some)
    incomplete = sum(r[method]["verdict"] in ("incomplete", "incomparable") for r in some)
    vain = sum(_is_vain(r, method) for r in some)
    return f"{false:5} {incomplete:11} {vain:15}"


def _grouped(results: Iterable[Result], key: Any) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return dict(sorted(groups.items()))


def _loud(results: Iterable[Result]) -> list[Result]:
    """Single faults that are gross."""
    return [
        r
        for r in results
        if r["set"] == "faults"
        and "compare" in r
        and r["place"] != "everywhere"
        and r["effect"] >= GROSS
    ]


def _faults(faults: Sequence[Result]) -> bool:
    skipped = Counter(r["skipped"] for r in faults if "skipped" in r)
    judged = [r for r in faults if "compare" in r]
    loud = _loud(judged)
    everywhere = [r for r in judged if r["place"] == "everywhere"]
    quiet = [r for r in judged if r["place"] != "everywhere" and r["effect"] < GROSS]
    print(f"\nplanted faults: {len(judged)}; " + ", ".join(f"{n}: {w}" for w, n in skipped.items()))
    head = "found  site  incomplete"
    print(f"  {'':30} {'n':>4} | compare  {head} | diagnose {head} | replay   {head}")
    for title, some in (
        ("gross, in one place", loud),
        ("smaller, in one place", quiet),
        ("in every layer", everywhere),
    ):
        print(f"  {title}")
        for kind, part in {**_grouped(some, lambda r: r["kind"]), "all of these": some}.items():
            print(f"    {kind:28} {len(part):4} | {_found(part)}")
    for title, key in (
        ("depth", lambda r: f"{r['pair']['layers']} layers"),
        ("weights", lambda r: r["pair"]["weights"]),
        ("format", lambda r: r["pair"]["candidate"]),
    ):
        print(f"  gross, by {title}")
        for name, part in _grouped(loud, key).items():
            print(f"    {name:28} {len(part):4} | {_found(part)}")
    missed = [r for r in loud if r.get("replay", r["compare"])["verdict"] != "fail"]
    passed = [r for r in loud if r["compare"]["verdict"] == "pass"]
    for result in [*missed, *passed][:20]:
        print(f"    not found: {result['name']} (effect {result['effect']:.2g})")
    return len(missed) <= 0.01 * len(loud) and len(passed) <= 0.01 * len(loud)


def _found(some: Sequence[Result]) -> str:
    cells: list[str] = []
    for method in (*METHODS, "replay"):
        judged = [r[method] for r in some if method in r]
        if not judged:
            cells.append(f"{'-':>31}")
            continue
        share = [
            100 * sum(test(seen) for seen in judged) / len(judged)
            for test in (
                lambda seen: seen["verdict"] == "fail",
                lambda seen: seen["verdict"] == "fail" and seen["exact"],
                lambda seen: seen["verdict"] == "incomplete",
            )
        ]
        cells.append(f"         {share[0]:4.0f}% {share[1]:4.0f}% {share[2]:10.0f}%")
    return " | ".join(cells)
