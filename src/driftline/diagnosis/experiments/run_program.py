"""Start an unchanged program with an experiment inside, and read the reports of its processes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline import settings
from driftline.captures.launch.child import require_command, run_child
from driftline.captures.launch.environment import build_environment
from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.launch.messages import Messages, read_messages
from driftline.errors import BadFile


class Ended(NamedTuple):
    """A program that has ended.

    Attributes:
        status: Its exit status, as a shell reports it.
        reports: The reports of its processes on the experiment.
        messages: All messages of its processes.
    """

    status: int
    reports: tuple[Mapping[str, Any], ...]
    messages: Messages

    @property
    def why_not(self) -> str:
        """Why no process reported anything; empty if one did."""
        # Reasons are tried in the order in which they can occur during a program's life.
        if self.reports:
            return ""
        if self.messages.failed:
            return f"the experiment could not start ({self.messages.failed[0]})"
        if self.messages.reached == 0:
            return "no Python process could be reached"
        if self.messages.started == 0 and self.messages.apart:
            frameworks = " and ".join(self.messages.apart)
            return f"the program imported {frameworks}, and experiments need a torch program"
        if self.messages.started == 0:
            return "no Python process of the program imported torch"
        return "the program ended before it could say anything"


def run_with(
    argv: Sequence[str],
    plan: CapturePlan,
    variables: Mapping[str, str] | None = None,
    *,
    to_stderr: bool = False,
) -> Ended:
    """Run a command to its end with the plan's experiment in it.

    Args:
        argv: The words of the command.
        plan: The capture plan, with an experiment and a selection.
        variables: Environment variables for the program, in addition to its usual ones.
        to_stderr: Whether the program's output goes to standard error. For programs that are run
            many times, so that only the result is printed to standard output.

    Raises:
        BadInput: The command cannot be started.
        BadFile: A file that the experiment read became shorter meanwhile, so zeros were read.
    """
    # `variables` come last, so that they override those of the shell.
    base = {**settings.environment(), **(variables or {})}
    require_command(argv, base)
    with tempfile.TemporaryDirectory(prefix="driftline-", ignore_cleanup_errors=True) as folder:
        program_environment = build_environment(Path(folder).resolve(), plan)
        status = run_child(argv, program_environment.environment(base), to_stderr=to_stderr)
        messages = read_messages(program_environment.messages)
    reports = tuple(_read(messages.experiments))
    for report in reports:
        if shortened := report.get("shortened"):
            raise BadFile(
                f"{shortened}; what came of it is not to be used",
                hint="wait until whoever writes it is done, then run this again",
            )
    return Ended(status, reports, messages)


def _read(texts: Sequence[str]) -> list[Mapping[str, Any]]:
    reports: list[Mapping[str, Any]] = []
    for text in texts:
        try:
            parsed: object = json.loads(text)
        except ValueError:  # cut short by a kill
            continue
        if isinstance(parsed, dict):
            reports.append(cast("Mapping[str, Any]", parsed))
    return reports
