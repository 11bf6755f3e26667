"""What a validation found, in lines for people: rates, prompts, the first failing token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from driftline.comparison.table.table import Table
from driftline.decoding.failing import Candidate, FirstFailure, Rate
from driftline.decoding.validation import Verdict

SHOWN = 8
"""Prompts that are listed one by one."""
SPLIT_UP = (
    "layers of a candidate that is split over ranks are not compared: run it in one process, or "
    "driftline layer-metrics"
)
NEAR = 3
"""Times the share that is allowed, up to which a rate may come from how the limit was made."""
_LONGEST = 24


def lines_of(verdict: Verdict, tokenizer: Any = None) -> Iterator[str]:
    """The findings, one line each.

    Args:
        verdict: What was found.
        tokenizer: Turns ids into text, where there is one.
    """
    text = _reader(tokenizer)
    if verdict.first_other is not None:
        prompt, position = verdict.first_other
        yield f"level 0: tokens differ first at prompt {prompt}, token {position}"
    if not verdict.rates:
        return
    yield f"limits: {verdict.ask.limits}"
    for rate in verdict.rates:
        yield _rate(rate)
    if any(not rate.passed and rate.rate < NEAR * rate.allowed for rate in verdict.rates):
        yield (
            "  near the edge: where a limit is the 99th percentile of a baseline, about 1 % of the "
            "tokens of an equally good run lie at or above it; --failure_threshold 0.02, or limits "
            "of `thresholds --statistic p99.5`, leave room"
        )
    yield (
        f"over the whole vocabulary: the likeliest token agrees at {verdict.agreed} of "
        f"{verdict.rates[0].kept} tokens, total variation is at most {verdict.variation:.4g}"
    )
    yield from _by_prompt(verdict)
    if verdict.first is not None:
        yield from _first(verdict.first, verdict, text)


def layer_lines(table: Table) -> Iterator[str]:
    """A judged comparison of layers, in a few lines."""
    found = table.finding or "no layer is beyond its limits"
    yield f"layers, on the text before that token: {found}"
    failing = [row for row in table.rows if row.status == "fail"]
    for row in failing[:SHOWN]:
        value = row.metrics.get("relative_l2")
        figure = "" if value is None else f" relative_l2 {value:.4g}"
        yield f"  {row.site} {row.key.port}{figure}"
    if len(failing) > SHOWN:
        yield f"  and {len(failing) - SHOWN} more"
    yield from (f"  note: {note}" for note in table.notes)


def _rate(rate: Rate) -> str:
    low, high = rate.interval
    verdict = "skipped" if rate.skipped else "passes" if rate.passed else "fails"
    return (
        f"{rate.called}: {rate.failing} of {rate.kept} tokens at or above {rate.limit:g}, a rate "
        f"of {rate.rate:.4g} (95 % interval {low:.4g} to {high:.4g}), allowed below "
        f"{rate.allowed:g}: {verdict}"
    )


def _by_prompt(verdict: Verdict) -> Iterator[str]:
    prompts = verdict.prompts
    bad = sorted((p for p in prompts if p.most), key=lambda p: -p.most / p.kept)
    if not bad:
        yield f"no failing token in any of the {_counted(len(prompts), 'prompt')}"
        return
    few = "" if len(bad) <= SHOWN else f", the worst {SHOWN}"
    has = "has" if len(bad) == 1 else "have"
    yield f"{len(bad)} of {_counted(len(prompts), 'prompt')} {has} failing tokens{few}:"
    for prompt in bad[:SHOWN]:
        name = f" ({prompt.name})" if prompt.name else ""
        counts = ", ".join(f"{rate.called} {prompt.failing[rate.check]}" for rate in verdict.rates)
        yield f"  iter={prompt.seed} prompt {prompt.prompt}{name}: {counts} of {prompt.kept} tokens"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _first(first: FirstFailure, verdict: Verdict, text: Callable[[int], str]) -> Iterator[str]:
    name = f" ({first.name})" if first.name else ""
    scores = ", ".join(f"{r.called} {first.values[r.check]:.6g}" for r in verdict.rates)
    yield (
        f"first failing token: iter={first.seed}, prompt {first.prompt}{name}, token "
        f"{first.position}, where the reference said {text(first.token)}: {scores}"
    )
    for side, chosen in (("reference", first.reference), ("candidate", first.candidate)):
        yield f"  {side}'s likeliest: " + ", ".join(_shown(each, text) for each in chosen)


def _shown(chosen: Candidate, text: Callable[[int], str]) -> str:
    return f"{text(chosen.token)} {chosen.probability:.4f}"


def _reader(tokenizer: Any) -> Callable[[int], str]:
    def read(token: int) -> str:
        if tokenizer is None:
            return str(token)
        shown = repr(str(tokenizer.decode([token])))
        if len(shown) > _LONGEST:
            shown = shown[: _LONGEST - 1] + "…"
        return f"{token} {shown}"

    return read
