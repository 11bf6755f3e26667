"""Run an unchanged command with capture in every Python process it starts, and report the outcome.

The command keeps its terminal and signals, and its exit status is reported (see `child`). This file
decides on the outcome: first comes a failure of the program, then a dump without any tensor, with
the reason found in the processes' messages.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from driftline import settings
from driftline.captures.launch.atb import (
    AtbHarvest,
    NoProbe,
    atb_environment,
    dumps_in,
    find_probe,
    gather_atb,
    not_for_the_probe,
    process_folders,
)
from driftline.captures.launch.child import UnseenPythons, require_command, run_child
from driftline.captures.launch.derived_files import Sheets, draw_atb, finish_sheets
from driftline.captures.launch.environment import build_environment
from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.launch.messages import Messages, Place, read_messages
from driftline.captures.launch.outcome import (
    Harvest,
    explain_empty_dump,
    gather,
    process_trees,
    unseen_words,
)
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE, BadInput, DriftlineError
from driftline.runs.layout import MANIFEST
from driftline.runs.provenance import hold_path
from driftline.runs.scope import note_end

if TYPE_CHECKING:
    from driftline.runs.stores.upload import Sending, Sent


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one launch.

    Attributes:
        plan: The plan that was carried out.
        program_status: The program's exit status as a shell reports it.
        harvest: Counts of the dump on disk.
        messages: Messages of the processes.
        skipped_steps: Steps that ran and were not selected.
        unmatched: Sentences about patterns that matched nothing, with the nearest names.
        reason: Why nothing was captured; empty if something was.
        hint: What to try then.
        atb: What the probe of the ATB library wrote; None if the probe was not used.
        without_probe: Why the probe was not used although it was requested; otherwise empty.
        sheets: Files next to the tensors: operators, kernels, times, graphs.
        sent: Result of the upload to the plan's address; None if it has none.
    """

    plan: CapturePlan
    program_status: int
    harvest: Harvest
    messages: Messages
    skipped_steps: tuple[int, ...] = ()
    unmatched: tuple[str, ...] = ()
    reason: str = ""
    hint: str = ""
    atb: AtbHarvest | None = None
    without_probe: str = ""
    sheets: Sheets = field(default_factory=Sheets)
    sent: Sent | None = None

    @property
    def exit_code(self) -> int:
        """The program's status if it failed; otherwise whether the dump is empty or unsent."""
        if self.program_status:
            return self.program_status
        unsent = self.sent is not None and self.sent.reason
        return EXIT_COULD_NOT if self.reason or unsent else EXIT_FINE

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the processes and the run, each once."""
        reported = [note for report in self.messages.reports for note in report.notes]
        probes = [] if self.atb is None else [*not_for_the_probe(self.plan), *self.atb.trouble]
        missed = [text for text in unseen_words(self.messages.unseen) if text not in self.reason]
        return tuple(
            dict.fromkeys([*reported, *self.harvest.events, *self.sheets.trouble, *probes, *missed])
        )


def run_command(
    argv: Sequence[str], plan: CapturePlan, *, force: bool = False, need_probe: bool = True
) -> Outcome:
    """Run a command to its end with the plan's capture in it.

    Args:
        argv: The words of the command; no shell reads them.
        plan: What to capture; its output must not exist.
        force: Replace an earlier dump at the output.
        need_probe: With the engine atb, refuse to start without its probe library.

    Raises:
        BadInput: The command cannot be started, or the output cannot be written.
        AlreadyThere: The output exists, or another process is writing to it.
        Unreachable: The plan's address does not answer.
        NoProbe: The probe is needed and does not exist.
    """
    # The command is checked first, so that a misspelt one leaves nothing on disk.
    require_command(argv, settings.environment())
    plan, base, without_probe = _engine_environment(plan, need_probe=need_probe)
    # The remote address may be refused, so it is claimed before the local folder is made.
    sending = _begin_sending(plan, force=force)
    try:
        prepare_output(plan, force=force and not plan.url)
    except DriftlineError:
        if sending is not None:
            sending.abandon()
        raise
    # A second dump into ait's tree only adds folders of processes, as the original tool does.
    earlier = process_trees(plan) if plan.layout == "ait" else frozenset[Path]()
    # The lock lasts until everything below has been read and sent.
    lock = _hold(plan)
    # Earlier dumps in the same folder must not be counted as this program's.
    already = process_folders(Path(plan.output)) if plan.engine == "atb" else frozenset[Path]()
    # The folder may still be in use by a process that outlives the program.
    with tempfile.TemporaryDirectory(prefix="driftline-", ignore_cleanup_errors=True) as folder:
        program_environment = build_environment(Path(folder).resolve(), plan)
        try:
            if sending is not None:
                sending.begin()
            unseen = UnseenPythons(settings.LAUNCH)
            status = run_child(argv, program_environment.environment(base), unseen=unseen)
        # The command could not be started, so everything that was prepared is removed.
        except BadInput:
            if sending is not None:
                sending.abandon()
            clear_empty_output(plan)
            raise
        messages = replace(
            read_messages(program_environment.messages), unseen=tuple(unseen.commands())
        )
    sheets = finish_sheets(plan)
    if plan.layout == "run" and (Path(plan.output) / MANIFEST).is_file():
        note_end(Path(plan.output), status)
    outcome = judge(plan, status, messages, gather(plan, earlier), sheets)
    if plan.engine == "atb":
        outcome = _with_atb(outcome, plan, already)
    empty = not outcome.harvest.tensors and not outcome.harvest.topologies and not sheets.words
    if sending is not None:
        if empty:
            sending.abandon()
        else:
            outcome = replace(outcome, sent=sending.finish())
    if lock is not None:
        os.close(lock)
    if empty:
        clear_empty_output(plan)
    return replace(outcome, without_probe=without_probe)


def _engine_environment(
    plan: CapturePlan, *, need_probe: bool
) -> tuple[CapturePlan, Mapping[str, str], str]:
    """The plan to carry out, the program's base environment, and why there is no probe.

    Without its probe, the engine atb is replaced by torch.

    Raises:
        NoProbe: The probe is needed and does not exist.
    """
    base = settings.environment()
    without_probe = ""
    if plan.engine == "atb":
        try:
            probe = find_probe(base)
            base = atb_environment(plan, base, probe, timestamp=f"{datetime.now():%Y%m%d_%H%M%S}")
        except NoProbe as problem:
            if need_probe:
                raise
            without_probe = str(problem)
            plan = replace(plan, engine="torch")
    if plan.wants_profile:
        # Without this the profiler's library prints to the program's terminal.
        base = {settings.PROFILER_LOG_LEVEL: "99", **base}
    return plan, base, without_probe


def _with_atb(outcome: Outcome, plan: CapturePlan, already: frozenset[Path]) -> Outcome:
    """Add the files of the ATB probe to an outcome, and draw their graphs if requested."""
    outcome = beside_torch(outcome, gather_atb(plan, already), plan.step_option)
    if "onnx" not in plan.types or outcome.atb is None:
        return outcome
    drawn = draw_atb(outcome.atb.roots)
    sheets = Sheets(outcome.sheets.words, outcome.sheets.trouble + drawn.trouble)
    also_written = (*outcome.atb.also_written, *drawn.words)
    return replace(outcome, sheets=sheets, atb=replace(outcome.atb, also_written=also_written))


def _begin_sending(plan: CapturePlan, *, force: bool) -> Sending | None:
    """Claim the remote address, if there is one, before the program is started."""
    if not plan.url:
        return None
    from driftline.runs.stores.upload import Sending

    return Sending(Path(plan.output), plan.url, force=force, staged=True)


def _hold(plan: CapturePlan) -> int | None:
    """Lock the output, so that no other dump replaces this run while this process lives."""
    if plan.layout != "run":
        return None
    try:
        return hold_path(Path(plan.output) / MANIFEST)
    except OSError:
        return None


def beside_torch(outcome: Outcome, atb: AtbHarvest, step_option: str) -> Outcome:
    """Combine the outcome of torch's capture with that of the ATB probe."""
    # The probe's files count as a dump, even if torch captured nothing.
    if atb.tensors or atb.also_written:
        return replace(outcome, atb=atb, reason="", hint="")
    if not outcome.reason:
        return replace(outcome, atb=atb)
    return replace(
        outcome,
        atb=atb,
        reason=f"{outcome.reason}; and the ATB probe wrote nothing",
        hint=f"does the program load libatb.so, and do {step_option}, -ids, -opname and -device "
        "leave something of it?",
    )


def prepare_output(plan: CapturePlan, *, force: bool) -> None:
    """Make the output folder; with `force`, replace an earlier dump in it, but nothing else."""
    output = Path(plan.output)
    if force and plan.engine == "atb":
        for dump in dumps_in(output):
            # The output itself may hold other files of the user, so only dumps in it are removed.
            if dump != output:
                shutil.rmtree(dump, ignore_errors=True)
    if plan.layout == "run":
        from driftline.runs.provenance import create_run

        create_run(output, command=plan.command, force=force)
        return
    tree = output / "ait_dump"
    try:
        # Every process writes its own folder there, so nothing that exists is overwritten.
        if force and tree.exists():
            shutil.rmtree(tree)
        tree.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(
            f"cannot write to '{output}': {problem.strerror or problem}",
            hint="choose an output folder that can be written",
        ) from None


def clear_empty_output(plan: CapturePlan) -> None:
    """Remove an output in which nothing was captured, so that its name can be used again."""
    output = Path(plan.output)
    if plan.layout == "ait":
        tree = output / "ait_dump"
        if not any(path.is_file() for path in tree.rglob("*")):
            shutil.rmtree(tree, ignore_errors=True)
    # Only files that `prepare_output` makes are removed, never a user's own.
    elif not any(output.glob("rank*")):
        for name in ("run.json", "events.jsonl"):
            (output / name).unlink(missing_ok=True)
    # The current folder is kept, because it is that of the user's shell.
    if output.is_dir() and output != Path.cwd() and not any(output.iterdir()):
        output.rmdir()


def judge(
    plan: CapturePlan,
    status: int,
    messages: Messages,
    harvest: Harvest,
    sheets: Sheets | None = None,
) -> Outcome:
    """Combine messages and counts into an outcome; a pure function, so that it is easy to test."""
    ran = sorted({step for report in messages.reports for step in report.steps_seen})
    skipped = tuple(step for step in ran if not plan.selection.takes_step(step))
    unmatched = tuple(_unmatched(plan, messages.places)) if messages.places else ()
    sheets = sheets or Sheets()
    topology = "model" in plan.types or "layer" in plan.types
    got_something = (
        harvest.tensors > 0
        or bool(sheets.words)
        or (harvest.topologies > 0 and topology and not plan.wants_tensors)
    )
    # If the run was refused, that reason is better than any derived one.
    reason, hint = harvest.refused
    if not got_something and not reason:
        reason, hint = explain_empty_dump(plan, messages, skipped, unmatched)
    return Outcome(plan, status, harvest, messages, skipped, unmatched, reason, hint, sheets=sheets)


def _unmatched(plan: CapturePlan, places: Iterable[Place]) -> Iterable[str]:
    seen = [(place.site, place.class_name, place.ids) for place in places]
    for kind, pattern, hint in plan.selection.unmatched(seen):
        option = {"site": "--site", "class": "--class", "ids": "-ids", "opname": "-opname"}[kind]
        yield f"{option} '{pattern}' matches no module" + (f"; {hint}" if hint else "")
