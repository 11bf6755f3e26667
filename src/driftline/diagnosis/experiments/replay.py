"""`driftline replay`: apply the reference program's modules to the candidate's inputs as well.

The reference program runs once. This file checks the request, starts the program and gathers its
reports; `live.replay` is the part inside the program. Diagnosis interprets the results.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.alignment.align import AlignOptions, align_runs
from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.selection import Selection
from driftline.diagnosis.experiments.experiment_folders import (
    EXACT,
    NATIVE,
    REPLAY,
    identity,
    make_room,
    write_json,
)
from driftline.diagnosis.experiments.replay_method import USUAL, ReplayMethod
from driftline.diagnosis.experiments.run_program import Ended, run_with
from driftline.errors import BadInput, DriftlineError
from driftline.formats.registry import open_run
from driftline.runs.redaction import redact_argv
from driftline.runs.run import Run


class NotTheSameModel(DriftlineError):
    """The program builds a model that differs from the captured one."""


class Replayed(NamedTuple):
    """The outcome of a replay.

    Attributes:
        folder: The folder of the replay.
        status: The program's exit status.
        sites: The outcome of each site of the candidate, as in `replay.json`.
        calls: Number of replayed calls.
        notes: Further remarks for the user, a sentence each.
    """

    folder: Path
    status: int
    sites: Mapping[str, Mapping[str, Any]]
    calls: int
    notes: tuple[str, ...] = ()

    def counts(self) -> Counter[str]:
        return Counter(str(entry["status"]) for entry in self.sites.values())


def replay(
    candidate: Path,
    argv: Sequence[str],
    output: Path,
    *,
    selection: Selection | None = None,
    reference_run: Path | None = None,
    maps: Sequence[str] = (),
    method: ReplayMethod = USUAL,
    force: bool = False,
) -> Replayed:
    """Run the reference program with its modules also applied to the candidate's inputs.

    Args:
        candidate: A run with inputs from before the calls, with all values.
        argv: The reference program.
        output: Folder for `replay.json` and the runs `exact` and `native`.
        selection: Which modules and steps; all by default.
        reference_run: A dump of that program, by which the names of the two models are aligned.
        maps: `REFERENCE=CANDIDATE` for modules that have different names.
        method: How thoroughly calls are replayed.
        force: Replace an earlier experiment at the output.

    Raises:
        NotTheSameModel: Modules or shapes clash; the message names the first clash.
        DriftlineError: The run has no inputs, or the program cannot be started or never calls a
            model.
    """
    runs = [(candidate, output)]
    (replayed,) = _replay(runs, argv, selection, reference_run, maps, method, force=force)
    if isinstance(replayed, DriftlineError):
        raise replayed
    return replayed


def replay_several(
    candidates: Sequence[Path],
    argv: Sequence[str],
    output: Path,
    *,
    selection: Selection | None = None,
    reference_run: Path | None = None,
    maps: Sequence[str] = (),
    method: ReplayMethod = USUAL,
    force: bool = False,
) -> list[Replayed]:
    """Replay several candidates with one execution of the reference program.

    Args:
        candidates: Runs with inputs, as for `replay`.
        argv: The reference program.
        output: Folder of the replays; each one has the name of its candidate's folder.
        selection: As for `replay`; it applies to all candidates.
        reference_run: As for `replay`; it applies to all candidates.
        maps: As for `replay`; they apply to all candidates.
        method: As for `replay`; it applies to all candidates.
        force: Replace earlier experiments.

    Raises:
        BadInput: Two candidates have the same name, or only some could be replayed. In that case
            the message has the first reason, and the other replays are complete.
        DriftlineError: The first reason that `replay` would raise, if none could be replayed.
    """
    names = Counter(candidate.absolute().name for candidate in candidates)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise BadInput(
            f"{count} of the runs are called '{name}', and each replay's folder is called like "
            "its run",
            hint="rename one, or replay it by itself",
        )
    runs = [(candidate, output / candidate.absolute().name) for candidate in candidates]
    outcomes = _replay(runs, argv, selection, reference_run, maps, method, force=force)
    replayed = [outcome for outcome in outcomes if isinstance(outcome, Replayed)]
    for outcome in outcomes:
        if isinstance(outcome, DriftlineError):
            if not replayed:
                raise outcome
            folders = " and ".join(f"'{other.folder}'" for other in replayed)
            raise BadInput(f"{outcome} (complete: {folders})", hint=outcome.hint) from outcome
    return replayed


def _replay(
    candidates: Sequence[tuple[Path, Path]],
    argv: Sequence[str],
    selection: Selection | None,
    reference_run: Path | None,
    maps: Sequence[str],
    method: ReplayMethod,
    *,
    force: bool,
) -> list[Replayed | DriftlineError]:
    """Replay each candidate into the folder paired with it; a failure is returned as its error."""
    runs = [open_run(candidate) for candidate, _ in candidates]
    for run in runs:
        require_inputs(run)
    shown = redact_argv(argv)
    plan = CapturePlan(
        output=str(candidates[0][1].absolute()),
        levels=(),
        command=tuple(shown),
        experiment={
            "kind": "replay",
            "command": shown,
            "selection": (selection or Selection()).to_json(),
            **method.to_json(),
            "runs": [
                {
                    "candidate": str(candidate.absolute()),
                    "output": str(output.absolute()),
                    # Names are aligned before the program starts: loading a model may take minutes.
                    "links": _links(run, reference_run, maps),
                }
                for run, (candidate, output) in zip(runs, candidates, strict=True)
            ],
        },
    )
    for _, output in candidates:
        make_room(output, force=force)
    try:
        ended = run_with(argv, plan)
    except DriftlineError:
        for _, output in candidates:
            _leave_nothing(output)
        raise
    reference = {
        "command": shown,
        "path": None if reference_run is None else str(reference_run.absolute()),
        "status": ended.status,
    }
    outcomes: list[Replayed | DriftlineError] = []
    for index, (run, (candidate, output)) in enumerate(zip(runs, candidates, strict=True)):
        reports = [report["runs"][index] for report in ended.reports if "runs" in report]
        try:
            sites, calls, notes = _gathered(reports, ended, run)
        except DriftlineError as failure:
            _leave_nothing(output)
            outcomes.append(failure)
            continue
        native = output / NATIVE
        # Readers expect both runs. If the candidate's format is wide, the native run is the exact
        # one, linked file by file.
        if not native.exists():
            shutil.copytree(output / EXACT, native, copy_function=_linked)
        write_json(
            output,
            REPLAY,
            {
                "candidate": identity(run, candidate),
                "reference": reference,
                "runs": {"exact": EXACT, "native": NATIVE},
                "calls": calls,
                "notes": list(notes),
                "sites": sites,
            },
        )
        outcomes.append(Replayed(output, ended.status, sites, calls, notes))
    return outcomes


def require_inputs(run: Run) -> None:
    """Raise if a run cannot be replayed at all, and say how to dump one that can.

    Raises:
        BadInput: It has no inputs from before the calls, no values of them, or no outputs.
    """
    how = 'driftline dump -o DIR --exec "..." keeps what replay needs: whole tensors, both sides'
    forward = [r for r in run.records if r.key.phase == "forward" and "/" not in r.key.site]
    inputs = [r for r in forward if r.key.port == "input"]
    before = [r for r in inputs if r.key.moment == "before"]
    if not inputs:
        raise BadInput(
            f"run '{run.name}' holds no inputs, which replay gives to the reference's modules",
            hint=f"{how} (without -stp 1, --port output)",
        )
    if not before:
        raise BadInput(
            f"run '{run.name}' holds inputs from after the calls only, where modules may have "
            "changed them",
            hint=f"{how} (without -time 1)",
        )
    if not any(r.kept == "full" and not run.lost(r) for r in before):
        raise BadInput(
            f"run '{run.name}' holds only the {before[0].kept} of each input, and replay needs "
            "values",
            hint=f"{how} (--keep full)",
        )
    if not any(r.key.port == "output" for r in forward):
        raise BadInput(
            f"run '{run.name}' holds no outputs to set the replayed ones against", hint=how
        )


def _links(run: Run, reference_run: Path | None, maps: Sequence[str]) -> dict[str, str]:
    """Sites of the candidate by those of the reference, from the alignment with `reference_run`.

    Empty without such a run.
    """
    if reference_run is None:
        if maps:
            raise BadInput(
                "--map needs a dump of the reference program to apply to",
                hint="give --reference-run RUN as well",
            )
        return {}
    plan = align_runs(open_run(reference_run), run, AlignOptions(maps=tuple(maps)))
    links: dict[str, str] = {}
    for pair in plan.pairs:
        # The modules of a transformed pair have different shapes, so the inputs would not fit.
        if pair.reference_recipe is None and pair.candidate_recipe is None:
            links.setdefault(pair.reference.key.site, pair.candidate.key.site)
    return links


def _gathered(
    all_reports: Sequence[Mapping[str, Any]], ended: Ended, run: Run
) -> tuple[dict[str, Mapping[str, Any]], int, tuple[str, ...]]:
    """Combine the reports of all processes about one candidate, site by site."""
    problems = [str(r["problem"]) for r in all_reports if r.get("problem")]
    reports = [r for r in all_reports if "sites" in r]
    failed = f" (the program ended with status {ended.status})" if ended.status else ""
    for report in reports:
        if report["clash"]:
            more = int(report["clash_count"]) - 1
            raise NotTheSameModel(
                f"the program does not build the model of run '{run.name}': {report['clash']}"
                + (f", and {more} more" if more > 0 else ""),
                hint="start the program with the candidate's configuration; --partial replays "
                "what the two have in common",
            )
    if not reports:
        why = problems[0] if problems else ended.why_not or "no module was called"
        raise BadInput(
            f"nothing was replayed: {why}{failed}", hint="is this the reference program?"
        )
    sites: dict[str, Mapping[str, Any]] = {}
    for report in reports:
        for site, entry in report["sites"].items():
            earlier = sites.get(site)
            # If several ranks or processes report a site, one that replayed it has precedence.
            if earlier is None or earlier["status"] != "replayed":
                sites[site] = entry
    calls = sum(int(report["calls"]) for report in reports)
    if not calls:
        reasons = [str(e["reason"]) for e in sites.values() if e["status"] == "unknown"]
        site = next(iter(run.sites()), "")
        shared = f"the program called none of the candidate's modules, '{site}' the first of them"
        why = reasons[0] if reasons else shared
        raise BadInput(
            f"nothing was replayed: {why}{failed}",
            hint="the program must call the same modules in the same steps as the candidate did",
        )
    notes = [note for report in reports for note in (*report["clashes"], *report["faults"])]
    return sites, calls, tuple(dict.fromkeys(notes))


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target


def _leave_nothing(output: Path) -> None:
    """Remove the files of a failed replay, and the folder if it is empty then."""
    for name in (EXACT, NATIVE):
        shutil.rmtree(output / name, ignore_errors=True)
    if output.is_dir() and output != Path.cwd() and not any(output.iterdir()):
        output.rmdir()
