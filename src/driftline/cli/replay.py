"""`driftline replay`: the reference's modules on the candidate's inputs."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

from driftline.captures.selection import Selection, patterns
from driftline.cli import dump_words as words
from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.diagnosis.experiments.replay import MOST_HELD, Replayed
from driftline.diagnosis.experiments.replay import replay as run_replay
from driftline.errors import EXIT_FINE
from driftline.units import size_of

_WHICH = "Which modules"
_SHOWN = 6


def replay(
    candidate: Path,
    /,
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    site: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    class_: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    step: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    reference_run: Annotated[Path | None, Option(metavar="RUN", group=_WHICH)] = None,
    map_: Annotated[
        list[str] | None, Option(several=True, metavar="REF=CAND", group=_WHICH)
    ] = None,
    partial: Annotated[bool, Option(group=_WHICH)] = False,
    check_each: bool = False,
    keep_all: bool = False,
    max_held: Annotated[str, Option(metavar="SIZE")] = "",
    output: Annotated[Path, Option(names=("--output", "-o"), metavar="DIR")] = Path("replay"),
    force: bool = False,
) -> int:
    """Run the reference program, its modules also applied to what the candidate's were given.

        driftline replay cand --exec "python infer.py --dtype float32" -o replayed
        driftline diagnose ref cand --replay replayed

    Every module is applied to the candidate's captured inputs, once in float32 and once in the
    candidate's number format. So an error is seen where it is made, not in everything after it.
    The program's own results stay what they are, to the bit. A module that does not give its own
    output again from its own inputs (dropout in training, say) is left out and listed.

    Args:
        candidate: A run with inputs and outputs in full, as `driftline dump` makes it.
        program: The reference program and its arguments, after two dashes.
        exec_: The reference program as one text; no pipes or redirection.
        site: Only module paths that match, such as 'model.layers.*.mlp'.
        class_: Only classes that match, such as '*Norm'.
        step: Only these steps: numbers, ranges (3-5) or globs.
        reference_run: A dump of the reference program, where the two models' names differ.
        map_: With --reference-run: modules that are called differently.
        partial: Go on where the two models differ, and leave out what differs.
        check_each: Prove for every call that the module gives its own output again. Default: once
            for all calls of one class with the same shapes and parts.
        keep_all: Keep every result. Default: not the values of calls that give, in the candidate's
            number format, the candidate's own output to the bit; their noise is measured on some
            rows instead.
        max_held: Memory that may be taken in the program, such as 2GB. Default: 4GB.
        output: Folder of the replay. Default: ./replay.
        force: Replace a replay that is there already.
    """
    outcome = script.step(
        "outcome",
        run_replay,
        candidate,
        words.command_of(exec_, program, "replay"),
        output,
        selection=Selection(sites=patterns(site), classes=patterns(class_), steps=patterns(step)),
        reference_run=reference_run,
        maps=tuple(map_ or ()),
        most_held=size_of(max_held) if max_held else MOST_HELD,
        partial=partial,
        check_each=check_each,
        keep_all=keep_all,
        force=force,
    )
    script.end(outcome)
    for line in summary(outcome, candidate):
        print(line, file=sys.stderr)
    return outcome.status or EXIT_FINE


def summary(outcome: Replayed, candidate: Path) -> list[str]:
    """What is said at the end."""
    lines: list[str] = []
    if outcome.status:
        lines.append(f"driftline: the program ended with status {outcome.status}")
    counts = outcome.counts()
    rest = [f"{counts[word]} {word}" for word in ("unknown", "skipped") if counts[word]]
    lines.append(
        f"driftline: {counts['replayed']} of {len(outcome.sites)} modules replayed, "
        f"{outcome.calls} calls" + "".join(f", {each}" for each in rest) + f" in {outcome.folder}"
    )
    unknown = [(s, str(e["reason"])) for s, e in outcome.sites.items() if e["status"] == "unknown"]
    reasons = Counter(reason for _, reason in unknown)
    for reason, count in reasons.most_common(_SHOWN):
        first = next(site for site, why in unknown if why == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"  unknown: {first}{more}: {reason}")
    if len(reasons) > _SHOWN:
        lines.append(f"  and {len(reasons) - _SHOWN} more reasons in replay.json")
    lines += [f"  note: {note}" for note in outcome.notes[:_SHOWN]]
    if counts["replayed"]:
        lines.append(
            f"  next: driftline diagnose REFERENCE_RUN {shlex.quote(str(candidate))} "
            f"--replay {shlex.quote(str(outcome.folder))}"
        )
    return lines
