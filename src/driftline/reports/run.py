"""A run, or somebody's tensor file, → a view: where it comes from, its modules, its tensors.

Reads no values unless statistics of tensors are asked for, and then only of the tensors shown.
"""

from __future__ import annotations

import fnmatch
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from driftline.errors import BadInput, DriftlineError, did_you_mean
from driftline.formats.run_tables import tables_of
from driftline.formats.tree import DumpTable
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.summary import Summary
from driftline.reports.modules import module_grid, modules_of
from driftline.reports.tensor_file import file_grid, is_file
from driftline.reports.view import (
    Block,
    Facts,
    Grid,
    Heading,
    Line,
    Sentence,
    Sheet,
    Value,
    View,
)
from driftline.reports.wording import counted, ranges, shape, size
from driftline.runs.record import Record
from driftline.runs.run import Run

SCHEMA = "driftline.show/1"
SHOWN_TENSORS = 40
SHOWN_LOSSES = 8
_STATISTICS = ("min", "max", "mean", "std", "l2", "zeros", "nan", "pos_inf", "neg_inf")


def select(run: Run, globs: Sequence[str]) -> list[Record]:
    """The records whose site matches one of the globs; all of them when there is none.

    Raises:
        BadInput: A glob matches nothing.
    """
    if not globs:
        return list(run.records)
    known = run.sites()
    wanted: set[str] = set()
    for glob in globs:
        hits = fnmatch.filter(known, glob)
        if not hits:
            raise BadInput(
                f"no site of {run.name} matches '{glob}'", hint=did_you_mean(glob, known)
            )
        wanted.update(hits)
    return [record for record in run.records if record.key.site in wanted]


def view(
    run: Run, *, globs: Sequence[str] = (), tensors: bool = False, everything: bool = False
) -> View:
    """What a person reads after `driftline show RUN`.

    Args:
        run: What to look at.
        globs: Only these sites.
        tensors: List tensors with statistics rather than modules.
        everything: Nothing is left out for length.
    """
    records = select(run, globs)
    blocks: list[Block] = [
        Sentence(f"{run.name}: {counted(len(run), 'tensor')}", "strong"),
        Facts(tuple(_facts(run, records))),
    ]
    if tensors or globs:
        blocks.append(_tensor_grid(run, records, everything))
    elif is_file(records):
        blocks.append(file_grid(records, everything))
    else:
        blocks.append(module_grid(run, records, everything=everything))
        blocks += [_table_grid(table, everything) for table in tables_of(run)]
    losses = run.losses
    for loss in losses if everything else losses[:SHOWN_LOSSES]:
        blocks.append(Sentence(f"missing: {loss}", "doubtful"))
    if len(losses) > SHOWN_LOSSES and not everything:
        blocks.append(Sentence(f"... and {len(losses) - SHOWN_LOSSES} more (--all)", "quiet"))
    blocks += [Sentence(text, "doubtful") for text in _warnings(run)]
    return View(tuple(blocks))


def document(run: Run, *, globs: Sequence[str] = (), tensors: bool = False) -> dict[str, Any]:
    """The same for programs: everything, as JSON values."""
    records = select(run, globs)
    shown: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "run",
        "path": run.name,
        "manifest": dict(run.manifest),
        "processes": [dict(facts) for facts in run.processes()],
        "tensors": len(run),
        "ranks": sorted({record.key.rank for record in records}),
        "steps": sorted({record.key.step for record in records}),
        "modules": [
            {"ids": ids, "site": site, "class": class_name, "tensors": count}
            for ids, site, class_name, count in modules_of(run, records)
        ],
        "losses": [str(loss) for loss in run.losses],
    }
    if tables := tables_of(run):
        shown["tables"] = [
            {
                "title": table.title,
                "lines": [dict(zip(table.headings, line, strict=True)) for line in table.lines],
            }
            for table in tables
        ]
    if tensors or globs:
        lines = sheet(run, globs=globs, statistics=tensors)
        shown["listing"] = [dict(zip(lines.headings, line, strict=True)) for line in lines.lines]
    return shown


def sheet(run: Run, *, globs: Sequence[str] = (), statistics: bool = False) -> Sheet:
    """Every tensor, one line each; statistics that were not kept are computed if asked for."""
    headings = (
        *("rank", "process", "step", "site", "visit", "port", "slot", "phase", "moment", "order"),
        *("class", "dtype", "shape", "device", "kept", "digest"),
        *_STATISTICS,
    )
    lines: list[tuple[Value, ...]] = []
    for record in select(run, globs):
        key = record.key
        summary = _summary(run, record) if statistics else record.summary
        lines.append(
            (
                *(key.rank, key.process, key.step, key.site, key.visit, key.port, key.slot),
                *(key.phase, key.moment, record.order, record.class_name, record.dtype),
                *(shape(record.shape), record.device, record.kept, record.digest),
                *_figures(summary),
            )
        )
    return Sheet(headings, lines)


_PROVENANCE = ("created", "framework", "python", "platform")


def _where_ranks_stand(run: Run) -> Iterator[tuple[str, str]]:
    """The mesh and the stages of a pipeline, where the processes of a job said them."""
    if any(facts.get("meshes") for facts in run.processes()):
        from driftline.alignment.rank_mesh import mesh_of

        yield "mesh", str(mesh_of(run))
    if any(facts.get("stages") for facts in run.processes()):
        shown = [
            f"{', '.join(str(stage) for stage, _ in stages)} on rank {rank}"
            for rank, stages in sorted(run.facts.stages.items())
        ]
        yield "stages", "; ".join(shown if len(shown) <= 8 else [*shown[:7], "...", shown[-1]])


def _facts(run: Run, records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    # What the launched process said of itself goes before what its launcher said.
    processes = run.processes()
    manifest = {**run.manifest, **(processes[0] if processes else {})}
    command = run.manifest.get("command")
    if isinstance(command, (list, tuple)):
        yield "command", shlex.join(str(word) for word in cast(list[Any], command))
    for name in ("format", "generation", "task", "level", *_PROVENANCE):
        if manifest.get(name):
            yield name, str(manifest[name])
    git = manifest.get("git")
    if isinstance(git, Mapping) and git:
        state = cast(Mapping[str, Any], git)
        yield "git", f"{state.get('commit')}" + (" with changes" if state.get("dirty") else "")
    for name in ("versions", "devices", "seed", "default_dtype", "threads"):
        known = manifest.get(name)
        if isinstance(known, Mapping) and known:
            pairs = cast(Mapping[str, Any], known).items()
            known = ", ".join(f"{key} {value}" for key, value in pairs if value is not None)
        elif isinstance(known, list):
            known = ", ".join(str(item) for item in cast(list[Any], known))
        if known is not None and known != "":
            yield name.replace("_", " "), str(cast(object, known))
    ranks = {(record.key.rank, record.key.process) for record in records}
    yield "ranks", ", ".join(f"{r}.p{p}" if p else str(r) for r, p in sorted(ranks)) or "none"
    if len(ranks) > 1:
        yield from _where_ranks_stand(run)
    yield "steps", ranges(record.key.step for record in records)
    for name, counts in (
        ("ports", Counter(record.key.port for record in records)),
        ("dtypes", Counter(record.dtype or "unknown" for record in records)),
        ("kept", Counter("lost" if run.lost(record) else record.kept for record in records)),
    ):
        yield name, ", ".join(f"{count} {word}" for word, count in counts.most_common()) or "none"
    beside = manifest.get("beside")
    if isinstance(beside, Mapping) and beside:
        found = cast(Mapping[str, Any], beside).items()
        yield "beside them", ", ".join(f"{what} ×{n}" if n != 1 else what for what, n in found)
    # Of a run's shards bytes that several tensors share lie there once; a file is what it is.
    blobs = {
        (record.key.rank, record.key.process, record.blob.shard, record.blob.offset, record.digest)
        if record.digest
        else record.key: record.blob.length
        for record in records
        if record.blob is not None
    }
    if blobs:
        yield "bytes", size(sum(blobs.values()))


def _table_grid(table: DumpTable, everything: bool) -> Grid:
    shown = table.lines if everything else table.lines[:SHOWN_TENSORS]
    return Grid(
        table.title,
        tuple(
            Heading(title, essential=at < 4, stretch=at == 0)
            for at, title in enumerate(table.headings)
        ),
        tuple(Line(tuple(line)) for line in shown),
        len(table.lines) - len(shown),
        "--all shows every one",
    )


def _tensor_grid(run: Run, records: Sequence[Record], everything: bool) -> Grid:
    shown = records if everything else records[:SHOWN_TENSORS]
    headings = (
        Heading("tensor", stretch=True),
        Heading("dtype"),
        Heading("shape"),
        Heading("min"),
        Heading("max"),
        Heading("mean"),
        Heading("std"),
        Heading("l2", essential=False),
        Heading("nan", essential=False),
        Heading("inf", essential=False),
        Heading("kept", essential=False),
    )
    lines: list[Line] = []
    for record in shown:
        found = _summary(run, record)
        low, high, mean, std, l2, _, nan, pos_inf, neg_inf = _figures(found)
        infinite = None if pos_inf is None else cast(int, pos_inf) + cast(int, neg_inf)
        statistics: tuple[Value, ...] = (low, high, mean, std, l2, nan, infinite)
        tone = "bad" if found is not None and (found.nan > 0 or found.pos_inf > 0) else "plain"
        lines.append(
            Line(
                (str(record.key), record.dtype, shape(record.shape), *statistics, record.kept), tone
            )
        )
    left = len(records) - len(shown)
    return Grid("Tensors", headings, tuple(lines), left, "--all shows every one")


def _figures(summary: Summary | None) -> tuple[Value, ...]:
    """The values of `_STATISTICS`; None for what a dump did not keep, as NaN reads as a finding."""
    if summary is None:
        return (None,) * len(_STATISTICS)
    values = [getattr(summary, name) for name in _STATISTICS]
    if math.isnan(summary.nan):
        return tuple(None if math.isnan(value) else value for value in values)
    return tuple(values)


def _summary(run: Run, record: Record) -> Summary | None:
    """What was kept, or what the values say now; None when there is neither."""
    if record.summary is not None:
        return record.summary
    if record.kept != "full" or record.dtype not in DTYPES or run.lost(record):
        return None
    from driftline.numerics import kernel

    try:
        values = run.raw(record)
        found = kernel.summarize(values, DTYPES[record.dtype], count=math.prod(record.shape))
    except DriftlineError:
        return None
    return found._replace(sketch=())


def _warnings(run: Run) -> list[str]:
    """What the program's own run noted, the same words once."""
    quiet = ("step", "label", "estimate")
    said = Counter(
        f"{event.get('kind')}: {event.get('message')}"
        for event in run.events()
        if event.get("kind") not in quiet
    )
    lines = [f"{text} ({count} times)" if count > 1 else text for text, count in said.items()]
    if len(lines) > SHOWN_LOSSES:
        lines = [*lines[:SHOWN_LOSSES], f"... and {len(lines) - SHOWN_LOSSES} more notes"]
    return lines
