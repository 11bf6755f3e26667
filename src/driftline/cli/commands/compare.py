"""`driftline compare`: two runs or tensor files → a table, a report and an exit code.

`driftline merge` makes the same of the parts that `compare --shard` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    ALIGNMENT,
    EVIDENCE,
    LIMITS,
    ONNX,
    OUTPUT,
    SELECTION,
    SEVERAL,
    SPEED,
    URLS,
    LimitOptions,
    OutputOptions,
    ThreadOptions,
    WorkerOptions,
    as_in_ait,
    numbers_from,
    place,
)
from driftline.cli.output import print_table, refuse_overwriting, write_table
from driftline.cli.progress import progress_bar
from driftline.errors import (
    EXIT_COULD_NOT,
    EXIT_DIFFERENT,
    EXIT_FINE,
    AlreadyThere,
    BadInput,
    DriftlineError,
)

if TYPE_CHECKING:
    from driftline.alignment.plan import Plan
    from driftline.comparison.table.table import Table
    from driftline.runs.run import Run


@Parameter(name="*", group=ONNX)
@dataclass(frozen=True)
class ModelPairOptions:
    """How ONNX files are run if they are given instead of runs.

    Attributes:
        inputs: Inputs for the ONNX files: arrays by name, or a run that provides the model inputs.
            Each file or run is a step. Default: the inputs of the other side, else random numbers.
        seed: Seed of the random numbers.
        optimize: How much ONNX Runtime optimizes the graphs. Default: all.
        providers: Execution providers, the preferred one first, such as CUDA CPU. Default: CPU.
    """

    inputs: Annotated[list[str] | None, SEVERAL, Parameter(metavar="FILE.npz|RUN")] = None
    seed: Annotated[int, Parameter(metavar="N")] = 0
    optimize: Literal["none", "basic", "extended", "all"] = "all"
    providers: Annotated[list[str] | None, SEVERAL, Parameter(metavar="NAME")] = None

    def open_pair(self, paths: tuple[Path, Path]) -> tuple[Run, Run]:
        """Both sides as runs; an ONNX file is run, and nothing of that run is written.

        Raises:
            BadInput: Options for models are given, and none is.
        """
        from driftline.formats.registry import open_run

        is_model = [path.suffix == ".onnx" and path.is_file() for path in paths]
        if not any(is_model):
            if self != ModelPairOptions():
                raise BadInput(
                    "--inputs, --seed, --optimize and --providers are for .onnx files",
                    hint="leave them out, or give an .onnx file",
                )
            return script.part(open_run, paths[0]), script.part(open_run, paths[1])
        # The inputs of the side that is a run already are used for the other side.
        if is_model[0] and not is_model[1]:
            candidate = script.step("candidate", open_run, paths[1])
            return self._run(paths[0], candidate), candidate
        if is_model[0]:
            reference = self._run(paths[0], None, companion=paths[1])
        else:
            reference = script.step("reference", open_run, paths[0])
        return reference, self._run(paths[1], reference)

    def _run(self, path: Path, other: Run | None, companion: Path | None = None) -> Run:
        from driftline.captures.onnxruntime.api import run_onnx
        from driftline.captures.onnxruntime.inputs import random_inputs

        inputs: Any = self.inputs or other
        if inputs is None:
            inputs = script.part(random_inputs, path, self.seed, companion)
        options: dict[str, Any] = {"optimize": self.optimize, "providers": self.providers or ()}
        return script.step("candidate" if other else "reference", run_onnx, path, inputs, **options)


_AS_USUAL = ModelPairOptions()


@Parameter(name="*")
@dataclass(frozen=True)
class SideOptions:
    """The two sides as options of `ait llm compare`, and how ONNX models are run.

    Attributes:
        golden_path: Another way to give REF.
        my_path: Another way to give CAND.
        models: How ONNX files are run.
    """

    golden_path: Annotated[Path | None, URLS, as_in_ait("--golden-path", "-gp", "REF")] = None
    my_path: Annotated[Path | None, URLS, as_in_ait("--my-path", "-mp", "CAND")] = None
    models: ModelPairOptions = _AS_USUAL

    @property
    def writes_ait_report(self) -> bool:
        """Whether ait's report is written too: both paths are given by ait's options."""
        return self.golden_path is not None and self.my_path is not None


@Parameter(name="*", group=LIMITS)
@dataclass(frozen=True)
class CompareLimits(LimitOptions):
    """What is measured and how much difference is allowed.

    Attributes:
        metric: Also measure this: sqnr (dB), kl, or a Python function of your own; may be repeated.
        rtol: Require |c - r| <= atol + rtol |r| of every element.
        atol: See --rtol.
        replay: What `driftline replay CAND` wrote: the error that each module adds by itself.
        noise: What `driftline noise` wrote, or another trusted run; may be repeated.
        bisect: What `driftline bisect --format json` printed: measures how much a site explains.
    """

    metric: Annotated[list[str] | None, Parameter(metavar="NAME|FILE.py:FUNC")] = None
    rtol: Annotated[float | None, Parameter(metavar="X")] = None
    atol: Annotated[float | None, Parameter(metavar="X")] = None
    replay: Annotated[Path | None, Parameter(metavar="DIR", group=EVIDENCE)] = None
    noise: Annotated[list[Path] | None, URLS, Parameter(metavar="DIR", group=EVIDENCE)] = None
    bisect: Annotated[Path | None, Parameter(metavar="FILE.json", group=EVIDENCE)] = None

    def evidence(self) -> dict[str, Any]:
        """Arguments of `driftline.compare` with the paths of evidence that are given."""
        files = {"replay": self.replay, "noise": self.noise, "bisect": self.bisect}
        return {name: value for name, value in files.items() if value}

    def keywords(self, metrics: Sequence[str]) -> dict[str, Any]:
        """Arguments of `driftline.compare` that say what is measured and what is allowed."""
        from driftline.comparison.metrics.catalogue import limited, requested

        limits = None
        if self.words:
            # A metric that has a limit is measured, whether it was asked for or not.
            limited_metrics = limited([word.partition("=")[0] for word in self.words])
            columns = [metric.column for metric in requested([*metrics, *limited_metrics])]
            limits = self.limits(columns)
        return {
            "metrics": metrics,
            "limits": limits,
            "rtol": self.rtol,
            "atol": self.atol,
            "min_coverage": self.min_coverage,
            "thresholds": self.thresholds,
        }


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class CompareSelection:
    """Which tensors of the two runs are compared.

    Attributes:
        site: Only sites that match, such as 'model.layers.*.mlp'; may be repeated.
        port: Only this side: input, output, grad_input, grad_output, param, ...; may be repeated.
        step: Only these steps, such as 0 or 3-5; may be repeated.
        rank: Only these ranks; may be repeated.
    """

    site: Annotated[list[str] | None, Parameter(metavar="GLOB")] = None
    port: Annotated[list[str] | None, Parameter(metavar="PORT")] = None
    step: Annotated[list[str] | None, Parameter(metavar="N[-M]")] = None
    rank: Annotated[list[str] | None, Parameter(metavar="N[-M]")] = None


@Parameter(name="*", group=ALIGNMENT)
@dataclass(frozen=True)
class CompareAlignment:
    """Which tensors are compared with each other.

    Attributes:
        map: Sites with different names on the two sides, such as 'model.*=*'; each star stands for
            the same text on both sides; may be repeated.
        op_mapping_file: A file of such pairs (.toml or .json), or the folder of ait's
            op_mapping_file.json, which maps classes.
        no_structure: Pair by names only, never by class, shape and order of execution.
        plan: Compare the tensors that this saved plan pairs, and no others.
        save_plan: Write the plan to this file; you can edit it and use it with --plan.
        step_map: Pairs of steps, if the two runs number their steps differently, such as 0=1,1=2.
        placement: How tensors are distributed over ranks if one side is sharded: shard(AXIS),
            replicate or partial(sum), such as 'attn.*=shard(1)'; may be repeated.
        mask: Exclude padding from all metrics: a file of shape [batch, tokens], non-zero where a
            position counts, or `captured` for the attention_mask in a run. `none` also counts the
            padding of two engines. May be repeated.
    """

    map: Annotated[list[str] | None, Parameter(metavar="REF=CAND")] = None
    op_mapping_file: Annotated[Path | None, as_in_ait("--op-mapping-file", "-mf", "FILE|DIR")] = (
        None
    )
    no_structure: bool = False
    plan: Annotated[Path | None, Parameter(metavar="FILE.toml")] = None
    save_plan: Annotated[Path | None, Parameter(metavar="FILE.toml")] = None
    step_map: Annotated[list[str] | None, Parameter(metavar="REF=CAND,...")] = None
    placement: Annotated[list[str] | None, Parameter(metavar="SITE=shard(AXIS)")] = None
    mask: Annotated[list[str] | None, Parameter(metavar="FILE.npy|captured|none")] = None

    def steps(self, steps: frozenset[int]) -> tuple[frozenset[int], dict[int, int] | None]:
        """The selected steps as the candidate numbers them, and the map of those steps."""
        if not self.step_map:
            return steps, None
        from driftline.alignment.normalise.steps import parse_step_map

        step_map = parse_step_map(",".join(self.step_map))
        if not steps:
            return steps, step_map
        selected = {ref: cand for ref, cand in step_map.items() if ref in steps}
        if not selected:
            raise BadInput(
                "--step-map names none of the steps of --step",
                hint="give only one of them",
            )
        return frozenset(selected.values()), selected

    def keywords(self, select: CompareSelection, step_map: dict[int, int] | None) -> dict[str, Any]:
        """Arguments of `driftline.align` and `driftline.compare`."""
        return {
            "sites": select.site or (),
            "ports": select.port or (),
            "maps": self.map or (),
            "mapping": self.op_mapping_file,
            "placements": self.placement or (),
            "masks": self.mask or (),
            "step_map": step_map,
            "plan": self.plan,
            "structural": not self.no_structure,
        }


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class CompareOutput(OutputOptions):
    """Where the comparison goes. With -gp and -mp, -o is the folder of the ait_cmp_report.

    Attributes:
        csv: Also write the rows to this file.
        dry_run: Print which tensors would be compared; reads only masks and token ids.
        log_level: debug also prints the plan; warning prints only differences; error prints
            nothing.
        fail_on_differences: Exit code 1 also if all tensors agree but the models differ: in
            attributes, code, weights, mode, process or training.
    """

    csv: Annotated[Path | None, Parameter(metavar="FILE")] = None
    dry_run: bool = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "warn", "error"] | None,
        Parameter(name=("--log-level", "-l")),
    ] = None
    fail_on_differences: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether nothing is printed at all."""
        return self.quiet or self.log_level == "error"

    @property
    def only_warns(self) -> bool:
        """Whether nothing is printed if the verdict is PASS."""
        return self.log_level in ("warning", "warn")


@Parameter(name="*", group=SPEED)
@dataclass(frozen=True)
class CompareWorkers(WorkerOptions, ThreadOptions):
    """Which threads, processes and machines measure.

    Attributes:
        shard: Measure only this part of the pairs, such as 3/8, and write it to the folder -o;
            `driftline merge` makes one table of all parts.
    """

    shard: Annotated[str | None, Parameter(metavar="I/N")] = None


def compare(
    reference: Annotated[Path | None, URLS, place("REF")] = None,
    candidate: Annotated[Path | None, URLS, place("CAND")] = None,
    /,
    *,
    sides: SideOptions = SideOptions(),
    limits: CompareLimits = CompareLimits(),
    select: CompareSelection = CompareSelection(),
    alignment: CompareAlignment = CompareAlignment(),
    output: CompareOutput = CompareOutput(),
    workers: CompareWorkers = CompareWorkers(),
) -> int:
    """Compare two runs, or two tensor files, tensor by tensor.

        driftline compare ref cand
        driftline compare a.npy b.pt --max relative_l2=0.01
        driftline compare float.onnx int8.onnx --inputs x.npz

    Names the sites that add more error than their inputs and their number format explain, and the
    first of them. Exit code 1 if there is such a site, 2 if too little was compared to judge. With
    -gp and -mp it also writes ait_cmp_report_{timestamp}.csv to the folder -o, or to the current
    one.

    Args:
        reference: The trusted side: a run, a dump of another program, a tensor file, or an ONNX
            model, which is run for the comparison.
        candidate: The side to test; the same kinds.
    """
    threads = workers.count()
    paths = _two_paths(reference, candidate, sides)
    if workers.shard is not None:
        _check_shard(workers.shard, output, sides)
        _refuse_evidence_for_shard(limits)
    # With -gp and -mp, -o means what it means to ait: the folder of its report.
    folder = None if sides.writes_ait_report else output.output
    report_folder = (output.output or Path()) if sides.writes_ait_report else None
    if not script.is_script():
        # A shard's own file was checked above; the folder may hold those of others.
        refuse_overwriting(
            None if workers.shard is not None else folder, output.csv, output.force, report_folder
        )
        _refuse_old_plan(alignment.save_plan, force=output.force)

    pair = _open_pair(paths, sides.models, select, alignment)
    align_by = alignment.keywords(select, pair.step_map)
    # Made here only if the plan itself is needed: `driftline.compare` makes its own.
    plan: Plan | None = None
    if alignment.save_plan is not None or output.dry_run or report_folder or pair.plan_ranks:
        plan = _make_plan(pair, align_by)
        align_by = {"plan": plan}  # all of it is in the plan now
        if alignment.save_plan is not None:
            _save_plan(plan, alignment.save_plan, paths, quiet=output.is_silent)
        if output.dry_run:
            return _print_plan(plan)

    metrics: list[str] = list(limits.metric or ())
    if report_folder is not None:
        from driftline.dialects.ait.compare_report import METRICS

        # Columns of the report that a comparison does not measure by itself.
        metrics += METRICS
    with progress_bar("pairs", quiet=output.is_silent) as progress:
        options: dict[str, Any] = {
            **limits.keywords(metrics),
            **align_by,
            "threads": threads,
            "jobs": workers.jobs,
            "executor": _executor(workers, quiet=output.is_silent),
            "planned": _announce(output),
            "progress": progress,
            **limits.evidence(),
        }
        if workers.shard is not None:
            return _compare_shard(pair, workers.shard, options, output)
        from driftline.comparison.pipeline import compare as compare_runs

        table = script.step("table", compare_runs, pair.reference, pair.candidate, **options)
    if report_folder is not None:
        _write_ait_report(table, cast("Plan", plan), pair, report_folder, output)
    write_table(table, folder, output.csv, force=output.force, quiet=output.is_silent)
    script.end(table)
    if not output.is_silent and not (output.only_warns and table.verdict == "pass"):
        print_table(table, output)
    code = output.exit_code(table.verdict)
    return _differences_code(table, output) if code == EXIT_FINE else code


def _refuse_evidence_for_shard(limits: CompareLimits) -> None:
    if limits.evidence():
        raise BadInput(
            "a shard is measured but not judged: evidence is for the whole comparison",
            hint="driftline report TABLE --replay DIR judges the merged table with it",
        )


def _differences_code(table: Table, output: CompareOutput) -> int:
    """The exit code if all tensors agree; `--fail-on-differences` makes it 1 if models differ."""
    from driftline.comparison.differences.difference import counted

    if not output.fail_on_differences:
        return EXIT_FINE
    if table.differences is None:
        if not output.is_silent:
            print(
                "driftline: --fail-on-differences: a run has no facts about its model; dump it "
                "without --no-model-facts",
                file=sys.stderr,
            )
        return EXIT_COULD_NOT
    number = counted(table.differences)
    if number and not output.is_silent:
        points = "1 point" if number == 1 else f"{number} points"
        print(f"driftline: exit 1: the models differ in {points}", file=sys.stderr)
    return EXIT_DIFFERENT if number else EXIT_FINE


def _refuse_old_plan(path: Path | None, *, force: bool) -> None:
    if path is not None and path.exists() and not force:
        raise AlreadyThere(f"{path} exists", hint="give another --save-plan, or --force")


def _write_ait_report(
    table: Table, plan: Plan, pair: _Pair, folder: Path, output: CompareOutput
) -> None:
    from driftline.dialects.ait.compare_report import write_report

    written = script.act(write_report, table, plan, pair.reference, pair.candidate, folder)
    if not (output.is_silent or output.only_warns or script.is_script()):
        print(f"driftline: the report is in {written}", file=sys.stderr)


@dataclass(frozen=True)
class _Pair:
    """The two runs, narrowed to the selected steps and ranks.

    Attributes:
        step_map: The candidate's step for each step of the reference.
        plan_ranks: Ranks that are selected in the plan, because the two runs have different ranks.
    """

    reference: Run
    candidate: Run
    step_map: dict[int, int] | None
    plan_ranks: frozenset[int]


def _open_pair(
    paths: tuple[Path, Path],
    models: ModelPairOptions,
    select: CompareSelection,
    alignment: CompareAlignment,
) -> _Pair:
    steps, ranks = numbers_from("--step", select.step), numbers_from("--rank", select.rank)
    candidate_steps, step_map = alignment.steps(steps)
    # Rank 3 of 8 is no rank of a run with one: the plan knows which shards belong together.
    plan_ranks = ranks if ranks and not _same_ranks(*paths) else frozenset[int]()
    run_ranks = ranks - plan_ranks
    reference, candidate = models.open_pair(paths)
    return _Pair(
        _narrowed(reference, steps, run_ranks),
        _narrowed(candidate, candidate_steps, run_ranks),
        step_map,
        plan_ranks,
    )


def _same_ranks(ref: Path, cand: Path) -> bool:
    """Whether the runs have the same ranks; `--python` assumes so if the runs do not exist."""
    from driftline.alignment.selection import have_the_same_ranks
    from driftline.formats.registry import open_run

    try:
        return have_the_same_ranks(open_run(ref), open_run(cand))
    except DriftlineError:
        if script.is_script():
            return True
        raise


def _narrowed(run: Run, steps: frozenset[int], ranks: frozenset[int]) -> Run:
    if not steps and not ranks:
        return run
    from driftline.runs.views import narrowed

    return script.part(narrowed, run, steps=steps, ranks=ranks)


def _make_plan(pair: _Pair, align_by: dict[str, Any]) -> Plan:
    from driftline.comparison.pipeline import align

    plan = script.step("plan", align, pair.reference, pair.candidate, **align_by)
    if pair.plan_ranks:
        from driftline.alignment.selection import of_ranks

        plan = script.step("plan", of_ranks, plan, pair.reference, pair.candidate, pair.plan_ranks)
    return plan


def _save_plan(plan: Plan, path: Path, paths: tuple[Path, Path], *, quiet: bool) -> None:
    from driftline.alignment.plan_file import write_plan

    script.act(write_plan, plan, path, str(paths[0]), str(paths[1]))
    if not quiet and not script.is_script():
        print(f"driftline: the plan is in {path}", file=sys.stderr)


def _print_plan(plan: Plan) -> int:
    script.end(plan)
    from driftline.reporting.terminal import printable

    for line in plan.lines():
        print(printable(line))
    return EXIT_FINE


def _announce(output: CompareOutput) -> Callable[[Plan], None]:
    """A function that prints the plan, or a summary of it, before tensors are read."""

    def announce(plan: Plan) -> None:
        if output.log_level == "debug":
            from driftline.reporting.terminal import printable

            for line in plan.lines():
                print(printable(line), file=sys.stderr)
        elif (
            output.log_level in (None, "info")
            and not output.is_silent
            and not plan.ways.keys() <= {"name", "alias"}  # equal names need no explanation
        ):
            print(f"driftline: {plan}", file=sys.stderr)

    return announce


def _executor(workers: CompareWorkers, *, quiet: bool) -> Any:
    """The executor; a quiet one for a Ray cluster if nothing may be printed."""
    if not quiet or workers.executor is None or script.is_script():
        return workers.executor
    from driftline.execution.jobs import chosen

    return chosen(workers.jobs, workers.executor, quiet=True)


def _check_shard(shard: str, output: CompareOutput, sides: SideOptions) -> None:
    """Refuse a shard without -o, or options of the whole comparison, before anything is read."""
    from driftline.comparison.table.part import part_name, refuse_part
    from driftline.execution.slicing import parse_shard

    # Refuses 9/8 and the like before the folder is looked at.
    which = parse_shard(shard)
    if output.output is not None and "://" in str(output.output):
        raise BadInput(
            "a part of a comparison goes into a folder of this machine",
            hint="`driftline merge` may write the table of all parts to an address",
        )
    for option, is_given in {
        "-gp and -mp": sides.writes_ait_report,
        "--csv": output.csv is not None,
        "--all": output.all,
    }.items():
        if is_given:
            raise BadInput(
                f"{option} is for the whole comparison, and --shard {shard} is a part of it",
                hint="give REF and CAND as plain arguments"
                if option.startswith("-gp")
                else f"give {option} to driftline merge",
            )
    if output.output is None:
        raise BadInput(
            "--shard needs -o, a folder for the parts of all shards", hint="such as -o parts"
        )
    if not script.is_script():
        refuse_part(output.output / part_name(which), force=output.force)


def _compare_shard(pair: _Pair, shard: str, options: dict[str, Any], output: CompareOutput) -> int:
    """Measure one shard of the pairs and write it; there is no verdict yet."""
    from driftline.comparison.shards import compare_shard
    from driftline.comparison.table.part import Part

    part = script.step("part", compare_shard, pair.reference, pair.candidate, shard, **options)
    written = script.act(Part.write, part, cast("Path", output.output), force=output.force)
    script.end(part)
    if not output.is_silent:
        print(f"driftline: {part}, in {written}", file=sys.stderr)
    return EXIT_FINE


def _two_paths(
    reference: Path | None, candidate: Path | None, sides: SideOptions
) -> tuple[Path, Path]:
    """REF and CAND, each given as an argument or by ait's option, in any mixture."""
    # An argument takes the first of the two roles that no option fills.
    places = [path for path in (reference, candidate) if path is not None]
    paths: list[Path] = []
    for name, option in (("REF", sides.golden_path), ("CAND", sides.my_path)):
        if option is None and not places:
            raise BadInput(
                f"`driftline compare` needs {name}",
                hint="driftline compare REF CAND: the trusted side, then the side to test",
            )
        paths.append(places.pop(0) if option is None else option)
    if places:
        raise BadInput(
            f"'{places[0]}' is one path too many",
            hint="REF is -gp and CAND is -mp: give each of them once",
        )
    return paths[0], paths[1]


def merge(
    *parts: Annotated[Path, place("PART")],
    csv: Annotated[Path | None, Parameter(metavar="FILE", group=OUTPUT)] = None,
    output: OutputOptions = OutputOptions(),
) -> int:
    """Merge the shards of a comparison into its table.

        driftline compare ref cand --shard 1/2 -o parts
        driftline compare ref cand --shard 2/2 -o parts
        driftline merge parts -o table

    The table, the report and the exit code are those of `driftline compare` without --shard, bit
    for bit. A shard that is missing or given twice is named. Parts that come from different runs,
    options or versions are refused.

    Args:
        parts: Files that `compare --shard` wrote, or folders that hold them.
        csv: Also write the rows to this file.
    """
    if not parts:
        raise BadInput(
            "`driftline merge` needs the parts of a comparison",
            hint="driftline merge DIR, where DIR is the -o of `driftline compare --shard`",
        )
    if not script.is_script():
        refuse_overwriting(output.output, csv, output.force)
    from driftline.comparison.shards import merge as merge_parts
    from driftline.comparison.shards import remarks
    from driftline.comparison.table.part import open_parts

    if script.is_script():
        table = script.step("table", merge_parts, list(parts))
    else:
        # Opened once, for the table and for the remarks.
        opened = open_parts(parts)
        table = merge_parts(opened)
        for line in [] if output.quiet else remarks(opened):
            print(f"driftline: {line}", file=sys.stderr)
    write_table(table, output.output, csv, force=output.force, quiet=output.quiet)
    script.end(table)
    if not output.quiet:
        print_table(table, output)
    return output.exit_code(table.verdict)
