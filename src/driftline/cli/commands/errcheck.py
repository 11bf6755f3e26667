"""`driftline errcheck`: run an unchanged program and name the operator of the first NaN or inf.

This module only turns options into a watch plan and prints the outcome; `launch.errcheck` does the
work.
"""

from __future__ import annotations

import csv
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from driftline.captures.errcheck.findings import Finding
from driftline.captures.launch.errcheck import WatchOutcome, check_command
from driftline.captures.launch.jobs import Engine, LogLevel, WatchLevel, WatchPlan
from driftline.cli import python_script as script
from driftline.cli.options import (
    OUTPUT,
    SEVERAL,
    ProgramOptions,
    engine_or_default,
    place,
)
from driftline.cli.output import short_path
from driftline.errors import BadInput
from driftline.units import csv_cell, size_of

# The first findings are the causes; the others follow from them, and are in the files.
MOST_SHOWN = 10
MOST_SITES = 5


@Parameter(name="*")
@dataclass(frozen=True)
class WatchOptions:
    """What is looked for, and where.

    Attributes:
        type_: overflow is NaN and infinity; saturation is the largest value of fp16, bf16 or fp8;
            underflow is non-zero numbers that became zero. Several may be given. Default: overflow.
        exit_: Stop the program at the first finding, which is printed last.
        level: operator checks every aten call; module checks the outputs of modules and is faster.
        allow: Sites or operators that are not checked, such as 'model.sampler/*' or 'aten.log'.
        engine: atb also lets the probe of the ATB library look for overflows; it is the default if
            ATB_HOME_PATH is set. torch does not.
    """

    type_: Annotated[
        list[Literal["overflow", "nan", "inf", "saturation", "underflow", "all"]] | None, SEVERAL
    ] = None
    exit_: bool = False
    level: WatchLevel = "operator"
    allow: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB")] = None
    engine: Engine | None = None


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class FindingOutput:
    """Where findings go.

    Attributes:
        headroom: Also write a csv that says how close every site came to the largest value of its
            number format.
        max_bytes: Keep at most this size of tensors of findings.
        output: Folder of the findings. Default: the current folder.
        log_level: How much to print.
    """

    headroom: Annotated[Path | None, Parameter(metavar="FILE")] = None
    max_bytes: Annotated[str, Parameter(metavar="SIZE")] = "256MB"
    output: Annotated[str, Parameter(name=("--output", "-o"), metavar="DIR")] = ""
    log_level: Annotated[LogLevel, Parameter(name=("--log-level", "-l"))] = "info"


def errcheck(
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    watch: WatchOptions = WatchOptions(),
    output: FindingOutput = FindingOutput(),
) -> int:
    """Run an unchanged program and name the operator that made the first NaN or infinity.

        driftline errcheck --exec "python train.py"
        driftline errcheck --type all --exit -o out -- torchrun --nproc-per-node 2 train.py

    A finding is an operator whose inputs were finite and whose output was not, with its module,
    line, step, rank and phase. Operators that only pass on a NaN or infinity are counted. Masks and
    other deliberate infinities are not reported. Every Python process that imports torch is
    watched; its results do not change. Files are written only if there is a finding. Exit code: 1
    with a finding, else the program's own if it fails, 2 if nothing could be watched.

    Args:
        program: The program and its arguments, after two dashes.
    """
    argv = start.command(program, "errcheck")
    engine, need_probe = engine_or_default(watch.engine)
    folder = Path(output.output or ".").absolute()
    max_bytes = size_of(output.max_bytes)
    headroom = output.headroom
    # Before the program runs: it may take hours, and the csv comes last.
    if headroom is not None and not headroom.absolute().parent.is_dir():
        raise BadInput(
            f"there is no folder {headroom.absolute().parent} for --headroom", hint="make it first"
        )
    plan = WatchPlan(
        output=str(folder),
        folder=str(_new_folder(folder)),
        types=tuple(dict.fromkeys(watch.type_ or ["overflow"])),
        level=watch.level,
        allow=tuple(watch.allow or ()),
        exit=watch.exit_,
        max_bytes=max_bytes,
        log_level=output.log_level,
        command=tuple(argv),
        engine=engine,
    )
    outcome = script.step("outcome", check_command, argv, plan, need_probe=need_probe)
    if headroom is not None and (script.is_script() or not outcome.reason):
        script.act(write_headroom, headroom, outcome)
    script.end(outcome)
    for line in messages(outcome):
        print(line, file=sys.stderr, flush=True)
    for line in findings(outcome):
        print(line, flush=True)
    return outcome.exit_code


def _new_folder(base: Path) -> Path:
    """A folder that does not exist yet."""
    stem = f"errcheck_{datetime.now():%Y%m%d_%H%M%S}"
    number, folder = 0, base / stem
    while folder.exists():
        number += 1
        folder = base / f"{stem}_{number}"
    return folder


def messages(outcome: WatchOutcome) -> list[str]:
    """What is printed to stderr around the findings, most important first."""
    plan = outcome.plan
    lines: list[str] = []
    if outcome.program_status and outcome.stopped is None and plan.says("error"):
        lines.append(f"driftline: the program ended with status {outcome.program_status}")
    if outcome.reason:
        if plan.says("critical"):
            lines.append(f"driftline: {outcome.reason}")
        if outcome.hint and plan.says("error"):
            lines.append(f"  hint: {outcome.hint}")
    elif plan.says("info"):
        lines.append(f"driftline: {_summary(outcome)}")
        lines += _headroom_lines(outcome)
    if plan.says("debug"):
        lines += [
            f"  debug: command: {shlex.join(plan.command)}",
            f"  debug: engine {plan.engine}, level {plan.level}, types {', '.join(plan.types)}, "
            f"output {plan.output}",
            f"  debug: {outcome.calls} calls in {outcome.processes} processes, "
            f"{outcome.propagators} propagated, {outcome.silent} processes without a report",
        ]
        lines += [
            f"  debug: headroom of {site}, {dtype}: largest magnitude {largest:.4g}"
            for site, dtype, largest, _ in outcome.headroom[:MOST_SITES]
        ]
    if plan.says("warning"):
        lines += [f"  note: {text}" for text in outcome.remarks[:MOST_SHOWN]]
    if outcome.findings and plan.says("info") and Path(plan.folder).is_dir():
        folder = shlex.quote(short_path(plan.folder))
        command = "opcheck -i" if plan.level == "operator" else "show"
        lines.append(f"  written to {folder}, tensors and all: driftline {command} {folder}")
    # At this log level, the line that these belong to is not printed.
    if lines and lines[0].startswith("  "):
        lines[0] = f"driftline: {lines[0].strip()}"
    return lines


def findings(outcome: WatchOutcome) -> list[str]:
    """The findings as lines; the one at which the program was stopped comes last."""
    lines: list[str] = []
    stopped = outcome.stopped
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for finding in outcome.findings:
        if stopped is None or (finding.pid, finding.number) != (stopped.pid, stopped.number):
            # The same operator fails in the same way at every step: say it once.
            key = (finding.site, finding.types, finding.cause, finding.rank)
            alike.setdefault(key, []).append(finding)
    for same in list(alike.values())[:MOST_SHOWN]:
        lines += same[0].lines()
        if len(same) > 1:
            lines.append(f"  and {len(same) - 1} more there, the last in step {same[-1].step}")
    if len(alike) > MOST_SHOWN:
        lines.append(f"findings at {len(alike) - MOST_SHOWN} more sites are in the files")
    for probed in outcome.atb or ():
        lines.append(f"overflow in {probed.operator}, says the ATB probe in {probed.path.name}")
    # Last, where a reader of a long log looks first.
    if stopped is not None:
        lines += stopped.lines()
    return lines


def _summary(outcome: WatchOutcome) -> str:
    plan = outcome.plan
    count = len(outcome.findings)
    processes = outcome.processes
    watched = f"{_count(outcome.calls, plan.level)} in {_count(processes, 'process', 'processes')}"
    text = f"{watched} watched for {', '.join(plan.types)}"
    if outcome.silent and not processes:
        text = f"{plan.level}s watched for {', '.join(plan.types)} until the program was killed"
    if outcome.atb is not None:
        text += " by torch, and kernels by the ATB probe"
    if not outcome.found:
        return f"{text}: nothing found"
    total = count + len(outcome.atb or ())
    text += f": {_count(total, 'finding')}"
    if outcome.propagators:
        text += f"; {_count(outcome.propagators, plan.level)} only passed on such values"
    if outcome.repeats:
        text += f"; {outcome.repeats} more of the same at the same sites"
    if outcome.silent and processes and outcome.stopped is None:
        text += (
            f"; {_count(outcome.silent, 'more process', 'more processes')} did not end by itself"
        )
    return text + ("; the program was stopped" if outcome.stopped is not None else "")


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _headroom_lines(outcome: WatchOutcome) -> list[str]:
    """Lines for the sites closest to the largest value of a narrow format, if asked for."""
    if not {"saturation", "all"}.intersection(outcome.plan.types):
        return []
    from driftline.numerics.dtypes import PATTERNS

    narrow = [row for row in outcome.headroom if PATTERNS[row[1]].narrow and row[3] is not None]
    return [
        f"  headroom {bits:.1f} bits: {site}, {dtype}, largest magnitude {largest:.4g}"
        for site, dtype, largest, bits in narrow[:MOST_SITES]
    ]


def write_headroom(path: Path, outcome: WatchOutcome) -> None:
    """Write a csv that says how close every site came to the largest value of its format."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("site", "dtype", "largest_magnitude", "headroom_bits"))
            for site, dtype, largest, bits in outcome.headroom:
                headroom = "" if bits is None else f"{bits:.3f}"
                table.writerow((csv_cell(site), dtype, repr(largest), headroom))
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror or error}", hint="give another --headroom"
        ) from None
