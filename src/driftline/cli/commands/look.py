"""`driftline show`, `report`, `view` and `topology`: commands to look at things."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    OUTPUT,
    URLS,
    AlignmentOptions,
    EvidenceOptions,
    ExitOptions,
    PageEvidenceOptions,
    RepeatEvidenceOptions,
    RunFormat,
    ThreadOptions,
    numbers_from,
    place,
)
from driftline.cli.progress import progress_bar
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, AlreadyThere, BadInput

if TYPE_CHECKING:
    from driftline.comparison.table.row import Verdict
    from driftline.comparison.table.table import Table
    from driftline.reporting.view import View
    from driftline.reporting.views.graphs import Overlay
    from driftline.runs.run import Run


@Parameter(name="*")
@dataclass(frozen=True)
class ShowOptions:
    """What is shown, and how.

    Attributes:
        tensors: List the tensors with their statistics instead of the modules.
        site: Only sites that match, such as 'model.layers.*.mlp'; lists their tensors, or the rows
            of a comparison; may be repeated.
        port: Only these ports: input, output, grad_input, grad_output, param, ...; may be repeated.
        step: Only these steps, such as 0 or 3-5; may be repeated.
        format: table for people; json and csv for programs, always complete; markdown for a review.
        all: Show everything, even if it is long.
    """

    tensors: bool = False
    site: Annotated[list[str] | None, Parameter(metavar="GLOB")] = None
    port: Annotated[list[str] | None, Parameter(metavar="GLOB")] = None
    step: Annotated[list[str] | None, Parameter(metavar="N[-M]")] = None
    format: RunFormat = "table"
    all: bool = False

    @property
    def narrow(self) -> bool:
        """Whether only some tensors are wanted."""
        return bool(self.site or self.port or self.step)

    @property
    def everything(self) -> bool:
        """Whether all of it is shown; only a table for people is shortened."""
        return self.all or self.format != "table"


def show(
    path: Annotated[Path, URLS, place("PATH")],
    candidate: Annotated[Path | None, URLS, place("CAND")] = None,
    /,
    *,
    options: ShowOptions = ShowOptions(),
    verify: bool = False,
    differences: bool = False,
) -> int:
    """Look at a run, a comparison table, a thresholds file or a tensor file.

        driftline show run
        driftline show run --site 'layers.5.*' --port output --step 0
        driftline show ref cand --differences

    A run shows where it comes from, its module tree with the ids that `dump -ids` takes, and what
    is missing from it. A folder that `compare -o` wrote shows the comparison again.

    Args:
        path: A run, a dump of another program, a comparison's folder, a thresholds file, or a
            tensor file.
        candidate: With --differences: the other run.
        verify: Read every byte of a run and name the tensors whose bytes are not those that were
            captured; exit code 1 if there are any.
        differences: Show how the models of two runs differ: attributes, code, state, training; no
            tensor is read.
    """
    if differences or candidate is not None:
        return _show_differences(path, candidate, options, asked=differences)
    from driftline.comparison.table.files import TABLE_FILE, is_table, open_table

    # Comparisons and thresholds are recognised by their files; anything else is opened as a run.
    if is_table(path) or path.name == TABLE_FILE:
        return _show_table(script.step("found", open_table, path), options)
    from driftline.comparison.tolerance.thresholds import looks_like_thresholds

    if looks_like_thresholds(path):
        return _show_thresholds(path, options)
    from driftline.formats.registry import open_run

    run = script.step("run", open_run, path)
    return _verify(run) if verify else _show_run(run, options)


def _show_differences(
    reference: Path, candidate: Path | None, options: ShowOptions, *, asked: bool
) -> int:
    if candidate is None or not asked:
        raise BadInput(
            "two runs can only be shown by their differences",
            hint="driftline show REF CAND --differences; driftline compare REF CAND for tensors",
        )
    from driftline.comparison.differences.find import differences_of
    from driftline.formats.registry import open_run
    from driftline.reporting.views import differences as report

    runs = script.part(open_run, reference), script.part(open_run, candidate)
    differences = script.step("differences", differences_of, *runs)
    if options.format == "json":
        from driftline.comparison.differences.difference import as_json
        from driftline.reporting import writers as json_report

        document = script.part(as_json, differences)
        script.act(json_report.write_json, document, sys.stdout)
    elif options.format == "csv":
        from driftline.reporting import writers

        script.act(writers.write_csv, script.part(report.sheet, differences), sys.stdout)
    else:
        view = script.part(report.view, differences, str(reference), str(candidate))
        _print_view(view, options)
    script.end()
    return EXIT_FINE


def _verify(run: Run) -> int:
    from driftline.reporting.formatting import counted
    from driftline.runs.verify import verify

    losses = script.step("damaged", list, script.part(verify, run))
    script.end(losses)
    for loss in losses:
        print(loss)
    tensors = counted(sum(1 for record in run.records if record.digest), "tensor")
    state = f"{len(losses)} of them not" if losses else "their bytes are"
    print(f"{run.name}: {tensors} with a digest, {state} what was captured")
    return EXIT_DIFFERENT if losses else EXIT_FINE


def _show_table(table: Table, options: ShowOptions) -> int:
    from driftline.reporting import writers

    if options.narrow:
        from driftline.comparison.table.table import Table
        from driftline.reporting.views import comparison as report

        table = script.step(
            "table",
            Table.only,
            table,
            sites=tuple(options.site or ()),
            ports=tuple(options.port or ()),
            steps=numbers_from("--step", options.step),
        )
        if options.format in ("table", "markdown"):
            view = script.part(report.rows_view, table, everything=options.everything)
            _print_view(view, options)
            script.end()
            return EXIT_FINE
    script.act(writers.table, table, options.format, sys.stdout, everything=options.all)
    script.end()
    return EXIT_FINE


def _show_thresholds(path: Path, options: ShowOptions) -> int:
    from driftline.comparison.tolerance.thresholds import load_thresholds
    from driftline.reporting.views import thresholds as report

    thresholds = script.step("found", load_thresholds, path)
    if options.format == "json":
        from driftline.comparison.tolerance.thresholds import Thresholds
        from driftline.reporting import writers as json_report

        script.act(json_report.write_json, script.part(Thresholds.as_json, thresholds), sys.stdout)
    elif options.format == "csv":
        from driftline.reporting import writers

        script.act(writers.write_csv, script.part(report.sheet, thresholds), sys.stdout)
    else:
        view = script.part(report.view, thresholds, everything=options.everything)
        _print_view(view, options)
    script.end()
    return EXIT_FINE


def _show_run(run: Run, options: ShowOptions) -> int:
    from driftline.reporting.views import run as report

    if options.step:
        from driftline.runs.views import narrowed

        run = script.step("run", narrowed, run, steps=numbers_from("--step", options.step))
    if options.port:
        from driftline.runs.views import of_ports

        run = script.step("run", of_ports, run, tuple(options.port))
    # A selection is a question about tensors, not about modules.
    sites = tuple(options.site or (["*"] if options.narrow else []))
    if options.format == "json":
        from driftline.reporting import writers as json_report

        document = script.part(report.document, run, globs=sites, tensors=options.tensors)
        script.act(json_report.write_json, document, sys.stdout)
    elif options.format == "csv":
        from driftline.reporting import writers

        sheet = script.part(report.sheet, run, globs=sites, statistics=options.tensors)
        script.act(writers.write_csv, sheet, sys.stdout)
    else:
        view = script.part(
            report.view, run, globs=sites, tensors=options.tensors, everything=options.everything
        )
        _print_view(view, options)
    script.end()
    return EXIT_FINE


def _print_view(view: View, options: ShowOptions) -> None:
    from driftline.reporting.writers import write_view

    script.act(write_view, view, options.format, sys.stdout)


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class PageOptions(ExitOptions):
    """The file that is written.

    Attributes:
        output: The file to write.
        title: Title of the page. Default: the names of the two runs.
        pictures: How many of the worst tensors get histograms and heat maps.
        tokenizer: For a decoder: folder or id of its tokenizer, to show tokens as text.
        force: Replace an existing file.
        quiet: Print nothing.
    """

    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="FILE.html")] = Path(
        "report.html"
    )
    title: Annotated[str, Parameter(metavar="TITLE")] = ""
    pictures: Annotated[int, Parameter(metavar="N")] = 32
    tokenizer: Annotated[str, Parameter(metavar="PATH")] = ""
    force: bool = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False

    def check(self) -> None:
        """Refuse what cannot be written, before the work is done."""
        if self.pictures < 0:
            raise BadInput(
                f"--pictures takes 0 or more, not {self.pictures}", hint="give 0 or more"
            )
        if self.output.is_dir():
            raise AlreadyThere(f"{self.output} is a folder", hint="give the name of a file with -o")
        if self.output.exists() and not self.force and not script.is_script():
            raise AlreadyThere(f"{self.output} exists", hint="give another -o, or --force")


def report(
    subject: Annotated[Path, URLS, place("TABLE|REF")],
    candidate: Annotated[Path | None, URLS, place("CAND")] = None,
    /,
    *,
    page: PageOptions = PageOptions(),
    evidence: EvidenceOptions = EvidenceOptions(),
    repeats: RepeatEvidenceOptions = RepeatEvidenceOptions(),
    extras: PageEvidenceOptions = PageEvidenceOptions(),
    alignment: AlignmentOptions = AlignmentOptions(),
    workers: ThreadOptions = ThreadOptions(),
) -> int:
    """Write a comparison as one HTML file, for example to attach to a bug.

        driftline report ref cand -o report.html
        driftline report table -o report.html

    The file opens in a browser, without a network and without Driftline. It shows the verdict, the
    error along the depth of the model, every row, and pictures of the worst tensors. Exit code 0 if
    the file was written, whatever the verdict is; with --bisect-exit the exit code of the verdict.

    Args:
        subject: A comparison (`driftline compare -o`), a folder of `driftline metrics`,
            `layer-metrics` or `validate`, a file of `opcheck --format json`; or the reference, if
            CAND is given.
        candidate: The run to test; it is compared with the reference first.
    """
    threads = workers.count()
    page.check()
    from driftline.reporting.html.report import report as write_report

    with progress_bar("pairs", quiet=page.quiet) as progress:
        written = script.step(
            "written",
            write_report,
            subject,
            candidate,
            page.output,
            thresholds=extras.thresholds,
            replay=evidence.replay,
            noise=evidence.noise or (),
            repeats=repeats.repeat or (),
            bisect=repeats.bisect,
            options=alignment.align_options(),
            diagnosis=not extras.no_diagnosis,
            pictures=page.pictures,
            tokenizer=page.tokenizer,
            title=page.title,
            force=page.force,
            threads=threads,
            progress=progress,
        )
    script.end(written)
    if not page.quiet:
        # People attach the file to bugs, where its size matters.
        size = Path(written).stat().st_size
        shown = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.0f} kB"
        print(
            f"driftline: the report is in {written} ({shown}); open it in a browser",
            file=sys.stderr,
        )
    if page.bisect_exit:
        from driftline.reporting.html.page import page_verdict

        return page.exit_code(cast("Verdict", page_verdict(Path(written))))
    return EXIT_FINE


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class ServerOptions:
    """The page and where it is served.

    Attributes:
        port: Port to listen on; if it is in use, the next free port. Default: 8412.
        open: Open the page in the browser of this machine.
        title: Title of the page. Default: the names of the two runs.
    """

    port: Annotated[int | None, Parameter(metavar="N")] = None
    open: bool = False
    title: Annotated[str, Parameter(metavar="TITLE")] = ""


def view(
    subject: Annotated[Path, URLS, place("REF|TABLE")],
    candidate: Annotated[Path | None, URLS, place("CAND")] = None,
    /,
    *,
    page: ServerOptions = ServerOptions(),
    evidence: EvidenceOptions = EvidenceOptions(),
    extras: PageEvidenceOptions = PageEvidenceOptions(),
    alignment: AlignmentOptions = AlignmentOptions(),
    workers: ThreadOptions = ThreadOptions(),
) -> int:
    """Open two runs in a browser: the page of the report, and every tensor behind it.

        driftline view ref cand
        driftline view table --open

    Prints the address of a page that only this machine can reach, and serves it until Ctrl-C. The
    page reads tensors when you open them: slices, statistics, error maps at any zoom, the values of
    both sides. Runs may be larger than memory. A run may still be growing: reload the page to see
    new tensors.

    Args:
        subject: The trusted run, or a dump of another program; or, without CAND, a comparison whose
            runs are still at the same paths.
        candidate: The run to test; it is compared with the reference first.
    """
    threads = workers.count()
    from driftline.alignment.align import AlignOptions
    from driftline.reporting.viewer.api import view as serve_view

    with progress_bar("pairs", quiet=script.is_script()) as progress:
        script.act(
            serve_view,
            subject,
            candidate,
            port=page.port,
            browser=page.open,
            thresholds=extras.thresholds,
            replay=evidence.replay,
            noise=evidence.noise or (),
            options=script.part(AlignOptions, **alignment.keywords()),
            diagnosis=not extras.no_diagnosis,
            title=page.title,
            threads=threads,
            progress=progress,
        )
    script.end()
    return EXIT_FINE


@Parameter(name="*")
@dataclass(frozen=True)
class GraphOptions:
    """What is drawn.

    Attributes:
        level: Depth of the graph: 0 draws the whole model as one node, 1 its outermost parts.
            Default: the innermost parts.
        step: Step of the run. Default: the first one.
        rank: Rank of the run.
        table: Folder of a comparison: each node gets its status and numbers as attributes.
            With model-explorer, nodes are also coloured, and FILE.node_data.json (numbers) and
            FILE.status.node_data.json are written next to the graph.
        metric: The number of the comparison to show. Default: value over limit of each tensor.
    """

    level: Annotated[int | None, Parameter(metavar="N")] = None
    step: Annotated[int | None, Parameter(metavar="N")] = None
    rank: Annotated[int, Parameter(metavar="N")] = 0
    table: Annotated[Path | None, URLS, Parameter(metavar="DIR")] = None
    metric: Annotated[str, Parameter(metavar="NAME")] = ""

    def overlay(self) -> Overlay | None:
        """The numbers of a comparison to show on the nodes; None if no comparison is given.

        Raises:
            BadInput: A metric without a comparison.
        """
        if self.table is None:
            if self.metric:
                raise BadInput(
                    "--metric names a number of a comparison", hint="give one with --table DIR"
                )
            return None
        from driftline.reporting.views.graphs import Overlay

        return Overlay(self.table, self.metric)


def topology(
    path: Annotated[Path, URLS, place("PATH")],
    /,
    *,
    to: Literal["onnx", "model-explorer"] = "onnx",
    graph: GraphOptions = GraphOptions(),
    output: Annotated[
        Path | None, Parameter(name=("--output", "-o"), metavar="FILE", group=OUTPUT)
    ] = None,
    force: Annotated[bool, Parameter(group=OUTPUT)] = False,
) -> int:
    """Write the structure of a model as a file for a graph viewer.

        driftline topology run --to onnx
        driftline topology ait_dump/model/4242/ToyModel.json --level 1
        driftline topology run --table cmp --metric relative_l2
        driftline topology run --to model-explorer --table cmp

    The graph of a run shows its modules and, if the run was dumped with --type op or onnx, their
    operators. The file cannot be executed: it holds shapes and parameters, but no weights.

    Args:
        path: A run, a dump of another program, or a topology file of ATB (*.json).
        to: onnx for Netron and others; model-explorer for Google's Model Explorer.
        output: The file. Default: next to the source, with the name of the source.
        force: Replace an existing file.
    """
    from driftline.reporting.formatting import counted
    from driftline.reporting.terminal import printable
    from driftline.reporting.views.graphs import write_graph

    drawn = script.step(
        "drawn",
        write_graph,
        path,
        to=to,
        level=graph.level,
        output=output,
        overlay=graph.overlay(),
        step=graph.step,
        rank=graph.rank,
        force=force,
    )
    script.end(drawn)
    size = f"{counted(drawn.nodes, 'node')}, {counted(drawn.edges, 'edge')}"
    print(printable(f"driftline: {size} in {drawn.place}"), file=sys.stderr)
    for file, content in zip(drawn.data_files, ("numbers", "statuses"), strict=False):
        print(printable(f"  {content} of the comparison in {file}"), file=sys.stderr)
    for note in drawn.notes:
        print(printable(f"  note: {note}"), file=sys.stderr)
    return EXIT_FINE
