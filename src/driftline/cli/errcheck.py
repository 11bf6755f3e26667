"""`driftline errcheck`: run an unchanged program and name who made the first NaN or infinity.

Only words are read and written here: options become a watch plan, `launch.errcheck` does the rest.
"""

from __future__ import annotations

import csv
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from driftline.captures.errcheck.findings import Finding
from driftline.captures.launch.errcheck import WatchOutcome, check_command
from driftline.captures.launch.jobs import Engine, LogLevel, WatchLevel, WatchPlan
from driftline.cli import dump_words as words
from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import BadInput
from driftline.units import size_of

MOST_SHOWN = 10
MOST_SITES = 5


def errcheck(
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    type_: Annotated[
        list[Literal["overflow", "nan", "inf", "saturation", "underflow", "all"]] | None,
        Option(several=True),
    ] = None,
    exit_: bool = False,
    level: WatchLevel = "operator",
    allow: Annotated[list[str] | None, Option(several=True, metavar="GLOB")] = None,
    headroom: Annotated[Path | None, Option(metavar="FILE")] = None,
    max_bytes: Annotated[str, Option(metavar="SIZE")] = "256MB",
    engine: Engine | None = None,
    output: Annotated[str, Option(names=("--output", "-o"), metavar="DIR")] = "",
    log_level: Annotated[LogLevel, Option(names=("--log-level", "-l"))] = "info",
) -> int:
    """Run an unchanged program and name who made the first NaN or infinity.

        driftline errcheck --exec "python train.py"
        driftline errcheck --type all --exit -o out -- torchrun --nproc-per-node 2 train.py

    A finding is the operator whose inputs were finite and whose output was not, with its module,
    line, step, rank and phase; operators that only hand it on are counted. Masks and other
    deliberate infinities are none. Every Python process that imports torch is watched, and computes
    what it computes without. Without a finding nothing is written. Exit code: the program's own if
    it fails, else 1 with a finding, 2 if nothing could be watched.

    Args:
        program: The program and its arguments, after two dashes.
        exec_: The program as one text, read like a shell reads quotes; no pipes or redirection.
        type_: overflow is nan and inf; saturation is the largest value of fp16, bf16 or fp8;
            underflow is numbers lost to zero; several may be given. Default: overflow.
        exit_: Stop the program at the first finding, which is printed last.
        level: operator looks at every aten call; module at what modules give, which costs less.
        allow: Sites or operators that may make what they like, such as 'model.sampler/*' or
            'aten.log'.
        headroom: Also write how near every site came to its format's largest value, as csv.
        max_bytes: Keep no more than this of the tensors of findings.
        engine: atb also has the probe of the ATB library look for overflows; that is the default
            where ATB_HOME_PATH is set. torch leaves it off.
        output: Folder for what is found. Default: the current one.
        log_level: How much is said.
    """
    argv = words.command_of(exec_, program, "errcheck")
    engine_, asked_for = words.engine_of(engine)
    base = Path(output or ".").absolute()
    size = size_of(max_bytes)
    if headroom is not None and not headroom.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {headroom.absolute().parent} for --headroom")
    plan = WatchPlan(
        output=str(base),
        folder=str(_fresh(base)),
        types=tuple(dict.fromkeys(type_ or ["overflow"])),
        level=level,
        allow=tuple(allow or ()),
        exit=exit_,
        max_bytes=size,
        log_level=log_level,
        command=tuple(argv),
        engine="atb" if engine_ == "atb" else "torch",
    )
    outcome = script.step("outcome", check_command, argv, plan, need_probe=asked_for)
    if headroom is not None and (script.asked() or not outcome.reason):
        script.act(write_headroom, headroom, outcome)
    script.end(outcome)
    for line in messages(outcome):
        print(line, file=sys.stderr, flush=True)
    for line in findings(outcome):
        print(line, flush=True)
    return outcome.exit_code


def _fresh(base: Path) -> Path:
    """A folder that is not there yet."""
    stem = f"errcheck_{datetime.now():%Y%m%d_%H%M%S}"
    number, folder = 0, base / stem
    while folder.exists():
        number += 1
        folder = base / f"{stem}_{number}"
    return folder


def messages(outcome: WatchOutcome) -> list[str]:
    """What is said around the findings, in the order of its importance."""
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
        lines.append(f"driftline: {_in_short(outcome)}")
        lines += _nearest(outcome)
    if plan.says("warning"):
        lines += [f"  note: {text}" for text in outcome.remarks[:MOST_SHOWN]]
    if outcome.findings and plan.says("info") and Path(plan.folder).is_dir():
        where = shlex.quote(words.shown(plan.folder))
        look = "opcheck -i" if plan.level == "operator" else "show"
        lines.append(f"  written to {where}, tensors and all: driftline {look} {where}")
    if lines and lines[0].startswith("  "):
        lines[0] = f"driftline: {lines[0].strip()}"
    return lines


def findings(outcome: WatchOutcome) -> list[str]:
    """The result: what was found. The one at which the program was stopped comes last."""
    lines: list[str] = []
    stopped = outcome.stopped
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for one in outcome.findings:
        if stopped is None or (one.pid, one.number) != (stopped.pid, stopped.number):
            alike.setdefault((one.site, one.types, one.cause, one.rank), []).append(one)
    for those in list(alike.values())[:MOST_SHOWN]:
        lines += those[0].lines()
        if len(those) > 1:
            lines.append(f"  and {len(those) - 1} more there, the last in step {those[-1].step}")
    if len(alike) > MOST_SHOWN:
        lines.append(f"findings at {len(alike) - MOST_SHOWN} more sites are in the files")
    for probed in outcome.atb or ():
        lines.append(f"overflow in {probed.operator}, says the ATB probe in {probed.path.name}")
    if stopped is not None:
        lines += stopped.lines()
    return lines


def _in_short(outcome: WatchOutcome) -> str:
    plan = outcome.plan
    count = len(outcome.findings)
    processes = outcome.processes
    where = "1 process" if processes == 1 else f"{processes} processes"
    looked = f"{_count(outcome.calls, plan.level)} in {where} watched for {', '.join(plan.types)}"
    if outcome.silent and not processes:
        looked = f"{plan.level}s watched for {', '.join(plan.types)} until the program was killed"
    if outcome.atb is not None:
        looked += " by torch, and kernels by the ATB probe"
    if not outcome.found:
        return f"{looked}: nothing found"
    total = count + len(outcome.atb or ())
    text = f"{looked}: {_count(total, 'finding')}"
    if outcome.propagators:
        text += f"; {_count(outcome.propagators, plan.level)} only handed on what was there"
    if outcome.repeats:
        text += f"; {outcome.repeats} more of the same at the same sites"
    if outcome.silent and processes and outcome.stopped is None:
        text += (
            f"; {_count(outcome.silent, 'more process', 'more processes')} did not end by itself"
        )
    return text + ("; the program was stopped" if outcome.stopped is not None else "")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _nearest(outcome: WatchOutcome) -> list[str]:
    """The sites that came nearest to the top of a narrow format, where that was asked for."""
    if not {"saturation", "all"}.intersection(outcome.plan.types):
        return []
    from driftline.numerics.dtypes import PATTERNS

    narrow = [row for row in outcome.headroom if PATTERNS[row[1]].narrow and row[3] is not None]
    return [
        f"  headroom {bits:.1f} bits: {site}, {dtype}, largest magnitude {most:.4g}"
        for site, dtype, most, bits in narrow[:MOST_SITES]
    ]


def write_headroom(path: Path, outcome: WatchOutcome) -> None:
    """How near every site came to the largest value of its format, as csv."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("site", "dtype", "largest_magnitude", "headroom_bits"))
            for site, dtype, most, bits in outcome.headroom:
                table.writerow((site, dtype, repr(most), "" if bits is None else f"{bits:.3f}"))
    except OSError as problem:
        raise BadInput(f"cannot write {path}: {problem.strerror or problem}") from None
