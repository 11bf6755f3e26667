"""Stages of a pipeline: every rank has some of the layers, and may count them from 0.

Which rank is which stage its process has said, or the layers' numbers do: where the ranks' layers
add up to those of the whole model, they follow one another. Looks at names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from driftline.runs.key import TensorKey
from driftline.runs.run import Run

Numbers = dict[str, set[int]]
"""Path before a number in a site's name → the numbers that follow it."""


class Stages(NamedTuple):
    """Who has which part of a pipeline.

    Attributes:
        of: Rank → its stage.
        stages: How many stages there are.
        shifts: (stage, path before a number) → path in the whole model, and what to add.
    """

    of: Mapping[int, int]
    stages: int
    shifts: Mapping[tuple[int, str], tuple[str, int]]

    def key(self, key: TensorKey) -> TensorKey:
        """The address of a stage's tensor in the whole model."""
        stage = self.of.get(key.rank)
        if stage is None:
            return key
        if key.site == "(root)":
            ends = ("input", "grad_input") if stage == 0 else ()
            ends += ("output", "grad_output") if stage == self.stages - 1 else ()
            return key if key.port in ends else key._replace(site=f"(stage {stage})")
        for before, number, after in _numbered(key.site):
            shift = self.shifts.get((stage, before))
            if shift is not None:
                path = f"{shift[0]}.{number + shift[1]}" if shift[0] else str(number + shift[1])
                return key._replace(site=path + after)
        return key

    def note(self) -> str:
        ranks: dict[int, list[int]] = {}
        for rank, stage in sorted(self.of.items()):
            ranks.setdefault(stage, []).append(rank)
        shown = [
            f"stage {stage} is rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
            for stage, who in sorted(ranks.items())
        ]
        text = f"a pipeline of {self.stages} stages: {'; '.join(shown)}"
        moved = [
            f"{before or 'number'} n of stage {stage} is {path} n + {shift}".replace("  ", " ")
            for (stage, before), (path, shift) in sorted(self.shifts.items())
            if shift or path != before
        ]
        return f"{text}; {'; '.join(moved)}" if moved else text


def stages_of(run: Run, other: Run) -> Stages | None:
    """The pipeline of a run; None where it is none."""
    sites: dict[int, dict[str, None]] = {}
    for record in run.records:
        sites.setdefault(record.key.rank, {})[record.key.site] = None
    whole = _numbers(dict.fromkeys(record.key.site for record in other.records))
    of = _said(run) or _by_counting(sites, whole)
    if not of:
        return None
    by_stage: dict[int, dict[str, None]] = {}
    for rank, stage in of.items():
        by_stage.setdefault(stage, {}).update(sites.get(rank, {}))
    stages = max(of.values()) + 1
    return Stages(of, stages, _shifts({s: _numbers(names) for s, names in by_stage.items()}, whole))


def _said(run: Run) -> dict[int, int]:
    """Stages as the processes named them; a rank that runs several has no single place."""
    found: dict[int, int] = {}
    for facts in run.processes():
        said: Any = facts.get("stages")
        stages = cast("list[Any]", said) if isinstance(said, list) else []
        if len(stages) != 1 or not isinstance(stages[0], Mapping):
            continue
        stage = cast("Mapping[str, Any]", stages[0]).get("stage")
        if type(stage) is int and 0 <= stage < 1 << 16:
            found[int(facts["rank"])] = stage
    return found if len(set(found.values())) > 1 else {}


def _by_counting(sites: Mapping[int, Iterable[str]], whole: Numbers) -> dict[int, int]:
    """Ranks in order, if they share out the layers of the whole model."""
    ranks = sorted(sites)
    numbers = [_numbers(sites[rank]) for rank in ranks]
    for path, layers in whole.items():
        mine = [each.get(path, set[int]()) for each in numbers]
        if len(layers) < 2 or not all(mine):
            continue
        if sum(map(len, mine)) == len(layers) and all(len(each) < len(layers) for each in mine):
            return {rank: stage for stage, rank in enumerate(ranks)}
    return {}


def _shifts(
    stages: Mapping[int, Numbers], whole: Numbers
) -> dict[tuple[int, str], tuple[str, int]]:
    found: dict[tuple[int, str], tuple[str, int]] = {}
    paths = sorted({path for numbers in stages.values() for path in numbers}, key=len)
    for path in paths:
        having = [stage for stage in sorted(stages) if path in stages[stage]]
        mine = [stages[stage][path] for stage in having]
        total = sum(map(len, mine))
        if len(having) < 2 or total == len(set[int]().union(*mine)):
            continue  # numbers of the whole model already
        if any(each != set(range(len(each))) for each in mine):
            continue
        target = path
        if len(whole.get(path, ())) != total:
            fitting = [name for name, layers in whole.items() if len(layers) == total]
            if len(fitting) != 1:
                continue
            target = fitting[0]
        at = 0
        for stage, each in zip(having, mine, strict=True):
            found[stage, path] = (target, at)
            at += len(each)
    return found


def _numbers(sites: Iterable[str]) -> Numbers:
    found: Numbers = {}
    for site in sites:
        for before, number, _ in _numbered(site):
            found.setdefault(before, set()).add(number)
    return found


def _numbered(site: str) -> Sequence[tuple[str, int, str]]:
    """Every number of a path, with what stands before and after it."""
    words = site.split(".")
    return [
        (".".join(words[:n]), int(word), "".join(f".{each}" for each in words[n + 1 :]))
        for n, word in enumerate(words)
        if word.isdecimal() and len(word) < 7
    ]
