"""The view of a run, a dump or a file of tensors: origin, modules, tensors and statistics.

`view` is for people; `document` and `sheet` have the same for programs. Of equal layers, only the
first is listed in full. Statistics are computed only if the run did not keep them.
"""

from __future__ import annotations

import fnmatch
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from driftline.errors import BadInput, DriftlineError, did_you_mean
from driftline.formats.dump_run import DumpTable, TreeRun
from driftline.graphs.module_tree import ModuleNode, ModuleTree
from driftline.graphs.sources.graph_files import Graph, read_graphs
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.reporting.formatting import counted, ranges, shape, size
from driftline.reporting.view import Block, Facts, Grid, Heading, Line, Sentence, Sheet, Value, View
from driftline.runs.records import Record
from driftline.runs.run import Run
from driftline.runs.scope import RunScope, ending_words, scope_of
from driftline.runs.sidecars.calls import GRAPHS
from driftline.runs.sidecars.operator_sheets import READ_OPERATIONS, READ_TIMES, kind_of_sheet

if TYPE_CHECKING:
    from driftline.formats.ascend.atb.tables import OperationLine

# About two screens; `--all` shows every one.
SHOWN_MODULES = 80


def _tree(run: Run, rank: int, process: int) -> ModuleTree | None:
    kept = run.topology(rank, process)
    if kept is None:
        return None
    try:
        return ModuleTree.from_json(cast(Mapping[str, Any], kept))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None  # damaged: the sites of the tensors are listed instead


def modules_of(run: Run, records: Sequence[Record]) -> Iterator[tuple[str | None, str, str, int]]:
    """Ids, site, class and number of tensors of every module; without a tree, of every site."""
    counts = Counter(record.key.site for record in records)
    classes = {record.key.site: record.class_name for record in records}
    listed: set[str] = set()
    for rank, process in sorted({(r.key.rank, r.key.process) for r in records}) or [(0, 0)]:
        tree = _tree(run, rank, process)
        for node in tree.walk() if tree else ():
            if node.site not in listed:
                listed.add(node.site)
                yield node.ids, node.site, node.class_name, counts[node.site]
    for site in run.sites():
        if site in counts and site not in listed:
            yield None, site, classes[site], counts[site]


def module_grid(run: Run, records: Sequence[Record], *, everything: bool) -> Grid:
    """The modules of a run with their ids and tensors; its sites if no tree was kept."""
    counts = Counter(record.key.site for record in records)
    lines: list[Line] = []
    listed: set[str] = set()
    for rank, process in sorted({(r.key.rank, r.key.process) for r in records}) or [(0, 0)]:
        tree = _tree(run, rank, process)
        for root in tree.roots if tree else ():
            if root.site not in listed:
                lines += _node_lines(root, root.site or "(root)", 0, counts, everything)
                listed.update(node.site for node in root.walk())
    classes = {record.key.site: record.class_name for record in records}
    lines += [
        Line((None, site or "(root)", classes[site], counts[site]))
        for site in dict.fromkeys(run.sites())
        if site not in listed and site in counts
    ]
    has_ids = any(line.values[0] is not None for line in lines)
    headings = (
        Heading("ids"),
        Heading("module", stretch=True),
        Heading("class"),
        Heading("tensors"),
    )
    shown = lines if everything else lines[:SHOWN_MODULES]
    # Ids exist only where a module tree was captured.
    if not has_ids:
        headings = headings[1:]
        shown = [Line(line.values[1:], line.tone) for line in shown]
    title = "Modules (ids are what `dump -ids` takes)" if has_ids else "Sites"
    return Grid(title, headings, tuple(shown), len(lines) - len(shown), "--all shows every one")


def _node_lines(
    node: ModuleNode, label: str, depth: int, counts: Mapping[str, int], everything: bool
) -> Iterator[Line]:
    """The lines of a module and its children; only the first of equal layers is opened."""
    ids = node.ids if node.ids is None or node.ids else "-"
    remark = "  (shared)" if node.shared else ""
    tone = "plain" if counts.get(node.site) else "quiet"
    yield Line(
        (ids, "  " * depth + label + remark, node.class_name, counts.get(node.site, 0)), tone
    )
    children = list(node.children)
    start = 0
    while start < len(children):
        name, child = children[start]
        yield from _node_lines(child, name, depth + 1, counts, everything)
        alike = start + 1
        kind = _numbered(name)
        # Most of a model is a stack of equal layers, whose lines would repeat.
        if kind is not None and not everything:
            pattern = _pattern(child)
            while (
                alike < len(children)
                and _numbered(children[alike][0]) == kind
                and _pattern(children[alike][1]) == pattern
            ):
                alike += 1
        if alike > start + 1:
            last_name, last = children[alike - 1]
            first_name, first = children[start + 1]
            inside = sum(
                counts.get(n.site, 0) for _, c in children[start + 1 : alike] for n in c.walk()
            )
            single = first_name == last_name
            span = first_name if single else f"{first_name} … {last_name}"
            ids_span = first.ids if single else f"{first.ids} … {last.ids}"
            yield Line(
                (ids_span, "  " * (depth + 1) + f"{span}  (like {name})", child.class_name, inside),
                "quiet",
            )
        start = alike


def _numbered(name: str) -> str | None:
    """The rest of a numbered name: '' of `3`, `Layer` of `3_Layer`; None without a number."""
    number, _, rest = name.partition("_")
    return rest if number.isdigit() else None


def _pattern(node: ModuleNode) -> tuple[Any, ...]:
    return (node.class_name, tuple((name, _pattern(child)) for name, child in node.children))


# A file of named tensors has no modules; its tensors are listed instead.


_SHOWN = 80


def is_file(records: Sequence[Record]) -> bool:
    """Whether these are only named tensors: one per site, without a class."""
    return len({record.key.site for record in records}) == len(records) > 0 and not any(
        record.class_name or record.key.port != "output" for record in records
    )


def file_grid(records: Sequence[Record], everything: bool) -> Grid:
    """Name, type and shape of every tensor."""
    lines = tuple(
        Line((record.key.site, record.dtype, shape(record.shape), record.kept))
        for record in (records if everything else records[:_SHOWN])
    )
    headings = (
        Heading("tensor", stretch=True),
        Heading("dtype"),
        Heading("shape"),
        Heading("kept"),
    )
    left = len(records) - len(lines)
    return Grid("Tensors (--tensors: statistics)", headings, lines, left, "--all shows every one")


# The whole view of a run, a dump or a file.


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
    sites = run.sites()
    wanted: set[str] = set()
    for glob in globs:
        hits = fnmatch.filter(sites, glob)
        # A glob that matches nothing is a typing error, not an empty result.
        if not hits:
            raise BadInput(
                f"no site of {run.name} matches '{glob}'", hint=did_you_mean(glob, sites)
            )
        wanted.update(hits)
    return [record for record in run.records if record.key.site in wanted]


def view(
    run: Run, *, globs: Sequence[str] = (), tensors: bool = False, everything: bool = False
) -> View:
    """The view that `driftline show RUN` prints.

    Args:
        run: The run.
        globs: Only sites that match one of these.
        tensors: List tensors with statistics instead of modules.
        everything: Show everything, even if it is long.
    """
    records = select(run, globs)
    scope = scope_of(run)
    blocks: list[Block] = [Sentence(text, "bad") for text in _endings(scope)]
    blocks += [
        Sentence(f"{run.name}: {counted(len(run), 'tensor')}", "strong"),
        Facts((*_program_facts(scope), *_facts(run, records))),
    ]
    if tensors or globs:
        blocks.append(_tensor_grid(run, records, everything))
    # A checkpoint or an npz file has names only.
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


def _endings(scope: RunScope) -> Iterator[str]:
    """Sentences about a program that did not end well; they come first."""
    if scope.ending:
        yield f"the program {scope.ending}"
    for step in scope.unfinished:
        yield f"it left {step} unfinished"


def _program_facts(scope: RunScope) -> Iterator[tuple[str, str]]:
    """Facts about the whole program: its end, its steps, what was left out."""
    if scope.status is not None:
        yield "program", ending_words(scope.status)
    if scope.steps_ran:
        yield "steps that ran", str(scope.steps_ran)
    if scope.filters:
        yield "captured only", "; ".join(scope.filters)


def document(run: Run, *, globs: Sequence[str] = (), tensors: bool = False) -> dict[str, Any]:
    """All facts and tensors of a run as JSON values, for programs."""
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
        "scope": scope_of(run).to_json(),
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
        # Computing reads every tensor, so it is done only on request.
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
    """The mesh and the stages of a pipeline, if the processes of a job recorded them."""
    if any(facts.get("meshes") for facts in run.processes()):
        from driftline.alignment.placements.mesh import mesh_of

        yield "mesh", str(mesh_of(run))
    if any(facts.get("stages") for facts in run.processes()):
        shown = [
            f"{', '.join(str(stage) for stage, _ in stages)} on rank {rank}"
            for rank, stages in sorted(run.facts.stages.items())
        ]
        yield "stages", "; ".join(shown if len(shown) <= 8 else [*shown[:7], "...", shown[-1]])


def _facts(run: Run, records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    # Facts of the launched process take precedence over those of its launcher.
    processes = run.processes()
    manifest = {**run.manifest, **(processes[0] if processes else {})}
    yield from _origin_facts(run, manifest)
    yield from _content_facts(run, records)
    companions = manifest.get("beside")
    if isinstance(companions, Mapping) and companions:
        items = cast(Mapping[str, Any], companions).items()
        yield "beside them", ", ".join(f"{what} ×{n}" if n != 1 else what for what, n in items)
    # Tensors that share bytes in a shard are counted once; a file of tensors is counted as it is.
    blobs = {
        (record.key.rank, record.key.process, record.blob.shard, record.blob.offset, record.digest)
        if record.digest
        else record.key: record.blob.length
        for record in records
        if record.blob is not None
    }
    if blobs:
        yield "bytes", size(sum(blobs.values()))


def _origin_facts(run: Run, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Who made the run: command, program, commit, versions and devices."""
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
        entry = manifest.get(name)
        if isinstance(entry, Mapping) and entry:
            pairs = cast(Mapping[str, Any], entry).items()
            entry = ", ".join(f"{key} {value}" for key, value in pairs if value is not None)
        elif isinstance(entry, list):
            entry = ", ".join(str(item) for item in cast(list[Any], entry))
        if entry is not None and entry != "":
            yield name.replace("_", " "), str(cast(object, entry))


def _content_facts(run: Run, records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """What the run holds: ranks, steps, ports, number formats, and how much was kept."""
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


def _table_grid(table: DumpTable, everything: bool) -> Grid:
    shown = table.lines if everything else table.lines[:SHOWN_TENSORS]
    return Grid(
        table.title,
        tuple(
            Heading(title, essential=column < 4, stretch=column == 0)
            for column, title in enumerate(table.headings)
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
        summary = _summary(run, record)
        low, high, mean, std, l2, _, nan, pos_inf, neg_inf = _figures(summary)
        infinite = None if pos_inf is None else cast(int, pos_inf) + cast(int, neg_inf)
        statistics: tuple[Value, ...] = (low, high, mean, std, l2, nan, infinite)
        tone = (
            "bad" if summary is not None and (summary.nan > 0 or summary.pos_inf > 0) else "plain"
        )
        lines.append(
            Line(
                (str(record.key), record.dtype, shape(record.shape), *statistics, record.kept), tone
            )
        )
    left = len(records) - len(shown)
    return Grid("Tensors", headings, tuple(lines), left, "--all shows every one")


def _figures(summary: Summary | None) -> tuple[Value, ...]:
    """The values of `_STATISTICS`; None if a dump did not keep them (NaN would be a finding)."""
    if summary is None:
        return (None,) * len(_STATISTICS)
    values = [getattr(summary, name) for name in _STATISTICS]
    # Such a dump kept only some statistics.
    if math.isnan(summary.nan):
        return tuple(None if math.isnan(value) else value for value in values)
    return tuple(values)


def _summary(run: Run, record: Record) -> Summary | None:
    """The stored summary, or one computed from the values; None if there is neither."""
    if record.summary is not None:
        return record.summary
    if record.kept != "full" or record.dtype not in DTYPES or run.lost(record):
        return None
    from driftline.numerics import kernel

    try:
        values = run.raw(record)
        summary = kernel.summarize(values, DTYPES[record.dtype], count=math.prod(record.shape))
    except DriftlineError:
        return None
    # The sketch is of no use to a reader.
    return summary._replace(sketch=())


def _warnings(run: Run) -> list[str]:
    """The notes of the run's own events, each text once."""
    # These events are bookkeeping, not warnings.
    quiet = ("step", "label", "estimate", "ended")
    texts = Counter(
        f"{event.get('kind')}: {event.get('message')}"
        for event in run.events()
        if event.get("kind") not in quiet
    )
    lines = [f"{text} ({count} times)" if count > 1 else text for text, count in texts.items()]
    if len(lines) > SHOWN_LOSSES:
        lines = [*lines[:SHOWN_LOSSES], f"... and {len(lines) - SHOWN_LOSSES} more notes"]
    return lines


# Tables that a run holds besides tensors. The sheets have the grammar of ATB's own files and are
# read by the same readers.


def tables_of(run: Run) -> Sequence[DumpTable]:
    """The tables that a run or dump holds besides its tensors."""
    # Dumps of other programs bring tables of their own.
    if isinstance(run, TreeRun):
        return run.tables()
    tables: list[DumpTable] = []
    for about in run.processes():
        rank, process = int(about.get("rank", 0)), int(about.get("process", 0))
        for name in run.sheets(rank, process):
            if name == GRAPHS:
                where = f" (rank {rank}, process {process})" if rank or process else ""
                tables += graph_tables(run.sheet(name, rank, process), where)
                continue
            kind = kind_of_sheet(name)
            # Times are read from their text form; the csv form is for other programs.
            if kind is None or (kind == "operation_statistic" and name.endswith(".csv")):
                continue
            text = run.sheet(name, rank, process)
            step = name.rpartition("_")[2].partition(".")[0]
            where = f"step {step}, rank {rank}" if rank or process else f"step {step}"
            if kind == "operation_statistic":
                tables.append(READ_TIMES.load()(text, f"Times of operators in µs ({where})"))
            elif kind == "kernel_tensors":
                tables.append(_run_kernels(READ_OPERATIONS.load()(text, int(step)), where))
            else:
                tables.append(_operators(READ_OPERATIONS.load()(text, int(step)), where))
    return tables


def _run_kernels(lines: Sequence[OperationLine], where: str) -> DumpTable:
    # A kernel runs thousands of times; one line per kernel and place.
    alike: dict[tuple[str, str, str, str], list[float]] = {}
    for line in lines:
        operator, site, device = (
            str(line.param.get(key, "")) for key in ("operator", "site", "device")
        )
        time = line.param.get("time_us")
        key = (line.name, operator, site, device)
        alike.setdefault(key, []).append(float(time) if isinstance(time, (int, float)) else 0.0)
    return DumpTable(
        f"Kernels ({where})",
        ("kernel", "operator", "site", "device", "calls", "time_us"),
        [(*key, len(times), round(sum(times), 3)) for key, times in alike.items()],
    )


def _operators(lines: Sequence[OperationLine], where: str) -> DumpTable:
    return DumpTable(
        f"Operators ({where})",
        ("operator", "inputs", "outputs", "site"),
        [
            (
                line.name,
                " ".join(
                    f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]" for tensor in line.inputs
                ),
                " ".join(
                    f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]" for tensor in line.outputs
                ),
                str(line.param.get("site", "")),
            )
            for line in lines
        ],
    )


# Compiled graphs: the graphs, their nodes, and the kernels that ran them.


_GRAPHS = ("graph", "compiled", "kind", "what ran", "nodes", "kernels", "results")
_NODES = ("node", "operator", "line", "phase")
_KERNELS = ("kernel", "keeps", "is the value of", "nodes on the way")
_NODES_SHOWN = 8


def graph_tables(text: str, where: str) -> Iterator[DumpTable]:
    """The tables of a run's compiled graphs, as `driftline show` prints them.

    Args:
        text: The list of graphs.
        where: The process, added to titles; may be empty.
    """
    graphs = list(read_graphs(text))
    if not graphs:
        return
    yield DumpTable(
        f"Compiled graphs{where}", _GRAPHS, tuple(_graph_line(graph) for graph in graphs)
    )
    for graph in graphs:
        title = f"of graph {graph.number} ({graph.kind}, {graph.compile_id}){where}"
        yield DumpTable(
            f"Nodes {title}",
            _NODES,
            tuple((node.site, node.target, node.line, node.phase) for node in graph.nodes),
        )
        if graph.kernels:
            yield DumpTable(f"Kernels {title}", _KERNELS, tuple(_graph_kernels(graph)))


def _graph_line(graph: Graph) -> tuple[str, ...]:
    ran = "inductor's kernels" if graph.engine == "inductor" else "nodes, one by one"
    if graph.engine == "fx" and graph.backend:
        ran += f" (not {graph.backend})"
    kept = sum(len(kernel.kept) for kernel in graph.kernels)
    counts = (len(graph.nodes), len(graph.kernels), kept or len(graph.nodes))
    return (str(graph.number), graph.compile_id, graph.kind, ran, *map(str, counts))


def _graph_kernels(graph: Graph) -> Iterator[tuple[str, ...]]:
    for kernel in graph.kernels:
        for kept in kernel.kept:
            way = ", ".join(kept.nodes[-_NODES_SHOWN:])
            more = len(kept.nodes) - _NODES_SHOWN
            node = kept.node or "no node: inside a fusion"
            yield kernel.name, kept.buffer, node, f"{way} and {more} more" if more > 0 else way
