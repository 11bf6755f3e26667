"""Facts about a whole run: which framework and tool made it, and what its order means.

The facts are read once, from the manifest and from the facts of every process; all views of a run
share them. A converted run stores them again under the same keys. This file knows no tensor values,
and nothing about processes that stored no facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from driftline.runs.json_values import MOST_RANKS, count_of, list_of, object_of

if TYPE_CHECKING:
    from driftline.runs.records import Record
    from driftline.runs.run import Run
    from driftline.runs.sinks import JSON

Order = Literal["execution", "registration", "none"]
"""Meaning of the records' order.

It is the order of computation, the order in which the program registered its modules (in which
norms may come last), or none, as in a file of named tensors.
"""
StepUnit = Literal["", "micro-batch"]
"""Unit of a step number, if the tool that wrote the run counts something other than steps."""

TILED_FORMATS = frozenset({"atb", "atb-bin", "ge", "ge-dump"})
"""Formats whose matrices may be padded to tiles; elsewhere a longer axis means more tokens."""

RUN_KEYS = ("framework", "order", "step_unit", "numbered_names", "formats")
"""Keys of a manifest or process.json that are facts about the whole run."""

# Names that tools use for a framework, if they differ from the framework's own: the debugger of
# transformers names its library, msprobe the project.
_FRAMEWORKS = {"transformers": "torch", "pytorch": "torch"}
_ORDERS = ("execution", "registration", "none")
_STEP_UNITS = ("micro-batch",)
# Larger numbers are ignored, because tables of this size would be allocated.
_MOST_STAGES = 1 << 16


class ProcessFacts(NamedTuple):
    """The place of one process in a job, as the process described it.

    Attributes:
        rank: Its rank.
        process: Its number among the processes of its rank.
        world: Number of ranks of its job; 0 if unknown.
        meshes: Device meshes, as the process described them.
        groups: Process groups it was part of, each a list of ranks.
        stages: Stages of a pipeline that it ran, as it described them.
    """

    rank: int
    process: int
    world: int = 0
    meshes: tuple[JSON, ...] = ()
    groups: tuple[JSON, ...] = ()
    stages: tuple[JSON, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        """All fields, under the keys of `process.json`."""
        world: dict[str, JSON] = {"world_size": self.world} if self.world else {}
        return {"rank": self.rank, "process": self.process, **world, **self.of_job()}

    def of_job(self) -> dict[str, JSON]:
        """Meshes, groups and stages. A copied run writes its own process numbers and world size."""
        lists = {"meshes": self.meshes, "groups": self.groups, "stages": self.stages}
        return {name: list(values) for name, values in lists.items() if values}


class RunFacts(NamedTuple):
    """Facts about a whole run.

    Attributes:
        framework: `torch`, `paddle`, `onnxruntime`...; empty if unknown.
        formats: The format in which the run is stored, then those it was converted from, newest
            first.
        order: What the order of its records means.
        step_unit: Unit of a step number; empty for the usual one, a step of the program.
        numbered_names: Whether layers are numbered in the order in which the program built them, so
            that the same layer may have another name in another program.
        operator_sites: Whether sites are numbered operators of a library (`0_WordEmbedding`, unlike
            the `0` of a Sequential), whose weights are inputs.
        processes: Each process's facts about its place in the job.
    """

    framework: str = ""
    formats: tuple[str, ...] = ()
    order: Order = "execution"
    step_unit: StepUnit = ""
    numbered_names: bool = False
    operator_sites: bool = False
    processes: tuple[ProcessFacts, ...] = ()

    @property
    def tiled(self) -> bool:
        """Whether its matrices may be padded to whole tiles."""
        return not TILED_FORMATS.isdisjoint(self.formats)

    @property
    def first_format(self) -> str:
        """The format of the tool that wrote the run, before any conversion; empty if unknown."""
        return self.formats[-1] if self.formats else ""

    @property
    def world(self) -> int:
        """Number of ranks of the job, including those that stored nothing; 0 if unknown."""
        return max((process.world for process in self.processes), default=0)

    @property
    def stages(self) -> dict[int, list[tuple[int, str | None]]]:
        """Rank → the pipeline stages that its processes declared, with their models' sites."""
        by_rank: dict[int, list[tuple[int, str | None]]] = {}
        for process in self.processes:
            for stage in map(object_of, process.stages):
                number, site = stage.get("stage"), stage.get("site")
                if type(number) is int and 0 <= number < _MOST_STAGES:
                    named = site if isinstance(site, str) else None
                    by_rank.setdefault(process.rank, []).append((number, named))
        return by_rank

    @classmethod
    def from_json(
        cls,
        manifest: Mapping[str, Any],
        processes: Sequence[Mapping[str, Any]] = (),
        *,
        order: Order = "execution",
        sites: Iterable[str] = (),
    ) -> RunFacts:
        """Read the facts; invalid values are ignored.

        Args:
            manifest: Manifest of the run.
            processes: Facts of each process, with its rank and process.
            order: Meaning of the records' order, unless the run declares it.
            sites: Site of the first record of each process.
        """
        declared = (manifest, *processes)
        return cls(
            _framework(manifest, processes),
            _formats(manifest, processes),
            # The first valid value is used; the manifest comes before the processes.
            cast("Order", _declared("order", declared, _ORDERS) or order),
            cast("StepUnit", _declared("step_unit", declared, _STEP_UNITS)),
            any(facts.get("numbered_names") is True for facts in declared),
            any(_is_operator(site) for site in sites),
            tuple(read_process(facts) for facts in processes),
        )

    def to_json(self) -> dict[str, JSON]:
        """The facts that are equal in all processes, under the keys from which they are read."""
        shown: dict[str, JSON] = {
            "framework": self.framework,
            "order": "" if self.order == "execution" else self.order,
            "step_unit": self.step_unit,
            "numbered_names": self.numbered_names,
            "formats": list(self.formats),
        }
        return {name: value for name, value in shown.items() if value}

    def of_process(self, rank: int, process: int) -> dict[str, JSON]:
        """Facts for the `process.json` of a copied run: the run's, and the process's place."""
        places = {(facts.rank, facts.process): facts for facts in self.processes}
        place = places.get((rank, process))
        return self.to_json() | ({} if place is None else place.of_job())


def read_facts(run: Run, order: Order) -> RunFacts:
    """The facts of a run that is not a view of another run.

    Args:
        run: Any run.
        order: Meaning of the records' order, unless the run declares it.
    """
    sites = [record.key.site for record in first_records(run)]
    return RunFacts.from_json(run.manifest, run.processes(), order=order, sites=sites)


def first_records(run: Run) -> list[Record]:
    """The first record of each process that has any."""
    from driftline.runs.index import IndexRecords

    if isinstance(run.records, IndexRecords):  # avoids building all records of a long run
        return run.records.firsts()
    firsts: dict[tuple[int, int], Record] = {}
    for record in run.records:
        firsts.setdefault((record.key.rank, record.key.process), record)
    return list(firsts.values())


def _framework(manifest: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]) -> str:
    for facts in (manifest, *processes):
        if name := str(facts.get("framework") or "").lower():
            return "paddle" if name.startswith("paddle") else _FRAMEWORKS.get(name, name)
    # Dumps of paddle may name only their format, not the framework.
    return "paddle" if "paddle" in str(manifest.get("format", "")).lower() else ""


def _formats(
    manifest: Mapping[str, Any], processes: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    chain = [str(manifest.get("format", ""))]
    for facts in (manifest, *processes):
        if earlier := list_of(facts.get("formats")):
            chain += [str(name) for name in earlier]
            break
        # Runs converted by version 0.1.0 name only the format before the last conversion.
        if before := facts.get("converted_from"):
            # A list of files has the text `FORMAT: path`, a run has a table.
            of_files = before.partition(":")[0] if isinstance(before, str) else ""
            chain.append(of_files or str(object_of(before).get("format", "")))
            break
    # A run that was copied without conversion would otherwise list its format twice.
    return tuple(
        name
        for index, name in enumerate(chain)
        if name and (index == 0 or chain[index - 1] != name)
    )


def read_process(facts: Mapping[str, Any]) -> ProcessFacts:
    """The place of a process in its job; invalid values are ignored."""
    return ProcessFacts(
        count_of(facts.get("rank")),
        count_of(facts.get("process")),
        count_of(facts.get("world_size"), MOST_RANKS),
        *(tuple(list_of(facts.get(name))) for name in ("meshes", "groups", "stages")),
    )


def _is_operator(site: str) -> bool:
    number, line, _ = site.partition("_")
    return bool(line) and number.isdigit()


def _declared(key: str, declared: Iterable[Mapping[str, Any]], choices: Sequence[str]) -> str:
    """The first valid value declared under a key; empty if there is none."""
    return next((facts[key] for facts in declared if facts.get(key) in choices), "")
