"""`driftline compare`: words → `driftline.compare` → a report and an exit code.

Annotations are no text here: to compile forty of them takes longer than to read the command line.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from driftline.cli import script
from driftline.cli.beside import load_meanwhile, release
from driftline.cli.parsing import Option
from driftline.cli.progress import on_terminal
from driftline.cli.table_output import refuse_overwriting, write
from driftline.errors import EXIT_FINE, AlreadyThere, BadInput, DriftlineError

if TYPE_CHECKING:
    from driftline.alignment.plan import Plan
    from driftline.runs.run import Run

_LIMITS = "What is allowed"
_WHICH = "Which tensors"
_HOW = "What belongs together"
_WHERE = "Output"
_SPEED = "Speed"


def compare(
    reference: Annotated[Path | None, Option(metavar="REF", urls=True)] = None,
    candidate: Annotated[Path | None, Option(metavar="CAND", urls=True)] = None,
    /,
    *,
    golden_path: Annotated[
        Path | None, Option(names=("--golden-path", "-gp"), metavar="REF", urls=True)
    ] = None,
    my_path: Annotated[
        Path | None, Option(names=("--my-path", "-mp"), metavar="CAND", urls=True)
    ] = None,
    metric: Annotated[list[str] | None, Option(metavar="NAME|FILE.py:FUNC", group=_LIMITS)] = None,
    max: Annotated[list[str] | None, Option(metavar="METRIC=VALUE", group=_LIMITS)] = None,
    min: Annotated[list[str] | None, Option(metavar="METRIC=VALUE", group=_LIMITS)] = None,
    rtol: Annotated[float | None, Option(group=_LIMITS)] = None,
    atol: Annotated[float | None, Option(group=_LIMITS)] = None,
    min_coverage: Annotated[float, Option(metavar="SHARE", group=_LIMITS)] = 0.0,
    thresholds: Annotated[Path | None, Option(metavar="FILE.json", group=_LIMITS)] = None,
    site: Annotated[list[str] | None, Option(metavar="GLOB", group=_WHICH)] = None,
    port: Annotated[list[str] | None, Option(group=_WHICH)] = None,
    step: Annotated[list[str] | None, Option(metavar="N[-M]", group=_WHICH)] = None,
    rank: Annotated[list[str] | None, Option(metavar="N[-M]", group=_WHICH)] = None,
    map: Annotated[list[str] | None, Option(metavar="REF=CAND", group=_HOW)] = None,
    op_mapping_file: Annotated[
        Path | None, Option(names=("--op-mapping-file", "-mf"), metavar="FILE|DIR", group=_HOW)
    ] = None,
    no_structure: Annotated[bool, Option(group=_HOW)] = False,
    plan: Annotated[Path | None, Option(metavar="FILE.toml", group=_HOW)] = None,
    save_plan: Annotated[Path | None, Option(metavar="FILE.toml", group=_HOW)] = None,
    step_map: Annotated[list[str] | None, Option(metavar="REF=CAND,...", group=_HOW)] = None,
    placement: Annotated[list[str] | None, Option(metavar="SITE=shard(AXIS)", group=_HOW)] = None,
    mask: Annotated[list[str] | None, Option(metavar="FILE.npy|captured|none", group=_HOW)] = None,
    output: Annotated[
        Path | None, Option(names=("--output", "-o"), metavar="DIR", group=_WHERE, urls=True)
    ] = None,
    csv: Annotated[Path | None, Option(metavar="FILE", group=_WHERE)] = None,
    format: Annotated[
        Literal["table", "json", "csv", "markdown", "github", "junit"], Option(group=_WHERE)
    ] = "table",
    all: Annotated[bool, Option(group=_WHERE)] = False,
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), group=_WHERE)] = False,
    force: Annotated[bool, Option(group=_WHERE)] = False,
    dry_run: Annotated[bool, Option(group=_WHERE)] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "warn", "error"] | None,
        Option(names=("--log-level", "-l"), group=_WHERE),
    ] = None,
    threads: Annotated[int | None, Option(group=_SPEED)] = None,
    jobs: Annotated[int | None, Option(metavar="N", group=_SPEED)] = None,
    executor: Annotated[str | None, Option(metavar="ray[://HOST:PORT]", group=_SPEED)] = None,
    shard: Annotated[str | None, Option(metavar="I/N", group=_SPEED)] = None,
) -> int:
    """Compare two runs, or two tensor files, tensor by tensor.

        driftline compare ref cand
        driftline compare a.npy b.pt --max relative_l2=0.01

    Prints which tensors differ by more than the coarser number format of the two sides explains,
    and which one is first. Exit code 1 if any does, 2 if nothing could be compared. With -gp and
    -mp it also writes ait_cmp_report_{timestamp}.csv into the folder -o, or into this one.

    Args:
        reference: What is right: a run, a dump of another program, or a tensor file.
        candidate: What is in question.
        golden_path: Another way to give REF.
        my_path: Another way to give CAND.
        metric: Measure this too: sqnr (dB), kl, or a Python function of your own; may be repeated.
        max: The largest value that passes, instead of the format's own limit; may be repeated.
        min: The smallest value that passes, for metrics such as cosine; may be repeated.
        rtol: Every element must keep |c - r| <= atol + rtol |r|.
        atol: See --rtol.
        min_coverage: Fail when less than this share of all tensors was compared, such as 0.9.
        thresholds: Limits of each layer, as `driftline calibrate` and `thresholds` write them.
        site: Only sites that match, such as 'model.layers.*.mlp'; may be repeated.
        port: Only this side: input, output, grad_input, grad_output, param, ...; may be repeated.
        step: Only these steps, such as 0 or 3-5; may be repeated.
        rank: Only these ranks; may be repeated.
        map: Sites that are called differently, such as 'model.*=*'; each star stands for the same
            text on both sides; may be repeated.
        op_mapping_file: A file of such pairs (.toml or .json), or the folder of ait's
            op_mapping_file.json, which maps classes.
        no_structure: Pair by names only, never by class, shape and order of execution.
        plan: Compare what this saved plan says, and nothing else.
        save_plan: Write the plan to this file, to be edited and given back with --plan.
        step_map: Which step is which where the runs count differently, such as 0=1,1=2.
        placement: How tensors lie over ranks when one side is sharded: shard(AXIS), replicate or
            partial(sum), such as 'attn.*=shard(1)'; may be repeated.
        mask: Leave pads out of all metrics: a file of [batch, tokens], non-zero where a position
            counts, or `captured` for the attention_mask that a run holds; `none` counts pads of
            two engines, too.
        output: Also write the comparison there: table.json, rows.parquet and rows.csv. With -gp
            and -mp: folder of the ait_cmp_report.
        csv: Also write the rows to this file.
        format: table for people; json, csv and markdown for programs and reviews; github
            (annotations and a step summary) and junit for CI.
        all: Show every row rather than the worst.
        quiet: Print nothing; the exit code says it.
        force: Replace output that is there already.
        dry_run: Print what would be compared with what; reads no tensor but masks and token ids.
        log_level: debug also prints the plan, warning only what does not agree, error nothing.
        threads: Worker threads. Default: one per usable core.
        jobs: Share the pairs out among so many processes; the result is the same, bit for bit.
        executor: Share them out on a Ray cluster: the one this machine is in, or one elsewhere.
        shard: Measure only this share of the pairs, such as 3/8, and write it into the folder -o;
            `driftline merge` makes the table of all of them.
    """
    if threads is not None and threads < 1:
        raise BadInput(f"--threads {threads} cannot do anything", hint="give 1 or more")
    ref, cand = _two_paths(reference, candidate, golden_path, my_path)
    seed = golden_path is not None and my_path is not None
    if shard is not None:
        _check_shard(shard, output, force, {"-gp and -mp": seed, "--csv": csv, "--all": all})
    report = (output or Path()) if seed else None
    output = None if seed else output
    quiet = quiet or log_level == "error"
    if not script.asked():
        refuse_overwriting(output if shard is None else None, csv, force, report)
        if save_plan is not None and save_plan.exists() and not force:
            raise AlreadyThere(f"{save_plan} exists", hint="give another --save-plan, or --force")
    from driftline.formats.registry import open_run

    steps, ranks = _numbers("--step", step), _numbers("--rank", rank)
    their_steps, mapped = _mapped_steps(steps, step_map)
    of_one = frozenset[int]() if ranks and not _same_ranks(ref, cand) else ranks
    ours = _some(script.part(open_run, ref), steps, of_one)
    theirs = _some(script.part(open_run, cand), their_steps, of_one)
    from driftline.comparison.pipeline import align
    from driftline.comparison.pipeline import compare as compare_runs

    pairing: Plan | None = None
    pairs_by: dict[str, Any] = {
        "sites": site or (),
        "ports": port or (),
        "maps": map or (),
        "mapping": op_mapping_file,
        "placements": placement or (),
        "masks": mask or (),
        "step_map": mapped,
        "plan": plan,
        "structural": not no_structure,
    }
    if save_plan is not None or dry_run or seed or ranks != of_one:
        pairing = script.step("plan", align, ours, theirs, **pairs_by)
        if ranks != of_one:
            from driftline.alignment.selection import of_ranks

            pairing = script.step("plan", of_ranks, pairing, ours, theirs, ranks)
        pairs_by = {"plan": pairing}  # all of it is in the plan now
        if save_plan is not None:
            _save(pairing, save_plan, ref, cand, quiet)
        if dry_run:
            script.end(pairing)
            from driftline.reporting.terminal import printable

            for line in pairing.lines():
                print(printable(line))
            return EXIT_FINE
    from driftline.comparison.metrics.catalogue import limited, requested
    from driftline.comparison.tolerance.tolerance import limits_from

    if seed:
        from driftline.dialects.ait.compare_report import METRICS

        metric = [*(metric or ()), *METRICS]
    limits = None
    if max or min:
        named = [word.partition("=")[0] for word in (*(max or ()), *(min or ()))]
        columns = [each.column for each in requested([*(metric or ()), *limited(named)])]
        limits = limits_from(None, columns, at_most=max or (), at_least=min or ())
    progress = None if quiet else on_terminal("pairs")
    mute = quiet and executor is not None and not script.asked()
    from driftline.execution.jobs import chosen

    asked: dict[str, Any] = {
        "metrics": metric or (),
        "limits": limits,
        "rtol": rtol,
        "atol": atol,
        "min_coverage": min_coverage,
        "thresholds": thresholds,
        **pairs_by,
        "threads": threads,
        "jobs": jobs,
        "executor": chosen(jobs, executor, quiet=True) if mute else executor,
        "planned": _telling(log_level, quiet),
        "progress": progress,
    }
    try:
        if shard is not None:
            return _shard(ours, theirs, shard, asked, cast(Path, output), force, quiet)
        table = script.step("table", compare_runs, ours, theirs, **asked)
    finally:
        if progress is not None:
            progress.close()
    if report is not None:
        from driftline.dialects.ait.compare_report import write_report

        written = script.act(write_report, table, cast("Plan", pairing), ours, theirs, report)
        if not quiet and not script.asked() and log_level not in ("warning", "warn"):
            print(f"driftline: the report is in {written}", file=sys.stderr)
    if not script.asked():
        release(ours, theirs)
    write(table, output, csv, force, quiet)
    script.end(table)
    if not quiet and not (log_level in ("warning", "warn") and table.verdict == "pass"):
        from driftline.reporting import writers

        writers.table(table, format, sys.stdout, everything=all)
    from driftline.comparison.verdict.judge import exit_code

    return exit_code(table)


def _check_shard(
    shard: str, output: Path | None, force: bool, others: Mapping[str, object]
) -> None:
    """Before anything is read: a shard needs a folder, and what is told of a whole table waits."""
    from driftline.comparison.table.part import part_name, refuse_part
    from driftline.execution.slicing import parse_shard

    which = parse_shard(shard)
    if output is not None and "://" in str(output):
        raise BadInput(
            "a part of a comparison goes into a folder of this machine",
            hint="`driftline merge` may write the table of all parts to an address",
        )
    for option, given in others.items():
        if given:
            raise BadInput(
                f"{option} is for the whole comparison, of which --shard {shard} is a part",
                hint="give REF and CAND by their places"
                if option.startswith("-gp")
                else f"give {option} to driftline merge",
            )
    if output is None:
        raise BadInput("--shard needs -o, a folder for the parts of all shards")
    if not script.asked():
        refuse_part(output / part_name(which), force=force)


def _shard(
    ours: "Run",
    theirs: "Run",
    shard: str,
    asked: Mapping[str, Any],
    output: Path,
    force: bool,
    quiet: bool,
) -> int:
    """One share of the pairs, measured and written; no verdict yet."""
    from driftline.comparison.shards import compare_shard
    from driftline.comparison.table.part import Part

    part = script.step("part", compare_shard, ours, theirs, shard, **asked)
    written = script.act(Part.write, part, output, force=force)
    script.end(part)
    if not quiet:
        print(f"driftline: {part}, in {written}", file=sys.stderr)
    return EXIT_FINE


def _same_ranks(ref: Path, cand: Path) -> bool:
    """Whether the runs have the same ranks; `--python` takes that of runs that are not there."""
    from driftline.alignment.selection import have_the_same_ranks
    from driftline.formats.registry import open_run

    try:
        return have_the_same_ranks(open_run(ref), open_run(cand))
    except DriftlineError:
        if script.asked():
            return True
        raise


def _some(run: "Run", steps: frozenset[int], ranks: frozenset[int]) -> "Run":
    if not steps and not ranks:
        return run
    from driftline.runs.views import narrowed

    return script.part(narrowed, run, steps=steps, ranks=ranks)


def _telling(log_level: str | None, quiet: bool) -> Callable[["Plan"], None]:
    """Says before tensors are read what will be set against what, as far as that was wanted."""

    def tell(plan: "Plan") -> None:
        if log_level == "debug":
            from driftline.reporting.terminal import printable

            for line in plan.lines():
                print(printable(line), file=sys.stderr)
        elif (
            log_level in (None, "info") and not quiet and not plan.ways.keys() <= {"name", "alias"}
        ):
            print(f"driftline: {plan}", file=sys.stderr)
        load_meanwhile()

    return tell


def _mapped_steps(
    steps: frozenset[int], step_map: Sequence[str] | None
) -> tuple[frozenset[int], dict[int, int] | None]:
    """The candidate's own numbers of the steps that were asked for, and the map of just those."""
    if not step_map:
        return steps, None
    from driftline.alignment.normalise.steps import parse_step_map

    known = parse_step_map(",".join(step_map))
    if not steps:
        return steps, known
    asked = {here: there for here, there in known.items() if here in steps}
    if not asked:
        raise BadInput("--step-map names none of the steps that --step asks for")
    return frozenset(asked.values()), asked


def _save(plan: "Plan", path: Path, ref: Path, cand: Path, quiet: bool) -> None:
    from driftline.alignment.plan_file import write_plan

    script.act(write_plan, plan, path, str(ref), str(cand))
    if not quiet and not script.asked():
        print(f"driftline: the plan is in {path}", file=sys.stderr)


def _two_paths(
    first: Path | None, second: Path | None, golden: Path | None, mine: Path | None
) -> tuple[Path, Path]:
    """REF and CAND, each given by its place or by the seed's option, in any mixture."""
    places = [path for path in (first, second) if path is not None]
    found: list[Path] = []
    for name, named in (("REF", golden), ("CAND", mine)):
        if named is None and not places:
            raise BadInput(
                f"`driftline compare` needs {name}",
                hint="driftline compare REF CAND: what is right, then what is in question",
            )
        found.append(places.pop(0) if named is None else named)
    if places:
        raise BadInput(
            f"'{places[0]}' is one path too many",
            hint="REF is -gp and CAND is -mp: give each of them once",
        )
    return found[0], found[1]


def _numbers(option: str, words: Sequence[str] | None) -> frozenset[int]:
    """`3`, `3-5` and `1,3-5`; several are added up."""
    found: set[int] = set()
    for word in (part.strip() for text in words or () for part in text.split(",")):
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise BadInput(f"{option} takes numbers such as 0 or 3-5, not '{word}'")
        if dash and int(last) < int(first):
            raise BadInput(f"{option} {word} is empty", hint=f"write {last}-{first}")
        if dash and int(last) - int(first) > 1_000_000:
            raise BadInput(f"{option} {word} is more than anybody has dumped")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
