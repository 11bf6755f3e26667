"""Stages of a pipeline: every rank has some of the layers, and may count them from 0.

A rank may run several stages (interleaved schedules): each is a model, or a part of one, with its
own place in the names. Which one is which stage its process has said, or the layers' numbers do:
where the layers add up to those of the whole model, they follow one another. Looks at names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.runs.records import TensorKey
from driftline.runs.run import Run

ROOT = "(root)"
Numbers = dict[str, set[int]]
"""Path before a number in a site's name → the numbers that follow it."""

Sites = Mapping[int, Mapping[str, None]]
"""Names of the sites of every rank, in the order of their first tensors."""


class Chunk(NamedTuple):
    """What one rank has of a pipeline at one place.

    Attributes:
        under: Site of the stage's own model on its rank; empty for the whole of the rank's names.
        stage: Which stage it is.
    """

    under: str
    stage: int

    def inside(self, site: str) -> str | None:
        """The name of a site in the stage's own model; None where it is not part of that."""
        if not self.under:
            return site
        if site == self.under:
            return ROOT
        return site[len(self.under) + 1 :] if site.startswith(f"{self.under}.") else None


class Stages(NamedTuple):
    """Who has which part of a pipeline.

    Attributes:
        of: Rank → its stages, those with the longest names first.
        stages: How many stages there are.
        shifts: (stage, path before a number) → path in the whole model, and what to add.
    """

    of: Mapping[int, Sequence[Chunk]]
    stages: int
    shifts: Mapping[tuple[int, str], tuple[str, int]]

    def key(self, key: TensorKey) -> TensorKey:
        """The address of a stage's tensor in the whole model."""
        for chunk in self.of.get(key.rank, ()):
            if (site := chunk.inside(key.site)) is not None:
                return key._replace(site=self._site(site, chunk.stage, key.port))
        return key

    def _site(self, site: str, stage: int, port: str) -> str:
        if site == ROOT:
            ends = ("input", "grad_input") if stage == 0 else ()
            ends += ("output", "grad_output") if stage == self.stages - 1 else ()
            return site if port in ends else f"(stage {stage})"
        for before, number, after in _numbered(site):
            shift = self.shifts.get((stage, before))
            if shift is not None:
                path = f"{shift[0]}.{number + shift[1]}" if shift[0] else str(number + shift[1])
                return path + after
        return site

    def note(self) -> str:
        shown = [
            f"rank {rank} has {_listed(sorted(chunk.stage for chunk in chunks))}"
            for rank, chunks in sorted(self.of.items())
        ]
        text = f"a pipeline of {self.stages} stages: {_some(shown)}"
        moved = [
            f"{before or 'number'} n of stage {stage} is {path} n + {shift}".replace("  ", " ")
            for (stage, before), (path, shift) in sorted(self.shifts.items())
            if shift or path != before
        ]
        return f"{text}; {_some(moved)}" if moved else text


def _listed(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _some(words: Sequence[str]) -> str:
    """All while they are few, else the first and the last.

    >>> _some(["a", "b"]), _some(list("abcdefgh"))
    ('a; b', 'a; b; c; ...; h')
    """
    few = list(words) if len(words) <= 4 else [*words[:3], "...", words[-1]]
    return "; ".join(few)


def is_border(key: TensorKey) -> bool:
    """Whether this is what a stage takes or gives, somewhere inside the whole model."""
    return key.site.startswith("(stage ")


def stages_of(run: Run, other: Run | None) -> Stages | None:
    """The pipeline of a run; None where it is none.

    Args:
        run: Of several ranks.
        other: What it is compared with; None where that says nothing about names.
    """
    sites: dict[int, dict[str, None]] = {}
    for record in run.records:
        sites.setdefault(record.key.rank, {})[record.key.site] = None
    names = dict.fromkeys(record.key.site for record in (() if other is None else other.records))
    whole = _numbers(names)
    of = _said(run, sites, whole) or _by_counting(sites, whole)
    if not of:
        return None
    of = {rank: _fitting(chunks, sites.get(rank, {}), names) for rank, chunks in of.items()}
    by_stage: dict[int, dict[str, None]] = {}
    for rank, chunks in of.items():
        for site in sites.get(rank, {}):
            for chunk in chunks:
                if (inner := chunk.inside(site)) is not None:
                    by_stage.setdefault(chunk.stage, {})[inner] = None
                    break
    stages = max(chunk.stage for chunks in of.values() for chunk in chunks) + 1
    return Stages(of, stages, _shifts({s: _numbers(names) for s, names in by_stage.items()}, whole))


def _fitting(
    chunks: Sequence[Chunk], sites: Iterable[str], whole: Iterable[str]
) -> Sequence[Chunk]:
    """Chunks, the longest names first; a single one whose names fit as they are has no place."""
    if len(chunks) == 1 and chunks[0].under:
        known = {_NUMBER.sub("#", name) for name in whole}
        mine = [site for site in sites if chunks[0].inside(site) is not None]
        apart = [chunks[0].inside(site) or "" for site in mine]
        fits = [sum(_NUMBER.sub("#", name) in known for name in each) for each in (mine, apart)]
        if fits[0] >= fits[1]:
            return [chunks[0]._replace(under="")]
    return sorted(chunks, key=lambda chunk: -len(chunk.under))


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _said(run: Run, sites: Sites, whole: Numbers) -> dict[int, Sequence[Chunk]]:
    """Stages as the processes named them."""
    found: dict[int, Sequence[Chunk]] = {}
    for rank, said in run.facts.stages.items():
        under = [None if site is None else site.removeprefix(ROOT) for _, site in said]
        stages = [stage for stage, _ in said]
        if None in under:  # in the order in which the rank has them
            under = _places(sites.get(rank, {}), whole) if len(said) > 1 else [""]
            stages.sort()
        if len(under) != len(stages):
            return {}
        found[rank] = [Chunk(u or "", stage) for u, stage in zip(under, stages, strict=True)]
    return found if len({c.stage for chunks in found.values() for c in chunks}) > 1 else {}


def _places(sites: Iterable[str], whole: Numbers) -> list[str]:
    """Where a rank has models of its own that hold layers of the whole model, in their order."""
    for path, layers in whole.items():
        if len(layers) > 1 and (found := list(_under(sites, path, whole))):
            return found
    return []


def _under(sites: Iterable[str], path: str, whole: Numbers) -> dict[str, set[int]]:
    """Names in front of a path of the whole model → the numbers after it there."""
    found: dict[str, set[int]] = {}
    for site in sites:
        for before, number, _ in _numbered(site):
            if before == path:
                found.setdefault("", set()).add(number)
            elif before.endswith(f".{path}" if path else ".") and before not in whole:
                found.setdefault(before[: -len(path) - 1], set()).add(number)
    return found


def _by_counting(sites: Sites, whole: Numbers) -> dict[int, Sequence[Chunk]]:
    """Ranks in order, if they share out the layers of the whole model.

    Where every rank has several models, the first models of all ranks come first.
    """
    ranks = sorted(sites)
    for path, layers in whole.items():
        mine = {rank: _under(sites[rank], path, whole) for rank in ranks}
        counts = [len(numbers) for each in mine.values() for numbers in each.values()]
        many = {len(each) for each in mine.values()}
        if len(layers) < 2 or len(many) != 1 or not all(mine.values()):
            continue
        if sum(counts) == len(layers) and all(count < len(layers) for count in counts):
            return {
                rank: [Chunk(under, n * len(ranks) + at) for n, under in enumerate(mine[rank])]
                for at, rank in enumerate(ranks)
            }
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
        if whole and len(whole.get(path, ())) != total:
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
