"""Run an unchanged command with the error check in every Python process, and report the findings.

As in `launcher`, the program keeps its terminal and signals. With `--engine atb` the probe of the
ATB library looks for overflows too; this file sets the probe's options and reads its result files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from driftline import settings
from driftline.captures.errcheck.findings import Finding, read_findings
from driftline.captures.launch.atb import NoProbe, find_probe
from driftline.captures.launch.child import require_command, run_child
from driftline.captures.launch.environment import build_environment
from driftline.captures.launch.jobs import LOG_LEVELS, WatchPlan
from driftline.captures.launch.messages import LARGEST_MESSAGE, Messages, read_messages
from driftline.captures.launch.outcome import explain_no_start
from driftline.errors import EXIT_COULD_NOT, EXIT_DIFFERENT, EXIT_FINE, BadInput

# Names of the result files of the older and the newer probe.
_RESULTS = ("ait_overflow_res_*.txt", "msit_overflow_res_*.txt")
_OPERATOR = re.compile(r"Operator name:\s*(\S.*)")
_LARGEST_TEXT = 1 << 20
Headroom = tuple[str, str, float, float | None]
"""(site, element type, largest magnitude, bits left before overflow)."""


@dataclass(frozen=True, slots=True)
class AtbFinding:
    """An overflow that the ATB library's probe reported: the kernel and the result file."""

    operator: str
    path: Path


@dataclass(frozen=True, slots=True)
class WatchOutcome:
    """The outcome of one launch.

    Attributes:
        plan: The plan that was carried out.
        program_status: The program's exit status as a shell reports it.
        findings: Findings of all processes, the earliest first.
        stopped: The finding at which the program was stopped.
        calls: Number of operator or module calls that were checked.
        processes: Number of processes that reported at their end.
        propagators: Number of calls that only passed on bad values of their inputs.
        repeats: Number of saturations and underflows at sites that were already reported.
        headroom: How near sites came to their format's largest value, the nearest first.
        atb: Findings of the probe; None if it was not used.
        reason: Why nothing was watched; empty if something was.
        hint: What to try then.
        remarks: Sentences for the user.
        silent: Number of watched processes that ended without a report, because they were killed.
    """

    plan: WatchPlan
    program_status: int
    findings: tuple[Finding, ...] = ()
    stopped: Finding | None = None
    calls: int = 0
    processes: int = 0
    propagators: int = 0
    repeats: int = 0
    headroom: tuple[Headroom, ...] = ()
    atb: tuple[AtbFinding, ...] | None = None
    reason: str = ""
    hint: str = ""
    remarks: tuple[str, ...] = ()
    silent: int = 0

    @property
    def found(self) -> bool:
        return bool(self.findings or self.atb)

    @property
    def exit_code(self) -> int:
        """1 if there is a finding; otherwise the program's own failure, or ours."""
        if self.found or self.stopped is not None:
            return EXIT_DIFFERENT
        if self.program_status:
            return self.program_status
        return EXIT_COULD_NOT if self.reason else EXIT_FINE


def check_command(argv: Sequence[str], plan: WatchPlan, *, need_probe: bool = True) -> WatchOutcome:
    """Run a command to its end, or to its first finding, with the error check in it.

    Args:
        argv: The words of the command; no shell reads them.
        plan: What to look for.
        need_probe: With the engine atb, refuse to start without its probe library.

    Raises:
        BadInput: The command cannot be started, or the output cannot be written.
        NoProbe: The probe is needed and does not exist.
    """
    base = settings.environment()
    require_command(argv, base)
    remarks: list[str] = []
    if plan.engine == "atb":
        try:
            base = atb_orders(plan, base, find_probe(base))
        except NoProbe as problem:
            if need_probe:
                raise
            remarks.append(str(problem))
            plan = replace(plan, engine="torch")
    _require_writable(Path(plan.output))
    made: list[Path] = []
    if plan.engine == "atb":
        # The probe does not make its folder, and without one it silently reports nothing.
        made = _make_folder(Path(plan.output))
    # The probe may append to result files of earlier programs, so files that change are recognised.
    before = _results(plan)
    # A process that stops at a finding sends signals to its ancestors below the launcher.
    plan = replace(plan, launcher=os.getpid())
    with tempfile.TemporaryDirectory(prefix="driftline-", ignore_cleanup_errors=True) as folder:
        program_environment = build_environment(Path(folder).resolve(), plan)
        status = run_child(argv, program_environment.environment(base))
        messages = read_messages(program_environment.messages)
        watched = _read_messages(program_environment.messages, "watched")
        stopped = _read_stop(program_environment.messages)
        if stopped is not None:
            _stop_the_rest(program_environment.messages, str(program_environment.plan_path))
    # Findings on disk survive a kill; messages contain those that a full disk did not take.
    findings = read_findings(Path(plan.folder))
    written = {(report.pid, report.number) for report in findings}
    for text in (line for report in watched for line in report["unwritten_findings"]):
        finding = Finding.from_json(text)
        if (finding.pid, finding.number) not in written:
            findings.append(finding)
    outcome = judge(plan, status, messages, watched, findings, stopped, remarks)
    if plan.engine == "atb":
        outcome = _beside_torch(outcome, _found_by_probe(plan, before))
    for folder in made:
        # Without a finding nothing is left behind.
        with contextlib.suppress(OSError):
            folder.rmdir()
    return outcome


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that did not exist, the innermost first.

    Raises:
        BadInput: The folder cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(
            f"cannot make the folder {folder}: {problem.strerror or problem}",
            hint="choose another output with -o",
        ) from None
    return missing


def judge(
    plan: WatchPlan,
    status: int,
    messages: Messages,
    watched: Sequence[Mapping[str, Any]],
    findings: Sequence[Finding],
    stopped: Finding | None,
    remarks: Iterable[str] = (),
) -> WatchOutcome:
    """Combine messages and findings on disk into an outcome."""
    calls = sum(int(report["calls"]) for report in watched)
    all_remarks = [*remarks, *(text for report in watched for text in report["remarks"])]
    all_remarks += messages.failed if messages.started else ()
    nearest: dict[tuple[str, str], Headroom] = {}
    for report in watched:
        for site, dtype, most, bits in report["headroom"]:
            nearest_so_far = nearest.get((site, dtype))
            # A site of several ranks has one row, with the value nearest to the limit.
            if nearest_so_far is None or most > nearest_so_far[2]:
                nearest[site, dtype] = (site, dtype, most, bits)
    outcome = WatchOutcome(
        plan,
        status,
        tuple(findings),
        stopped,
        calls,
        len(watched),
        sum(int(report["propagators"]) for report in watched),
        sum(int(report["repeats"]) for report in watched),
        tuple(sorted(nearest.values(), key=_by_headroom)),
        remarks=tuple(dict.fromkeys(all_remarks)),
        silent=max(0, messages.started - len(watched)),
    )
    if calls or findings or stopped is not None:
        return outcome
    reason, hint = _explain_nothing(plan, messages, len(watched))
    return replace(outcome, reason=reason, hint=hint)


def _by_headroom(row: Headroom) -> tuple[float, str]:
    return (float("inf") if row[3] is None else row[3], row[0])


def _explain_nothing(plan: WatchPlan, messages: Messages, reported: int) -> tuple[str, str]:
    if messages.started == 0:
        reason, hint = explain_no_start(messages)
        # The reasons are shared with capture and contain its verb.
        return reason.replace("captur", "watch"), hint
    if reported < messages.started:
        return (
            "nothing was found up to the end of the program, which did not end by itself: how much "
            "was watched is not known",
            "its own messages above say why it ended",
        )
    what = "operator ran" if plan.level == "operator" else "module was called"
    return (
        f"nothing was watched: torch was imported, and no {what}",
        "is this the command that runs the model?"
        if plan.level == "operator"
        else "--level operator also sees operators that run in no torch.nn.Module",
    )


def _require_writable(output: Path) -> None:
    """Check that findings can be written to the output, without making anything.

    Raises:
        BadInput: They cannot.
    """
    # The output is made with the first finding, so the nearest existing parent is checked.
    folder = output
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise BadInput(f"'{folder}' is no folder", hint="choose another output with -o")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(
            f"cannot write to '{folder}'", hint="choose an output folder that can be written"
        )


# --- Messages.


def _read_messages(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The readable messages of one kind."""
    messages: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"{kind}.*")):
        if path.stat().st_size > LARGEST_MESSAGE:
            continue
        with contextlib.suppress(ValueError):
            data: object = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            if isinstance(data, dict):
                messages.append(cast("dict[str, Any]", data))
    return messages


def _read_stop(folder: Path) -> Finding | None:
    # Several ranks may stop at once; the earliest finding is reported.
    stops = [Finding.from_json(json.dumps(data)) for data in _read_messages(folder, "stopped")]
    return min(stops, key=lambda finding: finding.time, default=None)


def _stop_the_rest(folder: Path, plan_path: str) -> None:
    """Terminate other ranks and children of a program that was stopped at a finding."""
    sign = f"{settings.LAUNCH}={plan_path}".encode()
    for path in folder.glob("reached.*"):
        word = path.name.split(".")[1]
        with contextlib.suppress(OSError, ValueError):
            # A process id may have been reused, so only processes with this plan in their
            # environment are terminated.
            carried = Path(f"/proc/{word}/environ").read_bytes().split(b"\0")
            if sign in carried:
                os.kill(int(word), signal.SIGTERM)


# --- The ATB library.


def atb_orders(plan: WatchPlan, base: Mapping[str, str], probe: Path) -> dict[str, str]:
    """The program's environment with the probe's options for finding overflows."""
    env = dict(base)
    preloaded = env.get("LD_PRELOAD", "")
    env["LD_PRELOAD"] = f"{probe}:{preloaded}" if preloaded else str(probe)
    return env | {
        "ATB_CHECK_TYPE": "1",  # overflow, the only check of the probe
        "ATB_EXIT": str(int(plan.exit)),
        "ATB_OUTPUT_DIR": os.path.realpath(plan.output),
        "ATB_AIT_LOG_LEVEL": str(LOG_LEVELS.index(plan.log_level)),
    }


def _results(plan: WatchPlan) -> dict[Path, tuple[int, int]]:
    """Existing result files, with the time and size by which a change is recognised."""
    folder = Path(plan.output)
    stamps: dict[Path, tuple[int, int]] = {}
    for pattern in _RESULTS:
        for path in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):
                facts = path.stat()
                stamps[path] = facts.st_mtime_ns, facts.st_size
    return stamps


def _found_by_probe(
    plan: WatchPlan, before: Mapping[Path, tuple[int, int]]
) -> tuple[AtbFinding, ...]:
    findings: list[AtbFinding] = []
    for path, facts in _results(plan).items():
        # The file was not changed by the program.
        if before.get(path) == facts:
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:
            text = file.read(_LARGEST_TEXT).decode("utf-8", "replace")
            names = [match[1].strip() for match in _OPERATOR.finditer(text)]
            findings += [AtbFinding(name, path) for name in names or ["(no operator is named)"]]
    return tuple(findings)


def _beside_torch(outcome: WatchOutcome, atb: tuple[AtbFinding, ...]) -> WatchOutcome:
    """Combine the outcome of torch's check with the findings of the ATB probe.

    With the probe, it is not a failure if torch's check saw nothing: the probe may have watched the
    program, and it reports nothing if there is no overflow.
    """
    remarks = outcome.remarks
    if set(outcome.plan.types) - {"overflow"}:
        remarks = (*remarks, "the ATB probe looks for overflow only")
    if outcome.reason:
        remarks = (*remarks, "torch: " + outcome.reason)
    return replace(outcome, atb=atb, reason="", hint="", remarks=remarks)
