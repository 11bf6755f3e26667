"""Stages of a pipeline: every rank has some of the layers, and may count them from 0.

A rank may run several stages (interleaved schedules); each is a separate model with a prefix in the
site names. The process declares the number of a stage, or it is concluded from layer numbers: if
the layers of all ranks add up to those of the complete model, the stages follow one another. This
file reads only names, never tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.runs.records import TensorKey
from driftline.runs.run import Run

ROOT = "(root)"
Numbers = dict[str, set[int]]
"""Path before a number in site names → the numbers that follow it."""

Sites = Mapping[int, Mapping[str, None]]
"""Site names of every rank, in the order of their first tensors."""


class Chunk(NamedTuple):
    """One stage on one rank.

    Attributes:
        under: Site of the stage's own model on its rank; empty if all sites of the rank belong to
            it.
        stage: Number of the stage.
    """

    under: str
    stage: int

    def inside(self, site: str) -> str | None:
        """Name of a site inside the stage's own model; None if it does not belong to the stage."""
        if not self.under:
            return site
        if site == self.under:
            return ROOT
        return site[len(self.under) + 1 :] if site.startswith(f"{self.under}.") else None


class Stages(NamedTuple):
    """The stages of a pipeline, and how their layers are numbered.

    Attributes:
        chunks: Rank → its stages, those with the longest names first.
        stages: Number of stages.
        shifts: (stage, path before a number) → path in the complete model, and the number to add.
    """

    chunks: Mapping[int, Sequence[Chunk]]
    stages: int
    shifts: Mapping[tuple[int, str], tuple[str, int]]

    def key(self, key: TensorKey) -> TensorKey:
        """Key of a stage's tensor in the complete model."""
        for chunk in self.chunks.get(key.rank, ()):
            if (site := chunk.inside(key.site)) is not None:
                return key._replace(site=self._site(site, chunk.stage, key.port))
        return key

    def _site(self, site: str, stage: int, port: str) -> str:
        if site == ROOT:
            # The complete model's input enters the first stage, and its output leaves the last one.
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
            for rank, chunks in sorted(self.chunks.items())
        ]
        text = f"a pipeline of {self.stages} stages: {_abbreviated(shown)}"
        moved = [
            f"{before or 'number'} n of stage {stage} is {path} n + {shift}".replace("  ", " ")
            for (stage, before), (path, shift) in sorted(self.shifts.items())
            if shift or path != before
        ]
        return f"{text}; {_abbreviated(moved)}" if moved else text


def _listed(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _abbreviated(words: Sequence[str]) -> str:
    """All words if there are few; otherwise the first three and the last.

    >>> _abbreviated(["a", "b"]), _abbreviated(list("abcdefgh"))
    ('a; b', 'a; b; c; ...; h')
    """
    few = list(words) if len(words) <= 4 else [*words[:3], "...", words[-1]]
    return "; ".join(few)


def is_border(key: TensorKey) -> bool:
    """Whether this is an input or output of a stage inside the complete model."""
    return key.site.startswith("(stage ")


def stages_of(run: Run, other: Run | None) -> Stages | None:
    """The pipeline of a run; None if it is not one.

    Args:
        run: A run of several ranks.
        other: The run it is compared with; None if its names are no evidence.
    """
    sites: dict[int, dict[str, None]] = {}
    for record in run.records:
        sites.setdefault(record.key.rank, {})[record.key.site] = None
    names = dict.fromkeys(record.key.site for record in (() if other is None else other.records))
    model_numbers = _numbers(names)
    # Declarations of the processes come first; counting is for programs without declarations.
    chunks_of_rank = _declared(run, sites, model_numbers) or _by_counting(sites, model_numbers)
    if not chunks_of_rank:
        return None
    chunks_of_rank = {
        rank: _fitting(chunks, sites.get(rank, {}), names)
        for rank, chunks in chunks_of_rank.items()
    }
    by_stage: dict[int, dict[str, None]] = {}
    for rank, chunks in chunks_of_rank.items():
        # The longest name first, because a stage inside another one must not be counted with it.
        for site in sites.get(rank, {}):
            for chunk in chunks:
                if (inner := chunk.inside(site)) is not None:
                    by_stage.setdefault(chunk.stage, {})[inner] = None
                    break
    stages = max(chunk.stage for chunks in chunks_of_rank.values() for chunk in chunks) + 1
    return Stages(
        chunks_of_rank,
        stages,
        _shifts({s: _numbers(names) for s, names in by_stage.items()}, model_numbers),
    )


def _fitting(
    chunks: Sequence[Chunk], sites: Iterable[str], model_sites: Iterable[str]
) -> Sequence[Chunk]:
    """Chunks, longest prefix first; a single chunk loses its prefix if full names fit better."""
    if len(chunks) == 1 and chunks[0].under:
        # Numbers are replaced, because a stage may count its layers from 0.
        model_names = {_NUMBER.sub("#", name) for name in model_sites}
        own_sites = [site for site in sites if chunks[0].inside(site) is not None]
        inner_sites = [chunks[0].inside(site) or "" for site in own_sites]
        fits = [
            sum(_NUMBER.sub("#", name) in model_names for name in names)
            for names in (own_sites, inner_sites)
        ]
        if fits[0] >= fits[1]:
            return [chunks[0]._replace(under="")]
    return sorted(chunks, key=lambda chunk: -len(chunk.under))


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _declared(run: Run, sites: Sites, model_numbers: Numbers) -> dict[int, Sequence[Chunk]]:
    """The stages that the processes declared."""
    chunks_of_rank: dict[int, Sequence[Chunk]] = {}
    for rank, declared in run.facts.stages.items():
        under = [None if site is None else site.removeprefix(ROOT) for _, site in declared]
        stages = [stage for stage, _ in declared]
        if None in under:  # in the order in which the rank has them
            under = _places(sites.get(rank, {}), model_numbers) if len(declared) > 1 else [""]
            stages.sort()
        if len(under) != len(stages):
            return {}
        chunks_of_rank[rank] = [
            Chunk(u or "", stage) for u, stage in zip(under, stages, strict=True)
        ]
    # A single stage is not a pipeline.
    return (
        chunks_of_rank
        if len({c.stage for chunks in chunks_of_rank.values() for c in chunks}) > 1
        else {}
    )


def _places(sites: Iterable[str], model_numbers: Numbers) -> list[str]:
    """Prefixes of a rank's own models that hold layers of the complete model, in their order."""
    for path, layers in model_numbers.items():
        if len(layers) > 1 and (prefixes := list(_under(sites, path, model_numbers))):
            return prefixes
    return []


def _under(sites: Iterable[str], path: str, model_numbers: Numbers) -> dict[str, set[int]]:
    """Prefix before a path of the complete model → the layer numbers after it."""
    numbers_of_prefix: dict[str, set[int]] = {}
    for site in sites:
        for before, number, _ in _numbered(site):
            if before == path:
                numbers_of_prefix.setdefault("", set()).add(number)
            elif before.endswith(f".{path}" if path else ".") and before not in model_numbers:
                numbers_of_prefix.setdefault(before[: -len(path) - 1], set()).add(number)
    return numbers_of_prefix


def _by_counting(sites: Sites, model_numbers: Numbers) -> dict[int, Sequence[Chunk]]:
    """Stages in the order of ranks, if the ranks share the layers of the complete model.

    If every rank has several models, the first models of all ranks come first.
    """
    ranks = sorted(sites)
    for path, layers in model_numbers.items():
        models_of_rank = {rank: _under(sites[rank], path, model_numbers) for rank in ranks}
        counts = [len(numbers) for models in models_of_rank.values() for numbers in models.values()]
        many = {len(models) for models in models_of_rank.values()}
        # All ranks must have equally many models; otherwise it is unknown which model is which
        # stage.
        if len(layers) < 2 or len(many) != 1 or not all(models_of_rank.values()):
            continue
        # If every rank has all layers and part of the experts of each, this is not a pipeline.
        if any(_all_have(sites, outer, model_numbers) for outer, _, _ in _numbered(path)):
            continue
        if sum(counts) == len(layers) and all(count < len(layers) for count in counts):
            return {
                rank: [
                    Chunk(under, n * len(ranks) + index)
                    for n, under in enumerate(models_of_rank[rank])
                ]
                for index, rank in enumerate(ranks)
            }
    return {}


def _all_have(sites: Sites, path: str, model_numbers: Numbers) -> bool:
    """Whether every rank has all layers of the complete model after a path."""
    return all(
        _under(names, path, model_numbers).get("", set()) == model_numbers.get(path)
        for names in sites.values()
    )


def _shifts(
    stages: Mapping[int, Numbers], model_numbers: Numbers
) -> dict[tuple[int, str], tuple[str, int]]:
    shifts: dict[tuple[int, str], tuple[str, int]] = {}
    paths = sorted({path for numbers in stages.values() for path in numbers}, key=len)
    for path in paths:
        holders = [stage for stage in sorted(stages) if path in stages[stage]]
        layer_numbers = [stages[stage][path] for stage in holders]
        total = sum(map(len, layer_numbers))
        if len(holders) < 2 or total == len(set[int]().union(*layer_numbers)):
            continue  # these already are numbers of the complete model
        # Numbers that do not count from 0 are not a stage's own; nothing is added to them.
        if any(layers != set(range(len(layers))) for layers in layer_numbers):
            continue
        target = path
        if model_numbers and len(model_numbers.get(path, ())) != total:
            # The complete model may have its layers under another path, if only one path has so
            # many.
            fitting = [name for name, layers in model_numbers.items() if len(layers) == total]
            if len(fitting) != 1:
                continue
            target = fitting[0]
        offset = 0
        for stage, layers in zip(holders, layer_numbers, strict=True):
            shifts[stage, path] = (target, offset)
            offset += len(layers)
    return shifts


def _numbers(sites: Iterable[str]) -> Numbers:
    numbers: Numbers = {}
    for site in sites:
        for before, number, _ in _numbered(site):
            numbers.setdefault(before, set()).add(number)
    return numbers


def _numbered(site: str) -> Sequence[tuple[str, int, str]]:
    """Every number of a path, with the text before and after it."""
    words = site.split(".")
    return [
        (".".join(words[:n]), int(word), "".join(f".{later}" for later in words[n + 1 :]))
        for n, word in enumerate(words)
        # Numbers of seven or more digits are not layers, and a hostile text could contain huge
        # numbers.
        if word.isdecimal() and len(word) < 7
    ]
